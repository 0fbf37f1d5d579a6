"""The limiters for asyncio. A call that waits for Redis never blocks the event loop.

A call that is cancelled may have been charged, and nothing is given back. A cancelled ``wait`` takes
no units afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._tidegate import Completions, Decision, Decisions, Quota

if TYPE_CHECKING:
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
    ) -> Decision:
        """Takes units of the quota for this key, or denies."""
        limiter = self._limiter
        if limiter.is_memory:
            return limiter._decide("acquire", key, quota, cost, policy, on_store_failure, None)
        return await _start(
            limiter._start, "acquire", key, quota, cost, policy, on_store_failure, None
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
        return await self._decide("peek", key, quota, cost, policy, on_store_failure, None)

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
        return await self._decide("report", key, quota, cost, policy, on_store_failure, None)

    async def refund(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        charged_at: float,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Returns the units of an earlier charge, if they still count."""
        return await self._decide(
            "refund", key, quota, cost, policy, on_store_failure, charged_at
        )

    async def reset(self, key: str, quota: Quota, *, policy: str | None = None) -> None:
        """Deletes the count of a key."""
        await self._decide("reset", key, quota, 1, policy, None, None)

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
        self, charges: Sequence[Charge], *, on_store_failure: str | None = None
    ) -> Decisions:
        """Decides several charges together, all or nothing; see ``Limiter.acquire_all``."""
        if self._limiter.is_memory:
            return self._limiter.acquire_all(charges, on_store_failure=on_store_failure)
        return await _start(self._limiter._start_all, "acquire", charges, on_store_failure)

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
        self, attributes: Mapping[str, str], *, cost: int | None = None
    ) -> Decisions:
        """Decides a request with these attributes; see ``PolicyLimiter.acquire``."""
        if self._limiter.limiter.is_memory:
            return self._limiter.acquire(attributes, cost=cost)
        return await _start(self._limiter._start, "acquire", dict(attributes), cost)

    async def peek(self, attributes: Mapping[str, str], *, cost: int | None = None) -> Decisions:
        """Returns the decisions of an acquire, without taking units."""
        if self._limiter.limiter.is_memory:
            return self._limiter.peek(attributes, cost=cost)
        return await _start(self._limiter._start, "peek", dict(attributes), cost)

    async def acquire_request(self, request: Request) -> Decisions:
        """Decides an HTTP request."""
        if self._limiter.limiter.is_memory:
            return self._limiter.acquire_request(request)
        return await _start(self._limiter._start_request, request)

    async def refund(self, decisions: Decisions, *, status: int | None = None) -> None:
        """Returns the units of a request that failed; see ``Limiter.refund_all``."""
        await self._limiter.limiter.aio.refund_all(decisions, status=status)
