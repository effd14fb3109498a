"""A reward model on engines of its own beside the trained one: train.py, Ray, two SGLang servers and two routers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.documents import example
from tests.integration.harness import ROOT, RUN_S, TrainProcess, series
from tests.integration.tiny_run import flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_SEEN = 3
_GUARD = """

_ask = reward_func


async def reward_func(args, sample, **kwargs):
    assert get_model_url(args, "reward") != get_model_url(args, "actor")
    return await _ask(args, sample, **kwargs)
"""


@torch.no_grad()
def chance_of_yes(model: Any, tokenizer: Any, question: str) -> float:
    """Of Yes against No, by a Hugging Face forward pass."""
    tokens = tokenizer.encode(question, add_special_tokens=False)
    pair = [tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No")]
    return float(model(torch.tensor([tokens])).logits[0, -1, pair].float().softmax(-1)[0])


def test_rewards_come_from_the_second_model_whose_weights_stay(tmp_path: Path) -> None:
    """The judge of docs/customize.md: after two pushes of the trained weights it judges as its files do. Its death then
    ends the run, with its name."""
    workspace, run_dir, judge = make_workspace(tmp_path), tmp_path / "run", tmp_path / "judge"
    make = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), str(judge), "--initializer-range", "0.1"]
    subprocess.run([*make, "--seed", "5"], check=True, stdout=subprocess.DEVNULL, timeout=120)
    program = example("customize.md", "get_model_url")
    (tmp_path / "judge.py").write_text(program + _GUARD)
    line = flags(
        workspace,
        run_dir,
        rm_type=None,
        custom_rm_path=str(tmp_path / "judge.py"),
        rm_model_path=str(judge),
        rm_num_gpus=1,
        rm_sglang_args=json.dumps({"context_length": 512}),
        num_rollout=100,
        no_use_fault_tolerance=True,
        lr="1e-2",
        save_debug_rollout_data=str(run_dir / "samples_{rollout_id}.pt"),
    )
    with TrainProcess(line, tmp_path / "log") as process:
        process.wait_until((run_dir / f"samples_{_SEEN - 1}.pt").exists, 2 * RUN_S, "the third rollout")
        process.find("slime.backends.sglang.launch", str(judge)).kill()
        assert process.wait(60) == 1, process.tail()
        process.assert_no_process_left()
    (error,) = (text for text in process.log.read_text().splitlines() if text.startswith("train.py: error:"))
    assert "reward engine 0" in error
    assert len(series(run_dir, "perf/update_weights_time")) >= _SEEN
    assert all(norm > 0 for norm in series(run_dir, "train/grad_norm"))
    scope: dict[str, Any] = {}
    exec(program, scope)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (judge, workspace / "model")]
    for rollout_id in range(_SEEN):
        samples = torch.load(run_dir / f"samples_{rollout_id}.pt", weights_only=False)["samples"]
        rewards = [sample["reward"] for sample in samples]
        questions = [scope["QUESTION"].format(**{k: s[k] for k in ("prompt", "response", "label")}) for s in samples]
        judged, trained = ([chance_of_yes(model, tokenizer, text) for text in questions] for model in models)
        assert rewards == pytest.approx(judged, abs=1e-4)
        assert rewards != pytest.approx(trained, abs=1e-2)
        assert max(rewards) - min(rewards) > 1e-3
