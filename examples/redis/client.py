import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

# Without retries: a repeated command is charged again.
tidegate = redis.Redis.from_url(
    "redis://127.0.0.1:8083", socket_timeout=0.5, retry=Retry(NoBackoff(), 0)
)

allowed, limit, remaining, retry_after_ms, reset_after_ms, delay_ms = tidegate.execute_command(
    "TG.ACQUIRE", "per-user", "user123"
)
if allowed:
    print("allowed,", remaining, "left")
else:
    print("denied, retry in", retry_after_ms, "ms")

# A pipeline is one round trip.
with tidegate.pipeline() as pipeline:
    for user in ["ann", "bob", "eve"]:
        pipeline.execute_command("TG.ACQUIRE", "per-user", user)
    print([remaining for allowed, limit, remaining, *_ in pipeline.execute()])
