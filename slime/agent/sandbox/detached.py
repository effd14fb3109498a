"""Commands that take minutes: started detached, their end told by a file that short calls ask for.

No call to a sandbox service lasts as long as the command, so a connection that is cut costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shlex
import time
from collections.abc import Mapping

from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, Sandbox, place

logger = logging.getLogger(__name__)

_FIRST_POLL_S, _LAST_POLL_S = 0.1, 5.0
_CALL_S = 30
_END_CALL_S = 60
_OUTPUT_BYTES = 1 << 16
_TAG = re.compile(r"[\w.-]+", re.ASCII)


async def exec_and_wait(
    sb: Sandbox,
    *,
    cmd: str,
    time_budget_sec: float,
    tag: str,
    user: str = "root",
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Run a shell command for as long as it takes, ``time_budget_sec`` seconds at most, and end all of it then.

    Args:
        tag: names its files, ``/tmp/.TAG.sh`` and others; one command at a time may have it. Letters, digits, dots,
            underscores and hyphens.
        out_file: where its standard output and error go.
        want_output: give the last 64 KiB of these back, else an empty string.

    Returns:
        Its exit status, `EXIT_TIME_BUDGET_EXCEEDED` where it was ended, and the output.

    Raises:
        SandboxError: the sandbox failed.
        ValueError: the tag can be no part of a file's name.
    """
    if not _TAG.fullmatch(tag):
        raise ValueError(f"tag must be letters, digits, dots, underscores and hyphens, not {tag!r:.80}")
    base = place(sb, f"/tmp/.{tag}")
    launcher, done, pid, lock = (f"{base}.{kind}" for kind in ("sh", "done", "pid", "lock"))
    out = out_file or f"{base}.out"
    # Not behind the guard below: the files of an earlier command with this tag must go, or its end is taken for ours.
    await sb.exec(f"rm -rf {lock}; rm -f {done} {pid} {launcher} {base}.out", user="root", timeout=_CALL_S)
    await sb.write_file(launcher, _script(cmd, workdir, done), user=user)
    # The guard makes sending this twice harmless. Only with the id written can the command be ended.
    run = f'setsid bash -c \'echo $$ > "$1" && exec bash "$2"\' _ {pid} {launcher}'
    spawn = (
        f"mkdir {lock} 2>/dev/null || exit 0; {run} < /dev/null > {shlex.quote(out)} 2>&1 & "
        f"for i in $(seq 100); do test -s {pid} && exit 0; sleep 0.1; done; exit 1"
    )
    try:
        await sb.exec(spawn, user=user, env=env, timeout=_CALL_S, check=True)
        code = await _end_of(sb, done, user, time.monotonic() + time_budget_sec)
    except asyncio.CancelledError:
        await _end(sb, pid, user, "cancellation")
        raise
    if code is None:
        await _end(sb, pid, user, "timeout")
        code = EXIT_TIME_BUDGET_EXCEEDED
    if not want_output:
        return code, ""
    _, text, _ = await sb.exec(f"tail -c {_OUTPUT_BYTES} {shlex.quote(out)}", user=user, timeout=_CALL_S)
    return code, text


def _script(cmd: str, workdir: str | None, done: str) -> str:
    """The command in a subshell, which it may leave as it likes; the mark of its end appears whole or not at all."""
    go = f"cd {shlex.quote(workdir)} || {{ echo 125 > {done}; exit; }}\n" if workdir else ""
    return f"{go}(\n{cmd}\n)\necho $? > {done}.tmp\nmv {done}.tmp {done}\n"


async def _end_of(sb: Sandbox, done: str, user: str, deadline: float) -> int | None:
    """The exit status when there is one, None at the deadline. Short commands are asked for often, long ones seldom."""
    pause = _FIRST_POLL_S
    while (left := deadline - time.monotonic()) > 0:
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LAST_POLL_S)
        code, text, _ = await sb.exec(f"test -f {done} && cat {done}", user=user, timeout=_CALL_S)
        if code == 0 and text.strip():
            return int(text)
    return None


async def _end(sb: Sandbox, pid: str, user: str, why: str) -> None:
    """End the command's whole process group, also while its start is still on its way."""
    script = (
        f"for i in $(seq 50); do test -s {pid} && break; sleep 0.1; done; pid=$(cat {pid} 2>/dev/null); "
        'test -n "$pid" || exit 0; kill -TERM -- -"$pid" 2>/dev/null; '
        'for i in $(seq 20); do kill -0 -- -"$pid" 2>/dev/null || exit 0; sleep 0.1; done; '
        'kill -KILL -- -"$pid" 2>/dev/null; exit 0'
    )
    ending = asyncio.ensure_future(sb.exec(script, user=user, timeout=_END_CALL_S))
    try:
        # A second cancellation must not leave the command running.
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await ending
        raise
    except Exception as error:  # of whatever package the sandbox is made with
        logger.warning("sandbox %s: process-group cleanup after %s failed: %s", sb.sandbox_id, why, error)


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """Have an unprivileged user ``agent`` that owns ``workdir``, and let any user run git there.

    Raises:
        SandboxError: the image can have no such user.
    """
    there = shlex.quote(workdir)
    if getattr(sb, "root", ""):  # no root and no users of its own
        await sb.exec(f"mkdir -p {there}", check=True, timeout=_CALL_S)
        return
    await sb.exec(
        f"mkdir -p {there} && {{ id agent >/dev/null 2>&1 || useradd -m -s /bin/bash agent; }} && "
        f"chown -R agent:agent /home/agent {there} && "
        "{ ! command -v git >/dev/null || git config --system --add safe.directory '*'; } && id agent",
        user="root",
        check=True,
        timeout=_END_CALL_S,
    )
