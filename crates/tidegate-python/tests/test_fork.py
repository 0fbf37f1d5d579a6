"""Forks: the child decides with sockets and threads of its own, and the parent is not disturbed."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable

import pytest
from conftest import Server, until
from tidegate import Limiter, Quota

# More than any of these tests takes: no unit is denied, and each decision needs Redis.
PLENTY = Quota("1_000_000/hour", algorithm="token-bucket")
CHILD_TIMEOUT = 10
FORKS = 20
THREADS = 8
FROM_REDIS = {"store", "deny-cache"}

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def fork(child: Callable[[], object]) -> int:
    """Forks, and returns the id of the child, which ends with status 0 if it raises nothing."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        signal.alarm(CHILD_TIMEOUT)
        child()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def join(process: int) -> None:
    """Waits for the end of a child, which its alarm bounds."""
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "see what the child wrote"


class Load:
    """Threads that call the limiter, and what became of their calls."""

    def __init__(self, limiter: Limiter) -> None:
        self.calls = [0] * THREADS
        self.sources: set[str] = set()
        self.errors: list[BaseException] = []
        self._limiter = limiter
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(index,)) for index in range(THREADS)
        ]

    def _run(self, index: int) -> None:
        try:
            if index == 0:
                asyncio.run(self._call_from_a_loop())
            while not self._ended.is_set():
                self._count(index, self._limiter.acquire(f"parent-{index}", PLENTY).source)
        except BaseException as error:
            self.errors.append(error)

    async def _call_from_a_loop(self) -> None:
        async def call() -> None:
            while not self._ended.is_set():
                decision = await self._limiter.aio.acquire("parent-loop", PLENTY)
                self._count(0, decision.source)

        await asyncio.gather(*(call() for _ in range(8)))

    def _count(self, index: int, source: str) -> None:
        self.calls[index] += 1
        self.sources.add(source)

    def wait_for_progress(self) -> None:
        """Waits until each thread has made calls that started from now on."""
        before = list(self.calls)
        until(
            lambda: bool(self.errors)
            or all(now > then + 8 for now, then in zip(self.calls, before)),
            "each thread makes progress",
        )

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.wait_for_progress()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(CHILD_TIMEOUT)
            assert not thread.is_alive(), "a call of the parent hangs"
        assert not self.errors
        assert self.sources <= FROM_REDIS


def check_limiter(limiter: Limiter) -> None:
    """Decides by Redis, from several threads and from an event loop."""
    assert limiter.acquire("child", PLENTY).source in FROM_REDIS

    async def main() -> None:
        calls = (limiter.aio.acquire("child", PLENTY) for _ in range(10))
        assert all(decision.source in FROM_REDIS for decision in await asyncio.gather(*calls))

    asyncio.run(main())
    sources: list[str] = []
    threads = [
        threading.Thread(target=lambda: sources.append(limiter.acquire("child", PLENTY).source))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sources) == 4 and set(sources) <= FROM_REDIS


