#!/usr/bin/env python3
"""Compares the Python package with other limiters of Python, by CPU time per decision.

All contestants take turns in one run, each in a process of its own, in memory and on a redis-server
that this program starts. Prints tables in Markdown, and the goals with their results.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import redis

from contestants import IN_MEMORY, LIMIT, ON_REDIS, WINDOWS, Contestant
from measure import MODES, USERS, Used, serve

START_TIMEOUT = 20.0
TURN_TIMEOUT = 120.0
ROUNDS = 15
MAX_LOAD = 3
# Decisions of a turn, by store and mode.
DECISIONS = {"memory": (40_000, 40_000, 40_000), "Redis": (3_200, 6_400, 12_800)}
PACKAGES = ("limits", "pyrate-limiter", "throttled-py", "redis", "hiredis", "coredis")
MODULES = ("tidegate", "limits", "pyrate_limiter", "throttled", "redis", "asyncio")

TEXT = """\
The Python package beside other limiters of Python, by `make bench-python`: CPU time of the whole
process per decision, with the background threads of the library. All contestants take turns in one
run, each in a process of its own, with the call as its documentation recommends it. The naive
script is `bench/python/naive.lua` with the time of the client and a `uuid4` as the member, by
redis-py with hiredis. "dictionary" is `counts[key] = counts.get(key, 0) + 1` in a function. On
Redis, Tidegate is `Limiter(url)`, with deny cache and fallback. throttled-py has no log, so its
counter is compared with Tidegate's. `allow` returns a bool, as the calls of limits and
pyrate-limiter do; `acquire` returns a decision with the units that are left and the times. Methods
of Tidegate and of limits are bound once, before the loop.
"""

# Use of each round, per decision.
Suite = dict[Contestant, list[Used]]


class Goal(NamedTuple):
    what: str
    is_met: bool
    goal: str
    result: str
    is_checked: bool = True


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """A server of its own on a free port, which ends with the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_TIMEOUT
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit("error: redis-server does not start")
            time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class Worker:
    """A process that measures one contestant."""

    def __init__(self, contestant: Contestant, url: str | None, mode: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._contestant = contestant
        self._connection, theirs = spawn.Pipe()
        arguments = (theirs, contestant, url, mode)
        self._process = spawn.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        with contextlib.suppress(EOFError):
            if self._connection.poll(TURN_TIMEOUT):
                return self._connection.recv()
        raise SystemExit(f"error: no result of {self._contestant}")

    def turn(self, decisions: int) -> Used:
        self._connection.send(decisions)
        return Used(*(used / decisions for used in self.receive()))

    def end(self) -> None:
        # Some libraries have threads that do not end.
        self._process.kill()
        self._process.join()


def measure(
    taking_part: list[Contestant], url: str | None, mode: str, decisions: int, rounds: int
) -> Suite:
    """Lets the contestants take turns, in the opposite order in every second round."""
    suite: Suite = {contestant: [] for contestant in taking_part}
    workers: dict[Contestant, Worker] = {}
    try:
        for contestant in taking_part:
            workers[contestant] = Worker(contestant, url, mode)
            workers[contestant].receive()
        for number in range(rounds):
            progress(f"{'Redis' if url else 'memory'}, {mode}: round {number + 1} of {rounds}")
            for contestant in taking_part[:: -1 if number % 2 else 1]:
                if url:
                    redis.Redis.from_url(url).flushall()
                suite[contestant].append(workers[contestant].turn(decisions))
    finally:
        for worker in workers.values():
            worker.end()
    return suite


def import_times(rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds of `import`, each in a new process."""
    times: dict[str, list[float]] = {module: [] for module in MODULES}
    for number in range(rounds):
        progress(f"import: round {number + 1} of {rounds}")
        for module in MODULES:
            code = f"import time; start = time.process_time(); import {module}; "
            code += "print((time.process_time() - start) * 1000)"
            times[module].append(float(subprocess.check_output([sys.executable, "-c", code])))
    return times


def ratios(suite: Suite, theirs: Contestant, call: str) -> list[float]:
    """CPU time, compared with Tidegate's same algorithm; the dictionary's with a token bucket."""
    library = "tidegate" if call == "acquire" else "tidegate allow"
    ours = suite[Contestant(library, theirs.algorithm or "token-bucket")]
    return [their.cpu / our.cpu for their, our in zip(suite[theirs], ours)]


def spread(values: list[float]) -> str:
    return f"{median(values):.2f}× ({min(values):.2f}–{max(values):.2f})"


def table(heads: list[str], rows: list[list[str]]) -> None:
    for row in [heads, ["---"] * len(heads), *rows]:
        print(f"| {' | '.join(row)} |")
    print()


def print_suite(suite: Suite, store: str) -> None:
    unit, scale = ("µs", 1e6) if store == "Redis" else ("ns", 1e9)
    calls = ["acquire", "allow"] if Contestant("dictionary", "") in suite else ["acquire"]
    heads = ["", f"CPU {unit}, median", "smallest", *(f"ratio to `{call}`" for call in calls)]
    rows = []
    for contestant, rounds in suite.items():
        cpu = [used.cpu * scale for used in rounds]
        row = [str(contestant), f"{median(cpu):,.1f}", f"{min(cpu):,.1f}"]
        is_ours = contestant.library.startswith("tidegate")
        row += ["–" if is_ours else spread(ratios(suite, contestant, call)) for call in calls]
        if store == "Redis":
            row.append(f"{median(used.wall for used in rounds) * scale:.1f}")
            row.append(f"{median(used.calls for used in rounds):.2f}")
        rows.append(row)
    table(heads + (["wall-clock µs", "calls per decision"] if store == "Redis" else []), rows)


def goals(suites: dict[tuple[str, str], Suite]) -> Iterator[Goal]:
    def compare(
        what: str, suite: Suite, theirs: Contestant, call: str, minimum: float, is_checked: bool
    ) -> Goal:
        found = ratios(suite, theirs, call)
        text = f"≥ {minimum:g}×" + ("" if is_checked else ", not checked")
        return Goal(what, median(found) >= minimum, text, spread(found), is_checked)

    if memory := suites.get(("memory", MODES[0])):
        # `allow` returns a bool, as the call of limits does; `acquire` creates a decision.
        for call in ("allow", "acquire"):
            for theirs in memory:
                if theirs.library in ("dictionary", "limits"):
                    what = f"memory, `{call}`, compared with {theirs}"
                    minimum = 20 if theirs.library == "limits" else 1
                    yield compare(what, memory, theirs, call, minimum, call == "allow")
    for mode, minimum in zip(MODES, (2, 3.5, 8)):
        if suite := suites.get(("Redis", mode)):
            what = f"Redis, {mode}, compared with redis-py and the naive script"
            yield compare(what, suite, ON_REDIS[0], "acquire", minimum, True)


def at_most(what: str, value: float, maximum: float) -> Goal:
    return Goal(what, value <= maximum, f"≤ {maximum:g}", f"{value:.1f}")


def print_environment() -> None:
    def version(package: str) -> str:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
        return f"no {package}"

    extension = importlib.util.find_spec("tidegate._tidegate")
    digest = hashlib.sha256(Path(extension.origin).read_bytes()).hexdigest()[:12]
    server = subprocess.check_output(["redis-server", "--version"], text=True)
    rows = [
        ["date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())],
        ["Python", platform.python_version()],
        ["extension", f"sha256 {digest}…"],
        ["packages", ", ".join(version(package) for package in PACKAGES)],
        ["Redis", server.split(" sha")[0]],
        ["machine", f"{os.cpu_count()} cores, a load of {os.getloadavg()[0]:.1f} at the start"],
        ["keys", f"{len(USERS)} users at random, all below the limit of {LIMIT} per minute"],
    ]
    table(["", ""], rows)
    if os.getloadavg()[0] > MAX_LOAD:
        print("**The machine was busy**: the numbers are not representative.\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds with fewer decisions")
    parser.add_argument("--rounds", type=int, help=f"number of rounds ({ROUNDS} by default)")
    parser.add_argument("--store", choices=DECISIONS, help="measure only this store")
    parser.add_argument("--wheel", type=Path, help="wheel whose size is a goal")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else ROUNDS)
    if not shutil.which("redis-server"):
        raise SystemExit("error: redis-server is not installed")
    print(TEXT)
    print_environment()

    suites: dict[tuple[str, str], Suite] = {}
    with redis_server() as server:
        for store in [options.store] if options.store else DECISIONS:
            url = server if store == "Redis" else None
            for mode, decisions in zip(MODES, DECISIONS[store]):
                taking_part = ON_REDIS if url else IN_MEMORY if mode == MODES[0] else WINDOWS
                decisions //= 4 if options.quick else 1
                suite = measure(taking_part, url, mode, decisions, rounds)
                print(f"{store}, {mode}:\n")
                print_suite(suite, store)
                suites[store, mode] = suite
    imports = import_times(rounds)
    print("CPU time of an import:\n")
    rows = [[name, f"{median(ms):.1f}", f"{min(ms):.1f}"] for name, ms in imports.items()]
    table(["", "ms, median", "smallest"], rows)

    results = [*goals(suites), at_most("`import tidegate`, ms", median(imports["tidegate"]), 30)]
    if options.wheel:
        results.append(at_most("size of the wheel, MB", options.wheel.stat().st_size / 1e6, 6))
    rows = [["✔" if goal.is_met else "✘", *goal[:1], *goal[2:4]] for goal in results]
    table(["", "measurement", "goal", "result"], rows)
    missed = any(goal.is_checked and not goal.is_met for goal in results)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
