"""Run it: uvicorn fastapi_app:app"""

import logging
import math
import os

import redis.asyncio as redis
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

tidegate = redis.Redis.from_url(
    os.environ.get("TIDEGATE_URL", "redis://127.0.0.1:8083"),
    socket_timeout=0.5,
    retry=Retry(NoBackoff(), 0),
)
app = FastAPI()


@app.middleware("http")
async def limit(request: Request, call_next):
    key = request.headers.get("X-User-Id", request.client.host)
    try:
        decision = await tidegate.execute_command("TG.ACQUIRE", "per-user", key)
        allowed, _, _, retry_after_ms, *_ = decision
    except redis.RedisError as error:
        # Fail open: a limiter that cannot be reached must not stop the application.
        logging.warning("not limited: %s", error)
        return await call_next(request)
    if allowed:
        return await call_next(request)
    retry_after = math.ceil(retry_after_ms / 1000)
    return JSONResponse(
        {"error": "too many requests"},
        status_code=429,
        headers={"Retry-After": str(retry_after)},
    )


@app.get("/", response_class=PlainTextResponse)
async def index():
    return "hello\n"
