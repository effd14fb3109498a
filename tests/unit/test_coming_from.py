"""docs/coming_from.md: what it says of this project's flags is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from slime.entry.arguments import assemble, parse_args
from slime.options.flags.parser import StrictParser
from slime.options.flags.unavailable import WITHOUT_EFFECT, explain_flag
from tests.command_line import write_model, write_rows
from tests.documents import DOCS, examples

NUM_GPUS = 0
CONVERTERS = ("--strategy", "--max-workers")
"""Flags of tools (tests/unit/test_tools.py)."""
PAGES = ["coming_from.md", "zh/coming_from.md"]


def lines(page: str) -> list[str]:
    """The page's commands, of all frameworks."""
    return [line for block in examples(page, "bash") for line in block.strip().replace("\\\n", " ").split("\n\n")]


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_parses_or_says_what_to_do(page: str) -> None:
    """But for OpenRLHF's own, which have underscores."""
    parser = StrictParser(prog="train.py")
    assemble(parser, [], {})
    known = {*parser._option_string_actions, *WITHOUT_EFFECT, "--pretrain", *CONVERTERS}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?![\w-])", (DOCS / page).read_text()))
    assert len(named) > 100
    assert not {flag for flag in named if "_" not in flag and flag not in known and explain_flag(flag) is None}


def test_both_languages_show_the_same_lines() -> None:
    assert lines(PAGES[0]) == lines(PAGES[1])


def test_the_lines_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    for name in ("train.parquet", "test.parquet", "train.jsonl"):
        write_rows(tmp_path / name)
    (tmp_path / "my_reward.py").write_text("def reward_func(args, sample, **kwargs):\n    return 0.0\n")
    values = {"MODEL": "model", "DATA": ".", "SAVE": "save", "REWARD_URL": "http://127.0.0.1:1"}
    ours = [line for line in lines(PAGES[0]) if line.startswith("python3 train.py")]
    assert len(ours) == 2
    for line in ours:
        words = re.sub(r"\$(\w+)", lambda name: values[name[1]], line)
        args = parse_args(shlex.split(words)[2:])
        assert (args.placement, args.world_size, args.num_steps_per_rollout) in (("colocate", 8, 4), ("colocate", 8, 1))
