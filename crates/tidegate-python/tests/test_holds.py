"""Reservations, ids and permits, on memory and on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from conftest import Server, until
from test_fork import check_script, fork, join
from tidegate import (
    Decisions, Denied, Limiter, ManualClock, Policies, PolicyLimiter, Quota, StoreError,
)
from tidegate.wsgi import RateLimitMiddleware

LEASE = 10.0
# Time by which a machine that is busy with other things may be late.
LATE = 20.0
CHILD_TIMEOUT = 30

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@pytest.fixture(params=["memory", "redis"])
def limiter(request: pytest.FixtureRequest) -> Limiter:
    if request.param == "memory":
        return Limiter()
    return Limiter(request.getfixturevalue("redis_server").redis_url, timeout=30)


def left(limiter: Limiter, key: str, quota: Quota) -> int:
    """Returns the units that are left, to which a peek adds its own."""
    peeked = limiter.peek(key, quota)
    return peeked.remaining + bool(peeked)


def test_commit_returns_what_was_not_used(limiter: Limiter) -> None:
    quota = Quota("100/hour")
    reservation = limiter.reserve("ann", quota, 80, ttl=30)
    assert reservation and reservation.allowed and not reservation.replayed
    assert reservation.decision.hold_status == "held" and len(reservation.id) == 32
    assert 25 < reservation.expires_after <= 30
    assert not limiter.reserve("ann", quota, 21), "the units count from now on"
    for _ in range(2):
        settled = reservation.commit(30)
        assert settled.hold_status == "settled" and settled.expires_after == 0
        assert left(limiter, "ann", quota) == 70
    limiter.reserve("ann", quota, 10).cancel()
    assert left(limiter, "ann", quota) == 70
    limiter.reserve("ann", quota, 10).commit(25)
    assert left(limiter, "ann", quota) == 45, "what exceeds a reservation is reported"


def test_same_id_is_the_same_reservation(limiter: Limiter) -> None:
    quota = Quota("100/hour")
    first = limiter.reserve("ann", quota, 40, id="job-1")
    again = limiter.reserve("ann", quota, 40, id="job-1")
    assert again and again.replayed and again.id == "job-1"
    assert again.decision.hold_status == "replayed"
    assert left(limiter, "ann", quota) == 60
    with pytest.raises(ValueError, match='"job-1" is in use with another cost'):
        limiter.reserve("ann", quota, 41, id="job-1")
    with pytest.raises(ValueError, match='"job-1" is in use with another cost'):
        asyncio.run(limiter.aio.acquire("ann", quota, 41, id="job-1"))
    # As another process would.
    assert limiter.commit("job-1", "ann", quota, 10).hold_status == "settled"
    assert first.commit(90).hold_status == "settled"
    assert left(limiter, "ann", quota) == 90, "the first commit counts"


def test_units_of_an_unknown_id_are_reported(limiter: Limiter) -> None:
    quota = Quota("100/hour")
    assert limiter.commit("nobody", "ann", quota, 7).hold_status in ("ended", "unknown")
    assert left(limiter, "ann", quota) == 93


def test_with_statement_settles_a_reservation(limiter: Limiter) -> None:
    quota = Quota("100/hour")
    with limiter.reserve("ann", quota, 80) as reservation:
        reservation.commit(10)
    with pytest.raises(KeyError), limiter.reserve("ann", quota, 50):
        raise KeyError
    assert left(limiter, "ann", quota) == 90, "an exception cancels"
    with pytest.raises(KeyError), limiter.reserve("ann", quota, 50) as reservation:
        reservation.commit(20)
        raise KeyError
    assert left(limiter, "ann", quota) == 70, "but not after a commit"
    with limiter.reserve("ann", quota, 20):
        pass
    assert left(limiter, "ann", quota) == 50, "without a commit the units stay taken"
    with pytest.raises(Denied, match="the limit 100 of .* is exceeded") as denied:
        with limiter.reserve("ann", quota, 51):
            raise AssertionError("it was denied")
    assert not denied.value.decision and denied.value.decision.retry_after > 0


def test_end_without_a_commit_is_as_the_quota_says() -> None:
    clock = ManualClock()
    limiter = Limiter(clock=clock)
    charging = Quota("10/hour", hold_ttl=5, hold_max_ttl=20)
    releasing = Quota("10/hour", hold_ttl=5, on_expire="release")
    for key, quota, expected in [("ann", charging, 0), ("bob", releasing, 10)]:
        limiter.reserve(key, quota, 10)
        assert left(limiter, key, quota) == 0
        clock.advance(5)
        assert left(limiter, key, quota) == expected
    clock.advance(3600)
    assert limiter.reserve("ann", charging, 1, ttl=3600).expires_after == 20


def test_acquire_with_an_id_is_charged_once(limiter: Limiter) -> None:
    quota, hour = Quota("10/hour"), Quota("20/day")
    assert limiter.acquire("ann", quota, 4).hold_status is None
    for expected in ["held", "replayed", "replayed"]:
        decision = limiter.acquire("ann", quota, 4, id="payment-1")
        assert decision and decision.hold_status == expected
    assert left(limiter, "ann", quota) == 2
    for _ in range(2):
        limiter.refund("ann", quota, id="payment-1")
        assert left(limiter, "ann", quota) == 6, "exactly its units, once"
    for _ in range(2):
        both = limiter.acquire_all([("ann", quota), ("ann", hour, 3)], id="both", id_ttl=60)
        assert both and both.hold_id == "both"
    assert (left(limiter, "ann", quota), left(limiter, "ann", hour)) == (5, 17)
    limiter.refund_all(both)
    assert (left(limiter, "ann", quota), left(limiter, "ann", hour)) == (5, 17), "a repetition"
    limiter.refund("ann", hour, id="both")
    assert left(limiter, "ann", hour) == 20


def test_wrong_holds_are_value_errors() -> None:
    limiter, quota, five = Limiter(), Quota("10/hour"), Quota.concurrency(5)
    with pytest.raises(ValueError, match="an id must have from 1 to 64 printable"):
        limiter.acquire("ann", quota, id="a b")
    with pytest.raises(ValueError, match="from 1s to 10m"):
        limiter.acquire("ann", quota, id="a", id_ttl=601)
    with pytest.raises(ValueError, match="from 1s to 24h"):
        limiter.reserve("ann", quota, ttl=0.5)
    with pytest.raises(ValueError, match="longer than their max_ttl"):
        Quota("10/hour", hold_ttl=61, hold_max_ttl=60)
    with pytest.raises(ValueError, match="charge, release"):
        Quota("10/hour", on_expire="keep")
    with pytest.raises(ValueError, match="needs the id of its charge, or charged_at"):
        limiter.refund("ann", quota)
    with pytest.raises(ValueError, match="need a hold"):
        limiter.acquire("ann", five)
    with pytest.raises(ValueError, match="is not a rate"):
        Quota("5")
    with pytest.raises(ValueError, match="concurrency has no window"):
        Quota("5/minute", algorithm="concurrency")
    with pytest.raises(ValueError, match="cost 6 can never be admitted"):
        limiter.hold("ann", five, 6)


def test_quotas_of_units_in_flight_are_plain_data() -> None:
    five = Quota.concurrency(5)
    assert (five.limit, five.window, five.burst) == (5, None, 5)
    assert five.algorithm == five.policy == "concurrency"
    assert Quota("5", algorithm="concurrency") == five
    for quota in [
        five,
        Quota.concurrency(5, hold_ttl=30, hold_max_ttl=3600),
        Quota.concurrency(5, hold_ttl=3600),
        Quota("10/minute", hold_ttl=1.5, on_expire="release"),
    ]:
        assert pickle.loads(pickle.dumps(quota)) == quota == copy.deepcopy(quota)
        assert eval(repr(quota)) == quota
    assert Quota.concurrency(5, hold_ttl=30) != five


def test_permit_is_held_until_it_is_released(limiter: Limiter) -> None:
    quota = Quota.concurrency(2)
    with limiter.hold("ann", quota) as first, limiter.hold("ann", quota, policy=quota.policy):
        assert first and 0 < first.expires_after <= LEASE
        denied = limiter.hold("ann", quota)
        assert not denied and not denied.allowed and denied.decision.limit == 2
        assert 0 < denied.decision.retry_after <= 600
        with pytest.raises(Denied, match="the limit 2 of 'concurrency'"), denied:
            raise AssertionError("it was denied")
        denied.release()
        assert limiter.hold("bob", quota, 2), "each key has its own count"
    assert left(limiter, "ann", quota) == 2
    with pytest.raises(KeyError), limiter.hold("ann", quota, 2):
        raise KeyError
    permit = limiter.hold("ann", quota, 2)
    assert permit
    permit.release()
    other = limiter.hold("ann", quota, 2)
    assert other
    permit.release()
    assert left(limiter, "ann", quota) == 0, "a permit is released once"
    with pytest.raises(RuntimeError, match="take others"), permit:
        raise AssertionError("it was released")


def test_permit_that_is_deleted_is_released(limiter: Limiter) -> None:
    quota = Quota.concurrency(1)
    permit = limiter.hold("ann", quota)
    assert permit and left(limiter, "ann", quota) == 0
    cycle = [permit]
    cycle.append(cycle)
    del permit, cycle
    gc.collect()
    started = time.monotonic()
    until(lambda: left(limiter, "ann", quota) == 1, "the permit is released")
    assert time.monotonic() - started < LEASE


def test_permit_in_memory_lasts_to_its_maximum() -> None:
    clock = ManualClock()
    limiter, quota = Limiter(clock=clock), Quota.concurrency(1, hold_ttl=5, hold_max_ttl=100)
    permit = limiter.hold("ann", quota)
    clock.advance(99)
    assert not limiter.hold("ann", quota)
    clock.advance(1)
    with limiter.hold("ann", quota):
        permit.release()
        assert not limiter.hold("ann", quota), "an ended permit releases nothing"


class InFlight:
    """Number of holders, counted outside of the limiter."""

    def __init__(self, limit: int) -> None:
        self.limit, self.now, self.most, self.admitted = limit, 0, 0, 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            self.now += 1
            self.admitted += 1
            self.most = max(self.most, self.now)
            assert self.now <= self.limit

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.now -= 1


def test_threads_never_exceed_the_limit(limiter: Limiter) -> None:
    quota, in_flight = Quota.concurrency(3), InFlight(3)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(100):
                permit = limiter.hold("ann", quota)
                if permit:
                    with permit, in_flight:
                        time.sleep(0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and in_flight.admitted >= 3
    assert left(limiter, "ann", quota) == 3


def test_tasks_never_exceed_the_limit(limiter: Limiter) -> None:
    quota, in_flight = Quota.concurrency(3), InFlight(3)

    async def work() -> None:
        for _ in range(30):
            try:
                async with limiter.aio.hold("ann", quota):
                    with in_flight:
                        await asyncio.sleep(0.001)
            except Denied:
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(work() for _ in range(20)))
        assert in_flight.most == 3 and in_flight.now == 0
        assert (await limiter.aio.peek("ann", quota)).remaining == 2

    asyncio.run(main())


def test_aio_has_the_same_holds(limiter: Limiter) -> None:
    quota, five = Quota("100/hour"), Quota.concurrency(5)

    async def main() -> None:
        aio = limiter.aio
        async with aio.reserve("ann", quota, 80, ttl=30) as reservation:
            assert not await aio.reserve("ann", quota, 21)
            await reservation.commit(30)
        with pytest.raises(KeyError):
            async with aio.reserve("ann", quota, 50):
                raise KeyError
        reservation = await aio.reserve("ann", quota, 10, id="job-1")
        assert (await aio.reserve("ann", quota, 10, id="job-1")).replayed
        await aio.commit("job-1", "ann", quota, 5)
        assert (await reservation.cancel()).hold_status == "settled"
        for _ in range(2):
            await aio.acquire("ann", quota, 5, id="payment-1")
            await aio.acquire_all([("ann", quota, 6)], id="payment-2")
        await aio.refund("ann", quota, id="payment-2")
        assert (await aio.peek("ann", quota, 60)).remaining == 0
        with pytest.raises(Denied):
            async with aio.reserve("ann", quota, 61):
                raise AssertionError("it was denied")

        permit = await aio.hold("ann", five, 5)
        assert permit.allowed and not await aio.hold("ann", five)
        await permit.release()
        with pytest.raises(KeyError):
            async with aio.hold("ann", five, 5):
                raise KeyError
        assert (await aio.peek("ann", five)).remaining == 4

    asyncio.run(main())


def test_cancelled_hold_is_released(redis_server: Server) -> None:
    limiter, quota = Limiter(redis_server.redis_url, timeout=30), Quota.concurrency(1)

    async def main() -> None:
        assert await limiter.aio.peek("ann", quota)
        os.kill(redis_server.process.pid, signal.SIGSTOP)
        call = asyncio.ensure_future(limiter.aio.hold("ann", quota))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        os.kill(redis_server.process.pid, signal.SIGCONT)
        started = time.monotonic()
        while not await limiter.aio.peek("ann", quota):
            assert time.monotonic() - started < LEASE
            await asyncio.sleep(0.01)

    asyncio.run(main())


def test_hold_of_a_closed_loop_is_released(redis_server: Server) -> None:
    limiter, quota = Limiter(redis_server.redis_url, timeout=30), Quota.concurrency(1)
    assert limiter.peek("ann", quota)

    async def main() -> None:
        os.kill(redis_server.process.pid, signal.SIGSTOP)
        call = asyncio.ensure_future(limiter.aio.hold("ann", quota))
        await asyncio.sleep(0.05)
        call.cancel()

    asyncio.run(main())
    gc.collect()
    os.kill(redis_server.process.pid, signal.SIGCONT)
    started = time.monotonic()
    # The hold runs before it.
    seen = [bool(limiter.peek("ann", quota))]
    until(lambda: bool(limiter.peek("ann", quota)), "the hold is released")
    assert time.monotonic() - started < LEASE, seen


@pytest.mark.parametrize("ending", ["pass", "del limiter", "gc.collect()", "sys.exit()"])
def test_process_ends_with_its_permits(redis_server: Server, ending: str) -> None:
    script = textwrap.dedent(f"""
        import asyncio, gc, os, sys
        from tidegate import Limiter, Quota
        limiter, quota = Limiter({redis_server.redis_url!r}, timeout=30), Quota.concurrency(3)
        permit = limiter.hold("ann", quota)
        async def hold():
            return await limiter.aio.hold("ann", quota)
        other = asyncio.run(hold())
        assert permit and other
        child = os.fork()
        {ending}
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """)
    check_script(script)


def test_renewals_need_no_thread_of_python(redis_server: Server) -> None:
    limiter, quota = Limiter(redis_server.redis_url, timeout=30), Quota.concurrency(1)
    with limiter.hold("ann", quota):
        ctypes.PyDLL(None).sleep(5)  # It keeps the GIL.
        assert limiter.peek("ann", quota).retry_after > LEASE - 5


HOLDER = """
    import os, signal, sys, time
    from tidegate import Limiter, Quota
    limiter = Limiter(sys.argv[1], timeout=30)
    permit = limiter.hold("ann", Quota.concurrency(1))
    assert permit
    child = {child}
    if child == 0:
        signal.alarm({timeout})
    print(child, flush=True)
    time.sleep({timeout})
