"""docs/option_rules.md has every rule that slime/options declares, in words that a reader can look up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.entry.arguments import assemble
from slime.options import lora, training
from slime.options.checks import layout, validate
from slime.options.checks.unheeded import UNHEEDED
from slime.options.flags.parser import StrictParser
from slime.options.learning import algorithm, distillation
from slime.options.rules import Rule
from tests.releases import gone_flags
from tools.website.observability_pages import with_tables
from tools.website.rules_page import PAGES, rules, table

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_has_the_rules_that_there_are(page: Path) -> None:
    assert page.read_text() == with_tables(page.read_text(), [table()]), "run python -m tools.website.rules_page"


def test_every_table_is_found_and_its_rows_stand_once_where_they_are_declared() -> None:
    found = [row for _, row in rules()]
    assert len(found) == len(set(found))
    for rows in (algorithm.RULES, training.RULES, layout.RULES, validate.RULES, lora.ADAPTER_SYNC, lora.MERGED_SYNC):
        assert set(rows) <= set(found)
    places = {row: path for path, row in rules()}
    assert places[lora.RULES[0]] == "lora.py"  # not that of the checks, whose table has it too
    assert places[layout.RULES[0]] == "checks/layout.py"
    assert places[distillation.RULES[0]] == "learning/distillation.py"
    assert sum(row.form == "is ignored" for row in found) == len(UNHEEDED)


def test_a_row_has_its_context_in_a_cell_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Rule("kl_coef>0", "needs", "rollout_function_path=a.b.c|a.b:c", ": x", when="!asynchronous use_tis")
    monkeypatch.setattr(algorithm, "RULES", (row,))
    (line,) = (line for line in table().splitlines() if line.startswith("| `learning/algorithm.py`"))
    cells = line.strip("| ").split(" | ")
    sentence = "`--kl-coef` above 0 needs `--rollout-function-path` `a.b.c`: x"
    assert cells == ["`learning/algorithm.py`", sentence, "`train.py` and `--use-tis`"]


def test_its_flags_are_flags() -> None:
    """What a rule calls by a derived attribute is written out in words."""
    parser = StrictParser(prog="train.py")
    assemble(parser)
    known = {flag for found in parser.actions_by_dest().values() for action in found for flag in action.option_strings}
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", table()))
    assert len(flags) > 150
    assert flags - known == flags & gone_flags()
