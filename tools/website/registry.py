"""The registry of what a run logs and traces: metrics.toml and spans.toml of slime/observability, as rows."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLES = Path(__file__).resolve().parents[2] / "slime" / "observability"
_FREE_PART = re.compile(r"(<\w+>|\{[\w,]+\})")
_WORD_OR_NUMBER = r"-?[\w.+]+"


@dataclass(frozen=True)
class Metric:
    """One row of metrics.toml, whose head explains the fields: a key, or several that are explained together."""

    section: str
    keys: tuple[str, ...]
    unit: str
    what: str
    by: str
    axis: str
    when: str = ""


@dataclass(frozen=True)
class SpanName:
    """One row of spans.toml: the process, as its file is called, the span, and its own fields."""

    role: str
    name: str
    what: str
    fields: str = ""


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """A file of TOML."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


METRICS = tuple(
    Metric(section, tuple(keys.split(", ")), **{"by": table["by"], "axis": table["axis"]} | row)
    for section, table in read_table(_TABLES / "metrics.toml").items()
    for keys, row in table["rows"].items()
)
SPANS = tuple(
    SpanName(role, name, **row)
    for role, rows in read_table(_TABLES / "spans.toml").items()
    for name, row in rows.items()
)


@functools.cache
def metric_of(key: str) -> tuple[Metric, int] | None:
    """The row of METRICS that explains ``key``, and which of its keys that is; None where there is none."""
    for metric in METRICS:
        for place, pattern in enumerate(map(_pattern, metric.keys)):
            if re.fullmatch(pattern, key):
                return metric, place
    return None


def unregistered(keys: Iterable[str]) -> list[str]:
    """Those of ``keys``, as a line of metrics.jsonl has them, that no row of METRICS explains.

    A word has letters, digits, ``_``, ``.`` and ``+`` only (a number may begin with ``-``), so that ``eval/<name>`` is
    not ``eval/sums-no_reward`` too.
    """
    known = re.compile("|".join(_pattern(key) for metric in METRICS for key in metric.keys))
    return sorted({key for key in keys if not known.fullmatch(key)})


def _pattern(key: str) -> str:
    parts = _FREE_PART.split(key)
    for i, part in enumerate(parts):
        choice = f"(?:{part[1:-1].replace(',', '|')})" if part.startswith("{") else _WORD_OR_NUMBER
        parts[i] = choice if i % 2 else re.escape(part)
    return "".join(parts)
