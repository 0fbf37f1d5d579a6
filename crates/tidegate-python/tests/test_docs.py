"""The Python examples of docs/python.md, README.md and this package's README run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Server

ROOT = Path(__file__).parents[3]
PAGES = ["docs/python.md", "README.md", "crates/tidegate-python/README.md"]


def examples() -> list[tuple[str, str]]:
    """Returns the blocks of each page that no other test runs: files have their name above."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"([^\n]*)\n+```python\n(.*?)```", text, re.DOTALL):
            above, code = match.groups()
            if not above.endswith("`:") and not above.startswith("<!-- not run"):
                line = text[: match.start(2)].count("\n") + 1
                found.append((f"{page}:{line}", code))
    return found


def test_pages_have_examples() -> None:
    pages = [name.split(":")[0] for name, _ in examples()]
    assert {page: pages.count(page) >= 1 for page in PAGES} == dict.fromkeys(PAGES, True)
    assert pages.count("docs/python.md") >= 10


@pytest.mark.parametrize(("name", "code"), examples(), ids=[name for name, _ in examples()])
def test_example_runs(name: str, code: str, redis_server: Server) -> None:
    code = code.replace("redis://127.0.0.1:6379", redis_server.redis_url)
    exec(compile(code, name, "exec"), {"__name__": "example"})


def test_classic_task_is_that_of_the_application() -> None:
    """tests/apps/classic.py is what a test runs with uvicorn."""

    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if line and not line.startswith('"""')]

    application = lines((ROOT / "crates/tidegate-python/tests/apps/classic.py").read_text())
    assert any(lines(code) == application for _, code in examples())
    assert len(application) <= 12
