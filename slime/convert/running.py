"""What every conversion does: refuse bad outputs, stage and commit, show progress, use several threads."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from torch import Tensor
from tqdm import tqdm

from slime.convert.hf_files import HFOutput, Spec, other_than_a_model
from slime.files import atomic_io
from slime.files.json_file import read_object
from slime.files.storage import StorageError, amount, writing
from slime.options.flags.schema import positive
from slime.utils.errors import BadInputError

logger = logging.getLogger(__name__)

WORKERS = min(8, os.cpu_count() or 1)
"""Threads of a conversion, unless its user says otherwise."""
_LOG_SECONDS = 10.0
_CLEANING_S = 5.0
"""In which a further interrupt does not end the cleaning up after one."""
_SPARE_BYTES = 2**20
"""What a directory takes besides its tensors, about."""
_UNITS = {"": 1, "ki": 2**10, "mi": 2**20, "gi": 2**30, "k": 10**3, "m": 10**6, "g": 10**9}

Task = TypeVar("Task")
Write = Callable[[str, Tensor], None]
"""Puts the tensor of a name into its place; from any thread."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which is to be cleaned up after as Ctrl-C is."""


def main(name: str, convert: Callable[[], None], output: Path, *, several_ranks: bool = False) -> int:
    """Run a program's conversion to ``output``; its exit status.

    One that is not for ``several_ranks`` refuses to start as one of them: all would write the same files.

    Errors of the input are one line and status 2, those of the machine, such as a full disk, one line and status 1; an
    interrupt is one line, and 130 by SIGINT or 143 by SIGTERM; further ones do nothing for a while, in which is cleaned
    up. Of several ranks, the first says that it was interrupted or where the output is.
    """
    interrupts: list[KeyboardInterrupt] = []
    deaf_until = 0.0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal deaf_until
        if time.monotonic() < deaf_until:
            return
        deaf_until = time.monotonic() + _CLEANING_S  # not for good: what cleans up may hang, and torch swallow this one
        interrupts.append(_Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise interrupts[-1]

    speaks = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("slime").setLevel(logging.INFO)
    handled = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is to be ignored
        handled[signal.SIGINT] = signal.default_int_handler
    try:
        for number in handled:
            signal.signal(number, interrupt)
        # WORLD_SIZE alone says nothing: cluster operators set it in every container.
        ranks = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
        if ranks != "1" and not several_ranks:
            raise BadInputError(f"this is one process with threads, and torchrun starts {ranks}: start it without")
        with writing("output", output, note="it was not made"):
            convert()
    except (KeyboardInterrupt, RuntimeError) as error:
        # torch holds an interrupt back while a rank writes, which then fails because the others have ended by theirs.
        if not (interrupts or isinstance(error, KeyboardInterrupt)):
            raise
        if speaks:
            print(f"{name}: interrupted", file=sys.stderr)
        return _status([*interrupts, error][0])
    except (BadInputError, FileNotFoundError, ValueError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except (StorageError, OSError) as error:
        note = "" if isinstance(error, StorageError) else f"; {output} was not made"
        print(f"{name}: error: {error}{note}", file=sys.stderr)
        return 1
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
    if speaks:
        print(f"{name}: wrote {output}")
    return _status(interrupts[0]) if interrupts else 0


def _status(interrupt: BaseException) -> int:
    return 128 + (signal.SIGTERM if isinstance(interrupt, _Terminated) else signal.SIGINT)


def memory() -> int:
    """Bytes that this process holds in memory, without those of files that it has mapped; 0 where it cannot be told."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """``--force``, ``--chunk-size`` and ``--workers``."""
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace a model that is there already; a directory that has anything else in it is refused",
    )
    parser.add_argument(
        "--chunk-size", type=byte_count, default=byte_count("5GiB"), help="largest safetensors file; default: 5GiB"
    )
    parser.add_argument(
        "--workers", "--max-workers", type=positive, default=WORKERS, help="threads; default: %(default)s"
    )


def without_effect(program: str, flag: str, value: object, reason: str) -> None:
    """Say that a flag of upstream's tool is taken and changes nothing here; nothing where it was not given."""
    if value is not None:
        print(f"{program}: warning: {flag} is ignored: {reason}", file=sys.stderr)


def byte_count(text: str) -> int:
    """``5GiB``, ``500MB`` or a number of bytes, for argparse."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]i?)?b?", text.lower())
    value = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; write it as 5GiB, 500MB or a number of bytes")
    return value


def check_output(output: Path, sources: Sequence[Path], *, force: bool) -> None:
    """Raise BadInputError for sources that are not there, and for an output that is, or holds, one of them, or has
    something in it: with ``force`` it may be a model, and nothing else. The last source is to be a Hugging Face
    directory."""
    for source in sources:
        if not source.is_dir():
            raise BadInputError(f"{source}: there is no such directory")
        if output.resolve() == source.resolve() or output.resolve() in source.resolve().parents:
            raise BadInputError(f"{output} would replace {source}, which it is made from: name another output")
    if reason := atomic_io.why_not_replaced(output):
        raise BadInputError(reason)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        if not force:
            raise BadInputError(f"{output} is there already; pass --force to replace it")
        if other := other_than_a_model(output, sources):
            raise BadInputError(f"{output} has other things in it than a model ({other}): name another output")
    if not (sources[-1] / "config.json").is_file():
        raise BadInputError(f"{sources[-1]} is not a Hugging Face directory: there is no config.json in it")
    read_object(sources[-1] / "config.json")


def check_room(output: Path, needed: int) -> None:
    """Remove what a killed conversion to there left; BadInputError where there is no room for ``needed`` bytes."""
    atomic_io.discard_directory(output)
    free = shutil.disk_usage(next(directory for directory in output.parents if directory.exists())).free
    if free < needed + _SPARE_BYTES:
        raise BadInputError(f"{output} needs {amount(needed)}, and {amount(free)} are free there")


@contextlib.contextmanager
def staged(output: Path, needed: int) -> Iterator[Path]:
    """A staging directory, committed as ``output`` when the block ends, and removed when it fails. A killed process
    leaves it as ``.NAME.tmp`` in the output's parent; the next conversion to there removes it. BadInputError where
    there is no room for ``needed`` bytes."""
    final = output.resolve()
    with atomic_io.removed_on_failure(final):
        check_room(final, needed)
        yield atomic_io.staging_directory(final)
        atomic_io.commit_directory(final)


@contextlib.contextmanager
def written_model(
    what: str,
    output: Path,
    specs: Mapping[str, Spec],
    shard_bytes: int,
    origin: Path,
    changes: Mapping[str, Any] | None = None,
) -> Iterator[Write]:
    """A Hugging Face directory of which the block writes each of ``specs`` once; it is whole when the block ends, and
    absent when it fails. Shows its progress; BadInputError where there is no room for it. ``origin`` and ``changes``
    are as of `HFOutput.finish`."""
    total = sum(spec.nbytes for spec in specs.values())
    with (
        staged(output, total) as directory,
        contextlib.closing(HFOutput(directory, specs, shard_bytes)) as out,
        contextlib.closing(Progress(what, total)) as progress,
    ):

        def write(name: str, tensor: Tensor) -> None:
            out.write(name, tensor)
            progress.add(tensor.nbytes)

        yield write
        out.finish(origin, changes)


class Progress:
    """Bytes done: a bar on a terminal, else a line every ten seconds; several threads may add."""

    def __init__(self, what: str, total: int, *, shown: bool = True) -> None:
        self._what, self._total, self._done = what, total, 0
        self._begin, self._peak = time.monotonic(), memory()
        self._lock = threading.Lock()
        self._shown, on_terminal = shown, sys.stderr.isatty()
        self._bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=not (shown and on_terminal))
        self._next_line = time.monotonic() + _LOG_SECONDS if shown and not on_terminal else None

    def add(self, count: int) -> None:
        """``count`` more bytes are done."""
        with self._lock:
            self._done += count
            self._peak = max(self._peak, memory())
            self._bar.update(count)
            due = self._next_line is not None and time.monotonic() >= self._next_line
            if due and self._done < self._total:
                self._next_line = time.monotonic() + _LOG_SECONDS
                logger.info(self._line())

    def close(self) -> None:
        """The end; of a failure too, of which the error says enough."""
        self._bar.close()
        if self._shown and self._done == self._total:
            seconds = time.monotonic() - self._begin
            logger.info("%s, %.1f s, at most %s of memory", self._line(), seconds, amount(self._peak))

    def _line(self) -> str:
        share = 100 * self._done // self._total if self._total else 100
        return f"{self._what}: {amount(self._done)} of {amount(self._total)} ({share} %)"


def run_all(tasks: Iterable[Task], do: Callable[[Task], None], workers: int) -> None:
    """Do every task on ``workers`` threads; after a failure no further one begins, and the first is raised."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(do, task) for task in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        failed = next((future for future in done if future.exception() is not None), None)
        if failed is not None:
            pool.shutdown(wait=True, cancel_futures=True)
            failed.result()
