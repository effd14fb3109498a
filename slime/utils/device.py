"""Which device, which collective backend, memory for other processes: alone outside patches in naming torch.cuda."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_DEVICE_ARGUMENT = 6
"""Where torch's rebuild_cuda_tensor takes the device."""
_WITH_COMMANDS = 32 * 2**10
"""Bytes of host memory that travel to a GPU with its commands; the copy engine, which takes more, makes one copy after
another, those of other streams too."""
_MANY_COMMANDS = 16 * 2**20
"""Bytes of which the pieces would take the host longer to send than they are worth."""
_MOST_KERNELS = 64
"""Of one function; from torch's limit of 8 on it would quietly not be compiled."""
_USED_UP = (
    "out of memory",
    "Failed to CUDA calloc",
    "Failed to CUDA malloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Words of NCCL and of CUDA's libraries, which ask for memory beside torch's allocator."""


def is_cuda() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def count() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count()


def hardware() -> str:
    """This host's accelerators in words."""
    return f"{count()} x {torch.cuda.get_device_name(0)}" if is_cuda() else "CPU"


def capability() -> tuple[int, int] | None:
    """The current GPU's compute capability; None without one."""
    return torch.cuda.get_device_capability() if is_cuda() else None


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


def synchronize_stream() -> None:
    """Wait for what was queued here; work of `side_stream` goes on."""
    if is_cuda():
        torch.cuda.current_stream().synchronize()


def compute_deterministically() -> None:
    """Have torch take kernels in this process that give the same bits each time; where it has none, it raises.

    The environment is `slime.utils.environment.deterministic_variables` since before the device was used. A warning in
    place of the error would not do: attention then keeps the gradient whose sums are in no order.
    """
    torch.use_deterministic_algorithms(True)


def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying to host memory; what is returned waits for the copy, not for what is queued after it."""
    copy = tensor.to("cpu", non_blocking=True)
    if not tensor.is_cuda:
        return lambda: copy
    done = torch.cuda.Event()
    done.record()

    def wait() -> torch.Tensor:
        done.synchronize()
        return copy

    return wait


def from_host(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """A tensor of pageable host memory on ``where``. Nothing waits: not the host for what is queued, nor the copy for
    large ones that go on `side_stream`. The tensor may be changed at once: CUDA has read such memory when a call
    returns.
    """
    if where.type != "cuda" or tensor.nbytes > _MANY_COMMANDS:
        return tensor.to(where)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
    step = _WITH_COMMANDS // tensor.element_size()
    for own, host in zip(copy.view(-1).split(step), tensor.reshape(-1).split(step), strict=True):
        own.copy_(host, non_blocking=True)
    return copy


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """Within: device work runs after what was queued before, and beside what is queued later (`wait_side_stream`)."""
    if not is_cuda():
        yield
        return
    _stream("side").wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_stream("side")):
        yield


def wait_side_stream() -> None:
    """Work that is queued from here on waits for that of `side_stream`."""
    if is_cuda():
        torch.cuda.current_stream().wait_stream(_stream("side"))


@contextlib.contextmanager
def dedicated_stream(where: torch.device) -> Iterator[None]:
    """Within, in a thread of its own: device work that waits for none of other threads and is over at the end.

    A new thread's stream is the device's default one, the main thread's: whatever that queued next would wait for this
    work; and its device is the first, whichever the main thread has.
    """
    if where.type != "cuda":
        yield
        return
    stream = _stream("dedicated", where)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


def in_turns(
    count: int,
    slots: int,
    load: Callable[[int], None],
    work: Callable[[int], None],
    store: Callable[[int], None],
) -> None:
    """``load(i)``, ``work(i)`` and ``store(i)`` for each of ``count`` pieces, over when it returns.

    With several ``slots`` the three go on beside each other for different pieces, and piece i is not loaded before that
    of i - slots is stored; they may only queue work of the device.
    """
    if slots < 2 or not is_cuda():
        for i in range(count):
            load(i)
            work(i)
            store(i)
        synchronize_stream()
        return
    current, loading, storing = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    loading.wait_stream(current)
    stored: list[torch.cuda.Event] = []
    for i in range(count):
        with torch.cuda.stream(loading):
            if i >= slots:
                loading.wait_event(stored[i - slots])
            load(i)
        current.wait_stream(loading)
        work(i)
        storing.wait_stream(current)
        with torch.cuda.stream(storing):
            store(i)
            stored.append(storing.record_event())
    current.wait_stream(storing)
    synchronize_stream()


@functools.cache
def _stream(use: str, where: torch.device | None = None) -> torch.cuda.Stream:
    return torch.cuda.Stream(where)


@functools.cache
def fused(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function`` as one or two kernels on a GPU, for any number of rows from 2 on; on a CPU itself. No gradient.

    The first extent of every tensor is a variable from the first call on: another compilation for another number of
    tokens could round differently, and the ratio of an on-policy step would not be 1. All else is constant in a kernel:
    where every extent is a variable, the division by them that each element's place then takes costs more than memory.

    Nor is a kernel compiled once more because of strides that mean nothing: torch (2.11, 2.13) may then time its
    variants again (`CachingAutotuner._make_launchers` in torch._inductor), and another one, which may add up in another
    order, takes over in the middle of a run.
    """
    if not is_cuda():
        return function
    from torch import _dynamo as dynamo  # takes seconds

    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MOST_KERNELS)
    compiled = torch.compile(function, dynamic=False)

    def call(*inputs: Any) -> torch.Tensor:
        inputs = tuple(_plain(x.detach()) if isinstance(x, torch.Tensor) else x for x in inputs)
        for x in inputs:
            if isinstance(x, torch.Tensor) and x.dim():
                dynamo.maybe_mark_dynamic(x, 0)
        return compiled(*inputs)

    return call


