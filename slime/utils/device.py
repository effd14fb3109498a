"""Which device, which collective backend, and what memory: the only module outside compat.py that names torch.cuda."""

from __future__ import annotations

import gc
import os

import torch


def is_cuda() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def device_type() -> str:
    """``"cuda"`` or ``"cpu"``."""
    return "cuda" if is_cuda() else "cpu"


def collective_backend() -> str:
    """The torch.distributed backend for tensors on this process's device."""
    return "nccl" if is_cuda() else "gloo"


def bind_local_device(local_rank: int) -> torch.device:
    """Make GPU ``local_rank`` the current device, or do nothing without GPUs; returns the device to build on."""
    if not is_cuda():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def current_device() -> torch.device:
    """The device on which this process builds tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def synchronize() -> None:
    """Wait for the device's queued work."""
    if is_cuda():
        torch.cuda.synchronize()


def release_cached_memory() -> None:
    """Give the allocator's free blocks back to the device."""
    gc.collect()
    if is_cuda():
        torch.cuda.empty_cache()


def memory_used_gib() -> float:
    """Memory in use: on the GPU by everyone, without one by this process."""
    if is_cuda():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    with open(f"/proc/{os.getpid()}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
