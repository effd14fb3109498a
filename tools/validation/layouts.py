"""Level 2: the same steps under tensor, pipeline, context and expert parallelism as on one rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tools.validation.launches import Run
from tools.validation.report import Check, Item, Status, checked
from tools.validation.resume import close
from tools.validation.setting import LORA, Setting
from tools.validation.smoke import agreement, blocked, step_checks, with_engine

_ROLLOUTS = 2
_REFUSAL = re.compile(r"train\.py: error: --[a-z-]+ \d+ is not a multiple of --[a-z-]+-parallel-size \d+")
"""Of a layout that does not divide the model."""
_NO_MEMORY = re.compile(r"\bout of memory\b", re.IGNORECASE)
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


def refused(setting: Setting, layout: Layout) -> Item | None:
    """Why a layout is not run with this model or on this host; None if it is."""
    if layout.experts and not setting.shape["num_experts"]:
        return Item(layout.name, Status.SKIPPED, "the model has no experts")
    if layout.ranks > setting.slots:
        unit = "GPUs" if setting.on_gpus else "processes (--slots)"
        text = f"takes {layout.ranks} {unit}, there are {setting.slots}"
        return Item(layout.name, Status.SKIPPED, text, left_out=True)
    return None


def ended(part: str, run: Run) -> Item:
    """What the bad end of a layout's run means: only what train.py is known to refuse does not apply."""
    if run.status == 2 and _REFUSAL.match(run.error()):
        return Item(part, Status.SKIPPED, f"refused for this model: {run.why()}", run.log)
    if run.status is not None and _NO_MEMORY.search(run.error()):
        return Item(part, Status.SKIPPED, run.why(), run.log, left_out=True)
    return Item(part, Status.FAIL, run.why(), run.log)


def check(setting: Setting) -> list[Item]:
    """All weights trained under each layout against one rank, then adapters from one layout to engines."""
    skipped = [refused(setting, layout) for layout in LAYOUTS]
    if all(skipped):
        return [item for item in skipped if item]
    one = _run(setting, Layout("one rank", 1, ()))
    if not one.ok:
        return [ended("one rank", one)]
    reference = checked("one rank", step_checks(one, _ROLLOUTS), one.log)
    items = [item or _compare(setting, layout, one) for item, layout in zip(skipped, LAYOUTS, strict=True)]
    if reference.status is Status.PASS and all(item.status is Status.SKIPPED for item in items):
        # The reference alone shows nothing, nor does a loop whose layout was compared with none.
        text = f"no layout was run that it could be compared with; {reference.text}"
        return [replace(reference, status=Status.SKIPPED, text=text), *items]
    return [reference, *items, *_to_engines(setting)]


def _run(setting: Setting, layout: Layout) -> Run:
    name = "level_2_" + layout.name.replace(", ", "_").replace(" ", "")
    # A large epsilon: Adam's step is otherwise the sign of gradients that are nothing but rounding.
    words = setting.training(_ROLLOUTS, 16, "--adam-eps", "1e-3", *layout.flags, ranks=layout.ranks)
    return setting.launcher.train(name, words)


def _compare(setting: Setting, layout: Layout, one: Run) -> Item:
    run = _run(setting, layout)
    if not run.ok:
        return ended(layout.name, run)
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
    if not run.ok:
        item = ended(part, run)
        return with_engine(part, setting, run, list) if run.status != 2 and item.status is Status.FAIL else [item]
    return [checked(part, [*step_checks(run, 2), agreement(setting, run)], run.log)]