def check_script(script: str) -> None:
    """Runs a script, which ends in time and writes nothing to stderr."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        timeout=2 * CHILD_TIMEOUT, capture_output=True, text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_fork_under_load(redis_server: Server) -> None:
    limiter = Limiter(redis_server.redis_url, timeout=10)
    with Load(limiter) as load:
        for _ in range(FORKS):
            join(fork(lambda: check_limiter(limiter)))
        load.wait_for_progress()


def test_child_that_drops_a_limiter_does_not_disturb_the_parent(redis_server: Server) -> None:
    # The last reference: no thread of the load is in a call of this one.
    dropped = [Limiter(redis_server.redis_url, timeout=10)]

    def drop() -> None:
        dropped.clear()
        gc.collect()

    def use_and_drop() -> None:
        check_limiter(dropped[0])
        drop()

    with Load(Limiter(redis_server.redis_url, timeout=10)) as load:
        for child in [drop, use_and_drop] * 5:
            assert dropped[0].acquire("parent", PLENTY).source == "store"
            join(fork(child))
            assert dropped[0].acquire("parent", PLENTY).source == "store"
        load.wait_for_progress()


def test_child_of_a_child_decides(redis_server: Server) -> None:
    limiter = Limiter(redis_server.redis_url, timeout=10)
    check_limiter(limiter)

    def child() -> None:
        check_limiter(limiter)
        join(fork(lambda: check_limiter(limiter)))
        check_limiter(limiter)

    join(fork(child))
    check_limiter(limiter)


@pytest.mark.parametrize("is_used_before", [False, True])
def test_prefork_workers_share_one_limit(redis_server: Server, is_used_before: bool) -> None:
    limit, workers, calls = 90, 4, 50
    limiter, quota = Limiter(redis_server.redis_url, timeout=10), Quota(f"{limit}/hour")
    if is_used_before:
        check_limiter(limiter)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def work() -> None:
        signal.alarm(CHILD_TIMEOUT)
        decisions = [limiter.acquire("client", quota) for _ in range(calls)]
        results.put((sum(map(bool, decisions)), {decision.source for decision in decisions}))

    children = [context.Process(target=work) for _ in range(workers)]
    for child in children:
        child.start()
    for child in children:
        child.join(CHILD_TIMEOUT)
        assert child.exitcode == 0
    answers = [results.get() for _ in children]
    assert sum(allowed for allowed, _ in answers) == limit
    assert set().union(*(sources for _, sources in answers)) <= FROM_REDIS
    assert not limiter.acquire("client", quota)


def test_fork_during_the_first_call_of_another_thread(redis_server: Server) -> None:
    """The child cannot wait for a value that a thread of the parent has begun to compute."""
    script = textwrap.dedent(f"""
        import os, random, signal, threading, time
        from tidegate import Limiter, Quota

        def parent():
            limiter = Limiter({redis_server.redis_url!r}, timeout=5)
            first = threading.Thread(target=limiter.acquire, args=("client", quota))
            first.start()
            time.sleep(random.uniform(0, 0.004))
            child = os.fork()
            if child == 0:
                signal.alarm({CHILD_TIMEOUT})
                os._exit(limiter.acquire("client", quota).source != "store")
            status = os.waitpid(child, 0)[1]
            first.join()
            os._exit(status != 0)

        quota = Quota("1000/hour")
        # Each of these processes has made no call before.
        for _ in range(30):
            process = os.fork()
            if process == 0:
                parent()
            assert os.waitpid(process, 0)[1] == 0
    """)
    check_script(script)


def test_fork_that_python_does_not_see(redis_server: Server) -> None:
    """uWSGI forks in C, and by default calls no hook of Python."""
    script = textwrap.dedent(f"""
        import ctypes, os, signal, sys
        from tidegate import Limiter, Quota
        limiter, quota = Limiter({redis_server.redis_url!r}, timeout=10), Quota("9/hour")
        assert limiter.acquire("client", quota).source == "store"
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            signal.alarm({CHILD_TIMEOUT})
            os._exit(0 if limiter.acquire("client", quota).source == "store" else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert limiter.acquire("client", quota).remaining == 6
    """)
    check_script(script)


def test_hook_that_was_registered_before_the_import(redis_server: Server) -> None:
    """Hooks run in the order of their registration."""
    script = textwrap.dedent(f"""
        import os, signal
        def use_limiter():
            signal.alarm({CHILD_TIMEOUT})
            assert limiter.acquire("client", quota).source == "store"
        os.register_at_fork(after_in_child=use_limiter)
        from tidegate import Limiter, Quota
        limiter, quota = Limiter({redis_server.redis_url!r}, timeout=10), Quota("9/hour")
        assert limiter.acquire("client", quota).source == "store"
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert limiter.acquire("client", quota).remaining == 6
    """)
    check_script(script)


def test_memory_is_copied() -> None:
    limiter, quota = Limiter(), Quota("10/hour")
    assert all(limiter.acquire("client", quota) for _ in range(4))

    def child() -> None:
        assert [bool(limiter.acquire("client", quota)) for _ in range(7)] == [True] * 6 + [False]

    for _ in range(FORKS):
        join(fork(child))
    assert limiter.acquire("client", quota).remaining == 5


def test_fork_while_threads_wait_in_memory() -> None:
    """No lock of the store is held in the child by a thread that does not exist there."""
    limiter, ended = Limiter(), threading.Event()

    def wait() -> None:
        while not ended.is_set():
            limiter.wait("client", PLENTY, 0)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    interval = sys.getswitchinterval()
    # The forking thread gets the GIL at once.
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            join(fork(lambda: limiter.acquire("client", PLENTY)))
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("ending", ["sys.exit()", "pass", "del limiter; gc.collect()"])
def test_processes_end(redis_server: Server, ending: str) -> None:
    """Child and parent end by way of Python's own cleaning up, with calls in flight elsewhere."""
    script = textwrap.dedent(f"""
        import asyncio, gc, os, signal, sys, threading
        from tidegate import Limiter, Quota
        limiter = Limiter({redis_server.redis_url!r}, timeout=10)
        plenty, empty = Quota("1_000_000/hour", algorithm="token-bucket"), Quota("1/hour")
        limiter.acquire("empty", empty)
        ended, started = threading.Event(), threading.Event()
        async def wait():
            limited = asyncio.create_task(limiter.aio.wait("empty", empty, 7200))
            while not ended.is_set():
                await limiter.aio.acquire("client", plenty)
                started.set()
            limited.cancel()
        thread = threading.Thread(target=lambda: asyncio.run(wait()))
        thread.start()
        started.wait()
        children = []
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm({CHILD_TIMEOUT})
                assert limiter.acquire("client", plenty).source == "store"
                {ending}
                sys.exit()
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        assert statuses == [0] * 5, statuses
        ended.set()
        thread.join()
        assert limiter.acquire("client", plenty).source == "store"
    """)
    check_script(script)
