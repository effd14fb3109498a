"""Lets ranks share a GPU: one is then enough for the cases of several (`scripts/test-gpu.sh --share`).

Python imports a module of this name when it starts; PYTHONPATH brings it to every process of a run. NCCL refuses two
ranks on one GPU of a host, so to NCCL each process is a host of its own; they talk through sockets. Each process has
the GPU as its number 0, by whatever number the rank calls it, and Ray is told that there are as many as wanted.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

RANKS = "SLIME_TEST_SHARE"


def be_a_host() -> None:
    """By NCCL's name for this process's host."""
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"


def share_in_torch(module: ModuleType) -> None:
    be_a_host()  # also where a Ray worker was given the variables of its driver
    set_device = module.set_device
    module.set_device = lambda device: set_device(0)  # type: ignore[attr-defined]


def share_in_ray(module: ModuleType) -> None:
    count = int(os.environ[RANKS])
    module.NvidiaGPUAcceleratorManager.get_current_node_num_accelerators = staticmethod(lambda: count)


def share_in_sglang(module: ModuleType) -> None:
    """Its own sums over ranks map the memory of other GPUs; NCCL's then take their place."""
    set_custom = module.set_custom_all_reduce
    module.set_custom_all_reduce = lambda enable: set_custom(False)  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "torch.cuda": share_in_torch,
    "ray._private.accelerators.nvidia_gpu": share_in_ray,
    "sglang.srt.distributed.parallel_state": share_in_sglang,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Changes the modules of `CHANGES` once they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """That of the other finders, with a loader that makes the change."""
        if fullname not in CHANGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            CHANGES[fullname](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


if RANKS in os.environ:
    be_a_host()
    os.register_at_fork(after_in_child=be_a_host)
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        # An engine's processes take the number of their place in this list; of numbers that are not there CUDA sees
        # those before.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(visible.count(",") + 1)))
    sys.meta_path.insert(0, AfterImport())
