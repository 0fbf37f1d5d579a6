"""An ASGI application that charges each request by hand."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from tidegate import Limiter, Quota

QUOTA = Quota(os.environ["RATE"])

limiter = Limiter(os.environ["REDIS_URL"], timeout=10)


async def application(
    scope: dict[str, Any], receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]
) -> None:
    decision = await limiter.aio.acquire("client", QUOTA)
    status = 200 if decision else 429
    headers = [
        (b"content-length", b"0"),
        (b"x-process", str(os.getpid()).encode()),
        (b"x-source", decision.source.encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
