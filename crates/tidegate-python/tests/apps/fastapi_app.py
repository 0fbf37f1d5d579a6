"""A FastAPI application with limits of routes, routers and mounted applications."""

from __future__ import annotations

import os

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from tidegate import Limiter
from tidegate.fastapi import install, limit


async def by_user(request: Request) -> str | None:
    return request.headers.get("x-user")


twice = Depends(limit("2/minute", key=by_user))
items = APIRouter(prefix="/items")
users = APIRouter(prefix="/users")


@items.get("/{number}", dependencies=[twice])
@users.get("/{number}", dependencies=[twice])
async def read(number: int) -> int:
    return number


@users.post("/{number}", dependencies=[twice])
def write(number: int) -> int:
    return number


app, mounted, bare = FastAPI(), FastAPI(), FastAPI()
limiter = Limiter(os.environ.get("REDIS_URL"))
install(app, limiter)
install(mounted, limiter)
for application in app, mounted, bare:
    application.include_router(items)
    application.include_router(users)
app.include_router(items, prefix="/v2")
app.mount("/mounted", mounted)
app.mount("/bare", bare)
shared = Depends(limit("3/minute", key=by_user, policy="shared"))


@app.get("/shared/a", dependencies=[shared])
async def shared_a() -> PlainTextResponse:
    return PlainTextResponse("a response of its own")


@app.get("/shared/b", dependencies=[shared])
async def shared_b() -> None:
    raise HTTPException(404)


@app.get("/broken", dependencies=[Depends(limit("1/minute", key=by_user, refund_on=[500]))])
async def broken() -> None:
    raise RuntimeError("broken")
