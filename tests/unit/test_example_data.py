"""What the programs of examples/ write: demonstrations, and problems of which some are held out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import demonstrations
from examples.retool import sft_data_processing
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


def problem_of(row: dict[str, Any]) -> str:
    """What a row asks for."""
    if "index" in row:  # tau-bench's
        return json.dumps(row["metadata"]["task"])
    return str(row["prompt"][0]["content"]) if isinstance(row["prompt"], list) else str(row["label"])


_NAMES = ["search-r1", "retool", "multi_agent", "strands_sglang", "coding_agent_rl", "tau-bench", "agent_tool_use"]


@pytest.mark.parametrize("name", _NAMES)
def test_data_are_the_seeds_and_held_out_problems_are(name: str, tmp_path: Path) -> None:
    for directory in ("a", "b"):
        command = [sys.executable, "-m", f"examples.{name}.make_data", str(tmp_path / directory), "--seed", "5"]
        paths = os.pathsep.join([str(ROOT / "examples" / "tau-bench" / "mock"), os.environ.get("PYTHONPATH", "")])
        subprocess.run(command, check=True, cwd=ROOT, timeout=300, env=os.environ | {"PYTHONPATH": paths})
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"eval.jsonl", "sft.jsonl", "train.jsonl"} <= set(files)
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    asked = [
        {problem_of(json.loads(line)) for line in (tmp_path / "a" / f"{part}.jsonl").read_text().splitlines()}
        for part in ("train", "eval")
    ]
    assert all(asked)
    assert not asked[0] & asked[1]


def test_retools_conversations_become_training_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = "So:\n<code>\nprint(6)\n</code>\n<interpreter>\n6\n</interpreter>\n\n"
    answer += "and <code>7</code><interpreter>7</interpreter>."
    messages = [{"role": "user", "content": "2*3?"}, {"role": "assistant", "content": answer}]
    source = tmp_path / "theirs.jsonl"
    source.write_text(json.dumps({"messages": [message | {"name": None} for message in messages]}) + "\n")
    sft_data_processing.main([str(source), "--output-dir", str(tmp_path / "a")])
    again = tmp_path / "a" / "ReTool-SFT.parquet"  # has the rows as they were, and is read as well
    sft_data_processing.main([str(again), str(source), "--output-dir", str(tmp_path / "b")])
    for directory, count in (("a", 1), ("b", 2)):
        rows = [json.loads(line) for line in (tmp_path / directory / "ReTool-SFT.jsonl").read_text().splitlines()]
        assert [row["prompt"] for row in rows] == [messages[:1]] * count
        parts = rows[-1]["metadata"]["demonstration"]
        assert "".join(text for text, _ in parts) == answer
        assert [text for text, trained in parts if not trained] == [
            "\n<interpreter>\n6\n</interpreter>\n\n",
            "<interpreter>7</interpreter>",
        ]
    for text, problem in (
        (json.dumps({"messages": messages[:1]}), ", line 1: the last of its messages is not an assistant's answer"),
        ('{"messages": 3}', ", line 1 has no chat messages under 'messages'"),
        ("", "no row in "),
    ):
        source.write_text(text + "\n")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            sft_data_processing.main([str(source)])
        assert ended.value.code == 2
        assert problem in capsys.readouterr().err
