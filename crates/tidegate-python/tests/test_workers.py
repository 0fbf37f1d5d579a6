"""Exact limits of several worker processes on one Redis, under load."""

from __future__ import annotations

import http.client
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tidegate
from conftest import Server, until

LIMIT = 200
WORKERS = 4
CLIENTS = 40
REQUESTS_PER_CONNECTION = 5
CONNECTIONS_PER_CLIENT = 3
PACKAGE = str(Path(tidegate.__file__).parent.parent)


def run_client(port: int) -> list[tuple[int, str, str]]:
    """Sends requests one after the other, and returns status, source and process of each."""
    answers = []
    for _ in range(CONNECTIONS_PER_CLIENT):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for _ in range(REQUESTS_PER_CONNECTION):
            connection.request("GET", "/")
            response = connection.getresponse()
            response.read()
            headers = response.headers
            answers.append((response.status, headers["x-source"], headers["x-process"]))
        connection.close()
    return answers


def check_exactly_the_limit_passes(server: Server, sign_of_a_worker: str) -> None:
    until(lambda: server.log.count(sign_of_a_worker) == WORKERS, "each worker has started")
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = list(pool.map(run_client, [server.port] * CLIENTS))
    answers = [answer for client in clients for answer in client]
    statuses = Counter(status for status, _, _ in answers)
    requests = CLIENTS * CONNECTIONS_PER_CLIENT * REQUESTS_PER_CONNECTION
    assert statuses == {200: LIMIT, 429: requests - LIMIT}, server.log
    assert {source for _, source, _ in answers} <= {"store", "deny-cache"}
    assert {source for status, source, _ in answers if status == 200} == {"store"}
    assert len({process for _, _, process in answers}) > 1, "several workers have decided"


@pytest.mark.parametrize("preload", [False, True])
def test_gunicorn_workers_with_threads(
    redis_server: Server, start_app: Callable[..., Server], preload: bool
) -> None:
    options = ["--workers", str(WORKERS), "--worker-class", "gthread", "--threads", "50"]
    options += ["--no-control-socket"]
    environment = {"PYTHONPATH": PACKAGE, "REDIS_URL": redis_server.redis_url}
    if preload:
        options.append("--preload")
        environment["USED_BEFORE_FORK"] = "1"
    server = start_app(
        lambda address: ["gunicorn", "--bind", address, *options, "bare_wsgi"],
        RATE=f"{LIMIT}/hour",
        **environment,
    )
    check_exactly_the_limit_passes(server, "Booting worker")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_uvicorn_workers(
    redis_server: Server, start_app: Callable[..., Server], loop: str
) -> None:
    options = ["--workers", str(WORKERS), "--loop", loop, "--lifespan", "off"]

    def command(address: str) -> list[str]:
        port = address.rpartition(":")[2]
        return ["uvicorn", "--port", port, *options, "bare_asgi:application"]

    server = start_app(
        command,
        PYTHONPATH=PACKAGE,
        REDIS_URL=redis_server.redis_url,
        RATE=f"{LIMIT}/hour",
    )
    check_exactly_the_limit_passes(server, "Started server process")
