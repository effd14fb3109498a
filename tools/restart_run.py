"""Run train.py, and again from its newest checkpoint when it fails; scripts/launch.sh calls this for --max-restarts.

python3 tools/restart_run.py 3 -- python3 train.py --save outputs/run ...

Statuses 0 (done) and 2 (bad input) are passed on, and so is the end by a signal that this program got. It ends what a
driver leaves before it begins the next one: the run's own janitor does, and is waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.files.checkpoints import LATEST, RELEASE, has_checkpoint, is_release, latest_name
from slime.observability import events
from slime.processes import kernel
from slime.utils.command_line import strike_secrets

_PROGRAM = "launch"
_BAD_INPUT = 2
_LEFT_S = 60.0
"""More than the janitor of a killed driver takes."""
_POLL_S = 0.2
_SETTINGS = "--custom-config-path"
_REFERENCES = ("--ref-load", "--initial-megatron-checkpoint")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(words: Sequence[str]) -> int:
    """The status of the last driver."""
    if len(words) < 3 or not words[0].isdecimal() or words[1] != "--":
        print(f"usage: {Path(__file__).name} MAX_RESTARTS -- PROGRAM train.py FLAG ...", file=sys.stderr)
        return _BAD_INPUT
    limit, command = int(words[0]), list(words[2:])
    before = Before.of(command)
    kernel.adopt_orphans()
    others = _below()
    child = Child()
    added: list[str] | None = []
    for restarts in range(limit + 1):
        status = child.run([*command, *(added or [])])
        if status in (0, _BAD_INPUT) or child.signalled:
            return status
        goes_on, added = _next(command, before, restarts < limit)
        left = f"{limit - restarts} of {limit} restarts left (--max-restarts)"
        print(f"{_PROGRAM}: the run ended with status {status}: {goes_on}; {left}", file=sys.stderr, flush=True)
        _note(command, status, goes_on)
        _wait_for_ends(others)
        if added is None:
            break
    return status


def _next(command: Sequence[str], before: Before, may: bool) -> tuple[str, list[str] | None]:
    """What becomes of a command that failed, in words, and the flags to add; None where it is not started again."""
    if not may:
        return "it is not started again", None
    added = resuming(command, before)
    if fixed := [flag for flag in added[::2] if _by_file(command, flag) not in (None, value_of(added, flag))]:
        what = f"{', '.join(fixed)} of {_SETTINGS}"
        return f"it is not started again: {what} would count more than what it has saved: give it as a flag", None
    return f"the run is started again, {_origin([*command, *added])}", added


@dataclass(frozen=True)
class Before:
    """What was there before the first start of a command."""

    stale: tuple[str, int] | None = None
    """The latest checkpoint in its ``--save``, which is no work of it."""
    release: str | None = None
    """The weights that its ``--load`` holds, where that holds no run to go on with."""

    @classmethod
    def of(cls, command: Sequence[str]) -> Before:
        """It is now."""
        load = value_of(command, "--load")
        release = os.path.join(load, RELEASE) if load is not None and is_release(load) else None
        return cls(_latest(value_of(command, "--save")), release)


def resuming(command: Sequence[str], before: Before) -> list[str]:
    """Flags that have a command go on from what it has saved, and count instead of its own; none where it saves
    nothing, or has nothing there yet but what was there ``before``."""
    save = value_of(command, "--save")
    if save is None or _latest(save) in (None, before.stale):
        return []
    flags = ["--load", save]
    if value_of(command, "--ckpt-step") is not None:
        flags += ["--ckpt-step", latest_name(save)]  # the command's own says where it began
    if before.release is not None and not any(value_of(command, flag) for flag in _REFERENCES):
        flags += ["--ref-load", before.release]  # it may have to stay close to what it started from
    if value_of(command, "--critic-load") is not None:
        flags += ["--critic-load", value_of(command, "--critic-save") or os.path.join(save, "critic")]
    return flags


def _origin(command: Sequence[str]) -> str:
    """From where a command begins, in words."""
    load = value_of(command, "--load")
    found = _latest(load)
    if found is None or found[0] == RELEASE:
        return "from its beginning"
    return f"from the checkpoint after rollout {found[0]} in {load}"


def value_of(command: Sequence[str], flag: str) -> str | None:
    """What a command has for a flag, ``~`` spelt out: by its file of settings, or by the last of it; None if not."""
    found = _by_file(command, flag) or _last(command, flag)
    return None if found is None else os.path.expanduser(found)


def _by_file(command: Sequence[str], flag: str) -> str | None:
    path = _last(command, _SETTINGS)
    if path is None:
        return None
    from slime.options.flags.values import read_yaml

    try:
        settings = read_yaml(path)
    except ValueError:  # which the driver says
        return None
    names = {str(key).replace("-", "_"): value for key, value in settings.items()} if isinstance(settings, dict) else {}
    found = names.get(flag.removeprefix("--").replace("-", "_"))
    return None if found is None else str(found)


def _last(command: Sequence[str], flag: str) -> str | None:
    found = None
    for word, after in zip(command, [*command[1:], None], strict=True):
        if word == flag:
            found = after
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _latest(save: str | None) -> tuple[str, int] | None:
    """Which checkpoint a directory calls its latest, and since when."""
    if save is None or not has_checkpoint(save):
        return None
    return latest_name(save), Path(save, LATEST).stat().st_mtime_ns


def _note(command: Sequence[str], status: int, action: str) -> None:
    """A line among the run's events, where its command line says which directory that is."""
    run_dir = value_of(command, "--run-dir") or value_of(command, "--save")
    if run_dir is not None and os.path.isdir(run_dir):
        events.begin(run_dir, _PROGRAM)
        events.at_version(pushed_version(run_dir))
        events.add("driver_died", "the driver", phase="run", cause=f"ended with status {status}", action=action)


