"""A plain WSGI application behind the middleware."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tidegate import Limiter, Policies
from tidegate.wsgi import RateLimitMiddleware

POLICIES = """
policies:
  - name: per-user
    match: {path: /api/**}
    key: [header.x-user]
    missing_key: deny
    limit: 4
    window: 1h
    refund_on: {status: [404]}
  - name: trial
    mode: shadow
    match: {path: /api/**}
    key: [header.x-user]
    missing_key: deny
    limit: 1
    window: 1h
"""


def hello(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    status = "404 Not Found" if environ["PATH_INFO"].endswith("/missing") else "200 OK"
    start_response(status, [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return [b"hello"]


limiter = Limiter(os.environ.get("REDIS_URL"))
policies = RateLimitMiddleware(hello, limiter, Policies.parse(POLICIES))
by_address = RateLimitMiddleware(hello, limiter, "3/hour")
