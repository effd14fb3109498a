"""Level 1: a run that was saved and goes on is the run that was not interrupted."""

from __future__ import annotations

import shutil
from math import isfinite
from pathlib import Path

from tools.validation.launches import Run
from tools.validation.report import Check, Item, Status, checked
from tools.validation.setting import LORA, Setting
from tools.validation.smoke import blocked, step_checks, with_engine
from tools.validation.weights import differences

_ROLLOUTS = 2
_EXPORT = "hf_{rollout_id}"
_SAMPLES = "samples_{rollout_id}.pt"
_SAME_TOKENS = "--sglang-enable-deterministic-inference"


def check(setting: Setting) -> list[Item]:
    """Two rollouts at once, against one, a checkpoint, and another; by the whole loop where engines serve the model."""
    if setting.unserved(_SAME_TOKENS):
        return [blocked("loop", setting, _SAME_TOKENS), *_of(setting, "training part alone", loop=False)]
    return _of(setting, "loop", loop=True)


def _of(setting: Setting, part: str, *, loop: bool) -> list[Item]:
    name = "level_1_loop" if loop else "level_1_training"
    whole = _run(setting, name, loop)
    if not whole.ok:
        if loop:
            instead = lambda: _of(setting, "training part alone", loop=False)  # noqa: E731
            return with_engine(part, setting, whole, instead, _SAME_TOKENS)
        return [Item(part, Status.FAIL, whole.why(), whole.log)]
    directory = setting.launcher.directory(f"{name}_resumed")
    if not (whole.directory / "iter_0000000").is_dir():
        return [Item(part, Status.FAIL, "the first rollout's checkpoint iter_0000000 is not there", whole.log)]
    shutil.copytree(whole.directory / "iter_0000000", directory / "iter_0000000")
    (directory / "latest_checkpointed_iteration.txt").write_text("0")
    resumed = _run(setting, directory.name, loop, "--load", str(directory))
    if not resumed.ok:
        return [Item(part, Status.FAIL, resumed.why(), resumed.log)]
    return [checked(part, _comparison(setting, whole, resumed, loop), resumed.log)]


def _run(setting: Setting, name: str, loop: bool, *more: str) -> Run:
    directory = setting.launcher.directory(name)
    words = [*LORA, "--save", str(directory), "--save-interval", "1", "--save-hf", str(directory / _EXPORT), *more]
    if loop:
        words += [_SAME_TOKENS, "--save-debug-rollout-data", str(directory / _SAMPLES)]
        return setting.launcher.train(name, setting.loop(_ROLLOUTS, 4, 4, *words))
    return setting.launcher.train(name, setting.training(_ROLLOUTS, 16, *words))


def _comparison(setting: Setting, whole: Run, resumed: Run, loop: bool) -> list[Check]:
    limits = {"loss": setting.tolerance.loss, "grad_norm": setting.tolerance.grad_norm}
    checks = [*step_checks(whole, _ROLLOUTS), *step_checks(resumed, _ROLLOUTS - 1)]
    if not all(check.ok for check in checks):
        return checks
    for name, limit in limits.items():
        expected, found = (run.steps()[-1][f"train/{name}"] for run in (whole, resumed))
        checks.append(close(f"{name} of the step after the resume", found, "uninterrupted", expected, limit))
    if loop:
        samples = [_tokens(run.directory / _SAMPLES.format(rollout_id=_ROLLOUTS - 1)) for run in (whole, resumed)]
        same = sum(a == b for a, b in zip(*samples, strict=True))
        # In bfloat16 the order of a GPU's sums may decide a token.
        wanted = len(samples[0]) if setting.dtype == "float32" else len(samples[0]) // 2
        checks.append(Check(f"{same} of {len(samples[0])} samples have the same tokens", same >= wanted))
    exports = [run.directory / _EXPORT.format(rollout_id=_ROLLOUTS - 1) for run in (whole, resumed)]
    apart = max(differences(*exports).values())
    limit = 1e-5 if setting.dtype == "float32" else 10 * setting.rate
    return [*checks, Check(f"exported weights at the end differ by {apart:.1e} (at most {limit:.1e})", apart <= limit)]


def close(what: str, found: float, reference: str, expected: float, limit: float) -> Check:
    """Whether two figures are the same but for rounding; the loss of GRPO, which is about 0, to 1e-6."""
    text = f"{what} {found:.6g}, {reference} {expected:.6g} (to {limit:g})"
    return Check(text, isfinite(expected) and abs(found - expected) <= max(limit * abs(expected), 1e-6))


def _tokens(path: Path) -> list[list[int]]:
    import torch

    return [sample["tokens"] for sample in torch.load(path, weights_only=True)["samples"]]
