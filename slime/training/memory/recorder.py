"""Which code allocates the memory of a training rank: the snapshots of ``--record-memory-history``."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from slime.files import atomic_io
from slime.files.storage import writing
from slime.utils import device

logger = logging.getLogger(__name__)

_EVENTS = 100_000
"""Allocations and releases that a snapshot has in the order of their time, at a few KiB each. What is allocated when it
is written has its stack however long ago that was."""

_BEGINS_S = 60.0
"""In which memray has begun to record, or failed to."""


class _Torch:
    """GPU memory, by torch's allocator."""

    suffix = "pickle"

    def __init__(self, _: Path) -> None:
        device.record_allocations(_EVENTS)

    def write(self, file: Path) -> None:
        atomic_io.write_file(file, device.dump_allocations)

    def finish(self, file: Path) -> None:
        self.write(file)
        device.stop_recording()


class _Memray:
    """The host's memory, of whatever library; memray writes it while it is recorded, to a file that is then renamed."""

    suffix = "bin"

    def __init__(self, place: Path) -> None:
        import memray

        self._file = atomic_io.unfinished(place)
        to = memray.FileDestination(self._file, overwrite=True)
        # Native frames too: in the backward pass no Python function is on the stack.
        self._tracker = memray.Tracker(destination=to, native_traces=True)
        # In a thread of its own: of the one that begins, memray loses the stack once this function's callers return.
        with ThreadPoolExecutor(1) as starting:
            starting.submit(self._tracker.__enter__).result(_BEGINS_S)

    def finish(self, file: Path) -> None:
        self._tracker.__exit__(None, None, None)
        atomic_io.write_file(file, self._file.rename)


_RECORDERS: dict[str, type[_Torch | _Memray]] = {"torch": _Torch, "memray": _Memray}


class MemoryRecorder:
    """Records from when it is made on, where the options want that; otherwise its methods do nothing."""

    def __init__(self, args: Namespace, rank: int) -> None:
        self._rank, self._rollouts_left = rank, args.memory_snapshot_num_steps
        self._recording: _Torch | _Memray | None = None
        if args.record_memory_history:
            self._directory = Path(args.memory_snapshot_dir or Path(args.run_dir, "memory"))
            with self._writing():
                self._directory.mkdir(parents=True, exist_ok=True)
                self._recording = _RECORDERS[args.memory_recorder](self._directory / f"rank{rank}")

    def after_rollout(self, rollout_id: int) -> None:
        """Write the snapshot, and record no more, where this was the last rollout to record; StorageError."""
        if self._recording is None or self._rollouts_left is None:
            return
        self._rollouts_left -= 1
        if self._rollouts_left == 0:
            self._write(self._recording.finish, f"rollout_{rollout_id}")
            self._recording = None

    def after_failure(self, phase: str) -> str:
        """Write the snapshot of a phase that did not fit into the GPU; a line that says where, empty without one."""
        if not isinstance(self._recording, _Torch):
            return ""
        try:
            file = self._write(self._recording.write, f"{phase}_did_not_fit")
        except Exception as error:  # the error that is being told says more
            logger.warning("no snapshot of the memory: %s", error)
            return ""
        return f"which code allocated what: {file}, drawn by https://pytorch.org/memory_viz"

    def _write(self, write: Callable[[Path], None], name: str) -> Path:
        assert self._recording is not None
        file = self._directory / f"{name}_rank{self._rank}.{self._recording.suffix}"
        with self._writing():
            write(file)
        logger.info("a snapshot of the memory: %s", file)
        return file

    def _writing(self) -> AbstractContextManager[None]:
        return writing("--memory-snapshot-dir", self._directory)
