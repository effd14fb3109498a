"""Which device, which collective backend, memory for other processes: alone outside compat.py in naming torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DEVICE_ARGUMENT = 6
"""Where torch's rebuild_cuda_tensor takes the device."""


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


def share(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """How another process on this host opens a tensor's GPU memory: a function and its arguments, to be pickled.

    The GPU is named by its UUID in place of its index, which differs between processes; the receiver, as SGLang's does,
    has to put the index back.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(tensor)
    uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
    return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
