#!/usr/bin/env python3
"""Measures `tidegate simulate` on access logs: lines per second of one core, and memory.

Usage: bench/simulate.py TIDEGATE [LINES]

It writes logs of LINES / 10 and of LINES requests of 1,000 clients, in each format, to a temporary
folder, and replays them. Memory must not grow with the number of lines.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time

CLIENTS = 1_000
PER_SECOND = 2_000
START = datetime.datetime(2026, 11, 16, tzinfo=datetime.timezone.utc)
AGENT = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"


def combined(client, path, now):
    stamp = now.strftime("%d/%b/%Y:%H:%M:%S +0000")
    start = f'{client} - - [{stamp}] "GET {path} HTTP/1.1" 200 5120'
    return f'{start} "https://example.com/" "{AGENT}"\n'


def caddy(client, path, now):
    request = {
        "remote_ip": client, "remote_port": "40000", "client_ip": client, "proto": "HTTP/2.0",
        "method": "GET", "host": "example.com", "uri": path,
        "headers": {"User-Agent": [AGENT], "Accept": ["*/*"], "Accept-Encoding": ["gzip"]},
    }
    line = {
        "level": "info", "ts": now.timestamp(), "logger": "http.log.access",
        "msg": "handled request", "request": request, "bytes_read": 0, "duration": 0.00018,
        "size": 5120, "status": 200,
    }
    return json.dumps(line, separators=(",", ":")) + "\n"


def write(path, lines, form):
    """Repeats one second of requests with other times, which is faster than formatting each."""
    mark = START
    clients = [i * 7 % CLIENTS for i in range(PER_SECOND)]
    second = [
        form(f"203.0.{client // 250}.{client % 250}", f"/api/items/{i}?page=2", mark)
        for i, client in enumerate(clients)
    ]
    block = "".join(second)
    old = str(mark.timestamp()) if form is caddy else mark.strftime("%d/%b/%Y:%H:%M:%S")
    with open(path, "w", encoding="ascii") as file:
        for number in range(lines // PER_SECOND):
            now = mark + datetime.timedelta(seconds=number)
            new = str(now.timestamp()) if form is caddy else now.strftime("%d/%b/%Y:%H:%M:%S")
            file.write(block.replace(old, new))


def replay(binary, path):
    """Returns the seconds, the seconds of CPU, and the highest resident memory in MiB."""
    child = subprocess.Popen(
        [binary, "simulate", "--access-log", path, "--limit", "100", "--window", "60s", "--json"],
        stdout=subprocess.DEVNULL,
    )
    start = time.monotonic()
    _, status, usage = os.wait4(child.pid, 0)
    if status != 0:
        sys.exit(f"{path}: exit status {status}")
    return time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main():
    binary = sys.argv[1]
    lines = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000_000
    print("format       lines     seconds  of CPU    lines per second of CPU    MiB")
    for name, form in [("combined", combined), ("caddy", caddy)]:
        for count in [lines // 10, lines]:
            with tempfile.NamedTemporaryFile(suffix=".log") as file:
                write(file.name, count, form)
                elapsed, cpu, memory = replay(binary, file.name)
            times = f"{elapsed:>9.2f} {cpu:>8.2f} {count / cpu:>22,.0f}"
            print(f"{name:<9} {count:>10,} {times} {memory:>10.1f}")


if __name__ == "__main__":
    main()
