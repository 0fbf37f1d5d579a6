"""The WSGI middleware: in process, and with gunicorn on Redis."""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest
from conftest import Server, get
from tidegate import ClientIp, Limiter, ManualClock, Policies, Quota
from tidegate.wsgi import RateLimitMiddleware


class Body:
    """A response body that records whether the server closed it."""

    def __init__(self) -> None:
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield b"hello"

    def close(self) -> None:
        self.is_closed = True


def respond(environ: Any, start_response: Any) -> Any:
    status = environ["PATH_INFO"].strip("/") or "200"
    if status == "599":
        raise RuntimeError("no response")
    start_response(f"{status} Any", [("Content-Type", "text/plain")])
    return Body()


def call(app: Any, path: str = "/", **environ: str) -> tuple[int, dict[str, str], Any]:
    """Sends a request to an application, and returns status, headers and the body's iterable."""
    started: list[Any] = []

    def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
        started[:] = [int(status[:3]), dict(headers)]

    request: dict[str, Any] = {"PATH_INFO": path, "REMOTE_ADDR": "192.0.2.1", **environ}
    setup_testing_defaults(request)
    body = app(request, start_response)
    return started[0], started[1], body


def test_application_is_not_touched_otherwise() -> None:
    app = RateLimitMiddleware(respond, Limiter(clock=ManualClock()), "2/minute", policy="per-ip")
    status, headers, body = call(app)
    assert (status, headers["Content-Type"]) == (200, "text/plain")
    assert headers["ratelimit"] == '"per-ip";r=1;t=60'
    assert isinstance(body, Body), "the server iterates and closes the application's own body"
    assert call(app)[0] == 200
    status, headers, (body,) = call(app)
    assert status == 429 and headers["content-length"] == str(len(body))
    assert headers["retry-after"] == "60"
    assert json.loads(body)["detail"] == 'policy "per-ip" allows 2 in 60 s: try again in 60 s'
    assert call(app, REQUEST_METHOD="HEAD")[2] == []
    assert call(app, REMOTE_ADDR="192.0.2.2")[0] == 200


