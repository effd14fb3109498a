"""What went wrong in a run and what it did about it: a line of JSON a fault in ``events.jsonl`` of the run's directory.

A line has ``time`` (seconds since the epoch), ``role`` (the process that tells), ``kind`` (one of `KINDS`),
``subject`` ("engine 0"), ``phase`` (what the run was doing), ``version`` (of the engines' weights, a string), ``cause``
(one line), ``action`` (what was done) and ``seconds`` (from when the fault was noticed until the action was complete;
null where nothing took time). A fault that is mended later has two lines, of the same ``subject``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from slime.observability.logs import LineFile

FILE = "events.jsonl"
KINDS = {
    "engine_died": "an engine's server, or one of its processes, ended",
    "engine_hangs": "an engine did not answer, or one of its processes stood still",
    "engine_back": "an engine that was lost serves again",
    "engine_given_up": "an engine is not started again",
    "router_died": "a router ended, or hung",
    "router_back": "a router that was lost sends requests again",
    "trainer_died": "a training rank ended",
    "manager_died": "the rollout manager ended",
    "driver_died": "a driver ended with an error, or was killed; told by what had started it",
    "push_failed": "a push of weights was begun again, or not proved",
    "bad_step": "loss or gradients of an optimizer step were not finite, or far too large",
}
"""By name, what happened."""


def begin(run_dir: str, role: str) -> None:
    """Write the events that this process, ``role`` of the run, tells of from now on."""
    global _log
    _log = role, LineFile(Path(run_dir, FILE))


def add(
    kind: str,
    subject: str,
    *,
    phase: str,
    cause: str,
    action: str,
    version: str = "",
    seconds: float | None = None,
) -> None:
    """Append one line; a full disk loses it, with a warning, and no more than that. Nothing in a process of no run."""
    assert kind in KINDS, kind
    if _log is None:
        return
    role, file = _log
    line = {"time": time.time(), "role": role, "kind": kind, "subject": subject, "phase": phase, "version": version}
    line |= {"cause": "".join(cause.splitlines()[:1]), "action": action}
    line |= {"seconds": None if seconds is None else round(seconds, 3)}
    file.try_to_append(lambda: json.dumps(line) + "\n")


_log: tuple[str, LineFile] | None = None
"""This process's role, and the file, to which others append as well."""
