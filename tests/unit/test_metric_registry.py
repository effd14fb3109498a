"""Every metric has a row in the registry, and the pages on metrics are made of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.observability.registry import METRICS, unregistered
from tools.website import metrics_page
from tools.website.metrics_page import PAGES, with_tables

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
KEYS = [key for metric in METRICS for key in metric.keys]
STEPS = [key for metric in METRICS if metric.section == "steps" for key in metric.keys]


def is_chinese(page: Path) -> bool:
    return page.parent.name == "zh"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_has_the_metrics_that_there_are(page: Path) -> None:
    anew = with_tables(page.read_text(), chinese=is_chinese(page))
    assert page.read_text() == anew, "run python -m tools.website.metrics_page"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_page_are_made_anew(page: Path) -> None:
    text = page.read_text()
    stale = text.replace("| `train/pg_loss` |", "| `train/another` |")
    assert stale != text
    assert with_tables(stale, chinese=is_chinese(page)) == text
    first = next(line for line in text.splitlines() if line.startswith("|"))
    with pytest.raises(ValueError, match="not a table of 5 columns"):
        with_tables(text.replace(first, f"{first} more |", 1), chinese=is_chinese(page))
    with pytest.raises(ValueError, match="1 tables too few"):
        with_tables(text[: text.rindex("\n\n| ")], chinese=is_chinese(page))
    with pytest.raises(ValueError, match="no section for the table"):
        with_tables(f"{text}\n{first}\n|---|---|---|---|---|\n", chinese=is_chinese(page))


def test_a_translation_that_lacks_or_leads_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metrics_page._CHINESE, "inputs", {"rollout/other": {"what": "?"}})
    with pytest.raises(ValueError, match=r"lacks .*rollout/advantages.* too much .*rollout/other"):
        metrics_page.tables(chinese=True)


def test_a_row_says_unit_axis_and_writer() -> None:
    assert len(KEYS) == len(set(KEYS)) > 100
    for metric in METRICS:
        assert metric.what, metric.keys
        assert metric.by in ("driver", "rollout manager", "trainers"), metric.keys
        assert metric.axis in ([""] if metric.section == "steps" else STEPS), metric.keys
        assert len(metric.unit.split(", ")) in (1, len(metric.keys)), metric.keys
        assert all(key.endswith("_time") == (metric.unit == "s") for key in metric.keys if key != "time"), metric.keys


def test_a_metric_that_is_not_registered_is_missed() -> None:
    known = ["train/loss", "train/lr-pg_12", "eval/sums", "eval/sums-pass@8", "eval/sums/response_len/min"]
    unknown = ["eval/sums-other", "eval/sums/other", "rollout/response_len/sum", "train/other", "trainXloss"]
    assert unregistered([*known, "rollout/zero_std/count_-0.5", "rollout/zero_std/count_1e+06", *unknown]) == unknown


def test_every_metric_that_the_source_names_is_registered() -> None:
    """Names that are put together of parts are checked where they are logged: `harness.assert_registered`."""
    missing = set()
    for name in unregistered(named_in_source()):
        known = re.compile(".*".join(map(re.escape, name.split("\0"))) + "(?:/.+)?")
        if not any(map(known.fullmatch, KEYS)):
            missing.add(name.replace("\0", "<...>"))
    assert not missing, f"slime/observability/metrics.toml has no row for {', '.join(sorted(missing))}"


def test_every_metric_of_the_registry_is_named_in_the_source() -> None:
    named = re.compile("|".join(".*".join(map(re.escape, name.split("\0"))) + "(?:/.+)?" for name in named_in_source()))
    left = [key for key in KEYS if key != "time" and not named.fullmatch(key)]
    assert not left, f"nothing in slime/ logs {', '.join(left)}: rows of slime/observability/metrics.toml"


def named_in_source() -> set[str]:
    return {name for file in (ROOT / "slime").rglob("*.py") for name in _named_in(file)}


def _named_in(file: Path) -> Iterator[str]:
    """Its strings that look like metrics, with a NUL for what an f-string puts in."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    strings = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    within = {id(part) for parts in strings for part in parts}
    strings += [[node] for node in nodes if isinstance(node, ast.Constant) and id(node) not in within]
    for parts in strings:
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts)
        if re.fullmatch(r"(train|rollout|eval|perf|passrate|multi_turn)/[\w/@\0-]+", text):
            yield text
