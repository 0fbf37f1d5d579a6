from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, final

__version__: str
__all__ = [
    "ClientIp",
    "Completions",
    "Decision",
    "Decisions",
    "Held",
    "Hold",
    "Limiter",
    "ManualClock",
    "Policies",
    "PolicyLimiter",
    "Quota",
    "StoreError",
    "Wait",
    "__version__",
]

_Algorithm = Literal[
    "sliding-log", "sliding-counter", "fixed-window", "token-bucket", "leaky-bucket", "concurrency"
]
_HoldStatus = Literal["held", "replayed", "settled", "ended", "unknown", "pending"]

class StoreError(Exception): ...

@final
class Quota:
    """An algorithm with its limit and window, validated when it is created."""

    def __new__(
        cls,
        rate: str,
        *,
        algorithm: str = "sliding-log",
        burst: int | None = None,
        encoding: str | None = None,
        count_denied: bool = False,
        block_for: Sequence[float] | None = None,
        hold_ttl: float | None = None,
        hold_max_ttl: float | None = None,
        on_expire: str = "charge",
    ) -> Quota: ...
    @staticmethod
    def concurrency(
        limit: int, *, hold_ttl: float | None = None, hold_max_ttl: float | None = None
    ) -> Quota:
        """A limit of the units in flight, which count until they are released."""

    @property
    def limit(self) -> int: ...
    @property
    def window(self) -> float | None:
        """The window in seconds; None for units in flight, which have none."""

    @property
    def burst(self) -> int: ...
    @property
    def algorithm(self) -> _Algorithm: ...
    @property
    def policy(self) -> str:
        """Name that charges without a policy count under."""

    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]: ...

@final
class Decision:
    """The answer to one charge: true if the request may pass. Times are in seconds."""

    @property
    def allowed(self) -> bool: ...
    @property
    def limit(self) -> int: ...
    @property
    def remaining(self) -> int: ...
    @property
    def retry_after(self) -> float:
        """The shortest wait after which the same request would be admitted; 0 if allowed."""

    @property
    def reset_after(self) -> float: ...
    @property
    def delay(self) -> float:
        """How long an admitted request has to wait in the queue of a leaky-bucket."""

    @property
    def hold_status(self) -> _HoldStatus | None:
        """What became of the hold of a reservation, a commit, or an acquire with an id."""

    @property
    def expires_after(self) -> float:
        """Time until the units are no longer held; 0 if they are not."""

    @property
    def source(self) -> Literal["store", "deny-cache", "local", "allow", "deny", "missing-key"]: ...
    @property
    def policy(self) -> str: ...
    @property
    def quota(self) -> Quota | None: ...
    @property
    def shadow(self) -> bool:
        """Whether a denial has no effect."""

    def headers(self, *, x_ratelimit_headers: bool = True) -> dict[str, str]: ...
    def __bool__(self) -> bool: ...

@final
class Decisions:
    """The answer to a request with several limits: true if it may pass."""

    @property
    def allowed(self) -> bool: ...
    @property
    def binding(self) -> Decision | None:
        """The most restrictive decision."""

    @property
    def denied_by(self) -> Decision | None: ...
    @property
    def exceeded(self) -> list[str]:
        """Names of the policies that a denied request exceeds."""

    @property
    def missing_key(self) -> str | None:
        """The attribute that the request lacks, if it is denied because of that."""

    @property
    def hold_id(self) -> str | None:
        """The id of what the request holds; a random one if a limit of units in flight needs it."""

    @property
    def hold_status(self) -> _HoldStatus | None: ...
    @property
    def expires_after(self) -> float: ...
    @property
    def delay(self) -> float: ...
    def headers(self, *, x_ratelimit_headers: bool = True) -> dict[str, str]: ...
    def __bool__(self) -> bool: ...
    def __len__(self) -> int: ...
    def __getitem__(self, position: int, /) -> Decision: ...
    def __iter__(self) -> Iterator[Decision]: ...

@final
class ManualClock:
    """A clock that moves only when a test moves it."""

    def __new__(cls) -> ManualClock: ...
    def advance(self, by: float) -> None: ...
    def step_back(self, by: float) -> None: ...
    def now(self) -> float: ...

@final
class ClientIp:
    """Finds the address of a client behind trusted proxies."""

    def __new__(
        cls, trusted_proxies: Sequence[str] = ..., *, ipv6_prefix: int = 64
    ) -> ClientIp: ...
    def trusts(self, peer: str) -> bool: ...
    def key(
        self,
        peer: str,
        x_forwarded_for: Sequence[bytes] = ...,
        forwarded: Sequence[bytes] = ...,
    ) -> str: ...

