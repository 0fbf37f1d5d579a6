"""A Flask application with a limit of its own and limits of views."""

from __future__ import annotations

import os

from flask import Blueprint, Flask, abort
from tidegate import Limiter
from tidegate.flask import RateLimit

limits = RateLimit(
    None,
    Limiter(os.environ.get("REDIS_URL")),
    "50/hour",
    key=lambda request: request.headers.get("x-user"),
)
pages = Blueprint("pages", __name__)


def by_user(request):
    return request.headers["x-user"]


@pages.get("/first")
@limits.limit("2/minute", key=by_user)
def first() -> str:
    return "first"


@pages.get("/second")
@limits.limit(["2/minute", "3/hour"], key=by_user)
async def second() -> str:
    return "second"


@pages.post("/login")
@limits.limit("2/minute", key=by_user, refund_on=range(200, 300))
def login() -> str:
    from flask import request

    if request.get_data() != b"secret":
        abort(401)
    return "welcome"


@pages.get("/open")
def open_to_all() -> str:
    return "open"


def create_app() -> Flask:
    app = Flask(__name__)
    limits.init_app(app)
    app.register_blueprint(pages)
    return app
