"""Runs Python that a model wrote: in a process and a jail of its own, with limits of time, memory, disk, output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

from slime.agent.sandbox.inside.code import READY
from slime.agent.sandbox.inside.confine import NOBODY
from slime.agent.sandbox.inside.start import remove_directory
from slime.agent.sandbox.local import INSIDE
from slime.agent.sandbox.protocol import SandboxError

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16
_GONE_S = 60


@dataclass(frozen=True)
class Limits:
    """What one piece of code may take."""

    wall_s: float = 5.0
    cpu_s: int = 4
    memory_mb: int = 512
    disk_mb: int = 16
    output_chars: int = 2000
    jail: bool = True
    """Namespaces: no network, no files but Python's own and an empty /tmp. False is for hosts that forbid them."""


@dataclass(frozen=True)
class Result:
    """What it printed, standard output and error as they came, and whether it ended by itself and raised nothing."""

    output: str
    ok: bool


async def run_python(code: str, limits: Limits) -> Result:
    """Run a program to its end or to a limit; nothing of it is left then. Cancelling the call ends it too.

    Raises:
        SandboxError: it could not be run; the message tells what the host does not permit.
    """
    printed = bytearray()
    timed_out = False
    async with _directory() as directory, _process(limits, directory) as process:
        try:
            async with asyncio.timeout(limits.wall_s):
                ended = await _communicate(process, code, printed, len(READY) + 4 * limits.output_chars)
        except TimeoutError:
            timed_out, ended = True, False
        status = process.returncode if ended else None
    text = printed.decode(errors="replace")
    if not text.startswith(READY):
        if timed_out:
            raise SandboxError(f"the sandbox was not ready within {limits.wall_s:g} s")
        hint = "; where the host forbids namespaces, the jail can be left out: the README says what is open then"
        raise SandboxError(
            f"the sandbox did not start: {text.strip()[-500:] or f'status {status}'}{hint if limits.jail else ''}"
        )
    return Result(*_told(text.removeprefix(READY), status, timed_out, limits))


def _told(text: str, status: int | None, timed_out: bool, limits: Limits) -> tuple[str, bool]:
    """The output with what ended the program, and whether that was the program itself."""
    if len(text) > limits.output_chars or (status is None and not timed_out):
        return f"{text[: limits.output_chars]}\n[cut: more than {limits.output_chars} characters]", False
    if timed_out:
        return f"{text}\n[ended: it ran longer than {limits.wall_s:g} s]".strip(), False
    # In the jail it is a process around the program that ends with 128 and the signal's number.
    if status is not None and (number := max(-status, status - 128 if limits.jail else 0)) > 0:
        return f"{text}\n[ended by signal {number}]".strip(), False
    return text.strip(), status == 0


@contextlib.asynccontextmanager
async def _directory() -> AsyncIterator[str]:
    """An empty directory that the program may write to; in the jail it is only where the jail is mounted."""
    directory = tempfile.mkdtemp(prefix="sandbox-")
    try:
        if os.getuid() == 0:
            os.chown(directory, NOBODY, NOBODY)
        yield directory
    finally:
        await asyncio.to_thread(remove_directory, directory)


@contextlib.asynccontextmanager
async def _process(limits: Limits, directory: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The sandbox's process; at the end of the block its whole group is gone, by id."""
    settings = json.dumps(asdict(limits) | {"directory": directory, "owner": os.getpid()})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(INSIDE), "code", settings),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=directory,
        env={"PYTHONIOENCODING": "utf-8", "HOME": "/tmp", "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:  # else it is gone, its children with it, and the id may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await _gone(process)


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a killed process, and of its output: asyncio's `wait` returns only after that.

    And asyncio reads no further while much is unread: what a program printed beyond its limit must be taken here.
    """
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_GONE_S):
            while await process.stdout.read(_CHUNK):
                pass
            await process.wait()
    except TimeoutError:
        logger.warning("process %d was killed and has not ended within %d s", process.pid, _GONE_S)


async def _communicate(process: asyncio.subprocess.Process, code: str, printed: bytearray, limit: int) -> bool:
    """Hand the code over and collect what comes; True when the process has ended, False when it prints too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(code.encode(errors="replace"))
    process.stdin.close()
    while chunk := await process.stdout.read(_CHUNK):
        printed += chunk
        if len(printed) > limit:
            return False
    await process.wait()
    return True
