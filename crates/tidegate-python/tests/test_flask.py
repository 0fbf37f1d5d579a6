"""Flask: limits of the application and of views, in process and with gunicorn on Redis."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import HERE, Server, get
from flask.testing import FlaskClient


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FlaskClient:
    monkeypatch.syspath_prepend(HERE / "apps")
    sys.modules.pop("flask_app", None)
    return importlib.import_module("flask_app").create_app().test_client()


def test_views_have_their_own_counts(client: FlaskClient) -> None:
    ann = {"x-user": "ann"}
    first = [client.get("/first", headers=ann) for _ in range(3)]
    assert [answer.status_code for answer in first] == [200, 200, 429]
    assert first[0].headers.getlist("ratelimit") == [
        '"sliding-log-3600s";r=49;t=3600', '"pages.first sliding-log-60s";r=1;t=60',
    ]
    assert first[0].headers["x-ratelimit-remaining"] == "49"
    assert first[2].content_type == "application/problem+json"
    assert first[2].json["policy"] == "pages.first sliding-log-60s"
    assert first[2].headers["retry-after"] == "60"
    second = [client.get("/second", headers=ann) for _ in range(3)]
    assert [answer.status_code for answer in second] == [200, 200, 429], "an asynchronous view"
    assert [answer.data for answer in second[:2]] == [b"second"] * 2


def test_only_failed_logins_count(client: FlaskClient) -> None:
    ann = {"x-user": "ann"}

    def login(password: str) -> int:
        return client.post("/login", data=password, headers=ann).status_code

    assert [login("secret") for _ in range(4)] == [200] * 4
    assert [login("wrong") for _ in range(2)] == [401] * 2
    assert login("secret") == 429


def test_limit_of_the_application(client: FlaskClient) -> None:
    ann = {"x-user": "ann"}
    statuses = [client.get("/unknown", headers=ann).status_code for _ in range(30)]
    statuses += [client.get("/open", headers=ann).status_code for _ in range(21)]
    assert statuses == [404] * 30 + [200] * 20 + [429]
    exempt = client.get("/open")
    assert exempt.status_code == 200 and "ratelimit" not in exempt.headers


def test_gunicorn_on_redis(start_app: Callable[..., Server], redis_server: Server) -> None:
    def gunicorn(address: str) -> list[str]:
        return ["gunicorn", "-w", "2", "--threads", "4", "-b", address, "flask_app:create_app()"]

    server = start_app(gunicorn, REDIS_URL=redis_server.redis_url)
    url = f"http://127.0.0.1:{server.port}/first"
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: get(url, {"x-user": "ann"}), range(12)))
    assert sorted(status for status, _, _ in answers) == [200] * 2 + [429] * 10
    denied = next(answer for answer in answers if answer[0] == 429)
    assert json.loads(denied[2])["violated-policies"] == ["pages.first sliding-log-60s"]
