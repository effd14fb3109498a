"""Level 2: the same steps under tensor, pipeline, context and expert parallelism as on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from tools.validation.launches import Run
from tools.validation.report import Check, Item, Status, checked
from tools.validation.resume import close
from tools.validation.setting import LORA, Setting
from tools.validation.smoke import agreement, blocked, step_checks, with_engine

_ROLLOUTS = 2
_TP = ("--tensor-model-parallel-size", "--sequence-parallel")


@dataclass(frozen=True)
class Layout:
    """Flags of train.py, and for how many ranks."""

    name: str
    ranks: int
    flags: tuple[str, ...]
    experts: bool = False
    """Whether it is for models with experts only."""


LAYOUTS = (
    Layout("data 2", 2, ()),
    Layout("tensor 2, sequence", 2, (_TP[0], "2", _TP[1])),
    Layout("pipeline 2", 2, ("--pipeline-model-parallel-size", "2")),
    Layout("context 2", 2, ("--context-parallel-size", "2")),
    Layout("expert 2", 2, ("--expert-model-parallel-size", "2"), experts=True),
    Layout("tensor 2, pipeline 2", 4, (_TP[0], "2", _TP[1], "--pipeline-model-parallel-size", "2")),
    Layout("tensor 2, context 2", 4, (_TP[0], "2", _TP[1], "--context-parallel-size", "2")),
    Layout(
        *("tensor 2, expert 4, expert tensor 1", 4),
        (_TP[0], "2", _TP[1], "--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"),
        experts=True,
    ),
)
_LOOP = LAYOUTS[1]
"""The layout from which weights go to engines: what they need is on several ranks."""


def refused(setting: Setting, layout: Layout) -> str | None:
    """Why a layout is not run on this host or with this model; None if it is."""
    if layout.experts and not setting.shape["num_experts"]:
        return "the model has no experts"
    if layout.ranks > setting.slots:
        unit = "GPUs" if setting.on_gpus else "processes (--slots)"
        return f"takes {layout.ranks} {unit}, there are {setting.slots}"
    return None


def check(setting: Setting) -> list[Item]:
    """All weights trained under each layout against one rank, then adapters from one layout to engines."""
    reasons = {layout.name: refused(setting, layout) for layout in LAYOUTS}
    if all(reasons.values()):
        return [Item(name, Status.SKIPPED, str(reason)) for name, reason in reasons.items()]
    one = _run(setting, Layout("one rank", 1, ()))
    if not one.ok:
        return [Item("one rank", Status.FAIL, one.why(), one.log)]
    items = [checked("one rank", step_checks(one, _ROLLOUTS), one.log)]
    for layout in LAYOUTS:
        reason = reasons[layout.name]
        items.append(Item(layout.name, Status.SKIPPED, reason) if reason else _compare(setting, layout, one))
    return [*items, *_to_engines(setting)]


def _run(setting: Setting, layout: Layout) -> Run:
    name = "level_2_" + layout.name.replace(", ", "_").replace(" ", "")
    # A large epsilon: Adam's step is otherwise the sign of gradients that are nothing but rounding.
    words = setting.training(_ROLLOUTS, 16, "--adam-eps", "1e-3", *layout.flags, ranks=layout.ranks)
    return setting.launcher.train(name, words)


def _compare(setting: Setting, layout: Layout, one: Run) -> Item:
    run = _run(setting, layout)
    if run.status == 2:
        return Item(layout.name, Status.SKIPPED, f"refused for this model: {run.why()}", run.log)
    if not run.ok:
        return Item(layout.name, Status.FAIL, run.why(), run.log)
    checks = step_checks(run, _ROLLOUTS)
    if all(check.ok for check in checks):
        checks += same_steps(setting, run, one)
    return checked(layout.name, checks, run.log)


def same_steps(setting: Setting, run: Run, one: Run) -> list[Check]:
    """Loss and gradient norm of each step as on one rank."""
    limits = {"loss": setting.tolerance.loss, "grad_norm": setting.tolerance.grad_norm}
    return [
        close(f"step {step} {name}", found[f"train/{name}"], "on one rank", expected[f"train/{name}"], limit)
        for step, (found, expected) in enumerate(zip(run.steps(), one.steps(), strict=True), 1)
        for name, limit in limits.items()
    ]


def _to_engines(setting: Setting) -> list[Item]:
    part = f"loop with adapters, {_LOOP.name}"
    if setting.unserved():
        return [blocked(part, setting)]
    flags = list(_LOOP.flags)
    if setting.shape["num_experts"]:
        flags += ["--expert-tensor-parallel-size", "1"]  # experts with adapters must be whole
    words = setting.loop(2, 4, 4, *LORA, *flags, "--check-weight-update-equal", ranks=_LOOP.ranks)
    run = setting.launcher.train("level_2_loop", words)
    if run.status == 2:
        return [Item(part, Status.SKIPPED, f"refused for this model: {run.why()}", run.log)]
    if not run.ok:
        return with_engine(part, setting, run, list)
    return [checked(part, [*step_checks(run, 2), agreement(setting, run)], run.log)]
