"""WSGI middleware, for every framework and server of WSGI.

    from wsgiref.simple_server import demo_app
    from tidegate import Limiter
    from tidegate.wsgi import RateLimitMiddleware

    app = RateLimitMiddleware(demo_app, Limiter("redis://127.0.0.1:6379"), "100/minute")

Behind a proxy, name its address, such as ``client_ip=ClientIp(["10.0.0.0/8"])``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ._http import LISTS, Limit, Options, Parts, Rule, Setup, address
from ._limiter import Limiter
from ._tidegate import ClientIp

if TYPE_CHECKING:
    from typing_extensions import Unpack

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


class RateLimitMiddleware:
    """Limits the requests of an application. The limit is a rate such as ``"100/minute"``, a
    ``Quota``, a list of them, or ``Policies``. ``key`` is a function of the environ that returns
    whom to count, or ``None`` for a request without a limit; by default it is the client's
    address, as ``client_ip`` finds it behind trusted proxies. The other options are ``policy``,
    ``cost``, ``on_store_failure``, ``refund_on`` and ``attributes``."""

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

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        outcome = self._rule.acquire(self._setup, environ, read_parts(environ))
        if outcome.rejection is not None:
            status, headers, body = outcome.rejection
            length = ("content-length", str(len(body)))
            start_response(f"{status} {HTTPStatus(status).phrase}", [length, *headers.items()])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

        has_started = False

        def start_with_headers(status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
            nonlocal has_started
            if not has_started:
                has_started = True
                self._rule.refund(self._setup, outcome, int(status[:3]))
            present = {name.lower() for name, _ in headers}
            added = [
                (name, value)
                for name, value in outcome.headers.items()
                if name in LISTS or name not in present
            ]
            return start_response(status, [*headers, *added], *exc_info)

        try:
            return self._app(environ, start_with_headers)
        except Exception:
            if not has_started:
                self._rule.refund(self._setup, outcome, 500)
            raise


def read_parts(environ: Environ) -> Parts:
    """Reads the parts of an environ that limits need."""
    path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace")
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    peer = address(environ.get("REMOTE_ADDR"))
    return Parts(environ["REQUEST_METHOD"], path, query, list(_headers(environ)), peer)


def _headers(environ: Environ) -> Iterator[tuple[bytes, bytes]]:
    for name, value in environ.items():
        header = name.removeprefix("HTTP_")
        if header != name or (name in ("CONTENT_TYPE", "CONTENT_LENGTH") and value):
            yield header.replace("_", "-").lower().encode("latin-1"), value.encode("latin-1")
