"""Every metric and span has a row in the registry, and pages are made of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tools.website import observability_pages
from tools.website.observability_pages import PAGES, tables, with_tables
from tools.website.registry import METRICS, SPANS, unregistered

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
SOURCE = sorted((ROOT / "slime").rglob("*.py"))
KEYS = [key for metric in METRICS for key in metric.keys]
STEPS = [key for metric in METRICS if metric.section == "steps" for key in metric.keys]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_has_the_rows_that_there_are(page: Path) -> None:
    anew = with_tables(page.read_text(), tables(page))
    assert page.read_text() == anew, "run python -m tools.website.observability_pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_page_are_made_anew(page: Path) -> None:
    text, rows = page.read_text(), tables(page)
    first = next(line for line in text.splitlines() if line.startswith("|"))
    stale = text.replace(rows[0].splitlines()[0], "| stale |")
    assert stale != text
    assert with_tables(stale, rows) == text
    with pytest.raises(ValueError, match="not a table of"):
        with_tables(text.replace(first, f"{first} more |", 1), rows)
    with pytest.raises(ValueError, match="1 tables too few"):
        with_tables(text[: text.rindex("\n\n| ")], rows)
    with pytest.raises(ValueError, match="no section for the table"):
        with_tables(f"{text}\n{first}\n", rows)


def test_a_translation_that_lacks_or_leads_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(observability_pages._CHINESE, "inputs", {"rollout/other": {"what": "?"}})
    with pytest.raises(ValueError, match=r"lacks .*rollout/advantages.* too much .*rollout/other"):
        tables(ROOT / "docs" / "zh" / "metrics.md")


def test_a_row_says_unit_axis_and_writer() -> None:
    assert len(KEYS) == len(set(KEYS)) > 100
    for metric in METRICS:
        assert metric.what, metric.keys
        assert metric.by in ("driver", "rollout manager", "trainers"), metric.keys
        assert metric.axis in ([""] if metric.section == "steps" else STEPS), metric.keys
        assert len(metric.unit.split(", ")) in (1, len(metric.keys)), metric.keys
        timed = [
            re.search(r"(_time|_latency)(/\{[a-z,]+\})?$", key) is not None for key in metric.keys if key != "time"
        ]
        assert all(each == (metric.unit == "s") for each in timed), metric.keys


def test_a_metric_that_is_not_registered_is_missed() -> None:
    known = ["train/loss", "train/lr-pg_12", "eval/sums", "eval/sums-pass@8", "eval/sums/response_len/min"]
    unknown = ["eval/sums-other", "eval/sums/other", "rollout/response_len/sum", "train/other", "trainXloss"]
    assert unregistered([*known, "rollout/zero_std/count_-0.5", "rollout/zero_std/count_1e+06", *unknown]) == unknown


def test_every_metric_that_the_source_names_is_registered() -> None:
    """Names that are put together of parts are checked where they are logged: `harness.assert_registered`."""
    assert not_in(KEYS, unregistered(named_in_source())) == [], "rows for slime/observability/metrics.toml"


def test_every_metric_of_the_registry_is_named_in_the_source() -> None:
    assert not_named(KEYS, named_in_source()) == ["time"], "rows of slime/observability/metrics.toml that nothing logs"


def test_spans_of_the_source_and_of_the_registry_are_the_same() -> None:
    names, used = [span.name for span in SPANS], spans_in_source()
    assert len(names) == len(set(names))
    assert used
    assert not_in(names, used) == [], "rows for slime/observability/spans.toml"
    assert not_named(names, used) == [], "rows of slime/observability/spans.toml that nothing writes"


def not_in(rows: list[str], names: Iterable[str]) -> list[str]:
    """Those of ``names``, with a NUL for what an f-string puts in, that can be none of ``rows``."""
    return sorted(name for name in names if not any(_pattern(name).fullmatch(row) for row in rows))


def not_named(rows: list[str], names: Iterable[str]) -> list[str]:
    """Those of ``rows`` that none of ``names`` can be."""
    patterns = [_pattern(name) for name in names]
    return [row for row in rows if not any(pattern.fullmatch(row) for pattern in patterns)]


def _pattern(name: str) -> re.Pattern[str]:
    """A prefix of metrics is named too."""
    return re.compile(".*".join(map(re.escape, name.split("\0"))) + "(?:/.+)?")


def named_in_source() -> set[str]:
    return {name for file in SOURCE for name in _named_in(file)}


def _named_in(file: Path) -> Iterator[str]:
    """Its strings that look like metrics."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    within = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    spans = {id(name) for name in _names_of_spans(nodes)}
    for node in nodes:
        if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in within | spans:
            text = _text(node)
            if re.fullmatch(r"(train|rollout|eval|perf|passrate|multi_turn|agent)/[\w/@\0-]+", text):
                yield text


def spans_in_source() -> set[str]:
    return {_text(name) for file in SOURCE for name in _names_of_spans(ast.walk(ast.parse(file.read_text())))}


def _names_of_spans(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """The first arguments of calls of `span`."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "span":
            yield node.args[0]


def _text(node: ast.expr) -> str:
    """A string, with a NUL for what an f-string puts in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts)
