"""A WSGI application that charges each request by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from tidegate import Limiter, Quota

QUOTA = Quota(os.environ["RATE"])

limiter = Limiter(os.environ["REDIS_URL"], timeout=10)
if "USED_BEFORE_FORK" in os.environ:
    assert limiter.acquire("before the fork", QUOTA).source == "store"


def application(
    environ: dict[str, Any], start_response: Callable[..., object]
) -> Iterable[bytes]:
    decision = limiter.acquire("client", QUOTA)
    status = "200 OK" if decision else "429 Too Many Requests"
    headers = {
        "Content-Length": "0", "X-Process": str(os.getpid()), "X-Source": decision.source
    }
    start_response(status, list(headers.items()))
    return [b""]
