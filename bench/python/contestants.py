"""The contestants: each library as its documentation recommends it.

A contestant is one call, written as an application writes it, and the objects that the call names.
Each is measured in a process of its own, so a library is imported only there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 1_000
WINDOW = 60
NAIVE = (Path(__file__).parent / "naive.lua").read_text()

Names = dict[str, Any]


def dictionary(_variant: str, _url: str | None, _is_async: bool) -> Names:
    counts: dict[str, int] = {}

    def increment(key: str) -> None:
        counts[key] = counts.get(key, 0) + 1

    return {"increment": increment}


def tidegate(algorithm: str, url: str | None, is_async: bool) -> Names:
    from tidegate import Limiter, Quota

    limiter = Limiter(url)
    quota = Quota(f"{LIMIT}/minute", algorithm=algorithm)
    if is_async:
        return {"acquire": limiter.aio.acquire, "quota": quota}
    return {"acquire": limiter.acquire, "allow": limiter.allow, "quota": quota}


def naive_script(_variant: str, url: str | None, is_async: bool) -> Names:
    import time
    import uuid

    import redis.asyncio

    client = redis.asyncio.Redis if is_async else redis.Redis
    script = client.from_url(url).register_script(NAIVE)
    return {"script": script, "time": time, "uuid": uuid, "window": WINDOW, "limit": LIMIT}


def limits(strategy: str, url: str | None, is_async: bool) -> Names:
    import limits

    uri = ("async+" if is_async else "") + (url or "memory://")
    strategies = limits.aio.strategies if is_async else limits.strategies
    limiter = getattr(strategies, strategy)(limits.storage.storage_from_string(uri))
    return {"hit": limiter.hit, "item": limits.parse(f"{LIMIT}/minute")}


def throttled(algorithm: str, url: str | None, is_async: bool) -> Names:
    import throttled

    library = throttled.asyncio if is_async else throttled
    store = library.RedisStore(server=url) if url else library.MemoryStore()
    return {"throttle": library.Throttled(using=algorithm, quota=f"{LIMIT}/m", store=store)}


def pyrate_limiter(algorithm: str, url: str | None, is_async: bool) -> Names:
    """A bucket for each key needs a factory, here the one of its documentation."""
    import pyrate_limiter as pyrate
    import redis.asyncio

    rates = [pyrate.Rate(LIMIT, pyrate.Duration.MINUTE)]
    policy = getattr(pyrate, algorithm)()
    clock = pyrate.WallClock() if url else pyrate.MonotonicClock()
    if url:
        put = pyrate.buckets.redis_bucket.LuaScript.PUT_ITEM
        script = redis.Redis.from_url(url).script_load(put)
        client = (redis.asyncio.Redis if is_async else redis.Redis).from_url(url)

    class PerName(pyrate.BucketFactory):
        def __init__(self) -> None:
            self.buckets: dict[str, pyrate.AbstractBucket] = {}

        def wrap_item(self, name: str, weight: int = 1) -> pyrate.RateItem:
            return pyrate.RateItem(name, clock.now(), weight=weight)

        def get(self, item: pyrate.RateItem) -> pyrate.AbstractBucket:
            if item.name not in self.buckets:
                self.buckets[item.name] = self.new_bucket(item.name)
            return self.buckets[item.name]

        def new_bucket(self, name: str) -> pyrate.AbstractBucket:
            if url:
                return self.create(pyrate.RedisBucket, rates, client, f"pyrate:{name}", script)
            is_state = algorithm == "TokenBucket"
            kind = pyrate.StateBucket if is_state else pyrate.InMemoryBucket
            return self.create(kind, rates, policy)

    return {"limiter": pyrate.Limiter(PerName())}


class Library(NamedTuple):
    # Creates what the call names: for the library's name of the algorithm, for a Redis URL or for
    # memory, and for asyncio or not.
    setup: Callable[[str, str | None, bool], Names]
    call: str
    # The library's names of algorithms, by those of Tidegate.
    variants: dict[str, str]
    # The call for asyncio, if it differs by more than `await`.
    asyncio_call: str = ""
    # An expression that is false if the request is denied, if that is not the call.
    check: str = ""


OURS = ("token-bucket", "sliding-log", "sliding-counter", "fixed-window", "leaky-bucket")
NAIVE_CALL = 'script(keys=["naive:" + key], args=[time.time(), window, limit, str(uuid.uuid4())])'
LIBRARIES = {
    "dictionary": Library(dictionary, "increment(key)", {"": ""}),
    "tidegate": Library(tidegate, "acquire(key, quota)", dict(zip(OURS, OURS))),
    "tidegate allow": Library(tidegate, "allow(key, quota)", dict(zip(OURS, OURS))),
    "naive script": Library(naive_script, NAIVE_CALL, {"sliding-log": ""}),
    "limits": Library(
        limits,
        "hit(item, key)",
        {
            "sliding-log": "MovingWindowRateLimiter",
            "sliding-counter": "SlidingWindowCounterRateLimiter",
            "fixed-window": "FixedWindowRateLimiter",
        },
    ),
    "throttled-py": Library(
        throttled,
        "throttle.limit(key)",
        {
            "token-bucket": "token_bucket",
            "sliding-counter": "sliding_window",
            "fixed-window": "fixed_window",
            "leaky-bucket": "leaking_bucket",
        },
        check="not throttle.limit(key).limited",
    ),
    "pyrate-limiter": Library(
        pyrate_limiter,
        "limiter.try_acquire(key)",
        {
            "token-bucket": "TokenBucket",
            "sliding-log": "SlidingWindowLog",
            "fixed-window": "FixedWindow",
        },
        asyncio_call="limiter.try_acquire_async(key)",
        # Not for threads: without blocking, it denies if another thread has its lock.
        check="limiter.try_acquire(key, blocking=False)",
    ),
}


class Contestant(NamedTuple):
    library: str
    # Tidegate's name of the algorithm.
    algorithm: str

    def __str__(self) -> str:
        return " ".join(self).strip()


IN_MEMORY = [
    Contestant(name, algorithm)
    for name, library in LIBRARIES.items()
    for algorithm in library.variants
    if name != "naive script"
]
# An exact window, or the nearest that the library has.
WINDOWS = [
    *(Contestant(name, "sliding-log") for name in ("tidegate", "limits", "pyrate-limiter")),
    *(Contestant(name, "sliding-counter") for name in ("tidegate", "throttled-py")),
]
ON_REDIS = [Contestant("naive script", "sliding-log"), *WINDOWS]
