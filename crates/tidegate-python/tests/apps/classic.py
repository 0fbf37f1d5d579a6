"""The classic task: 100 requests per 60 seconds per user, with FastAPI and Redis."""

import os

from fastapi import Depends, FastAPI
from tidegate import Limiter
from tidegate.fastapi import install, limit

app = FastAPI()
install(app, Limiter(os.environ["REDIS_URL"]))


@app.get("/", dependencies=[Depends(limit("100/60s", key=lambda r: r.headers["x-user-id"]))])
async def index() -> str:
    return "hello"
