"""FastAPI: the classic task on Redis, and names of routes, refunds and errors in process."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from conftest import HERE, Server, get
from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse
from tidegate.fastapi import limit


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The application, with new counts."""
    monkeypatch.syspath_prepend(HERE / "apps")
    sys.modules.pop("fastapi_app", None)
    return importlib.import_module("fastapi_app")


def call(app: FastAPI, *requests: tuple[str, str]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        options = {"base_url": "http://test", "headers": {"x-user": "ann"}}
        async with httpx.AsyncClient(transport=transport, **options) as client:
            return [await client.request(method, path) for method, path in requests]

    return asyncio.run(main())


def test_classic_task_admits_exactly_100_of_130(
    start_server: Callable[..., Server], redis_server: Server, tmp_path: Path
) -> None:
    program = (HERE / "apps" / "classic.py").read_text()
    assert "redis://127.0.0.1:6379" in program
    program = program.replace("redis://127.0.0.1:6379", redis_server.redis_url)
    (tmp_path / "classic.py").write_text(program)
    server = start_server(
        lambda port: [
            sys.executable, "-m", "uvicorn", "--workers", "2", "--port", str(port), "classic:app"
        ],
        cwd=tmp_path,
    )
    url = f"http://127.0.0.1:{server.port}/"
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: get(url, {"x-user-id": "ann"}), range(130)))
    assert Counter(status for status, _, _ in answers) == {200: 100, 429: 30}
    denied = next(answer for answer in answers if answer[0] == 429)
    assert denied[1]["content-type"] == "application/problem+json"
    assert 1 <= int(denied[1]["retry-after"]) <= 60
    problem = json.loads(denied[2])
    assert problem["policy"] == "GET / sliding-log-60s" and problem["title"] == "Quota Exceeded"
    status, headers, body = get(url, {"x-user-id": "bob"})
    assert (status, body) == (200, b'"hello"') and headers["x-ratelimit-remaining"] == "99"


def test_each_route_has_its_own_count(module: ModuleType) -> None:
    routes = [
        ("GET", "/items/1"), ("GET", "/users/1"), ("POST", "/users/1"), ("GET", "/v2/items/1"),
        ("GET", "/mounted/items/1"), ("GET", "/mounted/users/1"),
    ]
    for method, path in routes:
        answers = call(module.app, *[(method, path)] * 3)
        assert [answer.status_code for answer in answers] == [200, 200, 429], path
        template = path.replace("1", "{number}")
        assert answers[2].json()["policy"] == f"{method} {template} sliding-log-60s"
    assert call(module.app, ("GET", "/items/2"))[0].status_code == 429, "by template"
    denied = call(module.app, *[("GET", "/bare/items/1")] * 3)[2]
    assert denied.status_code == 429 and denied.headers["retry-after"] == "60"


def test_application_may_answer_a_denial_itself(module: ModuleType) -> None:
    module.app.exception_handler(429)(lambda request, error: JSONResponse("later", 429))
    denied = call(module.app, *[("GET", "/items/1")] * 3)[2]
    assert denied.status_code == 429 and denied.json() == "later"


def test_named_policy_is_shared_and_every_response_has_headers(module: ModuleType) -> None:
    own, error, last, denied = call(
        module.app,
        ("GET", "/shared/a"), ("GET", "/shared/b"), ("GET", "/shared/a"), ("GET", "/shared/b"),
    )
    assert [own.status_code, error.status_code, last.status_code] == [200, 404, 200]
    states = [answer.headers["ratelimit"].partition(";t=")[0] for answer in (own, error, last)]
    assert states == ['"shared";r=2', '"shared";r=1', '"shared";r=0']
    assert denied.status_code == 429
    assert denied.headers["content-type"] == "application/problem+json"
    assert denied.json()["violated-policies"] == ["shared"]


def test_failed_request_is_refunded(module: ModuleType) -> None:
    answers = call(module.app, *[("GET", "/broken")] * 3)
    assert [answer.status_code for answer in answers] == [500] * 3


def test_limit_without_limiter_is_a_clear_error() -> None:
    app = FastAPI()
    app.get("/", dependencies=[Depends(limit("5/minute"))])(lambda: None)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            await client.get("http://test/")

    with pytest.raises(RuntimeError, match=r"install\(app, limiter\) first"):
        asyncio.run(main())
    with pytest.raises(ValueError, match="write it like 100/minute"):
        limit("five")