"""


@pytest.mark.parametrize("child", ["None", "os.fork()"])
def test_killed_holder_frees_its_slot(redis_server: Server, child: str) -> None:
    """Also if a child of it lives, which does not renew the permit."""
    limiter, quota = Limiter(redis_server.redis_url, timeout=30), Quota.concurrency(1)
    script = textwrap.dedent(HOLDER.format(child=child, timeout=CHILD_TIMEOUT + int(LATE)))
    holder = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, redis_server.redis_url],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )
    try:
        lines = {holder.stdout.readline() for _ in range(1 if child == "None" else 2)}
        assert "" not in lines
        shortest = LEASE

        def is_renewed() -> bool:
            nonlocal shortest
            wait = limiter.peek("ann", quota).retry_after
            shortest = min(shortest, wait)
            return wait > shortest + 1

        until(is_renewed, "a renewal")
        assert not limiter.hold("ann", quota)
        holder.kill()
        holder.wait()
        killed = time.monotonic()
        assert limiter.peek("ann", quota).retry_after <= LEASE
        until(lambda: limiter.hold("ann", quota).allowed, "the lease ends", LEASE + LATE)
        assert time.monotonic() - killed > 1, "not by the end of a connection"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()


def test_child_does_not_release_a_permit_of_its_parent(redis_server: Server) -> None:
    limiter, quota = Limiter(redis_server.redis_url, timeout=30), Quota.concurrency(1)
    permits = [limiter.hold("ann", quota)]

    def leave() -> None:
        with permits[0]:
            pass

    def delete() -> None:
        permits.clear()
        gc.collect()

    def use() -> None:
        assert not limiter.hold("ann", quota)
        with limiter.hold("bob", quota):
            assert not limiter.hold("bob", quota)
        assert limiter.peek("bob", quota)

    for child in [leave, delete, use] * 3:
        join(fork(child))
        assert not limiter.hold("ann", quota)
    permits[0].release()
    assert limiter.hold("ann", quota)


def test_child_has_a_copy_of_the_permits_in_memory() -> None:
    limiter, quota = Limiter(), Quota.concurrency(1)
    permit = limiter.hold("ann", quota)

    def child() -> None:
        permit.release()
        assert limiter.hold("ann", quota)

    join(fork(child))
    assert not limiter.hold("ann", quota)
    permit.release()
    assert limiter.hold("ann", quota)


def test_holds_while_redis_is_away(redis_server: Server) -> None:
    limiter, quota = Limiter(redis_server.redis_url, timeout=0.5), Quota("100/hour")
    reservation = limiter.reserve("ann", quota, 40, ttl=600)
    assert reservation.decision.source == "store"
    redis_server.kill()
    settled = reservation.commit(10)
    assert settled.hold_status == "pending" and settled.source == "local"
    with pytest.raises(StoreError):
        limiter.reserve("ann", quota, on_store_failure="error").commit(1)
    with pytest.raises(KeyError), limiter.hold("ann", Quota.concurrency(100)) as permit:
        assert permit.decision.source == "local"
        raise KeyError


POLICIES = """
policies:
  - {name: per-user, key: [header.x-user-id], limit: 100, window: 1h}
  - {name: per-team, key: [header.x-team], limit: 50, window: 1h}
