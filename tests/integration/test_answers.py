"""Answers that end with the end-of-turn token, graded by ``--rm-type dapo``: train.py with the real parts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from slime.data import Sample, Status
from tests.integration.harness import run_well, series
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_END = "<|im_end|>"
_LEARNT, _OTHER = "7", "8"


def _run(line: list[str], log: Path) -> None:
    run_well(line, log)


def _write(path: Path, labels: list[str], answers: bool) -> str:
    """Questions whose answers are these labels; with ``answers``, as whole conversations."""
    rows = []
    for number, label in enumerate(labels):
        messages = [{"role": "user", "content": f"{number}?"}]
        reply = {"role": "assistant", "content": f"Answer: {label}"}
        rows.append({"prompt": [*messages, reply] if answers else messages, "label": label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _warm(workspace: Path) -> Path:
    """A model that has learnt to answer ``_LEARNT`` to everything, by supervised steps without an engine."""
    supervised: dict[str, Value] = {
        "rollout_function_path": "slime.rollout.sft_rollout.generate_rollout",
        "loss_type": "sft_loss",
        "debug_train_only": True,
        "disable_compute_advantages_and_returns": True,
        "prompt_data": _write(workspace / "sft.jsonl", [_LEARNT] * 8, answers=True),
        "num_rollout": 30,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 1,
        "lr": "1e-2",
        "save_hf": str(workspace / "warm"),
    }
    without = ("label_key", "apply_chat_template", "rm_type", "advantage_estimator", "use_kl_loss", "kl_loss_coef")
    without += ("kl_loss_type", "ref_load", "colocate", "ci_test", "sglang_enable_deterministic_inference")
    supervised |= dict.fromkeys(without)
    _run(flags(workspace, workspace / "sft", **supervised), workspace / "sft.log")
    return workspace / "warm"


def test_the_token_that_ends_a_response_is_no_part_of_its_answer(tmp_path: Path) -> None:
    workspace, run_dir, num_rollout = make_workspace(tmp_path), tmp_path / "run", 2
    warm = str(_warm(workspace))
    graded: dict[str, Value] = {
        "hf_checkpoint": warm,
        "ref_load": warm,
        "prompt_data": _write(workspace / "graded.jsonl", [_LEARNT, _OTHER] * 4, answers=False),
        "rm_type": "dapo",
        "reward_key": "score",
        "rollout_max_response_len": 16,
        "num_rollout": num_rollout,
        "save_debug_rollout_data": str(run_dir / "samples_{rollout_id}.pt"),
    }
    _run(flags(workspace, run_dir, **graded), tmp_path / "log")
    seen: Counter[tuple[str | None, float]] = Counter()
    for rollout_id in range(num_rollout):
        data = torch.load(run_dir / f"samples_{rollout_id}.pt", weights_only=True)
        for sample in map(Sample.from_dict, data["samples"]):
            if sample.response != f"Answer: {_LEARNT}{_END}":
                continue
            assert sample.status is Status.COMPLETED
            assert isinstance(sample.reward, dict)
            right = sample.label == _LEARNT
            assert sample.reward == {"score": 1.0 if right else -1.0, "acc": right, "pred": _LEARNT}
            seen[sample.label, sample.reward["score"]] += 1
    assert seen.keys() == {(_LEARNT, 1.0), (_OTHER, -1.0)}, "the model has learnt its answer"
    assert max(series(run_dir, "rollout/raw_reward")) > -1.0
    assert len(series(run_dir, "train/loss")) == num_rollout
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
