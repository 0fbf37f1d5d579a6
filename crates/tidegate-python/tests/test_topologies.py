"""Redis with TLS, as a cluster, and behind sentinels: a limiter connects and decides."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Server, free_port, until
from tidegate import Limiter, Quota, StoreError

QUOTA = Quota("2/hour")
REDIS = ["redis-server", "--bind", "127.0.0.1", "--save", ""]


def check_limit(limiter: Limiter, key: str) -> None:
    """Uses a limit up, which Redis counts."""
    decisions = [limiter.acquire(key, QUOTA) for _ in range(3)]
    assert [bool(decision) for decision in decisions] == [True, True, False]
    assert {decision.source for decision in decisions[:2]} == {"store"}


def redis_cli(server: Server, *command: str) -> str:
    arguments = ["redis-cli", "-p", str(server.port), *command]
    return subprocess.check_output(arguments, timeout=10, text=True)


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def create_certificate(directory: Path) -> tuple[Path, Path]:
    """Creates a certificate for 127.0.0.1 that signs itself, and its key."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=127.0.0.1",
        "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE",
    )
    return certificate, key


def test_tls(start_server: Callable[..., Server], tmp_path: Path) -> None:
    certificate, key = create_certificate(tmp_path)
    files = ["--tls-cert-file", certificate, "--tls-key-file", key]
    files += ["--tls-ca-cert-file", certificate]
    server = start_server(
        lambda port: [*REDIS, "--port", "0", "--tls-port", str(port), *map(str, files)]
    )
    url = f"rediss://127.0.0.1:{server.port}"
    trusted = {"tls_ca": certificate.read_bytes(), "timeout": 10}
    identity = {"tls_cert": certificate.read_bytes(), "tls_key": key.read_bytes()}
    check_limit(Limiter(url, **trusted, **identity), "client")
    # The server wants a certificate of its clients, and a client trusts only its authority.
    for options in [trusted, {**identity, "timeout": 1}]:
        with pytest.raises(StoreError):
            Limiter(url, **options).acquire("other", QUOTA, on_store_failure="error")
    with pytest.raises(ValueError, match="belong together"):
        Limiter(url, tls_cert=certificate.read_bytes())


def test_cluster(start_server: Callable[..., Server], tmp_path: Path) -> None:
    def command(port: int) -> list[str]:
        options = {
            "port": port,
            "cluster-enabled": "yes",
            "cluster-port": free_port(),
            "cluster-config-file": tmp_path / f"nodes-{port}.conf",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        return [*REDIS, *map(str, arguments)]

    nodes = [start_server(command) for _ in range(3)]
    addresses = [f"127.0.0.1:{node.port}" for node in nodes]
    subprocess.run(
        ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"],
        check=True, capture_output=True, timeout=60,
    )
    until(
        lambda: all("cluster_state:ok" in redis_cli(node, "cluster", "info") for node in nodes),
        "each node sees the whole cluster",
    )
    limiter = Limiter([node.redis_url for node in nodes[:2]], timeout=10)
    # The keys are on all of the nodes.
    for number in range(20):
        check_limit(limiter, f"client-{number}")
    assert all(int(redis_cli(node, "dbsize")) > 0 for node in nodes)


def test_sentinel(
    redis_server: Server, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    def command(port: int) -> list[str]:
        configuration = tmp_path / f"sentinel-{port}.conf"
        configuration.write_text(
            f"port {port}\nbind 127.0.0.1\n"
            f"sentinel monitor main 127.0.0.1 {redis_server.port} 1\n"
        )
        return ["redis-server", str(configuration), "--sentinel"]

    sentinel = start_server(command)
    limiter = Limiter([sentinel.redis_url], sentinel="main", timeout=10)
    check_limit(limiter, "client")
    assert int(redis_cli(redis_server, "dbsize")) > 0
