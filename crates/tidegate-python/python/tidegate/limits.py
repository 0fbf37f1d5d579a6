"""A storage for the ``limits`` library, and so for flask-limiter and slowapi.

``import tidegate.limits`` registers the schemes: those of ``limits``, with ``tidegate+`` in front.
``tidegate+redis://127.0.0.1:6379`` instead of ``redis://127.0.0.1:6379`` decides each hit by one
call of a script, on the clock of the server and within a deadline, and by a local share of the
limit while Redis is down. The other forms are ``tidegate+memory://``, ``tidegate+rediss://``,
``tidegate+unix:///path``, ``tidegate+redis+cluster://host:port,host:port`` and
``tidegate+redis+sentinel://host:port,host:port/mymaster``; ``async+`` in front of any of them is
the storage for ``limits.aio``. Options of the limiter are in the query, such as ``?timeout=0.05``,
or in the options of the storage.

The strategy ``fixed-window`` has windows that are aligned to the clock, ``moving-window`` is a
``sliding-log``, and ``sliding-window-counter`` a ``sliding-counter``. A denied hit takes nothing.
The reset time of a limit that is used up is that of the next unit, otherwise that of all units.
"""

from __future__ import annotations

import hashlib
import math
import time
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from limits.aio import storage as aio
from limits.limits import GRANULARITIES
from limits.storage import MovingWindowSupport, SlidingWindowCounterSupport, Storage

from . import Decision, Limiter, Quota, StoreError

__all__ = ["AsyncTidegateStorage", "TidegateStorage"]

_SCHEMES = [f"tidegate+{kind}" for kind in ("memory", "unix", "redis+unix", "valkey+unix")] + [
    f"tidegate+{server}{form}"
    for server in ("redis", "rediss", "valkey", "valkeys")
    for form in ("", "+cluster", "+sentinel")
]
_OPTIONS = (
    "prefix", "timeout", "on_store_failure", "password", "sentinel", "tls_ca", "tls_cert",
    "tls_key", "clock", "max_keys",
)
_NUMBERS: dict[str, type[int] | type[float]] = {"timeout": float, "max_keys": int}
# Options in the query of a Unix socket's URL, where other URLs have a part for them.
_SOCKET_OPTIONS = ("db", "user", "pass")
# Options of the storages of ``limits`` that have another name here.
_OTHER_NAMES = {"key_prefix": "prefix", "service_name": "sentinel", "socket_timeout": "timeout"}
_MAX_KEY_BYTES = 512
_FIXED, _MOVING, _SLIDING = "fixed-window", "sliding-log", "sliding-counter"
_HEALTH_CHECK = ("health-check", Quota("1/second"))


class _Usage(NamedTuple):
    used: int
    reset_in: float


