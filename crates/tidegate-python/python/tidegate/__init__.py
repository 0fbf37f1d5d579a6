"""Exact, fast rate limiting: in this process, or shared by a fleet through Redis.

    >>> from tidegate import Limiter, Quota
    >>> limiter = Limiter()                         # or Limiter("redis://127.0.0.1:6379")
    >>> decision = limiter.acquire("user123", Quota("100/minute"))
    >>> bool(decision), decision.remaining
    (True, 99)
"""

from ._holds import Denied, Permit, Reservation
from ._limiter import Limiter, PolicyLimiter
from ._tidegate import (
    ClientIp,
    Decision,
    Decisions,
    ManualClock,
    Policies,
    Quota,
    StoreError,
    __version__,
)

__all__ = [
    "ClientIp",
    "Decision",
    "Decisions",
    "Denied",
    "Limiter",
    "ManualClock",
    "Permit",
    "Policies",
    "PolicyLimiter",
    "Quota",
    "Reservation",
    "StoreError",
    "__version__",
]
