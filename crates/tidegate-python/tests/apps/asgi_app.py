"""A plain ASGI application behind the middleware."""

from __future__ import annotations

import os
from typing import Any

from tidegate import ClientIp, Limiter
from tidegate.asgi import RateLimitMiddleware


async def hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        return await send({"type": "lifespan.startup.complete"})
    headers = [(b"content-type", b"text/plain"), (b"x-loop", loop_name())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


def loop_name() -> bytes:
    import asyncio

    return type(asyncio.get_running_loop()).__module__.encode()


app = RateLimitMiddleware(
    hello,
    Limiter(os.environ.get("REDIS_URL")),
    "3/hour",
    client_ip=ClientIp(["127.0.0.1"]),
    on_store_failure="error",
)
