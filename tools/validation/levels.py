"""The ladder: its levels, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.validation import architecture, layouts, learning, resume, smoke
from tools.validation.report import Item, Status
from tools.validation.setting import Setting


@dataclass(frozen=True)
class Level:
    """What a level proves, and how."""

    title: str
    proves: str
    check: Callable[[Setting], list[Item]]


def _no_fsdp(setting: Setting) -> list[Item]:
    return [Item("Megatron-FSDP", Status.SKIPPED, "there is no FSDP variant in this version")]


LEVELS = {
    0: Level("LoRA + DDP smoke", "one step of the whole loop", smoke.check),
    1: Level("save/resume", "a run that goes on from a checkpoint equals the uninterrupted one", resume.check),
    2: Level("parallel stress", "layouts give the steps of one rank", layouts.check),
    3: Level("FSDP variant", "left out: there is none", _no_fsdp),
    4: Level("architecture-specific", "log-probs of transformers, all is trained, conversion", architecture.check),
    5: Level("learning signal", "loss and reward move by a stated margin", learning.check),
}
