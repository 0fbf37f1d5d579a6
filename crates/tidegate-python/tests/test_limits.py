"""The storage for the limits library: its strategies, flask-limiter and slowapi."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import runpy
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tidegate.limits
from conftest import HERE, Server, free_port, until
from flask import Flask
from flask_limiter import Limiter as FlaskLimiter
from limits import parse
from limits.aio.strategies import STRATEGIES as ASYNC_STRATEGIES
from limits.errors import StorageError
from limits.storage import storage_from_string
from limits.strategies import STRATEGIES
from tidegate import ManualClock, StoreError

# A window that does not end during a test.
LIMIT = parse("20/year")
# A busy machine may take longer than the default deadline, after which the limit is a local one.
LONG_TIMEOUT = "?timeout=20"
# The folder of the package, for applications that run in another folder.
PACKAGES = str(Path(tidegate.__file__).resolve().parents[1])
STRATEGY_NAMES = pytest.mark.parametrize("name", list(STRATEGIES))
STORES = pytest.mark.parametrize("store", ["memory", "redis"])


@pytest.fixture
def uri(request: pytest.FixtureRequest, store: str) -> str:
    if store == "memory":
        return "tidegate+memory://"
    return f"tidegate+{request.getfixturevalue('redis_server').redis_url}{LONG_TIMEOUT}"


@STORES
@STRATEGY_NAMES
def test_sixteen_threads_are_admitted_exactly_to_the_limit(uri: str, name: str) -> None:
    strategy = STRATEGIES[name](storage_from_string(uri))
    with ThreadPoolExecutor(16) as threads:
        admitted = list(threads.map(lambda _: strategy.hit(LIMIT, "ann"), range(200)))
    assert sum(admitted) == LIMIT.amount
    assert strategy.hit(LIMIT, "bob")


@STORES
@STRATEGY_NAMES
def test_tasks_are_admitted_exactly_to_the_limit(uri: str, name: str) -> None:
    async def main() -> None:
        storage = storage_from_string(f"async+{uri}")
        strategy = ASYNC_STRATEGIES[name](storage)
        assert await storage.check()
        assert (await strategy.get_window_stats(LIMIT, "ann")).remaining == LIMIT.amount
        admitted = await asyncio.gather(*(strategy.hit(LIMIT, "ann") for _ in range(200)))
        assert sum(admitted) == LIMIT.amount
        assert not await strategy.test(LIMIT, "ann")
        stats = await strategy.get_window_stats(LIMIT, "ann")
        assert stats.remaining == 0 and stats.reset_time > time.time()
        await strategy.clear(LIMIT, "ann")
        assert await strategy.test(LIMIT, "ann", cost=LIMIT.amount)
        assert not await strategy.hit(LIMIT, "ann", cost=LIMIT.amount + 1)
        assert await strategy.hit(LIMIT, "ann", cost=0)
        assert await strategy.hit(LIMIT, "ann", cost=LIMIT.amount)

    asyncio.run(main())


@STORES
@STRATEGY_NAMES
def test_hits_tests_and_clears(uri: str, name: str) -> None:
    storage = storage_from_string(uri)
    strategy = STRATEGIES[name](storage)
    assert storage.check()
    assert strategy.test(LIMIT, "ann", cost=20) and not strategy.test(LIMIT, "ann", cost=21)
    assert strategy.get_window_stats(LIMIT, "ann").remaining == 20
    assert strategy.hit(LIMIT, "ann", cost=18)
    assert strategy.test(LIMIT, "ann", cost=2) and not strategy.test(LIMIT, "ann", cost=3)
    assert not strategy.hit(LIMIT, "ann", cost=3), "a denied hit takes nothing"
    assert strategy.get_window_stats(LIMIT, "ann").remaining == 2
    assert strategy.hit(LIMIT, "ann", cost=0), "nothing is taken"
    assert not strategy.hit(LIMIT, "ann", cost=21), "never fits"
    assert strategy.hit(LIMIT, "ann", cost=2)
    assert strategy.get_window_stats(LIMIT, "ann").remaining == 0
    strategy.clear(LIMIT, "ann")
    assert strategy.hit(LIMIT, "ann", cost=20)
    blocked = parse("0/minute")
    assert not strategy.hit(blocked, "ann") and not strategy.test(blocked, "ann")
    assert not strategy.hit(blocked, "ann", cost=0)
    assert strategy.get_window_stats(blocked, "ann").remaining == 0
    strategy.clear(blocked, "ann")


@pytest.mark.parametrize(
    ("name", "after_one", "after_two"),
    [("fixed-window", 40, 30), ("moving-window", 60, 50), ("sliding-window-counter", 60, 30)],
)
def test_reset_times(name: str, after_one: float, after_two: float) -> None:
    clock = ManualClock()
    clock.advance(60 - clock.now() % 60 + 20)
    strategy = STRATEGIES[name](storage_from_string("tidegate+memory://", clock=clock))
    item = parse("2/minute")

    def reset_in() -> tuple[float, float]:
        """The bounds of the time until the reset, which is rounded up to whole seconds."""
        earliest = time.time()
        reset_time = strategy.get_window_stats(item, "ann").reset_time
        return reset_time - time.time() - 1, reset_time - earliest + 0.001

    assert strategy.hit(item, "ann")
    low, high = reset_in()
    assert low <= after_one <= high
    clock.advance(10)
    assert strategy.hit(item, "ann") and not strategy.hit(item, "ann")
    low, high = reset_in()
    assert low <= after_two <= high
    clock.advance(after_two - 0.001)
    assert not strategy.test(item, "ann")
    clock.advance(0.002)
    assert strategy.test(item, "ann"), "the reset of a used limit is exact"


def redis_cli(server: Server, *command: str) -> str:
    arguments = ["redis-cli", "-p", str(server.port), *command]
    return subprocess.run(arguments, capture_output=True, check=True).stdout.decode("latin-1")


@STRATEGY_NAMES
def test_a_hit_is_one_call_and_a_cached_denial_is_none(redis_server: Server, name: str) -> None:
    redis_cli(redis_server, "config", "set", "slowlog-log-slower-than", "0")
    redis_cli(redis_server, "config", "set", "slowlog-max-len", "10000")

    def calls() -> int:
        """The calls of scripts that name the key: those of the background do not."""
        log = redis_cli(redis_server, "slowlog", "get", "10000")
        return len(re.findall(r"EVAL(?:SHA)?\n.+\n1\n.+{LIMITER/ann/50/1/year}", log))

    storage = storage_from_string(f"tidegate+{redis_server.redis_url}{LONG_TIMEOUT}")
    strategy = STRATEGIES[name](storage)
    item = parse("50/year")
    assert strategy.hit(item, "bob"), "the script is loaded"
    assert all(strategy.hit(item, "ann") for _ in range(50))
    assert calls() == 50
    assert not any(strategy.hit(item, "ann") for _ in range(500))
    assert strategy.get_window_stats(item, "ann").remaining == 0
    # The cache is not used before its first invalidations have arrived.
    assert 51 <= calls() < 300


def test_a_key_that_a_limiter_refuses_is_hashed() -> None:
    strategy = STRATEGIES["fixed-window"](storage_from_string("tidegate+memory://"))
    item = parse("1/year")
    keys = ["x" * 600, "x" * 599 + "y", "a\nb", "a\x85b", "a\udc80b", "é" * 300, "漢字", "a b"]
    for key in keys:
        assert strategy.hit(item, key) and not strategy.hit(item, key), repr(key)
    for key in keys:
        assert strategy.get_window_stats(item, key).remaining == 0
        strategy.clear(item, key)
        assert strategy.test(item, key)


def test_impossible_limits_are_value_errors() -> None:
    storage = storage_from_string("tidegate+memory://")
    strategy = STRATEGIES["moving-window"](storage)
    assert strategy.hit(parse("1/year"), "ann") and strategy.hit(parse("1/12 months"), "ann")
    with pytest.raises(ValueError, match="366 days"):
        strategy.hit(parse("1/2 years"), "ann")
    with pytest.raises(ValueError, match="sliding-counter and token-bucket allow up to"):
        strategy.hit(parse("10000001/day"), "ann")
    with pytest.raises(ValueError, match="ends like 100/1/minute"):
        storage.incr("ann", 60)
    with pytest.raises(ValueError, match="ends like 100/1/minute"):
        storage.get("LIMITER/ann/5/1/fortnight")


@pytest.mark.parametrize(
    ("uri", "options", "message"),
    [
        ("tidegate+redis://127.0.0.1", {"retry_on_timeout": True}, "'retry_on_timeout' is not an"),
        ("tidegate+redis://127.0.0.1?db=1", {}, "'db' is not an option"),
        ("tidegate+redis://127.0.0.1?timeout=soon", {}, "soon"),
        ("tidegate+redis://", {}, "not a Redis URL"),
        ("tidegate+redis+sentinel://127.0.0.1:26379", {}, "//host:port/mymaster"),
        ("tidegate+redis+cluster://127.0.0.1:1,,", {}, "not a Redis URL"),
        ("tidegate+memory://", {"timeout": 1}, "need the URL"),
        ("async+tidegate+memory://", {"max_connections": 5}, "'max_connections' is not an option"),
    ],
)
def test_wrong_uris_and_options_are_value_errors(
    uri: str, options: dict[str, bool | int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        storage_from_string(uri, **options)


@pytest.mark.parametrize("form", ["unix", "redis+unix", "prefix", "cluster", "sentinel"])
def test_deployments(form: str, tmp_path: Path, start_server: Callable[..., Server]) -> None:
    def start(*options: str) -> Server:
        fixed = ["--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
        return start_server(lambda port: ["redis-server", "--port", str(port), *fixed, *options])

    prefix, options, password = "rate_limit", {}, []
    if form.endswith("unix"):
        redis = start("--unixsocket", f"{tmp_path}/redis.sock")
        uri = f"tidegate+{form}://{tmp_path}/redis.sock?timeout=20&db=0"
    elif form == "prefix":
        redis, password = start("--requirepass", "secret"), ["--no-auth-warning", "-a", "secret"]
        prefix, options = "shop", {"key_prefix": "shop", "socket_timeout": "20"}
        uri = f"tidegate+redis://:secret@127.0.0.1:{redis.port}/0?prefix=other"
    elif form == "cluster":
        redis = start("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
        redis_cli(redis, "cluster", "addslotsrange", "0", "16383")
        until(lambda: "state:ok" in redis_cli(redis, "cluster", "info"), "the cluster is ready")
        uri = f"tidegate+redis+cluster://127.0.0.1:{redis.port},127.0.0.1:1{LONG_TIMEOUT}"
    else:
        redis, file = start(), tmp_path / "sentinel.conf"
        file.write_text(f"sentinel monitor mymaster 127.0.0.1 {redis.port} 1\n")
        command = ["redis-server", str(file), "--sentinel", "--bind", "127.0.0.1", "--port"]
        sentinel = start_server(lambda port: [*command, str(port)])
        uri = f"tidegate+redis+sentinel://127.0.0.1:{sentinel.port}/mymaster{LONG_TIMEOUT}"
    strategy = STRATEGIES["moving-window"](storage_from_string(uri, **options))
    assert sum(strategy.hit(LIMIT, "ann") for _ in range(25)) == 20
    names = redis_cli(redis, *password, "keys", "*ann*").split()
    assert [name.partition(":")[0] for name in names] == [prefix]


def test_reset_is_for_memory_only() -> None:
    storage = storage_from_string("tidegate+memory://", max_keys=1000)
    strategy = STRATEGIES["fixed-window"](storage)
    assert strategy.hit(LIMIT, "ann", cost=20) and not strategy.hit(LIMIT, "ann")
    storage.reset()
    assert strategy.hit(LIMIT, "ann")
    with pytest.raises(NotImplementedError, match="clear each key"):
        storage_from_string("tidegate+redis://127.0.0.1:1").reset()
    with pytest.raises(NotImplementedError, match="clear each key"):
        asyncio.run(storage_from_string("async+tidegate+redis://127.0.0.1:1").reset())


def test_without_redis_hits_are_decided_locally_or_are_errors(redis_server: Server) -> None:
    uri = f"tidegate+{redis_server.redis_url}"
    storage = storage_from_string(uri)
    strategy = STRATEGIES["moving-window"](storage)
    assert strategy.hit(LIMIT, "ann")
    redis_server.kill()
    assert not storage.check()
    hits = [strategy.hit(LIMIT, "ann") for _ in range(25)]
    assert hits[0] and not hits[-1] and sum(hits) <= 20
    stats = strategy.get_window_stats(LIMIT, "ann")
    assert stats.remaining == 0 and stats.reset_time > time.time()
    strict = storage_from_string(uri, on_store_failure="error")
    with pytest.raises(StoreError):
        STRATEGIES["fixed-window"](strict).hit(LIMIT, "ann")
    wrapped = storage_from_string(f"{uri}?on_store_failure=error", wrap_exceptions=True)
    with pytest.raises(StorageError):
        STRATEGIES["sliding-window-counter"](wrapped).hit(LIMIT, "ann")

    async def main() -> None:
        storage = storage_from_string(f"async+{uri}", on_store_failure="error")
        assert not await storage.check()
        with pytest.raises(StoreError):
            await ASYNC_STRATEGIES["fixed-window"](storage).hit(LIMIT, "ann")

    asyncio.run(main())
    redis_server.start()
    until(storage.check, "Redis is used again")


@STRATEGY_NAMES
def test_headers_of_flask_limiter(redis_server: Server, name: str) -> None:
    app = Flask(__name__)
    # Storage, options and strategy as in the section on storages of its documentation.
    limiter = FlaskLimiter(
        lambda: "ann",
        app=app,
        headers_enabled=True,
        storage_uri=f"tidegate+{redis_server.redis_url}{LONG_TIMEOUT}",
        storage_options={"socket_connect_timeout": 30},
        strategy=name,
    )
    app.get("/")(limiter.limit("2/year")(lambda: "ok"))
    client = app.test_client()
    for status, remaining in ((200, "1"), (200, "0"), (429, "0")):
        response = client.get("/")
        assert response.status_code == status
        assert response.headers["x-ratelimit-limit"] == "2"
        assert response.headers["x-ratelimit-remaining"] == remaining
        retry_after = int(response.headers["retry-after"])
        assert 0 < retry_after <= LIMIT.get_expiry() + 1
        reset = int(response.headers["x-ratelimit-reset"]) - time.time()
        assert reset - 1 <= retry_after <= reset + 60


def within_one_window(seconds: int, attempt: Callable[[str], list[int]]) -> list[int]:
    """Repeats the requests of a client, as another one, if a window ended meanwhile."""
    for host in range(2, 7):
        window = time.time() // seconds
        answers = attempt(f"127.0.0.{host}")
        if time.time() // seconds == window:
            return answers
    raise AssertionError(f"none of five attempts was within a window of {seconds} s")


def requests(server: Server, path: str, count: int) -> Callable[[str], list[int]]:
    """Sends requests from an address of the loopback network, and returns their statuses."""

    def attempt(client: str) -> list[int]:
        answers = []
        for _ in range(count):
            connection = http.client.HTTPConnection(
                "127.0.0.1", server.port, timeout=20, source_address=(client, 0)
            )
            connection.request("GET", path)
            answers.append(connection.getresponse().status)
            connection.close()
        return answers

    return attempt


def gunicorn(address: str) -> list[str]:
    return ["gunicorn", "--workers", "2", "--bind", address, "flask_limiter_quickstart:app"]


def uvicorn(app: str) -> Callable[[str], list[str]]:
    def command(address: str) -> list[str]:
        host, port = address.split(":")
        options = ["--workers", "2", "--log-level", "warning"]
        return ["uvicorn", "--host", host, "--port", port, *options, f"slowapi_quickstart:{app}"]

    return command


def test_flask_limiter_quick_start(
    redis_server: Server, start_app: Callable[..., Server]
) -> None:
    uri = f"tidegate+{redis_server.redis_url}{LONG_TIMEOUT}"
    app = start_app(gunicorn, STORAGE_URI=uri, PYTHONPATH=PACKAGES)
    assert within_one_window(3600, requests(app, "/fast", 60)) == [200] * 50 + [429] * 10
    assert within_one_window(86_400, requests(app, "/slow", 3)) == [200, 429, 429]
    assert within_one_window(1, requests(app, "/medium", 3)) == [200, 429, 429]
    assert requests(app, "/ping", 3)("127.0.0.9") == [200] * 3


@pytest.mark.parametrize("name", ["starlette_app", "fastapi_app"])
def test_slowapi_quick_start(
    redis_server: Server, start_app: Callable[..., Server], name: str
) -> None:
    uri = f"tidegate+{redis_server.redis_url}{LONG_TIMEOUT}"
    app = start_app(uvicorn(name), STORAGE_URI=uri, PYTHONPATH=PACKAGES)
    assert within_one_window(60, requests(app, "/home", 8)) == [200] * 5 + [429] * 3


def test_quick_starts_go_on_while_redis_hangs_and_after_its_end(
    redis_server: Server, start_app: Callable[..., Server]
) -> None:
    uri = f"tidegate+{redis_server.redis_url}"
    flask = start_app(gunicorn, STORAGE_URI=uri, PYTHONPATH=PACKAGES)
    slowapi = start_app(uvicorn("fastapi_app"), STORAGE_URI=uri, PYTHONPATH=PACKAGES)
    for client, failure in (("127.0.0.2", signal.SIGSTOP), ("127.0.0.3", signal.SIGKILL)):
        for app, path in ((flask, "/fast"), (slowapi, "/home")):
            assert requests(app, path, 1)(client) == [200]
        os.kill(redis_server.process.pid, failure)
        start = time.monotonic()
        # A worker that has not seen its fleet yet has a tenth of the limit.
        answers = requests(flask, "/fast", 20)(client)
        assert answers[:4] == [200] * 4 and set(answers) <= {200, 429}
        answers = requests(slowapi, "/home", 30)(client)
        # Each of two workers admits at most the limit, in each of two windows.
        assert set(answers) == {200, 429} and answers.count(200) <= 20
        assert time.monotonic() - start < 20, "requests do not wait for Redis"
        os.kill(redis_server.process.pid, signal.SIGCONT)


def test_quick_starts_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_URI", "tidegate+memory://")
    flask = runpy.run_path(str(HERE / "apps/flask_limiter_quickstart.py"))["app"].test_client()
    slowapi = runpy.run_path(str(HERE / "apps/slowapi_quickstart.py"))["starlette_app"]

    def fast(client: str) -> list[int]:
        remote = {"REMOTE_ADDR": client}
        return [flask.get("/fast", environ_base=remote).status_code for _ in range(52)]

    async def home_of(client: str) -> list[int]:
        transport = httpx.ASGITransport(slowapi, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as session:
            return [(await session.get("/home")).status_code for _ in range(7)]

    def home(client: str) -> list[int]:
        return asyncio.run(home_of(client))

    assert within_one_window(3600, fast) == [200] * 50 + [429] * 2
    assert within_one_window(60, home) == [200] * 5 + [429] * 2
