"""The limiters: the calls that need no speed, on top of the extension module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from . import _tidegate
from ._holds import Permit, Reservation
from ._tidegate import Decision, Decisions, Hold, Quota

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


# Seconds for which an id is remembered.
ID_TTL = 600.0


def to_hold(id: str | None, id_ttl: float) -> Hold | None:
    """Returns the hold of an acquire that is charged once, if it has an id."""
    return None if id is None else Hold(id, id_ttl=id_ttl)


def to_refund(id: str | None, charged_at: float | None) -> Hold | None:
    """Returns the hold of an acquire to refund. Without an id, its time is needed."""
    if id is None and charged_at is None:
        raise ValueError("a refund needs the id of its charge, or charged_at")
    return None if id is None else Hold(id)


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
        return self._decide("peek", key, quota, cost, policy, on_store_failure, None, None)

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
        return self._decide("report", key, quota, cost, policy, on_store_failure, None, None)

    def refund(
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
        """Returns the units of an earlier charge: with the ``id`` of the acquire exactly those,
        once. Without an id ``charged_at`` is ``limiter.now()``, read just before the acquire, and
        units return that still count."""
        hold, failure = to_refund(id, charged_at), on_store_failure
        return self._decide("refund", key, quota, cost, policy, failure, charged_at, hold)

    def reset(self, key: str, quota: Quota, *, policy: str | None = None) -> None:
        """Deletes the count of a key."""
        self._decide("reset", key, quota, 1, policy, None, None, None)

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
    ) -> Reservation[Decision]:
        """Takes units, to settle later how many were used. The reservation ends after ``ttl``
        seconds, at most the quota's ``hold_max_ttl``. The same ``id`` again gets the same answer."""
        hold, failure = Hold(id, ttl=ttl), on_store_failure

        def commit(actual: int) -> Decision:
            return self._decide("commit", key, quota, actual, policy, failure, None, hold)

        decision = self._decide("acquire", key, quota, cost, policy, failure, None, hold)
        return Reservation(decision, hold.id, commit)

    def commit(
        self,
        id: str,
        key: str,
        quota: Quota,
        actual: int,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Decision:
        """Settles the reservation with this id, perhaps of another process. If the id is unknown
        or has ended, the units are reported."""
        hold, failure = Hold(id), on_store_failure
        return self._decide("commit", key, quota, actual, policy, failure, None, hold)

    def hold(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
    ) -> Permit[Decision]:
        """Takes units until the permit is released, at most for the quota's ``hold_max_ttl``. Its
        lease of ten seconds is renewed, and ends with the process."""
        charge = (key, quota, cost, quota.policy if policy is None else policy)
        held = self._hold([charge], on_store_failure, Hold.lease())
        return Permit(held, held.decisions[0])

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
        self,
        charges: Sequence[Charge],
        *,
        on_store_failure: str | None = None,
        id: str | None = None,
        id_ttl: float = ID_TTL,
    ) -> Decisions:
        """Decides several charges together, all or nothing: if one is denied, no units are taken.
        A charge is ``(key, quota)``, ``(key, quota, cost)`` or ``(key, quota, cost, policy)``. With
        an ``id``, a retry is not charged again for ``id_ttl`` seconds."""
        return self._decide_all("acquire", charges, on_store_failure, to_hold(id, id_ttl))

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

    def acquire(
        self,
        attributes: Mapping[str, str],
        *,
        cost: int | None = None,
        id: str | None = None,
        id_ttl: float = ID_TTL,
    ) -> Decisions:
        """Decides a request with these attributes, such as ``path``, ``ip`` or
        ``header.x-user-id``, and takes the units of every limit if it is allowed. With an ``id``, a
        retry is not charged again for ``id_ttl`` seconds."""
        return self._decide("acquire", dict(attributes), cost, to_hold(id, id_ttl))

    def reserve(
        self,
        attributes: Mapping[str, str],
        *,
        cost: int | None = None,
        ttl: float | None = None,
        id: str | None = None,
    ) -> Reservation[Decisions]:
        """Takes the units of every limit, to settle later how many were used; see
        ``Limiter.reserve``."""
        hold, read = Hold(id, ttl=ttl), dict(attributes)

        def commit(actual: int) -> Decisions:
            return self._decide("commit", read, actual, hold)

        return Reservation(self._decide("acquire", read, cost, hold), hold.id, commit)

    def commit(self, id: str, attributes: Mapping[str, str], actual: int) -> Decisions:
        """Settles the reservation with this id and these attributes; see ``Limiter.commit``."""
        return self._decide("commit", dict(attributes), actual, Hold(id))

    def hold(
        self, attributes: Mapping[str, str], *, cost: int | None = None
    ) -> Permit[Decisions]:
        """Takes the units of every limit. Those in flight are renewed until the permit is released
        or the process ends, and then end after the ``ttl`` of their policy."""
        held = self._hold(dict(attributes), cost)
        return Permit(held, held.decisions)

    def peek(self, attributes: Mapping[str, str], *, cost: int | None = None) -> Decisions:
        """Returns the decisions of an acquire, without taking units."""
        return self._decide("peek", dict(attributes), cost, None)

    def acquire_request(self, request: Request) -> Decisions:
        """Decides an HTTP request."""
        return self._acquire_request(request)

    def refund(self, decisions: Decisions, *, status: int | None = None) -> None:
        """Returns the units of a request that failed; see ``Limiter.refund_all``."""
        self.limiter.refund_all(decisions, status=status)
