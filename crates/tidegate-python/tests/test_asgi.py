"""The ASGI middleware: in process by a manual clock, and with uvicorn on Redis."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Server, get
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tidegate import ClientIp, Limiter, ManualClock, Policies, Quota
from tidegate.asgi import RateLimitMiddleware

EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"


async def respond(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the status that the path names, or fails."""
    if scope["type"] == "websocket":
        return await send({"type": "websocket.accept"})
    status = int(scope["path"].strip("/") or 200)
    if status == 599:
        raise RuntimeError("no response")
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b"hello"})


def call(app: Any, path: str = "/", **scope: Any) -> tuple[int, dict[str, str], bytes]:
    """Sends a request to an application, and returns status, headers and body."""
    messages: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        messages.append(message)

    request = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [], "client": ("192.0.2.1", 5000), **scope,
    }
    asyncio.run(app(request, receive, send))
    lines: dict[str, list[str]] = {}
    for name, value in messages[0].get("headers", ()):
        lines.setdefault(name.decode(), []).append(value.decode())
    headers = {name: ", ".join(values) for name, values in lines.items()}
    status = messages[0].get("status", messages[0]["type"])
    return status, headers, b"".join(message.get("body", b"") for message in messages)


def test_denial_is_a_problem_with_headers() -> None:
    clock = ManualClock()
    app = RateLimitMiddleware(respond, Limiter(clock=clock), "2/minute", policy="per-ip")
    assert call(app) == (
        200,
        {
            "x-own": "1",
            "ratelimit-policy": '"per-ip";q=2;w=60',
            "ratelimit": '"per-ip";r=1;t=60',
            "x-ratelimit-limit": "2",
            "x-ratelimit-remaining": "1",
            "x-ratelimit-reset": "60",
        },
        b"hello",
    )
    clock.advance(0.1)
    assert call(app)[0] == 200
    clock.advance(18.4005)
    status, headers, body = call(app)
    assert status == 429
    assert headers["content-type"] == "application/problem+json"
    assert headers["content-length"] == str(len(body))
    assert headers["retry-after"] == "42" and headers["ratelimit"] == '"per-ip";r=0;t=42'
    assert json.loads(body) == {
        "type": EXCEEDED,
        "title": "Quota Exceeded",
        "status": 429,
        "detail": 'policy "per-ip" allows 2 in 60 s: try again in 42 s',
        "policy": "per-ip",
        "retry_after_ms": 41_500,
        "violated-policies": ["per-ip"],
    }
    assert call(app, client=("192.0.2.2", 5000))[0] == 200, "each address has its own count"
    clock.advance(42)
    assert call(app)[0] == 200


def test_headers_of_two_limits_are_joined() -> None:
    limiter = Limiter(clock=ManualClock())
    inner = RateLimitMiddleware(respond, limiter, "5/minute", policy="inner")
    outer = RateLimitMiddleware(
        inner, limiter, ["9/minute", "7/hour"], policy="outer", x_ratelimit_headers=False
    )
    _, headers, _ = call(outer)
    assert headers["ratelimit"] == (
        '"inner";r=4;t=60, "outer sliding-log-60s";r=8;t=60, "outer sliding-log-3600s";r=6;t=3600'
    )
    assert headers["x-ratelimit-limit"] == "5"
    assert "x-ratelimit-limit" not in call(
        RateLimitMiddleware(respond, limiter, "5/minute", x_ratelimit_headers=False)
    )[1]


@pytest.mark.parametrize(
    "limit", ["1/hour", Policies.parse("policies: [{name: a, key: [ip], limit: 1, window: 1h}]")]
)
def test_forwarded_address_counts_only_behind_a_trusted_proxy(limit: str | Policies) -> None:
    limiter = Limiter(clock=ManualClock())
    app = RateLimitMiddleware(respond, limiter, limit, client_ip=ClientIp(["10.0.0.0/8"]))

    def status(peer: str, x_forwarded_for: str) -> int:
        headers = [(b"x-forwarded-for", x_forwarded_for.encode())]
        return call(app, client=(peer, 1), headers=headers)[0]

    assert status("10.0.0.1", "192.0.2.1") == 200
    assert status("10.0.0.1", "192.0.2.2") == 200
    assert status("10.0.0.1", "spoofed, 192.0.2.1") == 429
    assert status("203.0.113.1", "192.0.2.3") == 200
    assert status("203.0.113.1", "192.0.2.4") == 429, "the peer is not trusted"


@pytest.mark.parametrize("client", [None, ("testclient", 50000)])
def test_unknown_address_is_a_clear_error(client: Any) -> None:
    limiter = Limiter(clock=ManualClock())
    with pytest.raises(RuntimeError, match="set a key function"):
        call(RateLimitMiddleware(respond, limiter, "1/hour"), client=client)
    text = "policies: [{name: by-ip, match: {path: /200}, key: [ip], limit: 1, window: 1h}]"
    app = RateLimitMiddleware(respond, limiter, Policies.parse(text))
    with pytest.raises(RuntimeError, match="set a key function"):
        call(app, "/200", client=client)
    assert call(app, "/201", client=client)[0] == 201, "no policy needs the address"


