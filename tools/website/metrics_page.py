"""The tables of docs/metrics.md and docs/zh/metrics.md, made from the registry of metrics.

    python -m tools.website.metrics_page

writes the rows into both pages; what is around the tables, and their first lines, stand in the pages. Chinese rows are
in metrics_zh.toml beside this.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.observability.registry import METRICS, Metric

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "metrics.md", ROOT / "docs" / "zh" / "metrics.md")
_CHINESE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("metrics_zh.toml").read_text(encoding="utf-8"))
_COLUMNS = 5


def tables(*, chinese: bool) -> list[str]:
    """The rows of each table, in the registry's order: keys, unit, meaning, who makes it, when it is there.

    Raises:
        ValueError: metrics_zh.toml lacks a row or a word of the registry, or has one that is not there.
    """
    row = _chinese_row if chinese else _row
    if chinese:
        _check_translations()
    sections = itertools.groupby(METRICS, lambda metric: metric.section)
    return ["".join(f"{row(metric)}\n" for metric in metrics) for _, metrics in sections]


def _row(metric: Metric) -> str:
    return _line(metric, metric.unit, metric.what, metric.by, metric.when)


def _chinese_row(metric: Metric) -> str:
    words, text = _CHINESE["words"], _CHINESE[metric.section][_name(metric)]
    unit = "、".join(words[unit] for unit in metric.unit.split(", "))
    return _line(metric, unit, text["what"], words[metric.by], text.get("when", ""))


def _line(metric: Metric, *cells: str) -> str:
    keys = ", ".join(f"`{key}`" for key in metric.keys)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in (keys, *cells))


def _name(metric: Metric) -> str:
    return ", ".join(metric.keys)


def _check_translations() -> None:
    wanted = {(metric.section, _name(metric)) for metric in METRICS}
    wanted |= {("words", word) for metric in METRICS for word in (metric.by, *metric.unit.split(", "))}
    there = {(section, name) for section, rows in _CHINESE.items() for name in rows}
    if wanted != there:
        raise ValueError(f"metrics_zh.toml lacks {sorted(wanted - there)}, and has too much {sorted(there - wanted)}")


def with_tables(page: str, *, chinese: bool) -> str:
    """A page with the rows of its tables, each of which follows two lines of head, made anew.

    Raises:
        ValueError: it does not have one table of five columns for each section of the registry.
    """
    rows = iter(tables(chinese=chinese))
    result: list[str] = []
    for is_table, found in itertools.groupby(page.splitlines(keepends=True), lambda line: line.startswith("|")):
        lines = list(found)
        result += _anew(lines, rows) if is_table else lines
    if left := len(list(rows)):
        raise ValueError(f"the page has {left} tables too few for the registry's sections")
    return "".join(result)


def _anew(table: list[str], rows: Iterator[str]) -> list[str]:
    if not table[0].count("|") == table[1].count("|") == _COLUMNS + 1:
        raise ValueError(f"not a table of {_COLUMNS} columns: {table[0].strip()}")
    if (its_rows := next(rows, None)) is None:
        raise ValueError(f"the registry has no section for the table {table[0].strip()}")
    return [*table[:2], its_rows]


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text(), chinese=path.parent.name == "zh"))
