"""The registry of metrics, read from metrics.toml beside this: what a run may log, and what it means."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_FREE_PART = re.compile(r"(<\w+>|\{[\w,]+\})")
_WORD_OR_NUMBER = r"-?[\w.+]+"


@dataclass(frozen=True)
class Metric:
    """One row: a key, or several that are explained together."""

    keys: tuple[str, ...]
    """``<...>`` in them stands for a word or a number, ``{a,b}`` for a or b."""
    unit: str
    """One for all keys, or one a key, by commas."""
    what: str
    when: str
    """Where it is there; always if empty."""
    axis: str
    """The key of the step that it is drawn over; empty of the steps themselves."""
    by: str
    """The process that makes it."""
    section: str
    """The table that it is in."""


def _read() -> tuple[Metric, ...]:
    sections = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
    return tuple(
        Metric(tuple(keys.split(", ")), **{"when": "", "axis": table["axis"], "by": table["by"]} | row, section=section)
        for section, table in sections.items()
        for keys, row in table["rows"].items()
    )


METRICS = _read()


def unregistered(keys: Iterable[str]) -> list[str]:
    """Those of ``keys``, as a line of metrics.jsonl has them, that no row explains.

    A free part has letters, digits, ``_``, ``.`` and ``+`` only (a number may begin with ``-``), so that
    ``eval/<name>`` is not ``eval/sums-no_reward`` too.
    """
    known = re.compile("|".join(_pattern(key) for metric in METRICS for key in metric.keys))
    return sorted({key for key in keys if not known.fullmatch(key)})


def _pattern(key: str) -> str:
    parts = _FREE_PART.split(key)
    for i, part in enumerate(parts):
        choice = f"(?:{part[1:-1].replace(',', '|')})" if part.startswith("{") else _WORD_OR_NUMBER
        parts[i] = choice if i % 2 else re.escape(part)
    return "".join(parts)
