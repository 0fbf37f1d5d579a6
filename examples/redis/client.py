import redis

tidegate = redis.Redis.from_url(
    "redis://127.0.0.1:8083", protocol=3, decode_responses=True, socket_timeout=0.5
)

decision = tidegate.execute_command("TG.ACQUIRE", "per-user", "user123")
if decision["allowed"]:
    print("allowed,", decision["remaining"], "left")
else:
    print("denied, retry in", decision["retry_after_ms"], "ms")

# A pipeline is one round trip. Each command is atomic, so there is no transaction.
with tidegate.pipeline(transaction=False) as pipeline:
    for user in ["ann", "bob", "eve"]:
        pipeline.execute_command("TG.ACQUIRE", "per-user", user)
    print([decision["remaining"] for decision in pipeline.execute()])