def test_key_may_be_asynchronous_and_exempts_with_none() -> None:
    async def key(scope: Any) -> str | None:
        await asyncio.sleep(0)
        return dict(scope["headers"]).get(b"x-user", b"").decode() or None

    app = RateLimitMiddleware(respond, Limiter(clock=ManualClock()), "1/hour", key=key)
    ann = {"headers": [(b"x-user", b"ann")]}
    assert [call(app, **ann)[0] for _ in range(2)] == [200, 429]
    unlimited = [call(app, client=None) for _ in range(3)]
    assert all(answer == (200, {"x-own": "1"}, b"hello") for answer in unlimited)
    status, _, body = call(app, headers=[(b"x-user", b"x" * 600)])
    assert status == 400 and "at most 512" in json.loads(body)["detail"]
    with pytest.raises(TypeError, match="returned 7: return a str"):
        call(RateLimitMiddleware(respond, Limiter(), "1/hour", key=lambda scope: 7))


def test_refund_by_the_status_of_the_response() -> None:
    limiter = Limiter(clock=ManualClock())
    app = RateLimitMiddleware(respond, limiter, "2/hour", refund_on=range(500, 600))
    for _ in range(3):
        assert call(app, "/503")[0] == 503
        with pytest.raises(RuntimeError, match="no response"):
            call(app, "/599")
    assert [call(app, path)[0] for path in ("/404", "/200", "/200")] == [404, 200, 429]


def test_policies_with_shadow_mode_refunds_and_attributes() -> None:
    policies = Policies.parse(
        """
        attributes: [tenant]
        policies:
          - {name: tenants, key: [tenant], limit: 2, window: 1h, refund_on: {status: [4xx]}}
          - {name: trial, mode: shadow, key: [tenant], limit: 1, window: 1h}
          - {name: tokens, match: {path: "/201"}, key: [query.token], missing_key: deny,
             limit: 9, window: 1h}
        """
    )

    def attributes(scope: Any) -> dict[str, str]:
        return {"tenant": scope["tenant"]}

    limiter = Limiter(clock=ManualClock())
    app = RateLimitMiddleware(respond, limiter, policies, attributes=attributes)
    assert [call(app, "/404", tenant="acme")[0] for _ in range(3)] == [404] * 3
    assert [call(app, "/200", tenant="acme")[0] for _ in range(3)] == [200, 200, 429]
    _, headers, body = call(app, tenant="acme")
    assert json.loads(body)["violated-policies"] == ["tenants"]
    assert "trial" not in headers["ratelimit"]
    status, headers, body = call(app, "/201", tenant="other")
    assert status == 429 and "retry-after" not in headers
    assert json.loads(body) == {
        "type": "about:blank",
        "title": "Too Many Requests",
        "status": 429,
        "detail": 'the request lacks query.token, by which policy "tokens" counts: send it',
        "policy": "tokens",
        "retry_after_ms": 0,
        "source": "missing-key",
        "missing_key": "query.token",
    }
    # Some servers have lists in place of tuples.
    query = {"query_string": b"token=a", "tenant": "other", "headers": [[b"x-any", b"1"]]}
    assert call(app, "/201", **query)[0] == 201
    status, _, body = call(app, "/201", tenant="other", query_string=b"token=a&token=b")
    assert status == 400 and json.loads(body)["title"] == "Bad Request"


def test_leaky_bucket_delays_without_blocking_the_loop() -> None:
    passed: list[float] = []

    async def record(scope: Any, receive: Any, send: Any) -> None:
        passed.append(asyncio.get_running_loop().time())

    async def main() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}

        def queue(rate: str) -> Any:
            quota = Quota(rate, algorithm="leaky-bucket", burst=3)
            return RateLimitMiddleware(record, Limiter(), quota, key=lambda scope: "queue")

        begin = asyncio.get_running_loop().time()
        app = queue("20/second")
        await asyncio.gather(*(app(scope, None, None) for _ in range(3)))
        assert passed[1] - begin > 0.04 and passed[2] - begin > 0.09
        app = queue("1/minute")
        await app(scope, None, None)
        delayed = asyncio.create_task(app(scope, None, None))
        await asyncio.sleep(0.01)
        assert not delayed.done(), "it has to wait for a minute, and the loop does not"
        delayed.cancel()

    asyncio.run(main())


