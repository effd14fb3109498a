"""The programs that the documentation shows, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def examples(page: str) -> list[str]:
    """The Python programs of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def example(page: str, word: str) -> str:
    """The one of them that has ``word`` in it."""
    (found,) = (program for program in examples(page) if word in program)
    return found
