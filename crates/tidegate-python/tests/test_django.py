"""Django: the middleware and the decorator, with gunicorn and with uvicorn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from urllib.parse import quote

import pytest
from conftest import HERE, Server, get


def gunicorn(address: str) -> list[str]:
    return ["gunicorn", "-b", address, "django_site:wsgi"]


def uvicorn(address: str) -> list[str]:
    port = address.rpartition(":")[2]
    return ["uvicorn", "--lifespan", "off", "--port", port, "django_site:asgi"]


@pytest.mark.parametrize("command", [gunicorn, uvicorn])
def test_site(
    command: Callable[[str], list[str]], start_app: Callable[..., Server], redis_server: Server
) -> None:
    server = start_app(command, REDIS_URL=redis_server.redis_url)

    def ask(path: str, user: str) -> tuple[int, list[str], bytes]:
        status, headers, body = get(
            f"http://127.0.0.1:{server.port}/{quote(path, safe='/?')}", {"x-user": user}
        )
        policies = (headers["ratelimit"] or "").split(", ")
        return status, [policy.partition(";")[0].strip('"') for policy in policies], body

    site = "sliding-log-3600s"
    for path in ("strict/", "async/1/", "page/"):
        name = f"/{path.replace('1', '<int:number>')} sliding-log-60s"
        answers = [ask(path, f"user of {path}") for _ in range(3)]
        assert [status for status, _, _ in answers] == [200, 200, 429], path
        assert all(names == [name, site] for _, names, _ in answers), answers
        problem = json.loads(answers[2][2])
        assert problem["policy"] == name and problem["title"] == "Quota Exceeded"
    assert ask("async/2/", "user of async/1/")[0] == 429, "by route"
    broken = [ask("broken/", "eve")[0] for _ in range(3)]
    broken += [ask("broken/?missing", "eve")[0] for _ in range(2)]
    assert broken == [500, 500, 500, 404, 429]
    assert [ask("", "ann")[0] for _ in range(9)] == [200] * 8 + [429]
    assert get(f"http://127.0.0.1:{server.port}/")[0] == 200, "a request without a key passes"


@pytest.mark.parametrize(
    ("tidegate", "error"),
    [
        ({}, "ImproperlyConfigured"),
        ({"LIMITER": "http://x", "LIMIT": "1/hour"}, "Redis URL"),
        ({"LIMITER": "redis://x", "LIMIT": "1/hour", "COSTS": 1}, "costs"),
    ],
)
def test_wrong_settings_fail_at_the_start(tidegate: dict[str, object], error: str) -> None:
    program = f"""
from django.conf import settings
settings.configure(MIDDLEWARE=["tidegate.django.RateLimitMiddleware"], TIDEGATE={tidegate})
from django.core.wsgi import get_wsgi_application
get_wsgi_application()
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, cwd=HERE
    )
    assert run.returncode == 1 and error in run.stderr.splitlines()[-1], run.stderr


def test_changed_settings_apply() -> None:
    program = """
import django_site
from django.test import Client, override_settings
from tidegate import Limiter
with override_settings(TIDEGATE={"LIMITER": Limiter(), "LIMIT": "1/hour"}):
    print([Client().get("/").status_code for _ in range(2)])
print([Client(headers={"x-user": "ann"}).get("/").status_code for _ in range(2)])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30,
        cwd=HERE / "apps",
    )
    assert run.stdout == "[200, 429]\n[200, 200]\n", run.stderr
