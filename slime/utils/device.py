"""Which device, and which collective backend: the only module outside compat.py that names torch.cuda."""

from __future__ import annotations

import torch


def is_cuda() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def collective_backend() -> str:
    """The torch.distributed backend for tensors on this process's device."""
    return "nccl" if is_cuda() else "gloo"


def bind_local_device(local_rank: int) -> None:
    """Make GPU ``local_rank`` the current device; does nothing without GPUs."""
    if is_cuda():
        torch.cuda.set_device(local_rank)


def current_device() -> torch.device:
    """The device on which this process builds tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def synchronize() -> None:
    """Wait for the device's queued work."""
    if is_cuda():
        torch.cuda.synchronize()