def pushed_version(run_dir: str) -> str:
    """Of the weights that a run's engines got last, as its driver's trace tells."""
    with contextlib.suppress(OSError):
        for line in reversed(Path(run_dir, "trace", "driver.jsonl").read_bytes().splitlines()):
            with contextlib.suppress(ValueError):  # the last one may be half a line
                span = json.loads(line)
                if span["name"] == "driver/push_weights" and "error" not in span:
                    return str(span["version"])
    return "none yet"


class Child:
    """The driver, in a session of its own, so that it gets every signal once: from here."""

    def __init__(self) -> None:
        self.signalled = False
        self._process: subprocess.Popen[Any] | None = None
        for number in _SIGNALS:
            signal.signal(number, self._pass_on)

    def run(self, command: Sequence[str]) -> int:
        """Its status; 128 and the signal's number where one ended it."""
        own = os.getpid()
        with subprocess.Popen(
            command, start_new_session=True, preexec_fn=lambda: kernel.die_with_parent(own)
        ) as process:
            self._process = process
            if self.signalled:
                process.terminate()
            status = process.wait()
        self._process = None
        return status if status >= 0 else 128 - status

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        if self._process is not None:
            kernel.send(self._process.pid, number)


def _below() -> set[kernel.Process]:
    return set(kernel.below([os.getpid()], kernel.running().values()))


def _wait_for_ends(others: set[kernel.Process]) -> None:
    """Until nothing of the run is left: the next one needs its memory, and its directories."""
    known, deadline = {process.pid: process.started for process in others}, time.monotonic() + _LEFT_S
    while time.monotonic() < deadline:
        _reap()
        if not [process for process in _below() if known.get(process.pid) != process.started]:
            return
        time.sleep(_POLL_S)


def _reap() -> None:
    """Take the statuses of orphans that this process has adopted."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    words = sys.argv[1:]
    strike_secrets()  # the driver has them from here, and strikes them out of its own command line
    sys.exit(main(words))
