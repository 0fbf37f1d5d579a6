"""Event loops: cancellation, many loops, loops that end while calls are in flight."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop
from conftest import Server
from tidegate import Limiter, ManualClock, Quota

PLENTY = Quota("1_000_000/hour", algorithm="token-bucket")
EXIT_TIMEOUT = 20


def run_uvloop(main: Coroutine[Any, Any, Any]) -> Any:
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


RUNNERS = [asyncio.run, run_uvloop]


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "dev", "-W", "ignore::ResourceWarning", "-c"]
    return subprocess.run(
        [*command, textwrap.dedent(script), *arguments],
        timeout=EXIT_TIMEOUT, capture_output=True, text=True,
    )


@pytest.mark.parametrize("run", RUNNERS)
def test_many_calls_at_once(redis_server: Server, run: Any) -> None:
    limiter, quota = Limiter(redis_server.redis_url, timeout=30), Quota("3000/hour")

    async def main() -> None:
        calls = (limiter.aio.acquire("client", quota) for _ in range(10_000))
        decisions = await asyncio.gather(*calls)
        assert sum(map(bool, decisions)) == 3000
        assert {decision.source for decision in decisions} <= {"store", "deny-cache"}

    run(main())


@pytest.mark.parametrize("run", RUNNERS)
def test_cancelled_call_stays_charged(redis_server: Server, run: Any) -> None:
    limiter, quota = Limiter(redis_server.redis_url, timeout=30), Quota("10/hour")

    async def main() -> None:
        problems: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        assert await limiter.aio.acquire("client", quota)
        os.kill(redis_server.process.pid, signal.SIGSTOP)
        calls = [asyncio.create_task(limiter.aio.acquire("client", quota)) for _ in range(4)]
        await asyncio.sleep(0.05)
        for call in calls[:3]:
            call.cancel()
        cancelled = await asyncio.gather(*calls[:3], return_exceptions=True)
        assert {type(error) for error in cancelled} == {asyncio.CancelledError}
        os.kill(redis_server.process.pid, signal.SIGCONT)
        assert await calls[3]
        assert (await limiter.aio.peek("client", quota, 5)).remaining == 0
        assert not await limiter.aio.peek("client", quota, 6)
        assert not problems

    run(main())


@pytest.mark.parametrize("run", RUNNERS)
def test_cancelled_wait_takes_no_units(redis_server: Server, run: Any) -> None:
    clock = ManualClock()
    redis, memory = Limiter(redis_server.redis_url, timeout=30), Limiter(clock=clock)

    async def main(limiter: Limiter, quota: Quota) -> None:
        assert await limiter.aio.acquire("client", quota, 4)
        waits = [asyncio.create_task(limiter.aio.wait("client", quota, 60)) for _ in range(20)]
        await asyncio.sleep(0.05)
        for wait in waits:
            wait.cancel()
        answers = await asyncio.gather(*waits, return_exceptions=True)
        assert {type(error) for error in answers} == {asyncio.CancelledError}
        clock.advance(60)
        # Longer than the whole window: those that still waited would have been admitted.
        await asyncio.sleep(0.6)
        assert (await limiter.aio.peek("client", quota)).remaining == quota.limit - 1

    run(main(memory, Quota("4/minute")))
    run(main(redis, Quota("4/500ms")))


@pytest.mark.parametrize("run", RUNNERS)
def test_loops_leave_no_files_open(redis_server: Server, run: Any) -> None:
    limiter = Limiter(redis_server.redis_url, timeout=30)

    async def finish() -> None:
        await asyncio.gather(*(limiter.aio.acquire("client", PLENTY) for _ in range(10)))

    async def cancel() -> None:
        calls = [asyncio.create_task(limiter.aio.acquire("client", PLENTY)) for _ in range(10)]
        calls.append(asyncio.create_task(limiter.aio.wait("client", Quota("1/hour"), 7200)))
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    run(finish())
    before = open_files()
    for _ in range(50):
        run(finish())
        run(cancel())
    # The answers of the cancelled calls have arrived when later calls are answered.
    run(finish())
    assert open_files() <= before + 10


def test_loops_of_several_threads(redis_server: Server) -> None:
    limiter, quota = Limiter(redis_server.redis_url, timeout=30), Quota("500/hour")
    allowed: list[int] = []

    async def main() -> None:
        calls = (limiter.aio.acquire("client", quota) for _ in range(300))
        allowed.append(sum(map(bool, await asyncio.gather(*calls))))

    runners = [*RUNNERS, *RUNNERS]
    threads = [threading.Thread(target=lambda run=run: run(main())) for run in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(allowed) == len(runners) and sum(allowed) == 500


HANGING = """
    import asyncio, os, signal, sys, threading, time
    from tidegate import Limiter, Quota
    url, server, loop_module = sys.argv[1], int(sys.argv[2]), __import__(sys.argv[3])
    limiter, plenty = Limiter(url, timeout=3), Quota("1_000_000/hour", algorithm="token-bucket")
    assert limiter.acquire("client", plenty).source == "store"
    os.kill(server, signal.SIGSTOP)
    loop = loop_module.new_event_loop()
"""


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
def test_loop_is_closed_while_calls_are_in_flight(redis_server: Server, module: str) -> None:
    script = HANGING + """
    async def start():
        call = asyncio.ensure_future(limiter.aio.acquire("client", plenty))
        wait = asyncio.ensure_future(limiter.aio.wait("client", plenty, 10))
        await asyncio.sleep(0.05)
        for task in call, wait:
            task.cancel()
        await asyncio.gather(call, wait, return_exceptions=True)
    loop.run_until_complete(start())
    loop.close()
    os.kill(server, signal.SIGCONT)
    async def later():
        for _ in range(20):
            assert (await limiter.aio.acquire("client", plenty)).source == "store"
    loop = loop_module.new_event_loop()
    loop.run_until_complete(later())
    loop.close()
    """
    ended = run_script(script, redis_server.redis_url, str(redis_server.process.pid), module)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
@pytest.mark.parametrize("caller", ["loop", "daemon"])
def test_interpreter_ends_while_calls_are_in_flight(
    redis_server: Server, module: str, caller: str
) -> None:
    """The calls would take three seconds, and the interpreter does not wait for them."""
    script = HANGING + """
    def call():
        limiter.acquire("client", plenty)
    async def start():
        for _ in range(100):
            tasks.append(asyncio.ensure_future(limiter.aio.acquire("client", plenty)))
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tasks = []
    if sys.argv[4] == "loop":
        loop.run_until_complete(start())
    else:
        for _ in range(4):
            threading.Thread(target=call, daemon=True).start()
        time.sleep(0.1)
    loop.close()
    """
    started = time.monotonic()
    server = str(redis_server.process.pid)
    ended = run_script(script, redis_server.redis_url, server, module, caller)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert time.monotonic() - started < EXIT_TIMEOUT