"""


def test_policies_reserve_by_attributes(limiter: Limiter) -> None:
    policies = PolicyLimiter(limiter, Policies.parse(POLICIES))
    request = {"header.x-user-id": "ann", "header.x-team": "a"}

    def remaining() -> list[int]:
        return [decision.remaining + 1 for decision in policies.peek(request)]

    with policies.reserve(request, cost=40, ttl=30) as reservation:
        assert isinstance(reservation.decision, Decisions) and len(reservation.decision) == 2
        assert reservation.decision.hold_id == reservation.id
        assert sorted(remaining()) == [10, 60]
        reservation.commit(5)
    assert sorted(remaining()) == [45, 95]
    with pytest.raises(Denied, match="the limit 50 of 'per-team'"):
        with policies.reserve(request, cost=46):
            raise AssertionError("it was denied")
    policies.reserve(request, cost=20, id="job-1")
    assert policies.reserve(request, cost=20, id="job-1").replayed
    policies.commit("job-1", request, 10)
    for _ in range(2):
        policies.acquire(request, id="once")
    assert sorted(remaining()) == [34, 84]

    async def main() -> None:
        async with policies.aio.reserve(request, cost=30) as reservation:
            await reservation.commit(1)
        held = await policies.aio.reserve(request, cost=30, id="job-2")
        await policies.aio.commit(held.id, request, 3)
        assert await policies.aio.acquire(request, id="once")

    asyncio.run(main())
    assert sorted(remaining()) == [30, 80]


IN_FLIGHT = """
policies:
  - {name: per-user, key: [header.x-user-id], limit: 10, window: 1h}
  - {name: exports, key: [header.x-user-id], limit: 2, algorithm: concurrency}
