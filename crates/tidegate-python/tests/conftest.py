"""Real servers for the tests, on ports that the kernel chooses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_TIMEOUT = 20.0
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(condition: Callable[[], bool], what: str, timeout: float = START_TIMEOUT) -> None:
    """Waits for a condition, and fails after the timeout."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {timeout} s"
        time.sleep(0.01)


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class Server:
    """A process that listens on a port of its own, with what it writes in a file."""

    def __init__(self, command: Callable[[int], list[str]], log: Path, **options: object) -> None:
        self._command = command
        self._log = log
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None
        # Another process may take the port before the server does.
        for attempt in range(3):
            self.port = free_port()
            try:
                return self.start()
            except AssertionError:
                self.kill()
                if attempt == 2:
                    raise

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self.port), stdout=log, stderr=log, start_new_session=True,
                **self._options,
            )

        def is_up() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            return accepts(self.port)

        until(is_up, f"{self._command(self.port)[0]} listens")

    def kill(self) -> None:
        """Ends the process and its children at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the test."""
    servers: list[Server] = []

    def start(command: Callable[[int], list[str]], **options: object) -> Server:
        servers.append(Server(command, tmp_path / f"server-{len(servers)}.log", **options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def redis_server(start_server: Callable[..., Server]) -> Server:
    return start_server(
        lambda port: ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    )


@pytest.fixture
def start_app(start_server: Callable[..., Server]) -> Callable[..., Server]:
    """Starts an application of tests/apps with a real server, such as gunicorn."""

    def start(arguments: Callable[[str], list[str]], **environment: str) -> Server:
        return start_server(
            lambda port: [sys.executable, "-m", *arguments(f"127.0.0.1:{port}")],
            cwd=HERE / "apps",
            env={**os.environ, **environment},
        )

    return start


def get(url: str, headers: dict[str, str] | None = None, data: bytes | None = None):
    """Sends a request, and returns its status, headers and body."""
    request = urllib.request.Request(url, data=data, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()