def test_headers_of_two_limits_are_joined() -> None:
    limiter, started = Limiter(clock=ManualClock()), []
    inner = RateLimitMiddleware(respond, limiter, "5/minute", policy="inner")
    outer = RateLimitMiddleware(inner, limiter, "9/minute", policy="outer")
    environ: dict[str, Any] = {"PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}
    setup_testing_defaults(environ)
    outer(environ, lambda status, headers: started.extend(headers))
    states = [value for name, value in started if name == "ratelimit"]
    assert states == ['"inner";r=4;t=60', '"outer";r=8;t=60']
    assert [value for name, value in started if name == "x-ratelimit-limit"] == ["5"]


def test_middleware_keeps_the_rules_of_wsgi() -> None:
    def app(environ: Any, start_response: Any) -> Any:
        write = start_response("200 OK", [("Content-Type", "text/plain")])
        assert callable(write)
        try:
            raise KeyError("late")
        except KeyError as error:
            information = (KeyError, error, None)
            start_response("500 Late", [("Content-Type", "text/plain")], information)
        return [b"late"]

    limited = RateLimitMiddleware(app, Limiter(clock=ManualClock()), "1/minute")
    for expected in ("500 Late", "429 Too Many Requests"):
        started: list[Any] = []

        def start_response(*arguments: Any) -> Any:
            started.append(arguments)
            return io.BytesIO().write

        environ: dict[str, Any] = {"REMOTE_ADDR": "192.0.2.1", "QUERY_STRING": ""}
        setup_testing_defaults(environ)
        body = validator(limited)(environ, start_response)
        assert b"".join(body)
        body.close()
        assert started[-1][0] == expected
        assert len(started) == 1 or started[-1][2][0] is KeyError


def test_refund_by_the_status_of_the_response() -> None:
    limiter = Limiter(clock=ManualClock())
    app = RateLimitMiddleware(respond, limiter, "2/hour", refund_on=range(500, 600))
    for _ in range(3):
        assert call(app, "/503")[0] == 503
        with pytest.raises(RuntimeError, match="no response"):
            call(app, "/599")
    assert [call(app, path)[0] for path in ("/404", "/200", "/200")] == [404, 200, 429]


@pytest.mark.parametrize(
    "environ",
    [
        {"PATH_INFO": "/caf\u00c3\u00a9/1 2"},
        # As a client may send them through some servers, and the application routes them.
        {"PATH_INFO": "caf\u00c3\u00a9/1 2"},
        {"PATH_INFO": "/caf\u00c3\u00a9/1 2", "SCRIPT_NAME": "/x", "RAW_URI": "/x/other"},
        {"PATH_INFO": "/caf\u00c3\u00a9/1 2", "REQUEST_URI": "http:other"},
    ],
)
def test_policies_match_the_path_that_the_application_routes(environ: dict[str, str]) -> None:
    text = "policies: [{name: cafe, match: {path: /café/*}, limit: 1, window: 1h}]"
    app = RateLimitMiddleware(
        lambda environ, start: start("200 OK", []), Limiter(), Policies.parse(text)
    )
    path = environ.pop("PATH_INFO")
    assert [call(app, path, **environ)[0] for _ in range(2)] == [200, 429]
    assert call(app, "/tea")[0] == 200
    # It has the normal form /tea, but the application routes it below /café.
    for path in ("/caf\u00c3\u00a9/../tea", "/caf\u00c3\u00a9/..", "/./tea"):
        assert call(app, path)[0] == 400


def test_proxy_on_a_unix_socket_may_be_trusted() -> None:
    app = RateLimitMiddleware(respond, Limiter(), "1/hour", client_ip=ClientIp(["127.0.0.1"]))
    clients = ["192.0.2.1", "192.0.2.2", "192.0.2.1"]
    statuses = [
        call(app, "/200", REMOTE_ADDR="", HTTP_X_FORWARDED_FOR=client)[0] for client in clients
    ]
    assert statuses == [200, 200, 429]


def test_leaky_bucket_delays() -> None:
    quota = Quota("20/second", algorithm="leaky-bucket", burst=3)
    app = RateLimitMiddleware(respond, Limiter(), quota)
    begin = time.monotonic()
    assert [call(app)[0] for _ in range(3)] == [200] * 3
    assert time.monotonic() - begin > 0.09


def test_gunicorn_workers_share_the_count_on_redis(
    start_app: Callable[..., Server], redis_server: Server
) -> None:
    def gunicorn(address: str) -> list[str]:
        return ["gunicorn", "-w", "2", "-b", address, "wsgi_app:policies"]

    server = start_app(gunicorn, REDIS_URL=redis_server.redis_url)
    url = f"http://127.0.0.1:{server.port}/api/"
    ann = {"x-user": "ann"}
    assert [get(f"{url}missing", ann)[0] for _ in range(6)] == [404] * 6, "refunded"
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: get(f"{url}items", ann)[0], range(16)))
    assert statuses.count(200) == 4 and statuses.count(429) == 12
    _, headers, body = get(url, ann)
    assert headers.get_all("ratelimit-policy") == ['"per-user";q=4;w=3600']
    assert json.loads(body)["violated-policies"] == ["per-user"]
    status, _, body = get(url)
    assert status == 429 and json.loads(body)["missing_key"] == "header.x-user"
    assert get(f"http://127.0.0.1:{server.port}/other")[1]["ratelimit"] is None


def test_gunicorn_threads_and_a_unix_socket(
    start_app: Callable[..., Server], tmp_path: Path
) -> None:
    unix = tmp_path / "app.sock"

    def gunicorn(address: str) -> list[str]:
        binds = ["-b", f"unix:{unix}", "-b", address]
        return ["gunicorn", "--threads", "4", *binds, "wsgi_app:by_address"]

    server = start_app(gunicorn)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: get(f"http://127.0.0.1:{server.port}/"), range(8)))
    assert sorted(status for status, _, _ in answers) == [200] * 3 + [429] * 5
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(unix))
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 500
    assert "set a key function" in server.log
