"""Waiting for Ray calls: every wait has a deadline and ends within a second when any process of the run dies."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import (
    GetTimeoutError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from slime.backends.sglang.client import EngineError, HangError
from slime.options.flags.schema import flag_named
from slime.utils.errors import BadInputError, HookError, SlimeError

_DAEMONS = {"raylet": "raylet", "gcs_server": "head (gcs_server)"}
"""Of a local Ray, those that it does not live without."""
_EXIT = re.compile(r"Worker exit detail: (.*?\.)(?: |$)")
_NODE_GONE = ("node has died", "node was terminated", "node is dead", "owner's node has crashed")
_BROKEN_KINDS = {"DistError", "AcceleratorError"}
"""torch's, of NCCL and of CUDA."""
_BROKEN = ("/gloo/", "CUDA error", "Connection closed by peer", "Connection reset by peer")
_KERNEL_COUNTS = Path("/proc/vmstat")


def ray_failure() -> str | None:
    """What has ended our own local Ray; None while it lives, and of a Ray that others started."""
    node = worker._global_node
    for kind, process in node.dead_processes() if node is not None else ():
        if kind in _DAEMONS:
            status = process.returncode
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            return (
                f"Ray's {_DAEMONS[kind]} on this host, process {process.pid}, {how}, and the "
                f"run cannot go on without it{memory_hint()}; Ray's logs: {node.get_logs_dir_path()}"
            )
    return None


def why_it_died(error: RayError, who: str) -> str:
    """One line on an actor of which Ray says that it died."""
    text = " ".join(str(error).split())
    place = [found[1] for pattern in (r"\bpid: (\d+)", r"\bip: (\S+)") if (found := re.search(pattern, text))]
    where = f" ({' on '.join(place)})" if place else ""
    if _has_left(error):
        return (
            f"the host of {who}{where} has left Ray's cluster: its raylet was ended, or the host or its network failed"
        )
    if isinstance(error, OutOfMemoryError) or "memory monitor" in text or "running low on memory" in text:
        return f"Ray ended the process of {who}{where}, because its host was running out of memory: {text[:400]}"
    detail = found[1] if (found := _EXIT.search(text)) else text.split(" class_name:")[0]
    return f"the process of {who} died{where}: {detail}{memory_hint()}"


def _has_left(error: RayError) -> bool:
    """Whether an actor's host has left the cluster, and its slots with it."""
    return any(words in " ".join(str(error).split()) for words in _NODE_GONE)


def _is_broken_connection(error: BaseException) -> bool:
    """Whether a rank has lost another one, or its device, which nothing that the user gave is the reason of."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "RuntimeError" not in kinds or "OutOfMemoryError" in kinds:
        return False
    return bool(kinds & _BROKEN_KINDS) or any(words in str(error) for words in _BROKEN)


def memory_hint() -> str:
    """Words on what this host's kernel has ended for want of memory since the start; empty where it ended nothing."""
    killed = _killed_for_memory() - _BEFORE
    return f" (the kernel has ended {killed} processes of this host for want of memory meanwhile)" if killed > 0 else ""


def _killed_for_memory() -> int:
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in _KERNEL_COUNTS.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


_BEFORE = _killed_for_memory()


LOAD_DATA = "load data"
RESTORE_DATA = "restore the data source"
START_TRAINERS = "start trainers"
_READS_INPUT = (LOAD_DATA, RESTORE_DATA, START_TRAINERS)
"""Phases in which what the user gave is read for the first time."""
_POLL_S = 1.0
_GRACE_S = 5.0
_ENGINE_GRACE_S = 20.0
"""How long after a call to it failed an engine may take to be dead: its server's tree has ten seconds to end."""
_RAY_GRACE_S, _RAY_POLL_S = 1.0, 0.1
"""How long after its workers a raylet's own end may be seen."""
_FRAMES = 3


class RunError(SlimeError):
    """The run cannot go on; the message says who failed, in which phase, and why."""


class LostError(RunError):
    """Actors have died, or do not answer any longer: others may be made in their place.

    Attributes:
        names: who, as messages call them.
        phase: what they were asked for, or what was waited for meanwhile.
    """

    def __init__(self, message: str, names: Sequence[str], phase: str) -> None:
        super().__init__(message)
        self.names, self.phase = tuple(names), phase


class CallError(RunError):
    """A call failed by its own error: whoever was asked has not died of it.

    Attributes:
        is_of_user: whether that is an error of what the user gave, a function, a row or a setting.
        hangs: whether a server that it owns was found to hang.
    """

    def __init__(self, message: str, *, is_of_user: bool = False, hangs: bool = False) -> None:
        super().__init__(message)
        self.is_of_user, self.hangs = is_of_user, hangs


class RayDownError(RunError):
    """Our own local Ray has died: nothing that it runs can be called any more."""


class InputError(RunError):
    """What the user gave cannot be run, as far as only the cluster or the data could tell."""

    exit_status = 2


_OnDeath = Callable[[str, RunError], None]
MARGIN_S = 60.0
"""What a wait allows beyond the deadline of the call itself, whose own error says more."""


