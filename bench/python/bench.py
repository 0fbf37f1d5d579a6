#!/usr/bin/env python3
"""Compares the Python package with other limiters of Python, by CPU time per decision.

All contestants take turns in one run, each in a process of its own, in memory and on a redis-server
that this program starts. Prints tables in Markdown, and the goals with their results.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from contestants import LIMIT, Contestant, contestants, on_redis, windows
from measure import MODES, USERS, Used, serve

START_TIMEOUT = 20.0
TURN_TIMEOUT = 120.0
ROUNDS = 9
# Decisions of a turn, by store and mode.
DECISIONS = {"memory": [40_000, 40_000, 40_000], "Redis": [3_200, 6_400, 12_800]}
PACKAGES = ["tidegate", "limits", "pyrate-limiter", "throttled-py", "redis", "hiredis", "coredis"]
MODULES = ["tidegate", "limits", "pyrate_limiter", "throttled", "redis", "asyncio"]
MAX_IMPORT_MS = 30
MAX_WHEEL_MB = 6


@dataclass(frozen=True)
class Result:
    """Figures of a contestant per decision, for each round: seconds, and calls of scripts."""

    contestant: Contestant
    cpu: list[float]
    wall: list[float]
    calls: list[float]


@dataclass(frozen=True)
class Goal:
    what: str
    is_met: bool
    goal: str
    result: str


Suite = dict[str, Result]


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
        self._connection, theirs = spawn.Pipe()
        arguments = (theirs, contestant, url, mode)
        self._process = spawn.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._name = contestant.name
        self.receive()

    def receive(self) -> Used:
        try:
            if self._connection.poll(TURN_TIMEOUT):
                return self._connection.recv()
        except EOFError:
            pass
        self._process.kill()
        raise SystemExit(f"error: no result of {self._name}")

    def turn(self, decisions: int) -> Used:
        self._connection.send(decisions)
        return self.receive()

    def end(self) -> None:
        # Some libraries have threads that do not end.
        self._process.kill()
        self._process.join()


def measure(
    title: str,
    taking_part: list[Contestant],
    url: str | None,
    mode: str,
    decisions: int,
    rounds: int,
) -> Suite:
    """Lets the contestants take turns, in the opposite order in every second round."""
    client = redis.Redis.from_url(url) if url else None
    results = {each.name: Result(each, [], [], []) for each in taking_part}
    workers: dict[str, Worker] = {}
    try:
        for each in taking_part:
            workers[each.name] = Worker(each, url, mode)
        for number in range(rounds):
            progress(f"{title}: round {number + 1} of {rounds}")
            for name in list(results)[:: -1 if number % 2 else 1]:
                if client:
                    client.flushall()
                used = workers[name].turn(decisions)
                results[name].cpu.append(used.cpu / decisions)
                results[name].wall.append(used.wall / decisions)
                results[name].calls.append(used.calls / decisions)
    finally:
        for worker in workers.values():
            worker.end()
    return results


def import_times(rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds of `import`, each in a new process."""
    times: dict[str, list[float]] = {module: [] for module in MODULES}
    for number in range(rounds):
        progress(f"import: round {number + 1} of {rounds}")
        for module in MODULES:
            code = (
                f"import time; start = time.process_time(); import {module}; "
                "print((time.process_time() - start) * 1000)"
            )
            output = subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, timeout=TURN_TIMEOUT
            )
            times[module].append(float(output.stdout))
    return times


def ratios(suite: Suite, name: str, to: str) -> list[float]:
    return [theirs / ours for theirs, ours in zip(suite[name].cpu, suite[to].cpu)]


def spread(values: list[float], digits: int = 1) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f}× ({low:.{digits}f}–{high:.{digits}f})"


def table(heads: list[str], rows: list[list[str]]) -> None:
    for row in [heads, ["---"] * len(heads), *rows]:
        print(f"| {' | '.join(row)} |")
    print()


def counterpart(result: Result, call: str) -> str:
    """Tidegate with the same algorithm; the dictionary is compared with a token bucket."""
    library = "tidegate" if call == "acquire" else "tidegate allow"
    return f"{library} {result.contestant.algorithm or 'token-bucket'}"


