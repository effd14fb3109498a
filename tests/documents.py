"""The programs that the documentation shows, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def examples(page: str, language: str = "python") -> list[str]:
    """The programs of a page that are in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def example(page: str, word: str, language: str = "python") -> str:
    """The one of them that has ``word`` in it."""
    (found,) = (program for program in examples(page, language) if word in program)
    return found
