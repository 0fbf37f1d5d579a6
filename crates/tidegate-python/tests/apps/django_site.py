"""A Django site in one file, for WSGI and ASGI."""

from __future__ import annotations

import os

import django
from django.conf import settings
from tidegate import Limiter

settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    SECRET_KEY="of a test",
    MIDDLEWARE=[
        "django.middleware.common.CommonMiddleware",
        "tidegate.django.RateLimitMiddleware",
    ],
    TIDEGATE={
        "LIMITER": os.environ.get("REDIS_URL") or Limiter(),
        "LIMIT": "8/hour",
        "KEY": "django_site.by_user",
        "REFUND_ON": [404, 500],
    },
)
django.setup()

from django.core.asgi import get_asgi_application  # noqa: E402
from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.http import Http404, HttpRequest, HttpResponse  # noqa: E402
from django.urls import path  # noqa: E402
from django.utils.decorators import method_decorator  # noqa: E402
from django.views import View  # noqa: E402
from tidegate.django import ratelimit  # noqa: E402


def by_user(request: HttpRequest) -> str | None:
    return request.headers.get("x-user")


def index(request: HttpRequest) -> HttpResponse:
    return HttpResponse("hello")


@ratelimit("2/minute", key=by_user)
def strict(request: HttpRequest) -> HttpResponse:
    return HttpResponse("strict")


@ratelimit("2/minute", key=by_user)
async def asynchronous(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse(f"asynchronous {number}")


@ratelimit("1/minute", key=by_user, refund_on=[500])
def broken(request: HttpRequest) -> HttpResponse:
    raise Http404 if "missing" in request.GET else RuntimeError("broken")


@method_decorator(ratelimit("2/minute", key=by_user), name="dispatch")
class Page(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("page")


urlpatterns = [
    path("", index),
    path("strict/", strict),
    path("async/<int:number>/", asynchronous),
    path("broken/", broken),
    path("page/", Page.as_view()),
]
wsgi = get_wsgi_application()
asgi = get_asgi_application()
