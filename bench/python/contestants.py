"""The contestants: each library as its documentation recommends it.

A contestant is one call, written as an application writes it, and the objects that the call names.
Each is measured in a process of its own, so a library is imported only there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 1_000
WINDOW = 60
NAIVE = (Path(__file__).parent / "naive.lua").read_text()

Names = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    library: str
    # Tidegate's name of the algorithm.
    algorithm: str
    # Creates what the call names: for the library's name of the algorithm, for a Redis URL or for
    # memory, and for asyncio or not.
    setup: Callable[[str, str | None, bool], Names]
    variant: str
    call: str
    # The call for asyncio, if it differs by more than `await`.
    asyncio_call: str = ""
    # An expression that is false if the request is denied, if that is not the call.
    check: str = ""

    @property
    def name(self) -> str:
        return f"{self.library} {self.algorithm}".strip()


def dictionary(_algorithm: str, _url: str | None, _is_async: bool) -> Names:
    counts: dict[str, int] = {}

    def increment(key: str) -> None:
        counts[key] = counts.get(key, 0) + 1

    return {"increment": increment}


def tidegate(algorithm: str, url: str | None, is_async: bool) -> Names:
    from tidegate import Limiter, Quota

    limiter = Limiter(url)
    quota = Quota(f"{LIMIT}/minute", algorithm=algorithm)
    return {"limiter": limiter.aio if is_async else limiter, "quota": quota}


def naive_script(_algorithm: str, url: str | None, is_async: bool) -> Names:
    import time
    import uuid

    import redis
    import redis.asyncio

    client = redis.asyncio.Redis if is_async else redis.Redis
    script = client.from_url(url).register_script(NAIVE)
    return {"script": script, "time": time, "uuid": uuid, "window": WINDOW, "limit": LIMIT}


def limits(strategy: str, url: str | None, is_async: bool) -> Names:
    import limits

    prefix = "async+" if is_async else ""
    storage = limits.storage.storage_from_string(prefix + (url or "memory://"))
    strategies = limits.aio.strategies if is_async else limits.strategies
    limiter = getattr(strategies, strategy)(storage)
    return {"limiter": limiter, "item": limits.parse(f"{LIMIT}/minute")}


def throttled(algorithm: str, url: str | None, is_async: bool) -> Names:
    import throttled

    library = throttled.asyncio if is_async else throttled
    store = library.RedisStore(server=url) if url else library.MemoryStore()
    return {"throttle": library.Throttled(using=algorithm, quota=f"{LIMIT}/m", store=store)}


def pyrate_limiter(algorithm: str, url: str | None, is_async: bool) -> Names:
    """A bucket for each key needs a factory, here the one of its documentation."""
    import pyrate_limiter as pyrate
    import redis
    import redis.asyncio

    rates = [pyrate.Rate(LIMIT, pyrate.Duration.MINUTE)]
    buckets: dict[str, pyrate.AbstractBucket] = {}
    if url:
        script = redis.Redis.from_url(url).script_load(pyrate.buckets.redis_bucket.LuaScript.PUT_ITEM)
        client = (redis.asyncio.Redis if is_async else redis.Redis).from_url(url)
        clock: pyrate.AbstractClock = pyrate.WallClock()
    else:
        clock = pyrate.MonotonicClock()

    class PerName(pyrate.BucketFactory):
        def wrap_item(self, name: str, weight: int = 1) -> pyrate.RateItem:
            return pyrate.RateItem(name, clock.now(), weight=weight)

        def get(self, item: pyrate.RateItem) -> pyrate.AbstractBucket:
            bucket = buckets.get(item.name)
            if bucket is None:
                bucket = buckets[item.name] = self.bucket(item.name)
            return bucket

        def bucket(self, name: str) -> pyrate.AbstractBucket:
            if url:
                return self.create(pyrate.RedisBucket, rates, client, f"pyrate:{name}", script)
            if algorithm == "TokenBucket":
                return self.create(pyrate.StateBucket, rates, pyrate.TokenBucket())
            policy = getattr(pyrate, algorithm)()
            return self.create(pyrate.InMemoryBucket, rates, algorithm=policy)

    return {"limiter": pyrate.Limiter(PerName())}


def contestants() -> list[Contestant]:
    """Every library with every algorithm that it shares with Tidegate, in memory."""
    found = [Contestant("dictionary", "", dictionary, "", "increment(key)")]
    for algorithm in (
        "token-bucket", "sliding-log", "sliding-counter", "fixed-window", "leaky-bucket"
    ):
        for library, call in (
            ("tidegate", "limiter.acquire(key, quota)"),
            ("tidegate allow", "limiter.allow(key, quota)"),
        ):
            found.append(Contestant(library, algorithm, tidegate, algorithm, call))
    for algorithm, strategy in (
        ("sliding-log", "MovingWindowRateLimiter"),
        ("sliding-counter", "SlidingWindowCounterRateLimiter"),
        ("fixed-window", "FixedWindowRateLimiter"),
    ):
        found.append(Contestant("limits", algorithm, limits, strategy, "limiter.hit(item, key)"))
    for algorithm, using in (
        ("token-bucket", "token_bucket"),
        ("sliding-counter", "sliding_window"),
        ("fixed-window", "fixed_window"),
        ("leaky-bucket", "leaking_bucket"),
    ):
        call, check = "throttle.limit(key)", "not throttle.limit(key).limited"
        found.append(Contestant("throttled-py", algorithm, throttled, using, call, check=check))
    for algorithm, policy in (
        ("token-bucket", "TokenBucket"),
        ("sliding-log", "SlidingWindowLog"),
        ("fixed-window", "FixedWindow"),
    ):
        found.append(
            Contestant(
                "pyrate-limiter", algorithm, pyrate_limiter, policy, "limiter.try_acquire(key)",
                asyncio_call="limiter.try_acquire_async(key)",
                # Not in threads: it denies, too, if another thread has the lock.
                check="limiter.try_acquire(key, blocking=False)",
            )
        )
    return found


def windows() -> list[Contestant]:
    """The exact window of each library, or the nearest that it has."""
    taking_part = [each for each in contestants() if each.library != "tidegate allow"]
    exact = [each for each in taking_part if each.algorithm == "sliding-log"]
    nearest = [each for each in taking_part if each.algorithm == "sliding-counter"]
    return exact + [each for each in nearest if each.library != "limits"]


def on_redis() -> list[Contestant]:
    call = (
        'script(keys=["naive:" + key], args=[time.time(), window, limit, uuid.uuid4().hex])'
    )
    return [Contestant("redis-py, naive script", "sliding-log", naive_script, "", call), *windows()]
