"""Functions of a user's that end the process in which they run, once, or always, or spoil its gradients."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

MARK = "SLIME_TEST_MARK"
"""The variable that names the file by which the next one knows."""


def _is_first() -> bool:
    mark = Path(os.environ[MARK])
    if mark.exists():
        return False
    mark.touch()
    return True


def die_in_training(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Before the step of rollout 1, on rank 1; for ``--custom-megatron-before-train-step-hook-path``."""
    if rollout_id == 1 and torch.distributed.get_rank() == 1 and _is_first():
        os.kill(os.getpid(), signal.SIGKILL)


def always_die(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """The same, however often it is tried."""
    if rollout_id == 1 and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def spoil_gradients(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Of rollout 1, on rank 1 alone: its output layer's weight gets a gradient of NaN."""
    if rollout_id == 1 and torch.distributed.get_rank() == 1:
        parameter = next(iter(model[0].parameters()))
        parameter.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
