"""Run it: flask --app flask_app run"""

import math
import os

import redis
from flask import Flask, jsonify, request
from redis.backoff import NoBackoff
from redis.retry import Retry

tidegate = redis.Redis.from_url(
    os.environ.get("TIDEGATE_URL", "redis://127.0.0.1:8083"),
    socket_timeout=0.5,
    retry=Retry(NoBackoff(), 0),
)
app = Flask(__name__)


@app.before_request
def limit():
    key = request.headers.get("X-User-Id", request.remote_addr)
    try:
        allowed, _, _, retry_after_ms, *_ = tidegate.execute_command("TG.ACQUIRE", "per-user", key)
    except redis.RedisError as error:
        # Fail open: a limiter that cannot be reached must not stop the application.
        app.logger.warning("not limited: %s", error)
        return None
    if allowed:
        return None
    response = jsonify(error="too many requests")
    response.status_code = 429
    response.headers["Retry-After"] = str(math.ceil(retry_after_ms / 1000))
    return response


@app.get("/")
def index():
    return "hello\n"
