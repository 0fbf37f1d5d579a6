"""The limiters for asyncio. A call that waits for Redis never blocks the event loop.

A call that is cancelled may have been charged, and nothing is given back, except by a ``hold``. A
cancelled ``wait`` takes no units afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._holds import BaseReservation, D, HeldUnits
from ._limiter import ID_TTL, to_hold, to_refund
from ._tidegate import Completions, Decision, Decisions, Held, Hold, Quota, StoreError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._limiter import Charge, Limiter, PolicyLimiter, Request


def _completions_of(loop: Any) -> Completions:
    """Returns the answers for a loop, of which it owns the only reference."""
    try:
        return loop._tidegate
    except AttributeError:
        completions = loop._tidegate = Completions()
        loop.add_reader(completions.fileno(), completions.drain)
        return completions


def _start(start: Callable[..., bool], *arguments: object) -> asyncio.Future[Any]:
    """Starts a call at the end of this iteration of the loop, and returns the future of its
    answer."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    completions = _completions_of(loop)
    if start(completions, future, *arguments):
        loop.call_soon(completions.submit)
    return future


class AsyncReservation(BaseReservation[D]):
    """A ``Reservation`` for asyncio."""

    __slots__ = ()

    async def commit(self, actual: int) -> D:
        """Settles the units that were used; see ``Reservation.commit``."""
        return await self._settle(actual)

    async def cancel(self) -> D:
        """Returns all units."""
        return await self._settle(0)

    async def __aenter__(self) -> Self:
        self._check()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is not None and not self._is_over:
            with suppress(StoreError):
                await self.cancel()


class AsyncPermit(HeldUnits[D]):
    """A ``Permit`` for asyncio."""

    __slots__ = ("_held", "_is_memory")

    def __init__(self, held: Held, decision: D, is_memory: bool) -> None:
        super().__init__(decision)
        self._held, self._is_memory = held, is_memory

    async def release(self) -> None:
        """Releases the units, and returns when they are free."""
        self._is_over = True
        if self._is_memory:
            return self._held.release()
        await _start(self._held._start_release)

    async def __aenter__(self) -> Self:
        self._check()
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(StoreError):  # They are free at the end of the lease.
            await self.release()


E = TypeVar("E", bound=AbstractAsyncContextManager[Any])


class Call(Generic[E]):
    """A call whose answer is awaited, or entered with ``async with``."""

    __slots__ = ("_call", "_entered")

    def __init__(self, call: Coroutine[Any, Any, E]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, Any, E]:
        return self._call.__await__()

    async def __aenter__(self) -> E:
        self._entered = await self._call
        await self._entered.__aenter__()
        return self._entered

    async def __aexit__(self, *error: Any) -> None:
        await self._entered.__aexit__(*error)


async def _hold(limiter: Any, is_memory: bool, *arguments: object) -> Held:
    if is_memory:
        return limiter._hold(*arguments)
    return await _start(limiter._start_hold, *arguments)


