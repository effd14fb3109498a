"""Level 0: one step with adapters, data-parallel trainers, a reference model and an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import yaml

from slime.training.checks import rounding
from tools.validation.launches import Run
from tools.validation.report import Check, Item, Status, checked
from tools.validation.setting import LORA, Setting

_KL_TYPE = "low_var_kl"
_KL = ("--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", _KL_TYPE)
_DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def check(setting: Setting) -> list[Item]:
    """The whole loop; where no engine can serve the model, what a trainer does without one."""
    ranks = min(2, setting.slots)
    adapters = setting.output / "level_0_loop" / "adapters"
    words = setting.loop(1, 4, 4, *LORA, *_KL, "--save-lora", str(adapters), "--check-weight-update-equal", ranks=ranks)
    run = setting.launcher.train("level_0_loop", words)
    if run.ok:
        return [checked("loop", _loop_checks(setting, run, ranks, adapters), run.log)]
    return with_engine("loop", setting, run, lambda: _training_alone(setting, ranks))


def with_engine(part: str, setting: Setting, run: Run, instead: Callable[[], list[Item]], *flags: str) -> list[Item]:
    """What a failed run of the whole loop means: blocked where the engine alone fails too, and of itself.

    Args:
        instead: what can be checked without an engine, then.
        flags: of the engine, which the run needed.
    """
    alone = setting.ask_engine(*flags)
    if not alone.failed:
        asked = "" if alone.works else f"; whether SGLang alone serves the model is not known: {alone.reason}"
        return [Item(part, Status.FAIL, run.why() + asked, run.log)]
    return [blocked(part, setting, *flags), *instead()]


def blocked(part: str, setting: Setting, *flags: str) -> Item:
    """A part that needs an engine, on a host where none serves the model, or none with these flags."""
    plain = setting.engines.get(())
    generation = plain if plain is not None and plain.failed else setting.ask_engine(*flags)
    how = f" with {' '.join(flags)}" if generation is not plain and flags else ""
    reason = f"SGLang alone, without a trainer, does not serve this model on this host{how}: {generation.reason}"
    return Item(part, Status.BLOCKED, reason, generation.log)


def _training_alone(setting: Setting, ranks: int) -> list[Item]:
    adapters = setting.output / "level_0_training" / "adapters"
    words = setting.training(1, 16, *LORA, "--save-lora", str(adapters), ranks=ranks)
    run = setting.launcher.train("level_0_training", words)
    part = "training part alone"
    if not run.ok:
        return [Item(part, Status.FAIL, run.why(), run.log)]
    return [checked(part, [*step_checks(run, 1), *_wrapping_checks(run, ranks), *_adapter_checks(adapters)], run.log)]


def step_checks(run: Run, steps: int, idle: Collection[int] = ()) -> list[Check]:
    """So many optimizer steps, each with a gradient, and no figure that is none.

    Args:
        idle: the steps in which there was nothing to learn.
    """
    made, strange = len(run.steps()), run.not_finite()
    norms = [norm for step, norm in enumerate(run.series("train/grad_norm")) if step not in idle]
    if len(norms) > 3:
        shown = f"{min(norms):.3g} to {max(norms):.3g}"
    else:
        shown = ", ".join(f"{norm:.3g}" for norm in norms) or "not logged"
    if idle:
        shown += f", but in {len(idle)} steps whose rewards were all 1"
    return [
        Check(f"{made} of {steps} optimizer steps", made == steps),
        Check(f"gradient norm {shown}", bool(norms) and min(norms) > 0),
        Check(f"not finite: {', '.join(strange)}" if strange else "every figure is finite", not strange),
    ]


def agreement(setting: Setting, run: Run) -> Check:
    """Trainer's and engine's log-probs of the same tokens."""
    limit, found = setting.tolerance.log_prob, run.series(_DIFFERENCE)
    largest = max(found, default=float("nan"))
    return Check(f"log-probs of trainer and engine differ by {largest:.1e} (at most {limit:g})", largest <= limit)


def _loop_checks(setting: Setting, run: Run, ranks: int, adapters: Path) -> list[Check]:
    kl, bound = run.series("train/kl_loss"), rounding(setting.dtype, _KL_TYPE)
    most = f" (at most {bound:g})" if bound else ""
    pushes = len(run.series("perf/update_weights_time"))
    return [
        *step_checks(run, 1),
        *_wrapping_checks(run, ranks),
        *_adapter_checks(adapters),
        agreement(setting, run),
        Check(
            f"KL to the model without adapters {kl[0] if kl else 'not logged'}{most}",
            len(kl) == 1 and abs(kl[0]) <= bound,
        ),
        Check(f"{pushes} of 2 pushes of weights, compared byte by byte", pushes == 2),
    ]


def _wrapping_checks(run: Run, ranks: int) -> list[Check]:
    """What the run itself recorded of data parallelism and adapters."""
    sections = yaml.safe_load((run.directory / "config.yaml").read_text()).values()
    values = {name: value for section in sections for name, value in section.items()}
    size, rank = values["data_parallel_size"], values["lora_rank"]
    return [
        Check(f"Megatron DDP over {size} rank(s)", size == ranks),
        Check(f"adapters of rank {rank}", rank == int(LORA[1])),
    ]


def _adapter_checks(directory: Path) -> list[Check]:
    """That every kind of layer got adapters, and a step moved them: PEFT's second matrices begin at 0."""
    from safetensors import safe_open

    moved: dict[str, list[bool]] = {}
    count = 0
    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        names: list[str] = list(file.keys())
        for name in names:
            tensor = file.get_tensor(name)
            count += tensor.numel()
            if name.endswith(".lora_B.weight"):
                moved.setdefault(name.split(".")[-3], []).append(bool(tensor.count_nonzero()))
    still = [kind for kind, of_kind in moved.items() if not any(of_kind)]
    total, changed = sum(map(len, moved.values())), sum(map(sum, moved.values()))
    return [
        Check(f"{count} trainable parameters in the adapters that were saved", count > 0),
        Check(f"{changed} of {total} adapters moved ({', '.join(sorted(moved))})", bool(moved) and not still),
    ]