def _open(uri: str, options: dict[str, Any]) -> Limiter:
    """Creates the limiter of a storage URI."""
    address, _, query = uri.partition("?")
    scheme, _, rest = address.partition("://")
    kind = scheme.partition("tidegate+")[2]
    in_query = dict(parse_qsl(query))
    if kind.endswith("unix"):
        in_socket = {name: in_query.pop(name) for name in _SOCKET_OPTIONS if name in in_query}
        rest += f"?{urlencode(in_socket)}"
    options = {**_checked(in_query), **_checked(options)}
    if kind == "memory":
        return Limiter(**options)
    server, _, form = kind.partition("+")
    if form not in ("cluster", "sentinel"):
        return Limiter(f"{kind}://{rest}", **options)
    authority, _, name = rest.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    urls = [f"{server}://{credentials}{at}{host.strip()}" for host in hosts.split(",")]
    if form == "sentinel":
        options["sentinel"] = name.strip("/") or options.get("sentinel")
        if not options["sentinel"]:
            raise ValueError(f"name the primary at the end: {scheme}://host:port/mymaster")
    return Limiter(urls, **options)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options as those of a limiter. Texts are those of a URI, or of the environment."""
    checked = {_OTHER_NAMES.get(name, name): value for name, value in options.items()}
    # The first call waits at most a second for a connection, the others do not wait for one.
    checked.pop("socket_connect_timeout", None)
    for name, value in checked.items():
        if name not in _OPTIONS:
            raise ValueError(
                f"{name!r} is not an option of tidegate's storage: use {', '.join(_OPTIONS)}"
            )
        if isinstance(value, str) and name in _NUMBERS:
            checked[name] = _NUMBERS[name](value)
    return checked


@lru_cache(maxsize=1024)
def _quota(algorithm: str, limit: int, window: int) -> Quota:
    return Quota(f"{limit}/{window}s", algorithm=algorithm)


def _name(key: str) -> str:
    """Returns the key, or its hash if a limiter would refuse the key."""
    if key.isprintable() and len(key.encode()) <= _MAX_KEY_BYTES:
        return key
    return f"sha256:{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()}"


def _limit_and_window(key: str) -> tuple[int, int]:
    """Reads the end of a key, ``/amount/multiples/granularity``."""
    try:
        _, amount, multiples, granularity = key.rsplit("/", 3)
        return int(amount), int(multiples) * GRANULARITIES[granularity].GRANULARITY.seconds
    except (KeyError, ValueError):
        raise ValueError(
            f"the key {key!r} names no limit: use the one of RateLimitItem.key_for, "
            "which ends like 100/1/minute"
        ) from None


def _usage(decision: Decision, limit: int) -> _Usage:
    """Reads a peek with a cost of 1, which an allowed decision counts as taken."""
    if decision:
        return _Usage(max(0, limit - decision.remaining - 1), decision.reset_after)
    return _Usage(limit, decision.retry_after)


def _sliding_window(usage: _Usage, window: int) -> tuple[int, float, int, float]:
    """Returns the usage as one window: the strategy takes the remainder of its TTL by the window,
    so the TTL must be shorter."""
    return 0, 0.0, usage.used, min(usage.reset_in, window - 1e-6)


def _at(usage: _Usage) -> float:
    """Returns the time of a reset, in whole seconds: callers round it down to compute a wait."""
    return float(math.ceil(time.time() + usage.reset_in))


class TidegateStorage(Storage, MovingWindowSupport, SlidingWindowCounterSupport):
    """The counts of a ``tidegate.Limiter``, for the strategies of ``limits``.

    Options are those of the limiter, such as ``timeout``, ``prefix`` and ``on_store_failure``.
    """

    STORAGE_SCHEME = _SCHEMES

    def __init__(self, uri: str, wrap_exceptions: bool = False, **options: Any) -> None:
        super().__init__(uri, wrap_exceptions)
        self._origin = (uri, options)
        self._limiter = _open(uri, options)

    @property
    def base_exceptions(self) -> type[Exception]:
        return StoreError

    def _acquire(self, algorithm: str, key: str, limit: int, window: int, cost: int) -> int | None:
        """Takes units, and returns how many are left, or None if the hit is denied."""
        if limit < max(cost, 1):
            return None
        quota = _quota(algorithm, limit, window)
        decide = self._limiter.acquire if cost else self._limiter.peek
        decision = decide(_name(key), quota, cost)
        return decision.remaining if decision else None

    def _peek(self, algorithm: str, key: str, limit: int, window: int) -> _Usage:
        if limit == 0:
            return _Usage(0, 0.0)
        return _usage(self._limiter.peek(_name(key), _quota(algorithm, limit, window)), limit)

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Takes units of a fixed window, and returns its count; above the limit if denied."""
        limit, _ = _limit_and_window(key)
        remaining = self._acquire(_FIXED, key, limit, expiry, amount)
        return limit + max(amount, 1) if remaining is None else limit - remaining

    def get(self, key: str) -> int:
        """Returns the count of a fixed window."""
        return self._peek(_FIXED, key, *_limit_and_window(key)).used

    def get_expiry(self, key: str) -> float:
        """Returns the end of a fixed window, as a time of this host."""
        return _at(self._peek(_FIXED, key, *_limit_and_window(key)))

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Takes units of a moving window."""
        return self._acquire(_MOVING, key, limit, expiry, amount) is not None

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        """Returns the start of a moving window, from which its reset time is one window away, and
        its count."""
        usage = self._peek(_MOVING, key, limit, expiry)
        return _at(usage) - expiry, usage.used

    def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        """Takes units of a sliding window."""
        return self._acquire(_SLIDING, key, limit, expiry, amount) is not None

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Returns the weighted count of a sliding window and its reset time as one window."""
        limit, _ = _limit_and_window(key)
        return _sliding_window(self._peek(_SLIDING, key, limit, expiry), expiry)

    def clear(self, key: str) -> None:
        """Deletes the counts of a key, of whichever strategy they are."""
        for algorithm in (_FIXED, _MOVING, _SLIDING):
            self._clear(algorithm, key)

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        """Deletes the count of a sliding window."""
        self._clear(_SLIDING, key)

    def _clear(self, algorithm: str, key: str) -> None:
        limit, window = _limit_and_window(key)
        if limit > 0:
            self._limiter.reset(_name(key), _quota(algorithm, limit, window))

    def check(self) -> bool:
        """Returns whether the store answers."""
        try:
            self._limiter.peek(*_HEALTH_CHECK, on_store_failure="error")
        except StoreError:
            return False
        return True

    def reset(self) -> int | None:
        """Deletes all counts in memory. On Redis use ``clear`` with a key."""
        self._limiter = _new_memory(self._limiter, self._origin)
        return None