class AsyncLimiter:
    """The calls of a ``Limiter`` for asyncio."""

    __slots__ = ("_limiter",)

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    async def acquire(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
        id: str | None = None,
        id_ttl: float = ID_TTL,
    ) -> Decision:
        """Takes units of the quota for this key, or denies; see ``Limiter.acquire``."""
        limiter, failure, hold = self._limiter, on_store_failure, to_hold(id, id_ttl)
        if limiter.is_memory:
            return limiter._decide("acquire", key, quota, cost, policy, failure, None, hold)
        return await _start(
            limiter._start, "acquire", key, quota, cost, policy, failure, None, hold
        )

    async def peek(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Returns the decision of an acquire, without taking units."""
        return await self._decide("peek", key, quota, cost, policy, on_store_failure, None, None)

    async def report(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Records units that were used already, even beyond the limit."""
        failure = on_store_failure
        return await self._decide("report", key, quota, cost, policy, failure, None, None)

    async def refund(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        id: str | None = None,
        charged_at: float | None = None,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Returns the units of an earlier charge; see ``Limiter.refund``."""
        hold, failure = to_refund(id, charged_at), on_store_failure
        return await self._decide("refund", key, quota, cost, policy, failure, charged_at, hold)

    async def reset(self, key: str, quota: Quota, *, policy: str | None = None) -> None:
        """Deletes the count of a key."""
        await self._decide("reset", key, quota, 1, policy, None, None, None)

    def reserve(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        ttl: float | None = None,
        id: str | None = None,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Call[AsyncReservation[Decision]]:
        """Takes units, to settle later how many were used; see ``Limiter.reserve``. Await it, or
        use it with ``async with``."""
        hold, failure = Hold(id, ttl=ttl), on_store_failure

        def commit(actual: int) -> Coroutine[Any, Any, Decision]:
            return self._decide("commit", key, quota, actual, policy, failure, None, hold)

        async def reserve() -> AsyncReservation[Decision]:
            arguments = (key, quota, cost, policy, failure, None, hold)
            decision = await self._decide("acquire", *arguments)
            return AsyncReservation(decision, hold.id, commit)

        return Call(reserve())

    async def commit(
        self,
        id: str,
        key: str,
        quota: Quota,
        actual: int,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Settles the reservation with this id; see ``Limiter.commit``."""
        hold, failure = Hold(id), on_store_failure
        return await self._decide("commit", key, quota, actual, policy, failure, None, hold)

    def hold(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Call[AsyncPermit[Decision]]:
        """Takes units until the permit is released; see ``Limiter.hold``. Await it, or use it with
        ``async with``."""
        charge = (key, quota, cost, quota.policy if policy is None else policy)
        limiter, arguments = self._limiter, ([charge], on_store_failure, Hold.lease())

        async def hold() -> AsyncPermit[Decision]:
            held = await _hold(limiter, limiter.is_memory, *arguments)
            return AsyncPermit(held, held.decisions[0], limiter.is_memory)

        return Call(hold())

    async def wait(
        self,
        key: str,
        quota: Quota,
        timeout: float,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Waits until the charge is admitted, at most for ``timeout`` seconds."""
        wait = self._limiter._wait(key, quota, timeout, cost, policy, on_store_failure)
        loop = asyncio.get_running_loop()
        while True:
            woken = loop.create_future()
            decision = wait.poll(_completions_of(loop), woken)
            if decision is not None:
                return decision
            await woken

    async def acquire_all(
        self,
        charges: Sequence[Charge],
        *,
        on_store_failure: str | None = None,
        id: str | None = None,
        id_ttl: float = ID_TTL,
    ) -> Decisions:
        """Decides several charges together, all or nothing; see ``Limiter.acquire_all``."""
        limiter, arguments = self._limiter, (charges, on_store_failure, to_hold(id, id_ttl))
        if limiter.is_memory:
            return limiter._decide_all("acquire", *arguments)
        return await _start(limiter._start_all, "acquire", *arguments)

    async def refund_all(self, decisions: Decisions, *, status: int | None = None) -> None:
        """Returns the units of a request that failed; see ``Limiter.refund_all``."""
        if self._limiter.is_memory:
            return self._limiter.refund_all(decisions, status=status)
        await _start(self._limiter._start_refund_all, decisions, status)

    async def _decide(self, *arguments: Any) -> Decision:
        if self._limiter.is_memory:
            return self._limiter._decide(*arguments)
        return await _start(self._limiter._start, *arguments)


class AsyncPolicyLimiter:
    """The calls of a ``PolicyLimiter`` for asyncio."""

    __slots__ = ("_limiter",)

    def __init__(self, limiter: PolicyLimiter) -> None:
        self._limiter = limiter

    async def acquire(
        self,
        attributes: Mapping[str, str],
        *,
        cost: int | None = None,
        id: str | None = None,
        id_ttl: float = ID_TTL,
    ) -> Decisions:
        """Decides a request with these attributes; see ``PolicyLimiter.acquire``."""
        return await self._decide("acquire", dict(attributes), cost, to_hold(id, id_ttl))

    async def peek(self, attributes: Mapping[str, str], *, cost: int | None = None) -> Decisions:
        """Returns the decisions of an acquire, without taking units."""
        return await self._decide("peek", dict(attributes), cost, None)

    def reserve(
        self,
        attributes: Mapping[str, str],
        *,
        cost: int | None = None,
        ttl: float | None = None,
        id: str | None = None,
    ) -> Call[AsyncReservation[Decisions]]:
        """Takes the units of every limit, to settle later how many were used; see
        ``PolicyLimiter.reserve``. Await it, or use it with ``async with``."""
        hold, read = Hold(id, ttl=ttl), dict(attributes)

        async def reserve() -> AsyncReservation[Decisions]:
            decisions = await self._decide("acquire", read, cost, hold)
            commit = lambda actual: self._decide("commit", read, actual, hold)
            return AsyncReservation(decisions, hold.id, commit)

        return Call(reserve())

    async def commit(self, id: str, attributes: Mapping[str, str], actual: int) -> Decisions:
        """Settles the reservation with this id and these attributes."""
        return await self._decide("commit", dict(attributes), actual, Hold(id))

    def hold(
        self, attributes: Mapping[str, str], *, cost: int | None = None
    ) -> Call[AsyncPermit[Decisions]]:
        """Takes the units of every limit; see ``PolicyLimiter.hold``. Await it, or use it with
        ``async with``."""
        limiter, read = self._limiter, dict(attributes)
        is_memory = limiter.limiter.is_memory

        async def hold() -> AsyncPermit[Decisions]:
            held = await _hold(limiter, is_memory, read, cost)
            return AsyncPermit(held, held.decisions, is_memory)

        return Call(hold())

    async def acquire_request(self, request: Request) -> Decisions:
        """Decides an HTTP request."""
        if self._limiter.limiter.is_memory:
            return self._limiter.acquire_request(request)
        return await _start(self._limiter._start_request, request)

    async def refund(self, decisions: Decisions, *, status: int | None = None) -> None:
        """Returns the units of a request that failed; see ``Limiter.refund_all``."""
        await self._limiter.limiter.aio.refund_all(decisions, status=status)

    async def _decide(self, *arguments: Any) -> Decisions:
        if self._limiter.limiter.is_memory:
            return self._limiter._decide(*arguments)
        return await _start(self._limiter._start, *arguments)
