"""Run it: uvicorn fastapi_app:app"""

import logging
import math
import os

import redis.asyncio as redis
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

tidegate = redis.Redis.from_url(
    os.environ.get("TIDEGATE_URL", "redis://127.0.0.1:8083"),
    protocol=3,
    decode_responses=True,
    socket_timeout=0.5,
)
app = FastAPI()


@app.middleware("http")
async def limit(request: Request, call_next):
    key = request.headers.get("X-User-Id", request.client.host)
    try:
        decision = await tidegate.execute_command("TG.ACQUIRE", "per-user", key)
    except redis.RedisError as error:
        # Fail open: a limiter that cannot be reached must not stop the application.
        logging.warning("not limited: %s", error)
        return await call_next(request)
    if decision["allowed"]:
        return await call_next(request)
    retry_after = math.ceil(decision["retry_after_ms"] / 1000)
    return JSONResponse(
        {"error": "too many requests"},
        status_code=429,
        headers={"Retry-After": str(retry_after)},
    )


@app.get("/", response_class=PlainTextResponse)
async def index():
    return "hello\n"
