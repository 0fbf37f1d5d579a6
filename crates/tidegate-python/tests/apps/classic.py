"""The classic task: 100 requests per 60 seconds per user, with FastAPI and Redis."""

from fastapi import Depends, FastAPI, Request
from tidegate import Limiter
from tidegate.fastapi import install, limit


def user(request: Request) -> str:
    return request.headers.get("x-user-id", "anonymous")


app = FastAPI()
install(app, Limiter("redis://127.0.0.1:6379"))


@app.get("/", dependencies=[Depends(limit("100/60s", key=user))])
async def index() -> str:
    return "hello"
