"""Limits of Flask applications and of their views.

    from flask import Flask
    from tidegate import Limiter
    from tidegate.flask import RateLimit

    app = Flask(__name__)
    limits = RateLimit(app, Limiter("redis://127.0.0.1:6379"), "100/minute")

    @app.post("/login")
    @limits.limit("5/minute", key=lambda request: request.form["user"])
    def login() -> str:
        return "welcome"

The limit of the application counts by the client's address, unless it has a key; views may have
limits in addition. Each view has its own count, by the name of its endpoint, unless ``policy`` is
set. The decorator stands below that of the route.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from flask import Flask, Response, after_this_request, current_app, request

from ._http import LISTS, Limit, Options, Rule, Setup
from ._limiter import Limiter
from ._tidegate import ClientIp
from .wsgi import read_parts

if TYPE_CHECKING:
    from typing_extensions import Unpack

View = TypeVar("View", bound=Callable[..., Any])


class RateLimit:
    """Extension that limits requests. Without a limit of the application, only views with a
    decorator are limited. ``key`` is a function of the request that returns whom to count, or
    ``None`` for a request without a limit. The other options are those of the WSGI middleware."""

    def __init__(
        self,
        app: Flask | None,
        limiter: Limiter,
        limit: Limit | None = None,
        *,
        client_ip: ClientIp = ClientIp(),
        x_ratelimit_headers: bool = True,
        **options: Unpack[Options],
    ) -> None:
        self._setup = Setup(limiter, client_ip, x_ratelimit_headers).checked()
        self._rule = None if limit is None else Rule(limit, **options)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Limits the requests of an application."""
        app.extensions["tidegate"] = self
        rule = self._rule
        if rule is not None:
            app.before_request(lambda: self._reject(rule, ""))

    def limit(self, limit: Limit, **options: Unpack[Options]) -> Callable[[View], View]:
        """Limits the requests of a view."""
        rule = Rule(limit, **options)

        def decorate(view: View) -> View:
            @functools.wraps(view)
            def limited(*arguments: Any, **named: Any) -> Any:
                rejection = self._reject(rule, request.endpoint or "")
                return rejection or current_app.ensure_sync(view)(*arguments, **named)

            return limited  # type: ignore[return-value]

        return decorate

    def _reject(self, rule: Rule, route: str) -> Response | None:
        outcome = rule.acquire(self._setup, request, read_parts(request.environ), route)
        if outcome.rejection is not None:
            status, headers, body = outcome.rejection
            return Response(body, status, dict(headers))

        def finish(response: Response) -> Response:
            rule.refund(self._setup, outcome, response.status_code)
            for name, value in outcome.headers.items():
                if name in LISTS or name not in response.headers:
                    response.headers.add(name, value)
            return response

        after_this_request(finish)
        return None

