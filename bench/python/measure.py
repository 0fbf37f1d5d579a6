"""Measures one contestant in a process of its own, turn by turn.

The CPU time is that of the whole process, with the background threads of the library. Background
threads of the other contestants are in other processes, so they cost it nothing.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import redis

from contestants import LIBRARIES, LIMIT, Contestant, Names

USERS = [f"user{number}" for number in range(200)]
THREADS = 16
TASKS = 64
# Calls beyond the limit, of which some must be denied; buckets refill a few units meanwhile.
EXCESS = 200
MODES = ["one thread", f"{THREADS} threads", f"asyncio, {TASKS} tasks"]
Loop = Callable[[Iterable[str]], Any]


class Used(NamedTuple):
    """Use of a turn: seconds of CPU and of the clock, and calls of scripts on Redis."""

    cpu: float
    wall: float
    calls: int


def serve(connection: Connection, contestant: Contestant, url: str | None, mode: str) -> None:
    """Measures a turn for each number of decisions that it receives, until it receives 0."""
    if mode == MODES[0] and contestant.algorithm:
        check_that_it_limits(contestant, url)
    connection.send("ready")
    while decisions := connection.recv():
        keys = random.Random(decisions).choices(USERS, k=decisions)
        connection.send(turn(contestant, url, mode, keys))


def turn(contestant: Contestant, url: str | None, mode: str, keys: list[str]) -> Used:
    """Measures a decision on each key, with new counts."""
    if mode == MODES[2]:
        return asyncio.run(asyncio_turn(contestant, url, keys))
    library = LIBRARIES[contestant.library]
    loop = compile_loop(library.call, names_of(contestant, url, False), is_async=False)
    if mode == MODES[0]:
        loop(USERS)
        with Meter(url) as meter:
            loop(keys)
        return meter.used
    in_threads(loop, [USERS] * THREADS, url)
    return in_threads(loop, [keys[number::THREADS] for number in range(THREADS)], url)


def names_of(contestant: Contestant, url: str | None, is_async: bool) -> Names:
    library = LIBRARIES[contestant.library]
    return library.setup(library.variants[contestant.algorithm], url, is_async)


def in_threads(loop: Loop, shares: list[list[str]], url: str | None) -> Used:
    """Runs a loop for each share, and measures from the moment that all threads are started."""
    barrier = threading.Barrier(len(shares) + 1)

    def run(share: list[str]) -> None:
        barrier.wait()
        loop(share)

    threads = [threading.Thread(target=run, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    with Meter(url) as meter:
        barrier.wait()
        for thread in threads:
            thread.join()
    return meter.used


async def asyncio_turn(contestant: Contestant, url: str | None, keys: list[str]) -> Used:
    library = LIBRARIES[contestant.library]
    names = names_of(contestant, url, True)
    loop = compile_loop(library.asyncio_call or library.call, names, is_async=True)

    async def run(keys: Iterable[str]) -> None:
        # The tasks share the iterator, so that none is idle before the last decision.
        iterator = iter(keys)
        await asyncio.gather(*(loop(iterator) for _ in range(TASKS)))

    await run(USERS * 4)
    with Meter(url) as meter:
        await run(keys)
    return meter.used


class Meter:
    """Measures the body of a `with` statement."""

    def __init__(self, url: str | None) -> None:
        self._redis = redis.Redis.from_url(url) if url else None

    def __enter__(self) -> Meter:
        gc.collect()
        self._calls = self._script_calls()
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        self.used = Used(cpu, wall, self._script_calls() - self._calls)

    def _script_calls(self) -> int:
        if self._redis is None:
            return 0
        commands = self._redis.info("commandstats")
        counts = (commands.get(f"cmdstat_{name}", {}) for name in ("eval", "evalsha"))
        return sum(count.get("calls", 0) for count in counts)


def compile_loop(call: str, names: Names, *, is_async: bool) -> Loop:
    """Returns a function that makes the call for each key, with the names as local variables.

    The call is compiled into the loop, as `timeit` does it: no contestant pays for a lambda.
    """
    parameters = ", ".join(["keys", *names])
    prefix, wait = ("async ", "await ") if is_async else ("", "")
    source = f"{prefix}def loop({parameters}):\n    for key in keys:\n        {wait}{call}\n"
    scope: dict[str, Any] = {}
    exec(source, scope)
    loop = scope["loop"]
    return lambda keys: loop(keys, **names)


def check_that_it_limits(contestant: Contestant, url: str | None) -> None:
    """Makes more calls for one user than the limit, and expects it to deny some of them."""
    library = LIBRARIES[contestant.library]
    names = names_of(contestant, url, False)
    is_allowed = eval(f"lambda key: {library.check or library.call}", names)
    admitted = sum(bool(is_allowed("checked")) for _ in range(LIMIT + EXCESS))
    if not LIMIT <= admitted < LIMIT + EXCESS:
        raise AssertionError(f"{contestant}: {admitted} admitted of {LIMIT + EXCESS}")
