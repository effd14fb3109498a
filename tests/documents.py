"""The programs that the documentation shows, for tests that run them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
_FREE_PART = re.compile(r"(<\w+>|\{[\w,]+\})")
_WORD_OR_NUMBER = r"-?[\w.+]+"


def examples(page: str, language: str = "python") -> list[str]:
    """The programs of a page that are in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def example(page: str, word: str, language: str = "python") -> str:
    """The one of them that has ``word`` in it."""
    (found,) = (program for program in examples(page, language) if word in program)
    return found


def metric_names(page: str = "metrics.md") -> list[str]:
    """Every name in the first columns of a page's tables, as it stands there."""
    cells = re.findall(r"^\| (`[^|]*`) \|", (DOCS / page).read_text(), re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def missing_metrics(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that docs/metrics.md lacks. There ``<...>`` stands for a word or number, ``{a,b}`` for a or b.

    A word has letters, digits, ``_``, ``.`` and ``+`` only (a number may begin with ``-``), so that ``eval/<name>`` is
    not ``eval/sums-no_reward`` too.
    """
    known = re.compile("|".join(map(_pattern, metric_names())))
    return sorted({name for name in names if not known.fullmatch(name)})


def _pattern(name: str) -> str:
    parts = [re.escape(part) for part in _FREE_PART.split(name)]
    for i, part in enumerate(_FREE_PART.findall(name)):
        choice = part[1:-1].replace(",", "|")
        parts[2 * i + 1] = _WORD_OR_NUMBER if part.startswith("<") else f"(?:{choice})"
    return "".join(parts)