@dataclass(frozen=True)
class Deadline:
    """How long a wait may last, and the flag that says so (None: no flag does)."""

    seconds: float
    flag: str | None = None

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s" + (f" ({self.flag})" if self.flag else "")


def limit_of(args: argparse.Namespace, option: str, margin: float = 0.0) -> Deadline:
    """The deadline that an option sets."""
    return Deadline(getattr(args, option) + margin, flag_named(option))


class Supervisor:
    """Knows every actor of the run, and waits for their answers.

    Each watched actor has a method ``watch`` that only returns, by raising, when the process it owns has died. The
    death of an idle actor thus ends the wait for a busy one that would otherwise hang in a collective. Deaths that the
    run survives are reported instead, to whoever watches, during whatever wait they happen in.
    """

    def __init__(self) -> None:
        self._watches: dict[ray.ObjectRef, tuple[str, _OnDeath | None]] = {}
        self._dead: set[str] = set()
        self._background: dict[ray.ObjectRef, tuple[str, str]] = {}
        self._chores: list[Callable[[str], None]] = []
        self._at_chores = False
        self.version = "none yet"
        self._phase, self._phase_began = "start", time.monotonic()
        self._looked = self._phase_began

    def state(self) -> tuple[str, float, float, str]:
        """What was last waited for, seconds since that began and since the actors were last looked at, and the version
        of the engines' weights. Other threads may ask."""
        now = time.monotonic()
        return self._phase, now - self._phase_began, now - self._looked, self.version

    def watch(self, name: str, actor: Any, on_death: _OnDeath | None = None) -> None:
        """Fail every later `wait` when ``actor`` or the process that it owns dies; or ``on_death`` is called instead,
        once, with the phase and what `wait` would raise, and raises RunError if the run cannot go on."""
        self._watches[actor.watch.remote()] = name, on_death

    def forget(self, name: str) -> None:
        """Take `watch` and `expect` back, for one that is to be ended; another of its name may be watched then."""
        self._watches = {watch: entry for watch, entry in self._watches.items() if entry[0] != name}
        self._background = {call: entry for call, entry in self._background.items() if entry[0] != name}
        self._dead.discard(name)

    def expect(self, who: str, call: ray.ObjectRef, phase: str) -> None:
        """Fail every later `wait` when ``call``, whose answer is waited for at another time, fails."""
        self._background[call] = (who, phase)

    def dismiss(self, call: ray.ObjectRef) -> None:
        """Take `expect` back, for a call that is cancelled."""
        self._background.pop(call, None)

    def attend(self, chore: Callable[[str], None]) -> None:
        """Call ``chore`` with the phase in every `wait`, once a second or oftener. It waits for nothing by itself, and
        raises RunError where the run cannot go on."""
        self._chores.append(chore)

    def wait(
        self,
        calls: Mapping[str, ray.ObjectRef],
        phase: str,
        limit: Deadline,
        until: Callable[[], object] | None = None,
    ) -> list[Any]:
        """The answers of ``calls`` (who was asked -> reference), in their order, without those of the survived dead.
        RunError where a call failed, of these or of those expected, a watched actor died, or the deadline passed; in
        the last two cases a LostError.

        When ``until()`` holds before all have answered, it is not waited any longer, and there are no answers.
        """
        return list(self.answers(calls, phase, limit, until).values())

    def answers(
        self,
        calls: Mapping[str, ray.ObjectRef],
        phase: str,
        limit: Deadline,
        until: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """`wait`, of whom each answer is."""
        dead_before = len(self._dead)
        deadline = time.monotonic() + limit.seconds
        names = {ref: who for who, ref in calls.items()}
        pending = dict.fromkeys(ref for ref, who in names.items() if who not in self._dead)
        while pending:
            if until is not None and until():
                return {}
            self._pass(pending, names, phase, limit, deadline, dead_before)
        return {who: _get(ref) for ref, who in names.items() if who not in self._dead}

    def wait_until(self, condition: Callable[[], object], phase: str, limit: Deadline, who: str) -> None:
        """Wait for what a chore, or a death, brings about; RunError as of `wait`, where ``who`` took too long."""
        deadline = time.monotonic() + limit.seconds
        while not condition():
            self._pass({}, {}, phase, limit, deadline, len(self._dead), who)

    def _pass(
        self,
        pending: dict[ray.ObjectRef, None],
        names: dict[ray.ObjectRef, str],
        phase: str,
        limit: Deadline,
        deadline: float,
        dead_before: int,
        who: str = "",
    ) -> None:
        """Heed what comes within a second; who has answered, or died, is ``pending`` no more."""
        self._looked = now = time.monotonic()
        if phase != self._phase:
            self._phase, self._phase_began = phase, now
        left = deadline - now
        if left <= 0:
            silent = [names[ref] for ref in pending] or [who]
            message = f"{phase}: no answer within {limit} from {', '.join(silent)} (weight version {self.version})"
            raise LostError(message, silent, phase)
        self._do_chores(phase)
        others = [ref for ref in self._background if ref not in names]
        _check_ray(phase)
        # As many as are asked: for one after the other, as many waits would each look at all actors of the run. Where
        # several are, an end, or a failure of one, is thus heeded a poll later at most.
        for ref in _ready([*pending, *self._watches, *others], max(1, len(pending)), min(left, _POLL_S)):
            known = len(self._dead)
            if ref in self._watches:
                self._mark_dead(ref, phase)
            elif ref in pending or ref in self._background:
                pending.pop(ref, None)
                who, its_phase = self._background.pop(ref, (names.get(ref, ""), phase))
                if who not in self._dead and (error := _error_of(ref)):
                    self._raise_root_cause(error, who, its_phase, 0.0 if known > dead_before else _grace_of(error))
            if len(self._dead) > known:  # also those found as a root cause: no answer of theirs counts
                for lost in [ref for ref in pending if names[ref] in self._dead]:
                    del pending[lost]
            if names and not pending:
                break  # what else is ready is the next wait's

    def _do_chores(self, phase: str) -> None:
        if self._at_chores:  # of a wait within a chore
            return
        self._at_chores = True
        try:
            for chore in self._chores:
                chore(phase)
        finally:
            self._at_chores = False

    def _mark_dead(self, watch: ray.ObjectRef, phase: str) -> None:
        name, on_death = self._watches[watch]
        failure = self._failure(_error_of(watch), name, phase)
        if on_death is None:
            raise failure
        on_death(phase, failure)
        del self._watches[watch]
        self._dead.add(name)

    def _raise_root_cause(self, error: RayError, who: str, phase: str, grace: float) -> None:
        """Raise what a call failed of, unless that is the death of ``who``, which the run survives."""
        # A call often fails because somebody else died; the death explains more than the broken connection.
        dead, _ = ray.wait(list(self._watches), num_returns=1, timeout=grace) if self._watches else ([], [])
        for watch in dead:
            self._mark_dead(watch, phase)
        if who not in self._dead:
            raise self._failure(error, who, phase)

    def _failure(self, error: RayError | None, who: str, phase: str) -> RunError:
        if error is None:
            return RunError(f"{phase}: {who} ended its watch without a failure")
        version = f"(weight version {self.version})"
        if isinstance(error, RayTaskError):
            if phase in _READS_INPUT and isinstance(error.cause, BadInputError):
                # One manager reads the data; what ranks read may be there on other hosts.
                of_one = f"{who}: " if phase == START_TRAINERS else ""
                return InputError(f"{phase}: {of_one}{_reason(error)}")
            message = f"{phase}: {who} failed {version}: {_reason(error)}"
            if _is_broken_connection(error.cause):
                return LostError(message, [who], phase)
            of_user, hangs = (isinstance(error.cause, kinds) for kinds in (BadInputError | HookError, HangError))
            return CallError(message, is_of_user=of_user, hangs=hangs)
        _check_ray(phase, _RAY_GRACE_S)
        if isinstance(error, (RayActorError, OutOfMemoryError)):
            message = f"{phase}: {why_it_died(error, who)} {version}"
            return RunError(message) if _has_left(error) else LostError(message, [who], phase)
        return RunError(f"{phase}: Ray could not run {who} {version}: {' '.join(str(error).split())}")


def _ready(refs: list[ray.ObjectRef], least: int, seconds: float) -> list[ray.ObjectRef]:
    """All that are there when so many are, or when the time is up."""
    first, _ = ray.wait(refs, num_returns=least, timeout=seconds)
    if not first or len(refs) == 1:
        return list(first)
    every, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
    return list(every) or list(first)


def _check_ray(phase: str, grace: float = 0.0) -> None:
    """Raise RayDownError if our own Ray has died, or is about to be seen to have."""
    deadline = time.monotonic() + grace
    while True:
        if why := ray_failure():
            raise RayDownError(f"{phase}: {why}")
        if time.monotonic() >= deadline:
            return
        time.sleep(_RAY_POLL_S)


def _grace_of(error: RayError) -> float:
    cause = getattr(error, "cause", None)
    if isinstance(cause, BadInputError):
        return 0.0  # nobody who dies after it explains a bad row
    return _ENGINE_GRACE_S if isinstance(cause, EngineError) else _GRACE_S


def _error_of(ref: ray.ObjectRef) -> RayError | None:
    try:
        _get(ref)
    except RayError as error:
        return error
    return None


def _get(ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref, timeout=60)
    except GetTimeoutError:
        raise RunError("an answer that Ray called ready could not be fetched within 60 s") from None


def _reason(error: RayTaskError) -> str:
    """The message of an error that tells all by itself; the end of the remote traceback of any other."""
    if isinstance(error.cause, SlimeError):
        return str(error.cause)
    if isinstance(error.cause, (ObjectStoreFullError, OutOfDiskError)):
        text = " ".join(str(error.cause).split())
        return f"Ray has no room for an object, in memory or in RAY_TMPDIR (or TMPDIR, else /tmp): {text}"
    lines = str(error).rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    return "\n" + "\n".join(lines[frames[-_FRAMES] if len(frames) > _FRAMES else 0 :])