def _plain(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the strides, in dimensions of one element, that follow from the dimensions after them."""
    if 1 not in x.shape:
        return x
    strides, step = list(x.stride()), 1
    for dim in reversed(range(x.dim())):
        if x.size(dim) == 1:
            strides[dim] = step
        step = strides[dim] * x.size(dim)
    return x.as_strided(x.shape, strides)


@dataclass(frozen=True)
class Memory:
    """Bytes on the current device; without GPUs all are 0."""

    allocated: int = 0
    """By this process's live tensors."""
    reserved: int = 0
    """By torch for this process, live tensors and what it keeps for later ones."""
    peak: int = 0
    """The most that live tensors took since `reset_peak`."""
    used: int = 0
    """By all processes, with what is not torch's: contexts, collectives' buffers."""
    total: int = 0


def memory() -> Memory:
    """What is in use now."""
    if not is_cuda():
        return Memory()
    free, total = torch.cuda.mem_get_info()
    return Memory(
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated(),
        total - free,
        total,
    )


def memory_gib() -> dict[str, float]:
    """What is in use now, in GiB: of the host by this process, and on a GPU the figures of `Memory` by their names."""
    host = {"host": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30}
    of_device = {name: value / 2**30 for name, value in vars(memory()).items()} if is_cuda() else {}
    return {name: round(value, 3) for name, value in (host | of_device).items()}


def out_of_memory(error: BaseException) -> str:
    """The line of an error that says that a GPU's memory is used up, torch's own or a library's; empty for others."""
    lines = str(error).splitlines()
    if isinstance(error, torch.OutOfMemoryError):
        return lines[0]
    if not isinstance(error, RuntimeError):  # an error of ours may tell of another process's memory
        return ""
    return next((line for line in lines if any(words in line for words in _USED_UP)), "")


def record_allocations(entries: int) -> None:
    """Note the stack of everything that is allocated on GPUs from now on, and of the last so many events all of it."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def stop_recording() -> None:
    """Undo `record_allocations`, and forget what it noted."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_allocations(file: Path) -> None:
    """Write what `record_allocations` noted: a pickle of torch's, which https://pytorch.org/memory_viz draws."""
    torch.cuda.memory._dump_snapshot(str(file))


def reset_peak() -> None:
    """Start `Memory.peak` anew."""
    if is_cuda():
        torch.cuda.reset_peak_memory_stats()


def release_unused() -> None:
    """Give the device what torch keeps for later tensors and matrix products, for other processes to take."""
    if is_cuda():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


class _PinnedMemory(mmap.mmap):
    """Host memory that the device is told of for as long as it is there.

    Otherwise its addresses, once they are those of other memory, are still the old pages to the device: CUDA then
    fails to allocate (`cudaErrorAlreadyMapped`).
    """

    address: int | None = None

    def __del__(self) -> None:
        if self.address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def pinned(nbytes: int, *, in_forks: bool = False) -> torch.Tensor:
    """Host memory that the device copies from and to at full speed; uint8, at least one byte, its content undefined.
    torch's own pinned allocator rounds up to a power of two, which for tens of GiB is memory that nobody has.

    Args:
        nbytes: how much.
        in_forks: processes forked from this one may read it. It then takes longer to pin.
    """
    kind = mmap.MAP_SHARED if in_forks else mmap.MAP_PRIVATE
    memory = _PinnedMemory(-1, nbytes, flags=kind | mmap.MAP_ANONYMOUS)
    # Pages of 2 MiB take a fraction of the time to pin; of shared memory few hosts give such.
    memory.madvise(mmap.MADV_HUGEPAGE)
    if not in_forks:
        memory.madvise(mmap.MADV_DONTFORK)  # the kernel would copy pinned pages for every forked process
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if is_cuda():
        status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)
        if int(status) != 0:
            raise MemoryError(f"the host has no {nbytes / 2**30:.1f} GiB to pin (CUDA error {int(status)})")
        memory.address = tensor.data_ptr()
    return tensor


def open_bytes(path: str, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of a memory file, which `/proc` has a path of: shared with whoever opens it. Engines call it by
    this name (`weights.tensor`)."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def share(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """How another process on this host opens a tensor's GPU memory: a function and its arguments, to be pickled. The
    GPU is named by its UUID in place of its index, which differs between processes; the receiver, as SGLang's does, has
    to put the index back."""
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(tensor)
    uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
    return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
