"""Limits of FastAPI's routes, as dependencies.

    from fastapi import Depends, FastAPI, Request
    from tidegate import Limiter
    from tidegate.fastapi import install, limit

    def user(request: Request) -> str:
        return request.headers.get("x-user-id", "anonymous")

    app = FastAPI()
    install(app, Limiter("redis://127.0.0.1:6379"))

    @app.get("/", dependencies=[Depends(limit("100/60s", key=user))])
    async def index() -> str:
        return "hello"

Each route has its own count: the name of the policy is made of the route's methods and path, unless
``policy`` is set. Limits with one ``policy`` share their counts. Two limits of a route with equal
windows, such as one per user and one per address, need a ``policy`` each; two rates of one key are
written as ``limit(["10/second", "1000/day"])``. WebSockets are limited by the ASGI middleware.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ._http import Limit, Options, Outcome, Rule, Setup
from ._http import Response as Rejection
from ._limiter import Limiter
from ._tidegate import ClientIp, Decisions
from .asgi import App, Receive, Scope, Send, read_parts, run

if TYPE_CHECKING:
    from typing_extensions import Unpack

SCOPE_KEY = "tidegate.fastapi"


class _State(NamedTuple):
    """The setup, and the limits that admitted this request."""

    setup: Setup
    admitted: list[tuple[Rule, Outcome]]


class _Rejected(HTTPException):
    """Denial of a limit. It is an ``HTTPException`` for applications without ``install``, such as
    one that is mounted: they send its status and headers."""

    def __init__(self, response: Rejection) -> None:
        detail = json.loads(response.body)["detail"]
        super().__init__(response.status, detail, dict(response.headers))
        self.response = response


class _Middleware:
    def __init__(self, app: App, setup: Setup) -> None:
        self._app = app
        self._setup = setup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope[SCOPE_KEY] = _State(self._setup, [])
        await run(self._app, scope, receive, send, self._setup, state.admitted)


def install(
    app: FastAPI,
    limiter: Limiter,
    *,
    client_ip: ClientIp = ClientIp(),
    x_ratelimit_headers: bool = True,
) -> None:
    """Sets the limiter of an application, before it starts. Applications that are mounted in it
    need a call of their own for problem details in their denials. A handler of the application
    for the status 429 replaces the problem details."""
    app.add_middleware(_Middleware, setup=Setup(limiter, client_ip, x_ratelimit_headers).checked())
    app.add_exception_handler(_Rejected, _answer)


def limit(
    limit: Limit, **options: Unpack[Options]
) -> Callable[[Request], Awaitable[Decisions | None]]:
    """Creates a dependency that limits the requests of a route, of a router or of an application,
    and that returns the decisions, ``None`` for a request without a limit. ``key`` is a function
    of the ``Request``, asynchronous or not; by default it is the client's address. The other
    options are those of the ASGI middleware."""
    rule = Rule(limit, **options)

    async def acquire(request: Request) -> Decisions | None:
        state = request.scope.get(SCOPE_KEY)
        if state is None:
            raise RuntimeError("no limiter: call tidegate.fastapi.install(app, limiter) first")
        setup, scope = state.setup, request.scope
        outcome = await rule.acquire_async(setup, request, read_parts(scope), _route(scope))
        if outcome.rejection is not None:
            raise _Rejected(outcome.rejection)
        state.admitted.append((rule, outcome))
        return outcome.decisions

    return acquire


def _route(scope: Scope) -> str:
    """Returns the methods and the path of a route, such as ``GET /items/{id}``."""
    # FastAPI has the path without the prefix of an included router in `route`, from the version on
    # that has the other entry. The test of included routers would notice a change.
    route: Any = scope.get("fastapi", {}).get("effective_route_context") or scope["route"]
    return f"{','.join(sorted(route.methods))} {scope.get('root_path', '')}{route.path}"


async def _answer(_: Request, error: Exception) -> Response:
    assert isinstance(error, _Rejected)
    status, headers, body = error.response
    return Response(body, status, headers)
