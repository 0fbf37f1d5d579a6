"""The sequences of the conformance suite, through Python: each decision is that of the naive model.

``TIDEGATE_SEQUENCES`` names the file that the example ``conformance_sequences`` of the Rust library
prints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from tidegate import Decision, Limiter, ManualClock, Quota

MIN_STEPS = 1_000
MICROSECOND = 1_000_000
ALGORITHMS = {"sliding-log", "sliding-counter", "fixed-window", "token-bucket", "leaky-bucket"}
ACTIONS = {"acquire", "peek", "report", "refund", "reset"}


def read_steps() -> Iterator[dict[str, Any]]:
    with open(os.environ["TIDEGATE_SEQUENCES"], encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def to_quota(charge: dict[str, Any]) -> Quota:
    algorithm = charge["algorithm"]
    return Quota(
        f"{charge['limit']}/{charge['window_us']}us",
        algorithm=algorithm,
        burst=charge["burst"] if algorithm.endswith("bucket") else None,
        encoding=charge["encoding"] if algorithm.startswith("sliding") else None,
        count_denied=charge["count_denied"],
        block_for=[length / MICROSECOND for length in charge["block_for_us"]] or None,
    )


def to_fields(decision: Decision) -> dict[str, Any]:
    return {
        "allowed": decision.allowed,
        "limit": decision.limit,
        "remaining": decision.remaining,
        "retry_after_us": round(decision.retry_after * MICROSECOND),
        "reset_after_us": round(decision.reset_after * MICROSECOND),
        "delay_us": round(decision.delay * MICROSECOND),
    }


def move(clock: ManualClock, micros: int) -> None:
    """Moves a clock exactly: whole seconds first, since a long float has no microseconds."""
    change = clock.advance if micros >= 0 else clock.step_back
    seconds, rest = divmod(abs(micros), MICROSECOND)
    change(seconds)
    change(rest / MICROSECOND)


def decide(limiter: Limiter, step: dict[str, Any]) -> list[Decision]:
    action, charges = step["action"], step["charges"]
    if len(charges) > 1:
        arguments = [
            (charge["key"], to_quota(charge), charge["cost"], charge["policy"])
            for charge in charges
        ]
        return list(limiter._decide_all(action, arguments, None, None))
    [charge] = charges
    key, quota, policy = charge["key"], to_quota(charge), charge["policy"]
    if action == "reset":
        limiter.reset(key, quota, policy=policy)
        return []
    options = {"charged_at": charge["charged_at_us"] / MICROSECOND} if action == "refund" else {}
    return [getattr(limiter, action)(key, quota, charge["cost"], policy=policy, **options)]


def test_every_decision_is_that_of_the_model() -> None:
    seen: set[str] = set()
    decided = 0
    for sequence, steps in groupby(read_steps(), key=lambda step: step["sequence"]):
        clock = ManualClock()
        limiter = Limiter(clock=clock)
        now = round(clock.now() * MICROSECOND)
        for index, step in enumerate(steps):
            move(clock, step["now_us"] - now)
            now = step["now_us"]
            found = [to_fields(decision) for decision in decide(limiter, step)]
            expected = [] if step["action"] == "reset" else step["expected"]
            assert found == expected, f"sequence {sequence}, step {index}: {step}"
            decided += len(found)
            seen.add(step["action"])
            seen.update(charge["algorithm"] for charge in step["charges"])
    assert decided >= MIN_STEPS
    assert seen == ALGORITHMS | ACTIONS