def print_suite(suite: Suite, unit: float, is_redis: bool) -> None:
    name_of_unit = "µs" if unit == 1e6 else "ns"
    calls = ["acquire", "allow"] if "dictionary" in suite else ["acquire"]
    rows = []
    for name, result in suite.items():
        cpu = [value * unit for value in result.cpu]
        row = [name, f"{statistics.median(cpu):.1f}", f"{min(cpu):.1f}"]
        for ours in (counterpart(result, call) for call in calls):
            is_ours = result.contestant.library.startswith("tidegate")
            row.append("–" if is_ours else spread(ratios(suite, name, ours), 2))
        if is_redis:
            row.append(f"{statistics.median(result.wall) * unit:.1f}")
            row.append(f"{statistics.median(result.calls):.2f}")
        rows.append(row)
    heads = ["", f"CPU {name_of_unit}, median", "smallest"]
    heads += [f"ratio to `{call}`" for call in calls]
    table(heads + (["wall-clock µs", "calls per decision"] if is_redis else []), rows)


def ratio_goal(what: str, suite: Suite, name: str, call: str, minimum: float) -> Goal:
    found = ratios(suite, name, counterpart(suite[name], call))
    is_met = statistics.median(found) >= minimum
    return Goal(what, is_met, f"≥ {minimum:g}×", spread(found, 2))


def goals(
    suites: dict[tuple[str, str], Suite], imports: dict[str, list[float]], wheel: Path | None
) -> Iterator[Goal]:
    if memory := suites.get(("memory", MODES[0])):
        for call in ("acquire", "allow"):
            what = f"memory, `{call}`, token bucket, compared with a dictionary increment"
            yield ratio_goal(what, memory, "dictionary", call, 1)
        for name in memory:
            if name.startswith("limits "):
                what = f"memory, `acquire`, compared with {name}"
                yield ratio_goal(what, memory, name, "acquire", 20)
    for mode, minimum in zip(MODES, (2, 3.5, 8)):
        if suite := suites.get(("Redis", mode)):
            what = f"Redis, {mode}, compared with redis-py and the naive script"
            yield ratio_goal(what, suite, "redis-py, naive script sliding-log", "acquire", minimum)
    milliseconds = statistics.median(imports["tidegate"])
    is_met = milliseconds <= MAX_IMPORT_MS
    yield Goal("`import tidegate`, ms", is_met, f"≤ {MAX_IMPORT_MS}", f"{milliseconds:.1f}")
    if wheel:
        megabytes = wheel.stat().st_size / 1e6
        is_met = megabytes <= MAX_WHEEL_MB
        yield Goal("size of the wheel, MB", is_met, f"≤ {MAX_WHEEL_MB}", f"{megabytes:.2f}")


def print_environment() -> None:
    def version(package: str) -> str:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
        return f"{package} of PYTHONPATH" if package == "tidegate" else f"no {package}"

    server = subprocess.run(["redis-server", "--version"], capture_output=True, text=True)
    rows = [
        ["date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())],
        ["Python", platform.python_version()],
        ["packages", ", ".join(version(package) for package in PACKAGES)],
        ["Redis", server.stdout.split(" sha")[0]],
        ["machine", f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start"],
        ["keys", f"{len(USERS)} users at random, each below the limit of {LIMIT} per minute"],
    ]
    table(["", ""], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds, with fewer decisions")
    parser.add_argument("--rounds", type=int, help=f"number of rounds ({ROUNDS} by default)")
    parser.add_argument("--store", choices=["memory", "Redis"], help="measure only this store")
    parser.add_argument("--wheel", type=Path, help="wheel whose size is a goal")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else ROUNDS)
    print_environment()

    suites: dict[tuple[str, str], Suite] = {}
    with redis_server() as url:
        for store in [options.store] if options.store else list(DECISIONS):
            for mode, decisions in zip(MODES, DECISIONS[store]):
                taking_part = on_redis() if store == "Redis" else windows()
                if (store, mode) == ("memory", MODES[0]):
                    taking_part = contestants()
                decisions //= 4 if options.quick else 1
                suite = measure(
                    f"{store}, {mode}", taking_part, url if store == "Redis" else None, mode,
                    decisions, rounds,
                )
                suites[store, mode] = suite
                print(f"{store}, {mode}:\n")
                print_suite(suite, 1e6 if store == "Redis" else 1e9, store == "Redis")
    imports = import_times(rounds)
    print("CPU time of an import:\n")
    table(
        ["", "ms, median", "smallest"],
        [[name, f"{statistics.median(ms):.1f}", f"{min(ms):.1f}"] for name, ms in imports.items()],
    )
    reached = list(goals(suites, imports, options.wheel))
    rows = [["✔" if goal.is_met else "✘", goal.what, goal.goal, goal.result] for goal in reached]
    table(["", "measurement", "goal", "result"], rows)
    return 1 if options.check and not all(goal.is_met for goal in reached) else 0


if __name__ == "__main__":
    sys.exit(main())
