"""Rows of large prompt files become prompts in several processes, in the order of the file."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import queue
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from slime.data.rows.prompt_rows import Encoding, PromptSpec, RowEncoder
from slime.data.rows.reading import RawRow, RowFile
from slime.processes.kernel import die_with_parent, end_child
from slime.utils.environment import server_environment
from slime.utils.errors import BadInputError, SlimeError

_SHARE = 16 << 20
"""Bytes of a file that are worth a process: to start one takes as long as reading about so many."""
FEWEST_BYTES = 2 * _SHARE
"""Below, one process reads as fast as several."""
_MAX_WORKERS = 8
_END_S = 10.0


class WorkerError(SlimeError):
    """A process that made prompts of rows has died."""


def num_workers(path: Path) -> int:
    """How many processes to read a file in, besides this one; 0: in this one alone."""
    cores = len(os.sched_getaffinity(0))
    workers = min(cores, _MAX_WORKERS, path.stat().st_size // _SHARE)
    return workers if workers > 1 else 0


def encodings(
    spec: PromptSpec, file: RowFile, encoder: RowEncoder, batches: Iterable[list[RawRow]], workers: int
) -> Iterator[Encoding]:
    """What becomes of each batch of rows, in their order: the same in processes as in this one, by ``encoder``, where
    there are no ``workers``. WorkerError where a process died."""
    if not workers:
        yield from map(encoder.encode, batches)
        return
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    processes = [_Worker(spec, file) for _ in range(workers)]
    for process in processes:
        idle.put(process)

    def encode(batch: list[RawRow]) -> Encoding:
        process = idle.get()
        try:
            return process.encode(batch)
        finally:
            idle.put(process)

    ahead: collections.deque[Future[Encoding]] = collections.deque()
    threads = ThreadPoolExecutor(workers, thread_name_prefix="rows")
    try:
        for batch in batches:
            ahead.append(threads.submit(encode, batch))
            if len(ahead) > workers + 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        # Not waited for: they end with their processes, of which one that cannot be killed would hold its thread.
        threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.stop()


class _Worker:
    """A process of `main`; it ends when this one does, by the end of its input."""

    def __init__(self, spec: PromptSpec, file: RowFile) -> None:
        # A program of its own, not a fork: this process has threads of Ray and of CUDA.
        command = [sys.executable, "-W", "ignore", "-m", "slime.data.rows.row_workers"]
        env = {**server_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        env |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        # Else each says that there is no PyTorch, which `main` hides from it.
        env["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._begin: tuple[PromptSpec, RowFile] | None = (spec, file)

    def encode(self, batch: list[RawRow]) -> Encoding:
        """`RowEncoder.encode` there; however long it takes, only its death ends the wait."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if self._begin is not None:
                _send(self._process.stdin, self._begin)
                self._begin = None
            _send(self._process.stdin, batch)
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            # Its pipes are closed: it has ended, or is no more of use.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            raise WorkerError(
                f"a process that reads rows of a data file died (exit status {self._process.poll()}; -9 is mostly for "
                "lack of memory)"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Encoding)
        return answer

    def stop(self) -> None:
        end_child(self._process, _END_S)


def _send(pipe: IO[bytes], value: object) -> None:
    pickle.dump(value, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def main() -> None:
    """Answer batches of rows from the standard input on the standard output, until the input ends."""
    die_with_parent()  # the end of the input is seen between two batches only, and not by a process that is stopped
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is not an answer
    sys.modules["torch"] = None  # type: ignore[assignment]  # 250 MB that transformers imports for no tokenizer
    try:
        encoder = RowEncoder(*pickle.load(sys.stdin.buffer))
        while True:
            batch = pickle.load(sys.stdin.buffer)
            try:
                _send(answers, encoder.encode(batch))
            except BadInputError as error:
                _send(answers, error)
            except Exception:
                _send(answers, RuntimeError(traceback.format_exc()))
    except (EOFError, pickle.UnpicklingError, BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()