def _new_memory(limiter: Limiter, origin: tuple[str, dict[str, Any]]) -> Limiter:
    if not limiter.is_memory:
        raise NotImplementedError("counts on Redis cannot be deleted all at once: clear each key")
    return _open(*origin)


class AsyncTidegateStorage(
    aio.Storage, aio.MovingWindowSupport, aio.SlidingWindowCounterSupport
):
    """The same for the strategies of ``limits.aio``; no call blocks the event loop."""

    STORAGE_SCHEME = [f"async+{scheme}" for scheme in _SCHEMES]

    def __init__(self, uri: str, wrap_exceptions: bool = False, **options: Any) -> None:
        super().__init__(uri, wrap_exceptions)
        self._origin = (uri, options)
        self._limiter = _open(uri, options)

    @property
    def base_exceptions(self) -> type[Exception]:
        return StoreError

    async def _acquire(
        self, algorithm: str, key: str, limit: int, window: int, cost: int
    ) -> int | None:
        if limit < max(cost, 1):
            return None
        quota = _quota(algorithm, limit, window)
        decide = self._limiter.aio.acquire if cost else self._limiter.aio.peek
        decision = await decide(_name(key), quota, cost)
        return decision.remaining if decision else None

    async def _peek(self, algorithm: str, key: str, limit: int, window: int) -> _Usage:
        if limit == 0:
            return _Usage(0, 0.0)
        quota = _quota(algorithm, limit, window)
        return _usage(await self._limiter.aio.peek(_name(key), quota), limit)

    async def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Takes units of a fixed window, and returns its count; above the limit if denied."""
        limit, _ = _limit_and_window(key)
        remaining = await self._acquire(_FIXED, key, limit, expiry, amount)
        return limit + max(amount, 1) if remaining is None else limit - remaining

    async def get(self, key: str) -> int:
        """Returns the count of a fixed window."""
        return (await self._peek(_FIXED, key, *_limit_and_window(key))).used

    async def get_expiry(self, key: str) -> float:
        """Returns the end of a fixed window, as a time of this host."""
        return _at(await self._peek(_FIXED, key, *_limit_and_window(key)))

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Takes units of a moving window."""
        return await self._acquire(_MOVING, key, limit, expiry, amount) is not None

    async def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        """Returns the start of a moving window, from which its reset time is one window away, and
        its count."""
        usage = await self._peek(_MOVING, key, limit, expiry)
        return _at(usage) - expiry, usage.used

    async def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        """Takes units of a sliding window."""
        return await self._acquire(_SLIDING, key, limit, expiry, amount) is not None

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Returns the weighted count of a sliding window and its reset time as one window."""
        limit, _ = _limit_and_window(key)
        return _sliding_window(await self._peek(_SLIDING, key, limit, expiry), expiry)

    async def clear(self, key: str) -> None:
        """Deletes the counts of a key, of whichever strategy they are."""
        for algorithm in (_FIXED, _MOVING, _SLIDING):
            await self._clear(algorithm, key)

    async def clear_sliding_window(self, key: str, expiry: int) -> None:
        """Deletes the count of a sliding window."""
        await self._clear(_SLIDING, key)

    async def _clear(self, algorithm: str, key: str) -> None:
        limit, window = _limit_and_window(key)
        if limit > 0:
            await self._limiter.aio.reset(_name(key), _quota(algorithm, limit, window))

    async def check(self) -> bool:
        """Returns whether the store answers."""
        try:
            await self._limiter.aio.peek(*_HEALTH_CHECK, on_store_failure="error")
        except StoreError:
            return False
        return True

    async def reset(self) -> int | None:
        """Deletes all counts in memory. On Redis use ``clear`` with a key."""
        self._limiter = _new_memory(self._limiter, self._origin)
        return None
