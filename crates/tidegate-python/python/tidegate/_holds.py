"""Reservations and permits: units that are held until they are settled, released or end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._tidegate import Decision, Decisions, Held, StoreError

if TYPE_CHECKING:
    from typing_extensions import Self

D = TypeVar("D", bound=Decision | Decisions)


class Denied(Exception):
    """A ``with`` statement needs units that a limit denies."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(f"the limit {decision.limit} of {decision.policy!r} is exceeded")
        self.decision = decision


class HeldUnits(Generic[D]):
    """Units that a limit has admitted, or not, with its decision."""

    __slots__ = ("__weakref__", "_is_over", "decision")

    def __init__(self, decision: D) -> None:
        self.decision: D = decision
        self._is_over = False

    @property
    def allowed(self) -> bool:
        return bool(self.decision)

    @property
    def expires_after(self) -> float:
        """Seconds until the units are no longer held, as of the decision; 0 if they are not."""
        return self.decision.expires_after

    def __bool__(self) -> bool:
        return bool(self.decision)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.decision!r}>"

    def _check(self) -> None:
        """Checks at the start of a block that it has units."""
        if self._is_over:
            raise RuntimeError("the units were settled or released: take others for each block")
        denial: Decision | Decisions | None = None if self.decision else self.decision
        if isinstance(denial, Decisions):
            denial = denial.denied_by
        if denial is not None:
            raise Denied(denial)


class BaseReservation(HeldUnits[D]):
    """Units that are taken now, and settled when it is known how many were used."""

    __slots__ = ("_commit", "id")

    def __init__(self, decision: D, id: str, commit: Callable[[int], Any]) -> None:
        super().__init__(decision)
        self.id = id
        self._commit = commit

    @property
    def replayed(self) -> bool:
        """Whether the id was known: an earlier reservation has taken the units."""
        return self.decision.hold_status == "replayed"

    def _settle(self, actual: int) -> Any:
        self._is_over = True
        return self._commit(actual)


class Reservation(BaseReservation[D]):
    """Units that are taken now, and settled when it is known how many were used.

    Entered with ``with``, it raises ``Denied`` if it is denied, and is cancelled if the block
    raises before a commit. Without a commit the units stay taken until the reservation ends, and
    then as the quota's ``on_expire`` says.
    """

    __slots__ = ()

    def commit(self, actual: int) -> D:
        """Settles the units that were used: the rest returns to the time of the reservation, and
        what exceeds it is reported. A second commit changes nothing."""
        return self._settle(actual)

    def cancel(self) -> D:
        """Returns all units."""
        return self._settle(0)

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and not self._is_over:
            with suppress(StoreError):
                self.cancel()


class Permit(HeldUnits[D]):
    """Units in flight, until it is released or deleted. The process renews its lease.

    Entered with ``with``, it raises ``Denied`` if it is denied, and is released at the end.
    """

    __slots__ = ("_held",)

    def __init__(self, held: Held, decision: D) -> None:
        super().__init__(decision)
        self._held = held

    def release(self) -> None:
        """Releases the units, and returns when they are free."""
        self._is_over = True
        self._held.release()

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(StoreError):  # They are free at the end of the lease.
            self.release()
