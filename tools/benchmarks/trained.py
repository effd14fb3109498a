"""How far trainer and engine are apart once a model has learnt something: published weights need not be had."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tools.benchmarks import loop
from tools.benchmarks.report import Report, make_model, name_of, weights_of

STEPS, PIECES = 160, 16
_BYTES = 2000
_SUFFIXES = (".py", ".md", ".sh")
_NEEDS_S = 300.0


def measure(options: argparse.Namespace, report: Report) -> None:
    """Train the model on this repository's own text, a token a byte, and have engines sample from what came of it."""
    if report.out_of_time("a trained model's log-probs", _NEEDS_S):
        return
    data = options.scratch / "pieces.jsonl"
    with data.open("w") as file:
        for piece in pieces(loop.ROOT):
            turns = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": piece}]
            file.write(json.dumps({"messages": turns}) + "\n")
    model, trained = name_of(options), options.scratch / "trained"
    lines = loop.run(options, "supervised", supervised(options, data, trained))
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    options.hf_checkpoint = trained
    if (sampled := loop.colocated(options, report)) is None:
        return
    difference = loop.median(sampled, "train/train_rollout_logprob_abs_diff")
    details = {"steps": STEPS, "loss": [round(losses[0], 3), round(losses[-1], 3)]}
    report.add("log-prob difference, trained", model, options.gpus, difference, "", at_most=0.02, **details)


def pieces(root: Path) -> Iterator[str]:
    """The text of the repository's own files in pieces of `_BYTES` characters, in the order of their paths."""
    for path in sorted(
        path for part in ("slime", "tools", "tests", "docs", "scripts") for path in (root / part).rglob("*")
    ):
        if path.suffix in _SUFFIXES and path.is_file():
            text = path.read_text()
            yield from (text[start : start + _BYTES] for start in range(0, len(text) - _BYTES + 1, _BYTES))


def supervised(options: argparse.Namespace, data: Path, target: Path) -> list[str]:
    """A command line of train.py: `STEPS` steps on `PIECES` pieces each, whose weights go to ``target``."""
    words = [*weights_of(make_model(options)), "--run-dir", str(options.log_dir / "supervised")]
    words += ["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--prompt-data", str(data)]
    words += ["--input-key", "messages", "--rollout-shuffle", "--num-rollout", str(STEPS)]
    words += ["--rollout-batch-size", str(PIECES), "--loss-type", "sft_loss", "--debug-train-only"]
    words += ["--disable-compute-advantages-and-returns", "--save-hf", str(target), "--save-interval", str(STEPS)]
    words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "16384", "--bf16"]
    words += ["--actor-num-gpus-per-node", str(options.gpus), "--lr", "3e-4", "--min-lr", "3e-5"]
    words += ["--lr-decay-style", "cosine", "--lr-warmup-iters", "10", "--adam-beta2", "0.95"]
    return words + options.flags