@final
class Policies:
    """The policies of a file."""

    @staticmethod
    def load(path: str | PathLike[str]) -> Policies: ...
    @staticmethod
    def parse(text: str, name: str = "policies") -> Policies: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def in_flight(self) -> list[str]:
        """Names of the policies that limit what is in flight."""

class Limiter:
    def __new__(
        cls,
        url: str | Sequence[str] | None = None,
        *,
        sentinel: str | None = None,
        prefix: str | None = None,
        timeout: float | None = None,
        password: str | None = None,
        tls_ca: bytes | None = None,
        tls_cert: bytes | None = None,
        tls_key: bytes | None = None,
        instances: int | None = None,
        on_store_failure: str = "local",
        clock: ManualClock | None = None,
        max_keys: int | None = None,
    ) -> Limiter: ...
    def acquire(
        self,
        key: str,
        quota: Quota,
        cost: int = 1,
        *,
        policy: str | None = None,
        on_store_failure: str | None = None,
        id: str | None = None,
        id_ttl: float = 600.0,
    ) -> Decision:
        """Takes units of the quota for this key, or denies. With an `id`, a retry is not charged
        again for `id_ttl` seconds."""

    def allow(self, key: str, quota: Quota, cost: int = 1) -> bool:
        """Takes units as `acquire` does, and returns only whether the request may pass: the
        cheapest call in memory."""

    def now(self) -> float: ...
    @property
    def is_memory(self) -> bool: ...
    def _decide(
        self,
        action: str,
        key: str,
        quota: Quota,
        cost: int,
        policy: str | None,
        on_store_failure: str | None,
        charged_at: float | None,
        hold: Hold | None,
    ) -> Decision: ...
    def _start(
        self,
        completions: Completions,
        future: Any,
        action: str,
        key: str,
        quota: Quota,
        cost: int,
        policy: str | None,
        on_store_failure: str | None,
        charged_at: float | None,
        hold: Hold | None,
    ) -> bool: ...
    def _wait(
        self,
        key: str,
        quota: Quota,
        timeout: float,
        cost: int,
        policy: str | None,
        on_store_failure: str | None,
    ) -> Wait: ...
    def _decide_all(
        self,
        action: str,
        charges: Sequence[Any],
        on_store_failure: str | None,
        hold: Hold | None,
    ) -> Decisions: ...
    def _start_all(
        self,
        completions: Completions,
        future: Any,
        action: str,
        charges: Sequence[Any],
        on_store_failure: str | None,
        hold: Hold | None,
    ) -> bool: ...
    def _hold(
        self, charges: Sequence[Any], on_store_failure: str | None, hold: Hold
    ) -> Held: ...
    def _start_hold(
        self,
        completions: Completions,
        future: Any,
        charges: Sequence[Any],
        on_store_failure: str | None,
        hold: Hold,
    ) -> bool: ...
    def _refund_all(self, decisions: Decisions, status: int | None) -> None: ...
    def _start_refund_all(
        self,
        completions: Completions,
        future: Any,
        decisions: Decisions,
        status: int | None,
    ) -> bool: ...

class PolicyLimiter:
    def __new__(
        cls, limiter: Limiter, policies: Policies, *, client_ip: ClientIp | None = None
    ) -> PolicyLimiter: ...
    @property
    def limiter(self) -> Any: ...
    def _decide(
        self, action: str, attributes: Mapping[str, str], cost: int | None, hold: Hold | None
    ) -> Decisions: ...
    def _start(
        self,
        completions: Completions,
        future: Any,
        action: str,
        attributes: Mapping[str, str],
        cost: int | None,
        hold: Hold | None,
    ) -> bool: ...
    def _hold(self, attributes: Mapping[str, str], cost: int | None) -> Held: ...
    def _start_hold(
        self,
        completions: Completions,
        future: Any,
        attributes: Mapping[str, str],
        cost: int | None,
    ) -> bool: ...
    def _acquire_request(self, request: Any) -> Decisions: ...
    def _start_request(self, completions: Completions, future: Any, request: Any) -> bool: ...

@final
class Hold:
    def __new__(
        cls, id: str | None = None, *, ttl: float | None = None, id_ttl: float | None = None
    ) -> Hold: ...
    @staticmethod
    def lease() -> Hold: ...
    @property
    def id(self) -> str: ...

@final
class Held:
    @property
    def decisions(self) -> Decisions: ...
    def release(self) -> None: ...
    def _start_release(self, completions: Completions, future: Any) -> bool: ...

@final
class Wait:
    def poll(self, completions: Completions, future: Any) -> Decision | None: ...
    def block(self) -> Decision: ...

@final
class Completions:
    def __new__(cls) -> Completions: ...
    def fileno(self) -> int: ...
    def submit(self) -> None: ...
    def drain(self) -> None: ...
