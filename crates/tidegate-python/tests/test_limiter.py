"""The limiter in memory: answers, errors and time."""

from __future__ import annotations

import asyncio
import copy
import pickle

import pytest
from tidegate import Decision, Limiter, ManualClock, Policies, PolicyLimiter, Quota, StoreError


def test_limit_is_exact_and_a_denial_says_how_long() -> None:
    clock = ManualClock()
    limiter = Limiter(clock=clock)
    quota = Quota("2/minute")
    assert limiter.acquire("ann", quota).remaining == 1
    clock.advance(20)
    assert limiter.acquire("ann", quota)
    denied = limiter.acquire("ann", quota)
    assert not denied and not denied.allowed
    assert (denied.limit, denied.remaining) == (2, 0)
    assert (denied.retry_after, denied.reset_after) == (40, 60)
    assert limiter.acquire("bob", quota), "each key has its own count"
    clock.advance(denied.retry_after)
    assert limiter.acquire("ann", quota)
    assert not limiter.acquire("ann", quota)


@pytest.mark.parametrize(
    ("rate", "limit", "window"),
    [
        ("100/minute", 100, 60),
        ("10/second", 10, 1),
        ("5/15m", 5, 900),
        ("1000 per day", 1000, 86_400),
        ("1_000/hour", 1000, 3600),
        ("3 per 2 hours", 3, 7200),
        ("7/30seconds", 7, 30),
        ("7/1m30s", 7, 90),
        ("1/250ms", 1, 0.25),
    ],
)
def test_rates_are_read(rate: str, limit: int, window: float) -> None:
    quota = Quota(rate)
    assert (quota.limit, quota.window) == (limit, window)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("100",), "write it like 100/minute"),
        (("-1/minute",), "write it like 100/minute"),
        (("5/fortnight",), "write it like 100/minute"),
        (("99999999999999999999/s",), "write it like 100/minute"),
        (("0/minute",), "limit 0 is out of range"),
        (("5/400d",), "out of range"),
    ],
)
def test_wrong_rate_is_a_value_error(arguments: tuple[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quota(*arguments)


def test_wrong_options_are_value_errors() -> None:
    with pytest.raises(ValueError, match="token-bucket"):
        Quota("5/minute", algorithm="bucket")
    with pytest.raises(ValueError, match="has no burst"):
        Quota("5/minute", burst=10)
    limiter, quota = Limiter(), Quota("5/minute")
    with pytest.raises(ValueError, match="cost 6 can never be admitted"):
        limiter.acquire("ann", quota, 6)
    with pytest.raises(ValueError, match="key"):
        limiter.acquire("", quota)
    with pytest.raises(ValueError, match="on_store_failure"):
        limiter.acquire("ann", quota, on_store_failure="maybe")
    with pytest.raises(ValueError, match="Redis URL"):
        Limiter("http://127.0.0.1")
    with pytest.raises(ValueError, match="need the URL"):
        Limiter(prefix="api")
    with pytest.raises(ValueError, match="option of memory"):
        Limiter("redis://127.0.0.1", clock=ManualClock())


def test_actions() -> None:
    clock = ManualClock()
    limiter = Limiter(clock=clock)
    quota = Quota("10/second", burst=20, algorithm="token-bucket")
    assert limiter.peek("job", quota).remaining == 19
    charged_at = limiter.now()
    assert limiter.acquire("job", quota, 15).remaining == 5
    assert limiter.refund("job", quota, 15, charged_at=charged_at).remaining == 20
    reported = limiter.report("job", quota, 30)
    assert not reported and reported.retry_after > 0
    limiter.reset("job", quota)
    assert limiter.acquire("job", quota, 20)
    assert limiter.acquire("job", quota, policy="other").remaining == 19


def test_acquire_all_takes_all_or_nothing() -> None:
    limiter = Limiter(clock=ManualClock())
    minute, hour = Quota("5/minute"), Quota("2/hour")
    charges = [("ann", minute), ("ann", hour, 2, "hourly")]
    first = limiter.acquire_all(charges)
    assert first and len(first) == 2 and [d.policy for d in first] == [minute.policy, "hourly"]
    assert first.binding.policy == "hourly" and first.denied_by is None
    second = limiter.acquire_all(charges)
    assert not second and second.exceeded == ["hourly"]
    assert second.denied_by.policy == "hourly" and second[-1].policy == "hourly"
    assert limiter.peek("ann", minute).remaining == 3, "nothing was taken"
    limiter.refund_all(first)
    assert limiter.acquire_all(charges)
    with pytest.raises(IndexError):
        second[2]


def test_status_without_a_refund_does_not_use_up_the_refund() -> None:
    policies = Policies.parse(
        """
        attributes: [user]
        policies:
          - {name: logins, key: [user], limit: 3, window: 1h, refund_on: {status: [2xx]}}
        """
    )
    limiter = PolicyLimiter(Limiter(clock=ManualClock()), policies)
    for _ in range(2):
        decisions = limiter.acquire({"user": "ann"})
    remaining = []
    for status in (500, 200, 200):
        limiter.refund(decisions, status=status)
        remaining.append(limiter.peek({"user": "ann"}).binding.remaining)
    assert remaining == [0, 1, 1]


def test_headers() -> None:
    limiter = Limiter(clock=ManualClock())
    quota = Quota("1/minute")
    allowed = limiter.acquire("ann", quota, policy="per-user")
    assert allowed.headers()["ratelimit-policy"] == '"per-user";q=1;w=60'
    assert "retry-after" not in allowed.headers()
    denied = limiter.acquire("ann", quota, policy="per-user")
    assert denied.headers(x_ratelimit_headers=False) == {
        "ratelimit-policy": '"per-user";q=1;w=60',
        "ratelimit": '"per-user";r=0;t=60',
        "retry-after": "60",
    }


def test_wait_sleeps_by_the_clock() -> None:
    quota = Quota("100/second", burst=1, algorithm="token-bucket")
    limiter = Limiter()
    assert all(limiter.wait("crawl", quota, 1) for _ in range(3))
    hourly = Quota("1/hour")
    assert limiter.allow("slow", hourly) is True
    assert limiter.allow("slow", hourly) is False
    assert not limiter.wait("slow", hourly, 1), "denied without a wait that cannot help"


def test_aio_has_the_same_calls() -> None:
    async def main() -> None:
        clock = ManualClock()
        limiter = Limiter(clock=clock)
        quota = Quota("1/minute")
        charged_at = limiter.now()
        first = await asyncio.create_task(limiter.aio.acquire("ann", quota))
        assert isinstance(first, Decision) and first
        assert not await limiter.aio.acquire("ann", quota)
        assert not await limiter.aio.peek("ann", quota)
        await limiter.aio.refund("ann", quota, charged_at=charged_at)
        assert await limiter.aio.acquire("ann", quota)
        await limiter.aio.reset("ann", quota)
        assert await limiter.aio.acquire_all([("ann", quota)])
        assert not await limiter.aio.report("ann", quota)
        waiting = asyncio.create_task(limiter.aio.wait("ann", quota, 120))
        cancelled = asyncio.create_task(limiter.aio.wait("ann", quota, 120))
        await asyncio.sleep(0)
        cancelled.cancel()
        while not waiting.done():
            clock.advance(60)
            await asyncio.sleep(0.001)
        assert await waiting
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    asyncio.run(main())


def test_quotas_are_plain_data() -> None:
    for quota in [
        Quota("100/minute"),
        Quota("7/1h1m1s"),
        Quota("10/250ms", algorithm="token-bucket", burst=50),
        Quota("5/15m", block_for=[600, 3600]),
        Quota("5/15m", encoding="packed", count_denied=True),
    ]:
        assert pickle.loads(pickle.dumps(quota)) == quota
        assert copy.deepcopy(quota) == quota
        assert eval(repr(quota)) == quota
        assert hash(copy.copy(quota)) == hash(quota)
    assert Quota("100/minute") != Quota("100/hour")


@pytest.mark.parametrize("cost", [-1, 1 << 70])
def test_numbers_out_of_range_are_value_errors(cost: int) -> None:
    limiter, quota = Limiter(), Quota("5/minute")
    with pytest.raises(ValueError, match="must be from 1 to"):
        limiter.acquire("ann", quota, cost)
    with pytest.raises(ValueError, match="must be from 1 to"):
        limiter.acquire_all([("ann", quota, cost)])
    with pytest.raises(ValueError, match="must be from 1 to"):
        Quota("5/minute", algorithm="token-bucket", burst=cost)
    with pytest.raises(ValueError, match="at least 1"):
        Limiter(max_keys=0)


def test_wrong_charges_say_what_is_wrong() -> None:
    limiter, quota = Limiter(), Quota("5/minute")
    with pytest.raises(ValueError, match=r"a charge is \(key, quota\)"):
        limiter.acquire_all([("ann",)])
    with pytest.raises(TypeError):
        limiter.acquire_all([("ann", "5/minute")])
    for call in (lambda: limiter.acquire("\ud800", quota),
                 lambda: limiter.acquire_all([("\ud800", quota)])):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            call()


def test_units_are_refunded_once() -> None:
    limiter, quota = Limiter(clock=ManualClock()), Quota("5/hour")
    first = limiter.acquire_all([("ann", quota)])
    limiter.acquire("ann", quota, 4)
    for _ in range(3):
        limiter.refund_all(first)
    assert limiter.peek("ann", quota).remaining == 0
    assert limiter.acquire("ann", quota)
    assert not limiter.acquire("ann", quota)


@pytest.mark.parametrize(("failure", "allowed"), [("allow", True), ("deny", False)])
def test_full_memory_decides_by_the_failure_mode(failure: str, allowed: bool) -> None:
    limiter, quota = Limiter(max_keys=2, on_store_failure=failure), Quota("1/day")
    decisions = [limiter.acquire(str(number), quota) for number in range(10)]
    assert decisions[-1].source == failure and bool(decisions[-1]) is allowed
    assert bool(limiter.acquire_all([("another", quota)])) is allowed
    with pytest.raises(StoreError, match="full"):
        limiter.acquire("one more", quota, on_store_failure="error")
