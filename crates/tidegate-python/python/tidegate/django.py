"""Limits of Django sites and of their views, in synchronous and in asynchronous stacks.

    # settings.py
    MIDDLEWARE = ["tidegate.django.RateLimitMiddleware", ...]
    TIDEGATE = {"LIMITER": "redis://127.0.0.1:6379", "LIMIT": "100/minute"}

    # views.py
    from django.http import HttpRequest, HttpResponse
    from tidegate.django import ratelimit

    @ratelimit("5/minute", key=lambda request: request.POST.get("user", ""))
    def login(request: HttpRequest) -> HttpResponse:
        return HttpResponse("welcome")

``LIMITER`` is a URL or a ``Limiter``. ``LIMIT`` is the limit of the middleware; without it only
views with a decorator are limited. The other entries are the options of the WSGI middleware in
upper case, such as ``"CLIENT_IP": ClientIp(["10.0.0.0/8"])``; ``KEY`` and ``ATTRIBUTES`` are
functions of the request, or their dotted paths. The decorator works without the middleware. Each
route has its own count, unless ``policy`` is set. An exception of a view that has a decorator
refunds as the status 500, and not at all if it is one of Django's own, such as ``Http404``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, PermissionDenied, SuspiciousOperation
from django.core.signals import setting_changed
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from . import asgi, wsgi
from ._http import LISTS, Limit, Options, Outcome, Parts, Response, Rule, Setup
from ._limiter import Limiter

if TYPE_CHECKING:
    from typing_extensions import Unpack

View = TypeVar("View", bound=Callable[..., Any])

HAVE_OTHER_STATUSES = (Http404, PermissionDenied, SuspiciousOperation)


class RateLimitMiddleware:
    """Limits the requests of a site, by the settings ``TIDEGATE``."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)
        _configured()

    def __call__(self, request: HttpRequest) -> Any:
        rule = _configured()[1]
        if rule is None:
            return self._get_response(request)
        run = _run_async if self._is_async else _run
        return run(rule, "", request, functools.partial(self._get_response, request))


def ratelimit(limit: Limit, **options: Unpack[Options]) -> Callable[[View], View]:
    """Limits the requests of a view, asynchronous or not."""
    rule = Rule(limit, **options)

    def decorate(view: View) -> View:
        run = _run_async if iscoroutinefunction(view) else _run

        @functools.wraps(view)
        def limited(request: HttpRequest, *arguments: Any, **named: Any) -> Any:
            match = request.resolver_match
            route = match.route if match is not None else ""
            call = functools.partial(view, request, *arguments, **named)
            return run(rule, f"/{route}", request, call)

        if iscoroutinefunction(view):
            markcoroutinefunction(limited)
        return limited  # type: ignore[return-value]

    return decorate


@functools.cache
def _configured() -> tuple[Setup, Rule | None]:
    """Reads the settings."""
    given = {name.lower(): value for name, value in getattr(settings, "TIDEGATE", {}).items()}
    if "limiter" not in given:
        raise ImproperlyConfigured('set TIDEGATE = {"LIMITER": "redis://…"}, or a Limiter()')
    limiter, limit = given.pop("limiter"), given.pop("limit", None)
    common = {name: given.pop(name) for name in Setup._fields if name in given}
    for name in ("key", "attributes"):
        if isinstance(given.get(name), str):
            given[name] = import_string(given[name])
    setup = Setup(limiter if isinstance(limiter, Limiter) else Limiter(limiter), **common)
    return setup, None if limit is None else Rule(limit, **given)


def _forget_settings(*, setting: str, **_: Any) -> None:
    if setting == "TIDEGATE":
        _configured.cache_clear()


setting_changed.connect(_forget_settings)


def _run(rule: Rule, route: str, request: HttpRequest, view: Callable[[], Any]) -> Any:
    setup = _configured()[0]
    outcome = rule.acquire(setup, request, _read_parts(request), route)
    if outcome.rejection is not None:
        return _answer(outcome.rejection)
    try:
        response = view()
    except Exception as error:
        if not isinstance(error, HAVE_OTHER_STATUSES):
            rule.refund(setup, outcome, 500)
        raise
    rule.refund(setup, outcome, response.status_code)
    return _with_headers(response, outcome)


async def _run_async(rule: Rule, route: str, request: HttpRequest, view: Callable[[], Any]) -> Any:
    setup = _configured()[0]
    outcome = await rule.acquire_async(setup, request, _read_parts(request), route)
    if outcome.rejection is not None:
        return _answer(outcome.rejection)
    try:
        response = await view()
    except Exception as error:
        if not isinstance(error, HAVE_OTHER_STATUSES):
            await rule.refund_async(setup, outcome, 500)
        raise
    await rule.refund_async(setup, outcome, response.status_code)
    return _with_headers(response, outcome)


def _read_parts(request: HttpRequest) -> Parts:
    scope = getattr(request, "scope", None)
    return wsgi.read_parts(request.META) if scope is None else asgi.read_parts(scope)


def _answer(rejection: Response) -> HttpResponse:
    return HttpResponse(
        rejection.body, status=rejection.status, headers=dict(rejection.headers)
    )


def _with_headers(response: HttpResponseBase, outcome: Outcome) -> HttpResponseBase:
    for name, value in outcome.headers.items():
        if name in LISTS or name not in response.headers:
            # Django has one line for each header: lists are joined.
            before = response.headers.get(name)
            response.headers[name] = value if before is None else f"{before}, {value}"
    return response
