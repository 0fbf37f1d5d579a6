"""Shared parts of the integrations: the decision of an HTTP request, and the responses to it."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import json
import logging
import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict
from urllib.parse import quote

from ._limiter import Limiter, PolicyLimiter, Request
from ._tidegate import ClientIp, Decisions, Policies, Quota, StoreError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Limit = str | Quota | Sequence[str | Quota] | Policies

# Headers that are appended to those of an inner limit; of any other, that of the inner one stays.
LISTS = ("ratelimit", "ratelimit-policy")
LOOPBACK = "127.0.0.1"
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
UNKNOWN_ADDRESS = (
    "the limit counts by the client's address, which is unknown: this is a test client, or the "
    'server listens on a Unix socket; trust its proxy, ClientIp(["127.0.0.1"]), or set a key function'
)
IN_FLIGHT = "units in flight need the hold of a limiter: use it where the work is done"
# Characters of a path that need no percent code.
SAFE = "/!$&'()*+,;=:@~"
_log = logging.getLogger("tidegate")


class Options(TypedDict, total=False):
    """Options of a limit; see ``Rule``."""

    key: Callable[[Any], Any] | None
    attributes: Callable[[Any], Any] | None
    policy: str | None
    cost: int
    on_store_failure: str | None
    refund_on: Container[int]


class Setup(NamedTuple):
    """The limiter of an application, and the options that its limits have in common."""

    limiter: Limiter
    client_ip: ClientIp = ClientIp()
    x_ratelimit_headers: bool = True

    def checked(self) -> Setup:
        if not isinstance(self.limiter, Limiter):
            raise ValueError(f"{type(self.limiter).__name__} is not a Limiter: use Limiter(url)")
        return self


class Parts(NamedTuple):
    """What limits read of a request. The path is that by which the application routes."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    peer: str | None


