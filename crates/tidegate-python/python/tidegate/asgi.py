"""ASGI middleware, for Starlette, FastAPI, Litestar, Quart and others.

    from starlette.applications import Starlette
    from tidegate import Limiter
    from tidegate.asgi import RateLimitMiddleware

    app = Starlette()
    app.add_middleware(
        RateLimitMiddleware, limiter=Limiter("redis://127.0.0.1:6379"), limit="100/minute"
    )

HTTP requests and the handshakes of WebSockets are limited. A denied handshake gets the same
response as a request if the server can send one (``websocket.http.response``); otherwise it is
closed, which servers answer with 403.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from ._http import LISTS, Limit, Options, Outcome, Parts, Response, Rule, Setup, address
from ._limiter import Limiter
from ._tidegate import ClientIp

if TYPE_CHECKING:
    from typing_extensions import Unpack

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


class RateLimitMiddleware:
    """Limits the requests of an application. The limit is a rate such as ``"100/minute"``, a
    ``Quota``, a list of them, or ``Policies``. ``key`` is a function of the scope, asynchronous or
    not, that returns whom to count, or ``None`` for a request without a limit; by default it is
    the client's address, as ``client_ip`` finds it behind trusted proxies. The other options are
    ``policy``, ``cost``, ``on_store_failure``, ``refund_on`` and ``attributes``."""

    def __init__(
        self,
        app: App,
        limiter: Limiter,
        limit: Limit,
        *,
        client_ip: ClientIp = ClientIp(),
        x_ratelimit_headers: bool = True,
        **options: Unpack[Options],
    ) -> None:
        self._app = app
        self._setup = Setup(limiter, client_ip, x_ratelimit_headers).checked()
        self._rule = Rule(limit, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        outcome = await self._rule.acquire_async(self._setup, scope, read_parts(scope))
        if outcome.rejection is not None:
            return await respond(outcome.rejection, scope, receive, send)
        admitted = [(self._rule, outcome)]
        await run(self._app, scope, receive, send, self._setup, admitted)


def read_parts(scope: Scope) -> Parts:
    """Reads the parts of a scope that limits need. Applications route by the path without the
    root path that a server, a mount or they themselves have set."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    client = scope.get("client")
    peer = address(client[0] if client else None)
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    return Parts(scope.get("method", "GET"), path, scope.get("query_string") or b"", headers, peer)


async def respond(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends a response in place of the application."""
    prefix = "http.response"
    if scope["type"] == "websocket":
        await receive()  # The handshake: servers expect that it is read before the answer.
        prefix = "websocket.http.response"
        if prefix not in (scope.get("extensions") or {}):
            return await send({"type": "websocket.close", "code": 1008})
    headers = {**response.headers, "content-length": str(len(response.body))}
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": f"{prefix}.start", "status": response.status, "headers": lines})
    await send({"type": f"{prefix}.body", "body": response.body})


async def run(
    app: App,
    scope: Scope,
    receive: Receive,
    send: Send,
    setup: Setup,
    admitted: Sequence[tuple[Rule, Outcome]],
) -> None:
    """Runs the application. When its response starts, it refunds and adds headers."""
    has_started = False

    async def refund(status: int) -> None:
        for rule, outcome in admitted:
            await rule.refund_async(setup, outcome, status)

    async def send_with_headers(message: Message) -> None:
        nonlocal has_started
        if message["type"] in STARTS and not has_started:
            has_started = True
            await refund(message.get("status", 101))
            headers = list(message.get("headers") or ())
            for _, outcome in admitted:
                present = {bytes(name).lower().decode("latin-1") for name, _ in headers}
                headers += [
                    (name.encode(), value.encode())
                    for name, value in outcome.headers.items()
                    if name in LISTS or name not in present
                ]
            message = {**message, "headers": headers}
        await send(message)

    try:
        await app(scope, receive, send_with_headers)
    except Exception:
        if not has_started:
            await refund(500)
        raise