def test_websocket_handshake_is_limited() -> None:
    app = RateLimitMiddleware(respond, Limiter(clock=ManualClock()), "1/hour")
    status, headers, _ = call(app, type="websocket")
    assert status == "websocket.accept" and "ratelimit" in headers
    assert call(app, type="websocket")[0] == "websocket.close"
    extensions = {"websocket.http.response": {}}
    status, headers, body = call(app, type="websocket", extensions=extensions)
    assert status == 429 and "retry-after" in headers and json.loads(body)["status"] == 429


def test_other_scopes_pass() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    limited = RateLimitMiddleware(app, Limiter(), "1/hour")
    asyncio.run(limited({"type": "lifespan"}, None, None))
    asyncio.run(limited({"type": "lifespan"}, None, None))
    assert seen == ["lifespan", "lifespan"]


def test_import_of_an_application_starts_no_thread() -> None:
    program = """
from pathlib import Path
from tidegate import Limiter
from tidegate.asgi import RateLimitMiddleware
RateLimitMiddleware(None, Limiter("redis://127.0.0.1:1"), "5/minute")
print(len(list(Path("/proc/self/task").iterdir())))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert run.stdout == "1\n", "a server may fork afterwards: " + run.stderr


def test_wrong_options_fail_at_once() -> None:
    policies = Policies.parse("policies: [{name: all, limit: 1, window: 1s}]")
    for limit, options, message in [
        ("many", {}, "write it like 100/minute"),
        ("5/minute", {"cost": 6}, "cost 6 can never be admitted"),
        ("5/minute", {"policy": "a\nb"}, "control character"),
        ("5/minute", {"on_store_failure": "maybe"}, "on_store_failure"),
        ("5/minute", {"attributes": dict}, "attributes are for policies"),
        (["5/minute", "6/minute"], {}, "different windows"),
        ([], {}, "the limit has no rate"),
        ("5/minute", {"cost": 0}, "a cost is at least 1"),
        ("5/minute", {"refund_on": 500}, "list of statuses"),
        ("5/minute", {"key": "ip"}, "not a function"),
        (policies, {"cost": 2}, "the rest in the file"),
    ]:
        with pytest.raises(ValueError, match=message):
            RateLimitMiddleware(respond, Limiter(), limit, **options)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_uvicorn_on_redis(
    loop: str, start_app: Callable[..., Server], redis_server: Server
) -> None:
    def uvicorn(address: str) -> list[str]:
        port = address.rpartition(":")[2]
        options = ["--no-proxy-headers", "--loop", loop, "--port", port]
        return ["uvicorn", "asgi_app:app", *options]

    server = start_app(uvicorn, REDIS_URL=redis_server.redis_url)
    url = f"http://127.0.0.1:{server.port}/"
    client = {"x-forwarded-for": "192.0.2.1"}
    answers = [get(url, client) for _ in range(5)]
    assert [status for status, _, _ in answers] == [200, 200, 200, 429, 429]
    assert answers[0][1]["x-loop"].startswith(loop)
    assert answers[0][1]["ratelimit"] == '"sliding-log-3600s";r=2;t=3600'
    assert json.loads(answers[4][2])["type"] == EXCEEDED
    assert get(url, {"x-forwarded-for": "192.0.2.2"})[0] == 200
    redis_server.kill()
    status, headers, body = get(url, {"x-forwarded-for": "192.0.2.2"})
    assert status == 503 and headers["content-type"] == "application/problem+json"
    assert str(redis_server.port) not in body.decode()
    assert get(url, client)[0] in (429, 503), "the denial may still be known"


def test_policies_match_the_path_that_the_application_routes() -> None:
    text = "policies: [{name: login, match: {path: /login/**}, limit: 1, window: 1h}]"

    # With a root path, applications route by the rest.
    routed = Starlette(routes=[Route("/login/{rest:path}", lambda _: PlainTextResponse("hello"))])
    app = RateLimitMiddleware(routed, Limiter(), Policies.parse(text))
    paths = [("/login/x", ""), ("/login/y", ""), ("/api/login/y", "/api"), ("/login/z", "/api")]
    assert [call(app, path, root_path=root)[0] for path, root in paths] == [200, 429, 429, 429]
    # Their normal form is /y, but the application routes them below /login.
    for path in ("/login/../y", "/login/..", "/login/a/../../y"):
        assert call(app, path)[0] == 400


def test_key_that_is_no_text_is_refused() -> None:
    app = RateLimitMiddleware(respond, Limiter(), "1/hour", key=lambda _: "\ud800")
    status, _, body = call(app)
    assert status == 400 and json.loads(body)["status"] == 400


def test_store_error_says_when_to_retry(redis_server: Server) -> None:
    limiter = Limiter(redis_server.redis_url, on_store_failure="error")
    redis_server.kill()
    status, headers, _ = call(RateLimitMiddleware(respond, limiter, "1/hour"))
    assert (status, headers["retry-after"]) == (503, "1")
    with pytest.raises(ValueError, match="is not a Limiter"):
        RateLimitMiddleware(respond, redis_server.redis_url, "1/hour")
