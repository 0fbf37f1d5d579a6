"""The limiters: the calls that need no speed, on top of the extension module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from . import _tidegate
from ._tidegate import Decision, Decisions, Quota

if TYPE_CHECKING:
    from ._aio import AsyncLimiter, AsyncPolicyLimiter

# Key and quota of a charge, and perhaps its cost and the policy that it counts under.
Charge = (
    tuple[str, Quota] | tuple[str, Quota, int] | tuple[str, Quota, int, str]
)
# What policies read of an HTTP request: method, target, headers, address of the connection's other
# end, and attributes of your own.
Request = tuple[
    str, bytes, Sequence[tuple[bytes, bytes]], str | None, Mapping[str, str] | None
]


class Limiter(_tidegate.Limiter):
    """Decides whether requests may pass, by counts in memory or on Redis.

    ``Limiter()`` counts in this process. ``Limiter("redis://…")`` shares its counts with all
    processes on that Redis; a list of URLs is a cluster, and with ``sentinel="mymaster"`` the URLs
    are those of sentinels. It connects at the first call, in each process anew after a fork.
    While Redis is down, this process decides by its share of the limit: ``on_store_failure``, for
    the limiter or for a call, is ``"local"``, ``"allow"``, ``"deny"``, or ``"error"`` for a
    ``StoreError``. ``instances`` is the least number of processes that share the limit then, and
    ``max_keys`` the most keys in memory.
    """

    __slots__ = ()

    @property
    def aio(self) -> AsyncLimiter:
        """The same calls for asyncio, whose import takes longer than that of this package."""
        from ._aio import AsyncLimiter

        return AsyncLimiter(self)

    def peek(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Returns the decision of an acquire, without taking units."""
        return self._decide("peek", key, quota, cost, policy, on_store_failure, None)

    def report(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Records units that were used already, even beyond the limit."""
        return self._decide("report", key, quota, cost, policy, on_store_failure, None)

    def refund(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        charged_at: float,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Returns the units of an earlier charge, if they still count. ``charged_at`` is
        ``limiter.now()``, read just before the acquire."""
        return self._decide("refund", key, quota, cost, policy, on_store_failure, charged_at)

    def reset(self, key: str, quota: Quota, *, policy: str | None = None) -> None:
        """Deletes the count of a key."""
        self._decide("reset", key, quota, 1, policy, None, None)

    def wait(
        self,
        key: str,
        quota: Quota,
        timeout: float,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Waits until the charge is admitted, at most for ``timeout`` seconds. If that is not
        enough, it is denied at once. The ``delay`` of a leaky-bucket has passed."""
        return self._wait(key, quota, timeout, cost, policy, on_store_failure).block()

    def acquire_all(
        self, charges: Sequence[Charge], *, on_store_failure: str | None = None
    ) -> Decisions:
        """Decides several charges together, all or nothing: if one is denied, no units are taken.
        A charge is ``(key, quota)``, ``(key, quota, cost)`` or ``(key, quota, cost, policy)``."""
        return self._decide_all("acquire", charges, on_store_failure)

    def refund_all(self, decisions: Decisions, *, status: int | None = None) -> None:
        """Returns the units of a request that failed; with the status of its response, those of
        the policies that refund that status. Best effort: what is not returned expires. Units are
        returned once."""
        self._refund_all(decisions, status)


class PolicyLimiter(_tidegate.PolicyLimiter):
    """Decides requests by the policies of a file that apply to them, all or nothing."""

    __slots__ = ()

    @property
    def aio(self) -> AsyncPolicyLimiter:
        """The same calls for asyncio."""
        from ._aio import AsyncPolicyLimiter

        return AsyncPolicyLimiter(self)

    def acquire(self, attributes: Mapping[str, str], *, cost: int | None = None) -> Decisions:
        """Decides a request with these attributes, such as ``path``, ``ip`` or
        ``header.x-user-id``, and takes the units of every limit if it is allowed."""
        return self._decide("acquire", dict(attributes), cost)

    def peek(self, attributes: Mapping[str, str], *, cost: int | None = None) -> Decisions:
        """Returns the decisions of an acquire, without taking units."""
        return self._decide("peek", dict(attributes), cost)

    def acquire_request(self, request: Request) -> Decisions:
        """Decides an HTTP request."""
        return self._acquire_request(request)

    def refund(self, decisions: Decisions, *, status: int | None = None) -> None:
        """Returns the units of a request that failed; see ``Limiter.refund_all``."""
        self.limiter.refund_all(decisions, status=status)
