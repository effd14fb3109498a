"""The tables of docs/metrics.md and docs/traces.md, in both languages, made from those of slime/observability.

    python -m tools.website.observability_pages

writes the rows into the pages; what is around the tables, and their first two lines, stand in the pages. Chinese rows
are in observability_zh.toml beside this.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from tools.website.registry import METRICS, SPANS, Metric, SpanName, read_table

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(ROOT / "docs" / side / f"{name}.md" for name in ("metrics", "traces") for side in ("", "zh"))
_CHINESE = read_table(Path(__file__).with_name("observability_zh.toml"))


def tables(page: Path) -> list[str]:
    """The rows of each table of a page, in the registry's order.

    Raises:
        ValueError: observability_zh.toml lacks a row or a word of the registry, or has one that is not there.
    """
    chinese = page.parent.name == "zh"
    rows: tuple[Metric | SpanName, ...] = METRICS if page.stem == "metrics" else SPANS
    if chinese:
        _check_translations()
    sections = itertools.groupby(rows, lambda row: row.section if isinstance(row, Metric) else row.role)
    return ["".join(f"{_cells(row, chinese)}\n" for row in section) for _, section in sections]


def _cells(row: Metric | SpanName, chinese: bool) -> str:
    if isinstance(row, SpanName):
        what = _CHINESE["spans"][row.name] if chinese else row.what
        return _line([row.name], what, ", ".join(f"`{field}`" for field in row.fields.split(", ") if field))
    if not chinese:
        return _line(row.keys, row.unit, row.what, row.by, row.when)
    words, text = _CHINESE["words"], _CHINESE[row.section][", ".join(row.keys)]
    unit = "、".join(words[unit] for unit in row.unit.split(", "))
    return _line(row.keys, unit, text["what"], words[row.by], text.get("when", ""))


def _line(keys: tuple[str, ...] | list[str], *cells: str) -> str:
    names = ", ".join(f"`{key}`" for key in keys)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in (names, *cells))


def _check_translations() -> None:
    wanted = {(metric.section, ", ".join(metric.keys)) for metric in METRICS}
    wanted |= {("words", word) for metric in METRICS for word in (metric.by, *metric.unit.split(", "))}
    wanted |= {("spans", span.name) for span in SPANS}
    there = {(section, name) for section, rows in _CHINESE.items() for name in rows}
    if wanted != there:
        lacks, too_much = sorted(wanted - there), sorted(there - wanted)
        raise ValueError(f"observability_zh.toml lacks {lacks}, and has too much {too_much}")


def with_tables(page: str, anew: list[str]) -> str:
    """A page with the rows of its tables, each of which follows two lines of head, made anew.

    Raises:
        ValueError: it does not have as many tables, of as many columns.
    """
    result: list[str] = []
    rows = iter(anew)
    for is_table, found in itertools.groupby(page.splitlines(keepends=True), lambda line: line.startswith("|")):
        lines = list(found)
        result += _renewed(lines, rows) if is_table else lines
    if left := len(list(rows)):
        raise ValueError(f"the page has {left} tables too few for the registry's sections")
    return "".join(result)


def _renewed(table: list[str], rows: Iterator[str]) -> list[str]:
    if (its_rows := next(rows, None)) is None:
        raise ValueError(f"the registry has no section for the table {table[0].strip()}")
    bars = its_rows.partition("\n")[0].count("|")
    if not table[0].count("|") == table[1].count("|") == bars:
        raise ValueError(f"not a table of {bars - 1} columns: {table[0].strip()}")
    return [*table[:2], its_rows]


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text(), tables(path)))
