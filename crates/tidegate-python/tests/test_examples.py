"""The examples in the docstrings of the integrations, run on a real Redis."""

from __future__ import annotations

import asyncio
import importlib
import textwrap
from typing import Any

import httpx
import pytest
from conftest import Server


def lines_of_example(module: str) -> list[str]:
    """Returns the indented lines of a module's docstring."""
    text = importlib.import_module(f"tidegate.{module}").__doc__ or ""
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    assert 0 < len(lines) <= 10
    return textwrap.dedent("\n".join(lines)).splitlines()


def app_of_example(module: str, redis: Server) -> Any:
    program = "\n".join(lines_of_example(module))
    assert "redis://127.0.0.1:6379" in program
    names: dict[str, Any] = {"__name__": "example"}
    exec(program.replace("redis://127.0.0.1:6379", redis.redis_url), names)
    return names["app"]


@pytest.mark.parametrize(("module", "limit"), [("asgi", "100"), ("fastapi", "100")])
def test_asynchronous_example(module: str, limit: str, redis_server: Server) -> None:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app_of_example(module, redis_server))
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.get("http://test/")

    assert asyncio.run(main()).headers["x-ratelimit-limit"] == limit


@pytest.mark.parametrize(("module", "path"), [("wsgi", "/"), ("flask", "/login")])
def test_synchronous_example(module: str, path: str, redis_server: Server) -> None:
    transport = httpx.WSGITransport(app_of_example(module, redis_server))
    with httpx.Client(transport=transport) as client:
        answers = [client.post(f"http://test{path}", data={"user": "ann"}) for _ in range(6)]
    assert answers[0].headers["x-ratelimit-limit"] == "100"
    assert [answer.status_code for answer in answers[:5]] == [200] * 5
    assert answers[5].status_code == (429 if module == "flask" else 200)


def test_example_of_django_has_at_most_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "none")
    names: dict[str, Any] = {"__name__": "example"}
    lines = lines_of_example("django")
    exec("\n".join(lines[lines.index("# views.py") :]), names)
    assert callable(names["login"])
