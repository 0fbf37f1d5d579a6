"""The quick starts of slowapi's documentation for Starlette and FastAPI, with a storage URI."""

import os

import tidegate.limits  # noqa: F401
from fastapi import FastAPI
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded
from slowapi.util import get_remote_address
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse

limiter = Limiter(key_func=get_remote_address, storage_uri=os.environ["STORAGE_URI"])


@limiter.limit("5/minute")
async def homepage(request: Request):
    return PlainTextResponse("test")


starlette_app = Starlette()
starlette_app.state.limiter = limiter
starlette_app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)
starlette_app.add_route("/home", homepage)

fastapi_app = FastAPI()
fastapi_app.state.limiter = limiter
fastapi_app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)


@fastapi_app.get("/home")
@limiter.limit("5/minute")
async def home(request: Request):
    return PlainTextResponse("test")
