"""A program of `scripts/launch.sh`, run or submitted as a job, and followed to its end, however that comes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from slime.processes import kernel
from slime.utils.errors import SlimeError
from slime.utils.external_utils.own_ray import Ray, stop_job

_ENDED = re.compile(r"launch: job \S+ (succeeded|failed|stopped)\b")
_JOB = "SLIME_JOB_ID"
"""Under which id tools/submit_job.py submits a job."""
_END_S = 60.0


class JobError(SlimeError):
    """A job did not succeed; the message says why, and where its log is."""

    def __init__(self, message: str, status: str) -> None:
        """``status``: FAILED or STOPPED as Ray has it, UNKNOWN of a job that was not taken, or was lost sight of."""
        super().__init__(message)
        self.status = status


def run_job(program: str, ray: Ray, variables: Mapping[str, str]) -> str:
    """Run a program for bash whose ``launch`` submits to ``ray``, print the job's log, and wait for its end, SUCCEEDED;
    JobError if it ended otherwise, or was not taken. Where this process leaves before that, by Ctrl-C for one, the job
    is stopped. The program has our environment, and ``variables``."""
    job = f"raysubmit_{secrets.token_hex(8)}"
    log = ray.log_of(job)
    print(f"execute_train: submitting job {job}; its log: {log}", flush=True)
    try:
        status, said = run_program(program, {**variables, "RAY_ADDRESS": ray.address, _JOB: job})
    except BaseException:
        stop_job(ray, job)
        raise
    if status == 0:
        print(f"execute_train: job {job} SUCCEEDED; its log: {log}", flush=True)
        return "SUCCEEDED"
    ended = _ENDED.match(said)
    why = said.removeprefix("launch: ").removeprefix("error: ") or f"its submission ended with status {status}"
    raise JobError(f"{why}; its log: {log}", ended[1].upper() if ended else "UNKNOWN")


def run_program(program: str, variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a program for bash in a session of its own; its status, and the last line that it wrote to standard error.
    Its text is not on a command line, which others on the host can read. It ends with this process."""
    with tempfile.TemporaryFile("w+") as file:
        file.write(program)
        file.flush()
        process = subprocess.Popen(
            ["bash", f"/dev/fd/{file.fileno()}"],
            pass_fds=[file.fileno()],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=functools.partial(kernel.die_with_parent, os.getpid()),
        )
    last = ""
    try:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                last = line.strip() or last
        return process.wait(), last
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