"""


def test_permit_by_policies_holds_units_in_flight(limiter: Limiter) -> None:
    policies = PolicyLimiter(limiter, Policies.parse(IN_FLIGHT))
    request = {"header.x-user-id": "ann"}
    with policies.hold(request) as permit, policies.hold(request):
        assert isinstance(permit.decision, Decisions) and permit.decision.hold_id
        assert 50 < permit.expires_after <= 60
        denied = policies.hold(request)
        assert not denied and denied.decision.exceeded == ["exports"]
        assert denied.decision.headers()["retry-after"] == "1"
        with pytest.raises(Denied, match="the limit 2 of 'exports' is exceeded"), denied:
            raise AssertionError("it was denied")
    remaining = {decision.policy: decision.remaining for decision in policies.peek(request)}
    assert remaining == {"per-user": 7, "exports": 1}, "the units of a rate stay taken"

    async def main() -> None:
        async with policies.aio.hold(request), policies.aio.hold(request):
            assert not await policies.aio.hold(request)
        permit = await policies.aio.hold(request)
        assert permit and (await policies.aio.peek(request)).binding.remaining == 0
        await permit.release()

    asyncio.run(main())
    # Without a permit: until the end of the policy's ttl, or a refund.
    decisions = [policies.acquire(request) for _ in range(2)]
    assert not policies.acquire(request)
    policies.refund(decisions[0])
    policies.commit(decisions[1].hold_id, request, 0)
    remaining = {decision.policy: decision.remaining for decision in policies.peek(request)}
    assert remaining["exports"] == 1


def test_middleware_refuses_units_in_flight() -> None:
    for limit in (Quota.concurrency(5), ["5/minute", Quota.concurrency(5)]):
        with pytest.raises(ValueError, match="need the hold of a limiter"):
            RateLimitMiddleware(lambda *_: [], Limiter(), limit)
    with pytest.raises(ValueError, match="'exports': units in flight need"):
        RateLimitMiddleware(lambda *_: [], Limiter(), Policies.parse(IN_FLIGHT))
