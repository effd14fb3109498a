"""Level 5: a short run whose loss falls and another whose reward rises, each by more than chance would."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from statistics import fmean
from typing import Any

from slime.data import Sample
from tools.validation.launches import Run
from tools.validation.report import Check, Item, Status, checked
from tools.validation.setting import LORA, Setting
from tools.validation.smoke import agreement, blocked, step_checks, with_engine

_STEPS, _BATCH = 60, 32
_ROLLOUTS, _PROMPTS, _SAMPLES = 20, 16, 8
_MEANS_OF = 4
"""Steps at either end."""
LOSS_FALL = 0.3
"""Of its first value."""
REWARD_RISE = 0.1
_ADAPTERS_RATE = 5e-3
"""Of a model 128 wide; of a wider one less."""


def check(setting: Setting) -> list[Item]:
    """Supervised steps of all weights; then GRPO of adapters, from there if the model's weights were random."""
    export = setting.launcher.directory("level_5_sft") / "hf"
    run = setting.launcher.train("level_5_sft", setting.training(_STEPS, _BATCH, "--save-hf", str(export)))
    sft = _judge(setting, "loss, supervised, all weights", run, "train/loss")
    if setting.dummy and not run.ok:
        return [sft]
    return [sft, *_grpo(setting, export if setting.dummy else setting.model)]


def _grpo(setting: Setting, model: Path) -> list[Item]:
    part = "reward, GRPO, adapters"
    if setting.unserved():
        return [blocked(part, setting)]
    words = [
        "--custom-rm-path",
        "tools.validation.learning.even_tokens",
        "--lr",
        f"{setting.for_width(_ADAPTERS_RATE):.2e}",
    ]
    run = setting.launcher.train(
        "level_5_grpo", setting.loop(_ROLLOUTS, _PROMPTS, _SAMPLES, *LORA, *words, model=model)
    )
    if not run.ok:
        return with_engine(part, setting, run, list)
    return [_judge(setting, part, run, "rollout/raw_reward")]


def _judge(setting: Setting, part: str, run: Run, key: str) -> Item:
    if not run.ok:
        return Item(part, Status.FAIL, run.why(), run.log)
    values = run.series(key)
    first, last = fmean(values[:_MEANS_OF]), fmean(values[-_MEANS_OF:])
    text = f"mean of {_MEANS_OF} steps {first:.3f} before, {last:.3f} after {len(values)} steps"
    if key == "train/loss":
        moved = Check(f"{text} (at most {1 - LOSS_FALL:g} of it)", last <= (1 - LOSS_FALL) * first)
        return checked(part, [moved, *step_checks(run, _STEPS)], run.log)
    moved = Check(f"{text} (at least {REWARD_RISE:+g})", last >= first + REWARD_RISE)
    log_probs = {f"{value:.6f}" for value in run.series("rollout/log_probs")}
    best = [step for step, reward in enumerate(values) if reward == 1]  # no response was better than another
    checks = [moved, *step_checks(run, _ROLLOUTS, best), agreement(setting, run)]
    return checked(part, [*checks, Check(f"log-probs of {len(log_probs)} values", len(log_probs) > 1)], run.log)


async def even_tokens(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """The share of a response's tokens whose numbers are even: any model begins near a half, and can be better."""
    tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))
