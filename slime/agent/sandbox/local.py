"""A sandbox on this host: namespaces of its own around the host's programs, or, if asked for, plain processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from slime.agent.sandbox.inside.cgroup import PARENT as CGROUP_PARENT
from slime.agent.sandbox.inside.start import remove_directory
from slime.agent.sandbox.pipes import Reader, feed
from slime.agent.sandbox.protocol import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ExecResult,
    FileContent,
    SandboxError,
    checked,
    writing,
)
from slime.processes import kernel

logger = logging.getLogger(__name__)

INSIDE = Path(__file__).with_name("inside")
_MARK = "SLIME_SANDBOX_ID"
_DIRECTORY = "/tmp/slime-sandbox-"
"""Not where the environment has temporary files: the way there must be open to the users that root makes it of."""
_PLAIN_IDS = 0x71000000
"""Where root runs plain processes: from here on, ids of the host that no account has, one a sandbox."""
_START_S = 60.0
_END_S = 30.0
_FILE_S = 600.0
_LARGEST_FILE = 64 << 20
_PACKET = 1 << 16
_LARGEST_COMMAND = 120_000


@dataclass(frozen=True)
class SandboxLimits:
    """What all programs of one sandbox may take together, unless another thing is said."""

    memory_mb: int = 2048
    """Of all programs together, files of the sandbox not included."""
    address_space_mb: int | None = None
    """Of one program; None is ``memory_mb``, 0 none. Node and Go reserve far more than they use: give them 0."""
    processes: int = 128
    """Processes and threads of one user."""
    disk_mb: int = 1024
    """Files; in a jail they are in memory."""
    open_files: int = 1024
    """Of one program."""
    output_mb: int = 8
    """Of one command, each of standard output and error; what is beyond is dropped."""
    lifetime_s: float = 3600.0
    """After which the sandbox ends."""


class LocalSandbox:
    """Programs of this host in a jail: its files read-only, an own /tmp, /home, /workspace, /opt, no network.

    Args:
        limits: what it may take.
        reach: the one address that programs can connect to, as a URL or ``host:port``; the same inside.
        read_only: further paths of the host that programs see.
        jail: False asks for plain processes with limits, where the host forbids namespaces: they are protected from
            neither the network nor other files; ``root`` is then the directory that stands for ``/``.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        reach: str | None = None,
        read_only: Sequence[str | Path] = (),
        jail: bool = True,
    ) -> None:
        self.sandbox_id = f"local-{secrets.token_hex(6)}"
        self.root = ""
        self._directory = f"{_DIRECTORY}{self.sandbox_id}"
        self.single_user = False
        self._limits = limits or SandboxLimits()
        self._reach = _address(reach) if reach else None
        self._read_only = [str(Path(path).absolute()) for path in read_only]
        self._jail = jail
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._commands: dict[int, asyncio.Future[int]] = {}
        self._count = 0
        self._ended_by = ""
        self._exceeded = ""
        self._lifetime: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        """Start it.

        Raises:
            SandboxError: the host does not permit it; the message says what.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._control = ours
        loop.add_reader(ours, self._hear)
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(INSIDE), "start", json.dumps(self._settings(theirs.fileno()))),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    cwd="/",
                    env=self._environment(),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            async with asyncio.timeout(_START_S):
                told = await self._ready
        except BaseException as error:
            await self._end()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the sandbox was not ready within {_START_S:g} s") from error
            if not isinstance(error, (SandboxError, OSError)):
                raise
            hint = "; where the host forbids namespaces, jail=False runs plain processes: docs/agents.md says what is"
            raise SandboxError(
                f"the sandbox did not start: {error}{f'{hint} open then' if self._jail else ''}"
            ) from None
        self.root, self.single_user = told["root"], told["single_user"]
        self._lifetime = loop.call_later(self._limits.lifetime_s, self._outlived)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """As `Sandbox.exec`; processes that it leaves in the background go on until the sandbox ends."""
        if len(cmd.encode(errors="replace")) > _LARGEST_COMMAND:
            raise SandboxError(f"a command of {len(cmd)} characters is too long for a shell: write it to a file")
        result = await self._run(["/bin/bash", "-c", cmd], user, env or {}, timeout, None, self._limits.output_mb << 20)
        return checked(result, cmd, self.sandbox_id, check)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        """As `Sandbox.write_file`."""
        script = writing(self._inside(path))
        code, _, err = await self._run(["/bin/bash", "-c", script], user, {}, _FILE_S, content, _PACKET)
        if code != 0:
            raise SandboxError(f"sandbox {self.sandbox_id}: {path} could not be written: {err.strip()[-300:]}")

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """As `Sandbox.read_file`; 64 MiB at most."""
        script = 'test -e "$1" || exit 66; cat -- "$1"'
        command = ["/bin/bash", "-c", script, "read", self._inside(path)]
        code, out, err = await self._run(command, user, {}, _FILE_S, None, _LARGEST_FILE)
        if code not in (0, 66) or "[cut:" in err[-40:]:
            raise SandboxError(f"sandbox {self.sandbox_id}: {path} could not be read: {err.strip()[-300:]}")
        return out

    def _inside(self, path: str) -> str:
        if not path.startswith(f"{self.root}/"):
            raise SandboxError(f"{path} is no absolute path in the sandbox: it must start with {self.root}/")
        return path

    def _settings(self, control: int) -> dict[str, Any]:
        limits = self._limits
        space = limits.memory_mb if limits.address_space_mb is None else limits.address_space_mb
        numbers = {name: getattr(limits, name) for name in ("memory_mb", "disk_mb", "processes")}
        return {
            **{"control": control, "owner": os.getpid(), "jail": self._jail, "id": self.sandbox_id, "mark": _MARK},
            **{"reach": self._reach, "read_only": self._read_only, "files": limits.open_files},
            **{"directory": self._directory, "address_space": space << 20 or None, "python": f"{sys.base_prefix}/bin"},
            **{"plain_id": _PLAIN_IDS + secrets.randbelow(1 << 24), **numbers},
        }

    def _environment(self) -> dict[str, str]:
        """Nothing of the run's: no key can be read where none is."""
        own = {"LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", _MARK: self.sandbox_id}
        return own | {name: os.environ[name] for name in (CGROUP_PARENT,) if name in os.environ}

    async def _run(
        self,
        argv: list[str],
        user: str,
        env: Mapping[str, str],
        timeout: float,
        content: FileContent | None,
        output_bytes: int,
    ) -> ExecResult:
        """A program's end, with what it printed; cancelling the call kills it."""
        self._count += 1
        number = self._count
        if not self._commands:
            self._exceeded = ""  # of those that ran then
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        self._commands[number] = ended
        cwd = f"{self.root}/workspace" if self.root else ""
        message = {"run": number, "argv": argv, "user": user, "env": dict(env), "cwd": cwd}
        late = False
        async with contextlib.AsyncExitStack() as stack:
            out, err = Reader(loop, output_bytes), Reader(loop, output_bytes)
            stack.callback(out.close)
            stack.callback(err.close)
            stdin = await stack.enter_async_context(feed(content))
            stack.callback(self._commands.pop, number, None)
            await self._send(message, [stdin, out.theirs, err.theirs])
            out.start()
            err.start()
            try:
                async with asyncio.timeout(timeout):
                    status = await asyncio.shield(ended)
            except TimeoutError:
                late, status = True, EXIT_TIME_BUDGET_EXCEEDED
                await self._kill(number, ended)
            except asyncio.CancelledError:
                await self._kill(number, ended)
                raise
            text, error_text = out.text(), err.text()
            if out.cut or err.cut:
                error_text += f"\n[cut: more than {output_bytes} bytes]"
        if late:
            error_text += f"\n[ended: it ran longer than {timeout:g} s]"
        elif status == 128 + signal.SIGKILL and self._exceeded:
            error_text += f"\n[ended: the sandbox's programs took more than {self._told_limit()}]"
        return status, text, error_text

    def _told_limit(self) -> str:
        limits = self._limits
        return {"memory": f"{limits.memory_mb} MB of memory", "disk": f"{limits.disk_mb} MB of files"}.get(
            self._exceeded, f"{limits.processes} processes"
        )

    async def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if self._control is None:
            raise SandboxError(f"sandbox {self.sandbox_id} {self._ended_by or 'is not open'}")
        data = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
        while True:
            try:
                socket.send_fds(self._control, [data], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError as error:
                why = self._ended_by or "has ended"
                if error.errno == errno.EMSGSIZE:
                    why = f"takes no command and variables of {len(data)} bytes: write them to a file"
                raise SandboxError(f"sandbox {self.sandbox_id} {why}: {error}") from error

    async def _kill(self, number: int, ended: asyncio.Future[int]) -> None:
        with contextlib.suppress(SandboxError, TimeoutError):
            await self._send({"kill": number}, [])
            async with asyncio.timeout(_END_S):
                await asyncio.shield(ended)

    def _hear(self) -> None:
        """What the sandbox's first process tells; an empty packet is its end."""
        assert self._control is not None
        try:
            data = self._control.recv(_PACKET)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(self._ended_by or "has ended")
            return
        message = json.loads(data)
        if "ended" in message:
            if (command := self._commands.get(message["ended"])) is not None and not command.done():
                command.set_result(message["status"])
        elif "exceeded" in message:
            self._exceeded = message["exceeded"]
            logger.warning(
                "sandbox %s: all programs ended, they took more than %s", self.sandbox_id, self._told_limit()
            )
        elif self._ready is not None and not self._ready.done():
            if "failed" in message:
                self._ready.set_exception(SandboxError(message["failed"]))
            else:
                self._ready.set_result(message["ready"])

    def _lost(self, why: str) -> None:
        """Nobody answers any more: who waits is told."""
        self._ended_by = why
        self._hang_up()
        error = SandboxError(f"sandbox {self.sandbox_id} {why}")
        waits: list[asyncio.Future[Any]] = [*self._commands.values()]
        for waiting in [*waits, self._ready]:
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # told to whoever waits; where nobody does, it is no news

    def _hang_up(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    def _outlived(self) -> None:
        self._lost(f"was ended after its {self._limits.lifetime_s:g} s")
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _end(self) -> None:
        """All of it is gone, by id, when this returns."""
        if self._lifetime is not None:
            self._lifetime.cancel()
        self._lost(self._ended_by or "was closed")
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            logger.warning("sandbox %s has not ended within %g s: killed", self.sandbox_id, _END_S)
            process.kill()
            with contextlib.suppress(TimeoutError):  # it waits for the disk, or the like
                await asyncio.wait_for(process.wait(), _END_S)
        if not self._jail:  # a jail's processes end with its first one, whatever happens to the others
            mark = f"{_MARK}={self.sandbox_id}"
            await asyncio.to_thread(kernel.kill_all, lambda: _marked(mark), _END_S)
        if os.path.lexists(self._directory):  # who was to remove it was killed
            await asyncio.to_thread(remove_directory, self._directory)


def _marked(mark: str) -> list[kernel.Process]:
    return [process for process in kernel.running().values() if kernel.is_marked(process.pid, mark)]


def _address(reach: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ValueError: they are not both there, or the host is an IPv6 address.
    """
    parts = urlsplit(reach if "//" in reach else f"//{reach}")
    if not parts.hostname or ":" in parts.hostname:
        raise ValueError(f"reach={reach!r} must be a URL or host:port, the host a name or an IPv4 address")
    if parts.port is None and parts.scheme not in ("http", "https"):
        raise ValueError(f"reach={reach!r} has no port")
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
