"""Saved rollouts for tests: samples of several turns, versions and groups, as runs write them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slime.data import Sample, Status

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u202e"


def make_sample(tokenizer: Any, index: int, turns: Sequence[tuple[str, str | None]], **fields: Any) -> Sample:
    """One sample; a turn is its text and the version of the weights that made it, None of a tool.

    The engine's log-prob of the i-th token of a turn is -i/8.
    """
    prompt = [{"role": "user", "content": f"{index}+1="}]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    sample = Sample(group_index=index // 2, index=index, prompt=prompt, tokens=tokenizer(text)["input_ids"])
    for text, version in turns:
        tokens = tokenizer(text)["input_ids"]
        made = version is not None
        sample.append_response_tokens(
            Namespace(),
            tokens=tokens,
            log_probs=[-i / 8 for i in range(len(tokens))] if made else None,
            trainable=made,
            meta_info={"weight_version": version, "finish_reason": {"type": "stop"}} if made else None,
            text=text,
        )
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def make_samples(tokenizer: Any) -> list[Sample]:
    """Eight samples, every one with something of its own."""
    return [
        make_sample(tokenizer, 0, [("one é", "3")], reward=1.0, label="1", metadata={"turns": 1}),
        make_sample(tokenizer, 1, [("two ", "3"), ("echo\n", None), ("done", "4")], reward=0.5, label="2"),
        make_sample(tokenizer, 2, [("three", "3")], reward=0.0, status=Status.TRUNCATED),
        make_sample(tokenizer, 3, [("four", "3")], reward=0.25, remove_sample=True),
        make_sample(tokenizer, 4, [(HOSTILE, "3")], reward=1.0, label=HOSTILE, metadata={HOSTILE: HOSTILE}),
        make_sample(tokenizer, 5, [("six", "3")], reward=None, status=Status.FAILED),
        make_sample(tokenizer, 6, [("seven", "3")], reward=float("nan")),
        make_sample(tokenizer, 7, [("eight\t\u4f60", "3")], reward=0.75),
    ]


def write_rollout(file: Path, rollout_id: int, samples: Sequence[Sample]) -> Path:
    """As ``--save-debug-rollout-data``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, file)
    return file


def write_train_data(file: Path, rollout_id: int, samples: Sequence[Sample], gap: float) -> Path:
    """As ``--save-debug-train-data`` of one rank: the trainer's log-probs are the engine's plus ``gap``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    engines = [torch.tensor(sample.rollout_log_probs) for sample in samples]
    columns = {
        "tokens": [torch.tensor(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [torch.tensor(sample.loss_mask) for sample in samples],
        "rollout_log_probs": engines,
        "log_probs": [row + gap for row in engines],
        "advantages": [torch.full_like(row, 0.5) for row in engines],
        "metadata": [sample.metadata for sample in samples],
    }
    torch.save({"rollout_id": rollout_id, "rank": 0, "samples": columns, "steps": []}, file)
    return file