class Response(NamedTuple):
    """A response that the limiter sends in place of the application."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Outcome(NamedTuple):
    """How a request goes on. One that is not limited has no decisions."""

    decisions: Decisions | None = None
    headers: Mapping[str, str] = {}
    rejection: Response | None = None


class Rule:
    """A limit of requests: some rates, all or nothing, or the policies of a file.

    - ``key`` is a function of the request that returns whom to count, or ``None`` for a request
      without a limit. By default it is the client's address.
    - ``policy`` is the name of the count. Limits of one name share their counts.
    - ``cost`` is the number of units that a request takes.
    - ``on_store_failure`` is that of ``Limiter``.
    - ``refund_on`` has the statuses of responses that take no units, such as ``range(500, 600)``.
    - ``attributes`` is for policies: a function of the request that returns attributes of your
      own, or ``None``. The file has the other options.
    """

    def __init__(
        self,
        limit: Limit,
        *,
        key: Callable[[Any], Any] | None = None,
        policy: str | None = None,
        cost: int = 1,
        on_store_failure: str | None = None,
        refund_on: Container[int] = (),
        attributes: Callable[[Any], Any] | None = None,
    ) -> None:
        for function in (key, attributes):
            if function is not None and not callable(function):
                raise ValueError(f"{function!r} is not a function of the request")
        if not hasattr(refund_on, "__contains__"):
            raise ValueError("refund_on is a list of statuses, such as [500, 503]")
        if cost < 1:
            raise ValueError(f"cost {cost} is too low: a cost is at least 1")
        self._policies = limit if isinstance(limit, Policies) else None
        self._read = key or attributes
        self._policy, self._cost = policy, cost
        self._on_store_failure, self._refund_on = on_store_failure, refund_on
        self._quotas: list[Quota] = []
        if isinstance(limit, Policies):
            if (key, policy, cost, on_store_failure, refund_on) != (None, None, 1, None, ()):
                raise ValueError("with policies, set only attributes here, the rest in the file")
            if limit.in_flight:
                raise ValueError(f"policy {limit.in_flight[0]!r}: {IN_FLIGHT}")
            return
        if attributes is not None:
            raise ValueError("attributes are for policies: a rate has a key")
        limits = [limit] if isinstance(limit, (str, Quota)) else limit
        self._quotas = [Quota(limit) if isinstance(limit, str) else limit for limit in limits]
        if any(quota.window is None for quota in self._quotas):
            raise ValueError(IN_FLIGHT)
        charges = self._charges("any key", "")
        if not charges:
            raise ValueError('the limit has no rate: write it like "100/minute"')
        if len({charge[3] for charge in charges}) != len(charges):
            raise ValueError("several rates of one limit need different windows")
        # A wrong cost or name fails now. A peek in memory starts no thread before a fork.
        for any_key, quota, _, name in charges:
            Limiter().peek(any_key, quota, cost, policy=name, on_store_failure=on_store_failure)

    def acquire(self, setup: Setup, caller: Any, parts: Parts, route: str = "") -> Outcome:
        """Decides a request. ``caller`` is the framework's own form of it, for the key function,
        and ``route`` is part of the policy's name if the rule has none."""
        read = self._read and self._read(caller)
        try:
            subject = self._subject(setup, parts, read)
            if subject is None:
                return Outcome()
            decisions = self._call(setup, subject, route, is_async=False)
        except (ValueError, StoreError) as error:
            return _undecided(error)
        if decisions and decisions.delay:
            time.sleep(decisions.delay)
        return _decided(decisions, setup.x_ratelimit_headers)

    async def acquire_async(
        self, setup: Setup, caller: Any, parts: Parts, route: str = ""
    ) -> Outcome:
        """Decides a request, for asyncio. The key function may be asynchronous."""
        read = self._read and self._read(caller)
        if inspect.isawaitable(read):
            read = await read
        try:
            subject = self._subject(setup, parts, read)
            if subject is None:
                return Outcome()
            decisions = await self._call(setup, subject, route, is_async=True)
        except (ValueError, StoreError) as error:
            return _undecided(error)
        if decisions and decisions.delay:
            await asyncio.sleep(decisions.delay)
        return _decided(decisions, setup.x_ratelimit_headers)

    def refund(self, setup: Setup, outcome: Outcome, status: int) -> None:
        """Returns the units of an admitted request, if the status of its response says so."""
        if outcome.decisions is not None and self._may_refund(status):
            setup.limiter.refund_all(outcome.decisions, status=status if self._policies else None)

    async def refund_async(self, setup: Setup, outcome: Outcome, status: int) -> None:
        """Returns the units of an admitted request, for asyncio."""
        if outcome.decisions is not None and self._may_refund(status):
            refunded = status if self._policies else None
            await setup.limiter.aio.refund_all(outcome.decisions, status=refunded)

    def _may_refund(self, status: int) -> bool:
        return self._policies is not None or status in self._refund_on

    def _subject(self, setup: Setup, parts: Parts, read: Any) -> str | Request | None:
        """Returns the key of a rate or the request for policies; ``None`` if it is not limited."""
        method, path, query, headers, peer = parts
        if peer is None and setup.client_ip.trusts(LOOPBACK):
            peer = LOOPBACK  # A proxy on this host, by a Unix socket.
        if self._policies is not None:
            return method, to_target(path, query), headers, peer, read
        if self._read is None:
            if peer is None:
                raise RuntimeError(UNKNOWN_ADDRESS)
            lines = [(name.lower(), value) for name, value in headers]
            forwarded = [value for name, value in lines if name == b"forwarded"]
            x_forwarded_for = [value for name, value in lines if name == b"x-forwarded-for"]
            return setup.client_ip.key(peer, x_forwarded_for, forwarded)
        if read is not None and not isinstance(read, str):
            raise TypeError(f"the key function returned {read!r}: return a str, or None")
        return read

    def _call(self, setup: Setup, subject: Any, route: str, *, is_async: bool) -> Any:
        if self._policies is None:
            limiter = setup.limiter.aio if is_async else setup.limiter
            charges = self._charges(subject, route)
            return limiter.acquire_all(charges, on_store_failure=self._on_store_failure)
        policies = PolicyLimiter(setup.limiter, self._policies, client_ip=setup.client_ip)
        return (policies.aio if is_async else policies).acquire_request(subject)

    def _charges(self, key: str, route: str) -> list[tuple[str, Quota, int, str]]:
        if self._policy is not None and len(self._quotas) == 1:
            return [(key, self._quotas[0], self._cost, self._policy)]
        name = self._policy or route
        # The default name of a quota has its algorithm and window.
        return [
            (key, quota, self._cost, f"{name} {quota.policy}" if name else quota.policy)
            for quota in self._quotas
        ]


