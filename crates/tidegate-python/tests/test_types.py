"""The types: those of the Python part, those of the extension module, and those that users see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tidegate

HERE = Path(__file__).parent
PACKAGE = Path(tidegate.__file__).parent

USER = """\
import asyncio
from tidegate import Decision, Decisions, Limiter, Policies, PolicyLimiter, Quota

limiter = Limiter("redis://127.0.0.1:6379", timeout=0.05)
decision: Decision = limiter.acquire("ann", Quota("1/minute"), policy="login")
wait: float = decision.retry_after
decisions: Decisions = limiter.acquire_all([("ann", Quota("1/minute"), 2)])

with limiter.reserve("ann", Quota("1/minute"), 2, id="job") as reservation:
    settled: Decision = reservation.commit(1)
with PolicyLimiter(limiter, Policies.parse("policies: []")).hold({}) as permit:
    held: Decisions = permit.decision

async def main() -> Decision:
    async with limiter.aio.hold("ann", Quota.concurrency(5)) as permit:
        allowed: bool = permit.allowed
    settled: Decision = await (await limiter.aio.reserve("ann", Quota("1/minute"))).cancel()
    return await limiter.aio.wait("ann", Quota("1/minute"), 1.0)
"""


def mypy(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    return run.returncode, run.stdout + run.stderr


def test_stub_describes_the_extension_module() -> None:
    status, output = mypy("mypy.stubtest", "tidegate._tidegate", "--ignore-disjoint-bases")
    assert status == 0, output


def test_python_part_and_uses_have_types(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    config = ["--config-file", str(HERE.parent / "pyproject.toml"), "--cache-dir", str(tmp_path)]
    status, output = mypy("mypy", *config, str(PACKAGE), str(tmp_path / "user.py"))
    assert status == 0, output
    (tmp_path / "user.py").write_text(USER.replace('policy="login"', "policy=7"))
    status, output = mypy("mypy", *config, str(tmp_path / "user.py"))
    assert status == 1 and '"str | None"' in output
