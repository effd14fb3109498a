"""What the programs of examples/ write: demonstrations, and problems of which some are held out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demonstrations
from slime.data import Sample, Status
from tests.scripted_turns import Args, turn_by_turn

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]


def test_demonstrations_train_the_models_words_only(make_args: Args) -> None:
    args = make_args()
    parts = [["<search>x</search>", True], ["\n<information>y</information>\n", False], ["<answer>y</answer>", True]]
    sample = Sample(prompt=[{"role": "user", "content": "q"}], metadata={"demonstration": parts})
    demonstrations.fill(args, sample)
    assert turn_by_turn(args, sample) == [
        (1, parts[0][0]),
        (0, parts[1][0]),
        (1, parts[2][0] + "<|im_end|>"),
    ]
    assert (sample.status, sample.reward) == (Status.COMPLETED, 0.0)


@pytest.mark.parametrize("name", ["search_r1", "retool", "multi_agent", "agent_tool_use"])
def test_data_are_the_seeds_and_held_out_problems_are(name: str, tmp_path: Path) -> None:
    for directory in ("a", "b"):
        command = [sys.executable, "-m", f"examples.{name}.make_data", str(tmp_path / directory), "--seed", "5"]
        subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"eval.jsonl", "sft.jsonl", "train.jsonl"} <= set(files)
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    asked = [
        {
            json.loads(line)["prompt"][0]["content"]
            for line in (tmp_path / "a" / f"{part}.jsonl").read_text().splitlines()
        }
        for part in ("train", "eval")
    ]
    assert all(asked)
    assert not asked[0] & asked[1]