def to_target(path: str, query: bytes) -> bytes:
    """Returns the target of a request whose application routes by this path. Policies read it in
    normal form; a path with dot segments, which an application may route as it is, is refused."""
    if any(segment in (".", "..") for segment in path.split("/")):
        raise ValueError("the path has dot segments: send it without them")
    target = quote(path if path.startswith("/") else f"/{path}", safe=SAFE).encode()
    return target + b"?" + query if query else target


def address(peer: str | None) -> str | None:
    """Returns the address of a connection's other end, or ``None`` if it has none."""
    try:
        return str(ipaddress.ip_address((peer or "").partition("%")[0]))
    except ValueError:
        return None


def _decided(decisions: Decisions, x_ratelimit_headers: bool) -> Outcome:
    headers = decisions.headers(x_ratelimit_headers=x_ratelimit_headers)
    return Outcome(decisions, headers, None if decisions else _denied(decisions, headers))


def _undecided(error: Exception) -> Outcome:
    if isinstance(error, StoreError):
        # Only the operator sees the reason: it may name servers.
        _log.warning("request not decided: %s", error)
        detail = "the limits cannot be checked now: try again in a moment"
        status, headers = HTTPStatus.SERVICE_UNAVAILABLE, {"retry-after": "1"}
        return Outcome(rejection=_problem(status, detail, headers=headers))
    if "address of the peer is unknown" in str(error):
        raise RuntimeError(UNKNOWN_ADDRESS) from error
    return Outcome(rejection=_problem(HTTPStatus.BAD_REQUEST, str(error)))


def _denied(decisions: Decisions, headers: Mapping[str, str]) -> Response:
    denied_by = decisions.denied_by
    assert denied_by is not None, "a denial has its decision"
    # Rounded up, so that no client retries too early. Times are whole microseconds.
    retry_after_ms = -(-round(denied_by.retry_after * 1e6) // 1000)
    more: dict[str, Any] = {"policy": denied_by.policy, "retry_after_ms": retry_after_ms}
    name = json.dumps(denied_by.policy, ensure_ascii=False)
    if decisions.missing_key is not None:
        more |= {"source": denied_by.source, "missing_key": decisions.missing_key}
    if denied_by.quota is None or decisions.missing_key is not None:
        lacks = decisions.missing_key or "the key"
        detail = f"the request lacks {lacks}, by which policy {name} counts: send it"
    else:
        wait = max(1, -(-retry_after_ms // 1000))
        limit, window = denied_by.quota.limit, denied_by.quota.window
        what = "in flight" if window is None else f"in {math.ceil(window)} s"
        detail = f"policy {name} allows {limit} {what}: try again in {wait} s"
    if decisions.exceeded:
        more |= {"violated-policies": decisions.exceeded}
        more |= {"type": QUOTA_EXCEEDED, "title": "Quota Exceeded"}
    return _problem(HTTPStatus.TOO_MANY_REQUESTS, detail, more, headers)


def _problem(
    status: HTTPStatus,
    detail: str,
    more: Mapping[str, Any] = {},
    headers: Mapping[str, str] = {},
) -> Response:
    """Builds RFC 9457 problem details."""
    problem = {"type": "about:blank", "title": status.phrase, "status": int(status)}
    body = json.dumps({**problem, "detail": detail, **more}, ensure_ascii=False)
    headers = {"content-type": "application/problem+json", **headers}
    return Response(int(status), headers, body.encode(errors="replace"))
