"""Redis that is killed, hangs or is not there: each call is answered within its deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from conftest import Server, free_port, until
from tidegate import Limiter, Quota, StoreError

PLENTY = Quota("1_000_000/hour", algorithm="token-bucket")
TIMEOUT = 0.1
# Ten times the deadline: the machine may be busy with other things.
SLOW = 1.0
# Maximum for a single call, whose thread may have to wait for its turn.
SLOWEST = 5.0
THREADS = 16
TASKS = 50


class Calls:
    """Durations and sources of calls."""

    def __init__(self) -> None:
        self.durations: list[float] = []
        self.sources: list[str] = []
        self.errors: list[BaseException] = []
        self.ended = False

    def record(self, started: float, source: str) -> None:
        self.durations.append(time.monotonic() - started)
        self.sources.append(source)

    def wait_for(self, source: str, count: int = 100) -> None:
        """Waits for `count` further decisions in a row with this source."""
        start = len(self.sources)

        def is_reached() -> bool:
            recent = self.sources[start:][-count:]
            return bool(self.errors) or (len(recent) == count and set(recent) == {source})

        until(is_reached, f"decisions by {source}")

    def check(self) -> None:
        assert not self.errors
        slow = sum(duration > SLOW for duration in self.durations)
        assert slow <= len(self.durations) / 100
        assert max(self.durations) < SLOWEST


@contextmanager
def threads_that_call(limiter: Limiter) -> Iterator[Calls]:
    calls = Calls()

    def run(key: str) -> None:
        try:
            while not calls.ended:
                started = time.monotonic()
                calls.record(started, limiter.acquire(key, PLENTY).source)
                time.sleep(0.001)
        except BaseException as error:
            calls.errors.append(error)

    threads = [threading.Thread(target=run, args=(f"key-{n}",)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield calls
    finally:
        calls.ended = True
        for thread in threads:
            thread.join()
    calls.check()


@contextmanager
def loop_that_calls(limiter: Limiter) -> Iterator[Calls]:
    """Tasks in a loop, which has a ticker, too: the loop is never blocked by a call."""
    calls = Calls()
    ticks = Calls()

    async def call(key: str) -> None:
        while not calls.ended:
            started = time.monotonic()
            calls.record(started, (await limiter.aio.acquire(key, PLENTY)).source)
            await asyncio.sleep(0.005)

    async def tick() -> None:
        while not calls.ended:
            started = time.monotonic()
            await asyncio.sleep(0.01)
            ticks.record(started, "")

    async def main() -> None:
        await asyncio.gather(tick(), *(call(f"key-{n}") for n in range(TASKS)))

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            calls.errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield calls
    finally:
        calls.ended = True
        thread.join()
    calls.check()
    ticks.check()


def kill(server: Server) -> Callable[[], None]:
    server.kill()
    return server.start


def stop(server: Server) -> Callable[[], None]:
    """Lets the server hang: it accepts connections and bytes, and answers nothing."""
    process = server.process.pid
    os.kill(process, signal.SIGSTOP)
    return lambda: os.kill(process, signal.SIGCONT)


@pytest.mark.parametrize("fault", [kill, stop])
@pytest.mark.parametrize("load", [threads_that_call, loop_that_calls])
def test_calls_keep_their_deadline_while_redis_is_away(
    redis_server: Server,
    load: Callable[[Limiter], Iterator[Calls]],
    fault: Callable[[Server], Callable[[], None]],
) -> None:
    limiter = Limiter(redis_server.redis_url, timeout=TIMEOUT)
    with load(limiter) as calls:
        calls.wait_for("store")
        for _ in range(2):
            repair = fault(redis_server)
            calls.wait_for("local")
            repair()
            calls.wait_for("store")


@pytest.mark.parametrize("hangs", [False, True])
def test_limiter_starts_before_redis(redis_server: Server, hangs: bool) -> None:
    repair = stop(redis_server) if hangs else kill(redis_server)
    limiter = Limiter(redis_server.redis_url, timeout=TIMEOUT)
    with threads_that_call(limiter) as calls:
        calls.wait_for("local")
        repair()
        calls.wait_for("store")


def test_other_answers_without_redis() -> None:
    limiter = Limiter(f"redis://127.0.0.1:{free_port()}", timeout=TIMEOUT)
    for failure, allowed in [("allow", True), ("deny", False), ("local", True)]:
        decision = limiter.acquire("client", PLENTY, on_store_failure=failure)
        assert (decision.source, decision.allowed) == (failure, allowed)
    with pytest.raises(StoreError):
        limiter.acquire("client", PLENTY, on_store_failure="error")

    async def main() -> None:
        with pytest.raises(StoreError):
            await limiter.aio.acquire("client", PLENTY, on_store_failure="error")

    asyncio.run(main())


def test_other_threads_run_while_a_call_hangs(redis_server: Server) -> None:
    limiter = Limiter(redis_server.redis_url, timeout=60)
    assert limiter.acquire("client", PLENTY).source == "store"
    repair = stop(redis_server)
    decisions = []
    calling = threading.Thread(target=lambda: decisions.append(limiter.acquire("client", PLENTY)))
    calling.start()
    # This thread runs Python all the time, and the other one is inside its call.
    steps = 0
    end = time.monotonic() + 0.2
    while time.monotonic() < end or steps < 1000:
        steps += 1
    assert calling.is_alive() and not decisions
    repair()
    calling.join(10)
    assert decisions and decisions[0].source == "store"


@pytest.mark.parametrize("url", [None, "redis"])
def test_ctrl_c_ends_a_wait(redis_server: Server, url: str | None) -> None:
    script = textwrap.dedent(f"""
        import os, signal, threading
        from tidegate import Limiter, Quota
        limiter, quota = Limiter({url and redis_server.redis_url!r}), Quota("1/hour")
        assert limiter.acquire("client", quota)
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            limiter.wait("client", quota, 7200)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, timeout=20, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")
