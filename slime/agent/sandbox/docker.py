"""Sandboxes that are containers of this host's Docker, or of a program with its command line, podman for one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, ExecResult, SandboxError, setting, writing
from slime.agent.sandbox.service import ServiceSandbox

_PULL_S, _FILE_S, _CALL_S = 1800.0, 600.0, 60.0
_LATE_S = 15.0
_NO_FILE = 66


@dataclass(frozen=True)
class ContainerLimits:
    """What a container may take."""

    memory_mb: int = 4096
    processes: int = 512
    cpus: float = 2.0
    network: str = "bridge"
    """As ``docker run --network``: ``none`` has no way to the gateway either, ``host`` has the host's own."""


class DockerSandbox(ServiceSandbox):
    """A container of ``image``, which must have bash; SLIME_AGENT_DOCKER names another program than docker.

    The gateway's host is ``host.docker.internal`` inside, so it must listen on an address that containers reach.
    """

    kind = "docker"

    def __init__(
        self,
        image: str,
        *,
        limits: ContainerLimits | None = None,
        lifetime_sec: int | None = None,
        rpc_retries: int | None = None,
    ) -> None:
        super().__init__(image, lifetime_sec=lifetime_sec, rpc_retries=rpc_retries)
        self._limits = limits or ContainerLimits()
        self._container = ""

    async def _start(self) -> str:
        self._container = f"slime-{secrets.token_hex(6)}"
        limits = self._limits
        memory = f"{limits.memory_mb}m"
        bounds = ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes)]
        bounds += ["--cpus", f"{limits.cpus:g}", "--security-opt", "no-new-privileges", "--network", limits.network]
        if limits.network not in ("none", "host"):
            bounds += ["--add-host", "host.docker.internal:host-gateway"]
        # It ends by itself after its lifetime and is removed then, though nobody be left to ask for it.
        run = ["run", "--detach", "--rm", "--init", "--name", self._container, *bounds, "--entrypoint", "sleep"]
        code, _, err = await self._docker([*run, self.image, str(self.lifetime_sec)], _PULL_S)
        if code != 0:
            told = " ".join(line for line in err.split("\n") if line and not line.startswith("Run 'docker"))
            raise SandboxError(f"docker: no sandbox of {self.image!r}: {told[-500:]}")
        return self._container

    async def _stop(self) -> None:
        if self._container:
            code, _, err = await self._docker(["rm", "--force", self._container], _CALL_S)
            if code != 0 and "No such container" not in err:
                raise SandboxError(err.strip()[-300:])

    async def _exec(self, cmd: str, user: str, env: dict[str, str], timeout: float) -> ExecResult:
        started = time.monotonic()
        # The client's end is not the command's: that is ended inside.
        script = f"exec timeout -k 5 {timeout:g} bash -c {shlex.quote(cmd)}"
        # By name, the value in the client's environment, which nobody else can read; what it needs itself, by value.
        given = [name if name not in _clients_own() else f"{name}={value}" for name, value in env.items()]
        variables = [part for each in given for part in ("--env", each)]
        line = ["exec", "--user", user, *variables, self._container, "bash", "-c", script]
        code, out, err = await self._docker(line, timeout + _LATE_S, env=env)
        if code in (124, 137) and time.monotonic() - started >= timeout:
            code = EXIT_TIME_BUDGET_EXCEEDED
        if code == EXIT_TIME_BUDGET_EXCEEDED:
            err += f"\n[ended: it ran longer than {timeout:g} s]"
        return code, out, err

    async def _write(self, path: str, content: bytes | Path, user: str) -> None:
        line = ["exec", "--interactive", "--user", user, self._container, "bash", "-c", writing(path)]
        code, _, err = await self._docker(line, _FILE_S, content=content)
        if code != 0:
            raise SandboxError(f"sandbox {self._name}: {path} could not be written: {err.strip()[-300:]}")

    async def _read(self, path: str, user: str) -> bytes | None:
        there = shlex.quote(path)
        script = f"test -e {there} || exit {_NO_FILE}; cat {there}"
        code, out, err = await self._docker(["exec", "--user", user, self._container, "bash", "-c", script], _FILE_S)
        if code not in (0, _NO_FILE):
            raise SandboxError(f"sandbox {self._name}: {path} could not be read: {err.strip()[-300:]}")
        return None if code == _NO_FILE else out.encode()

    async def _docker(
        self,
        arguments: list[str],
        timeout: float,
        *,
        env: Mapping[str, str] | None = None,
        content: bytes | Path | None = None,
    ) -> ExecResult:
        """The client's end; -1 where it took too long."""
        program = setting("SLIME_AGENT_DOCKER", default="docker")
        if (found := shutil.which(program)) is None:
            raise SandboxError(f"docker: there is no program {program!r} on PATH")
        with contextlib.ExitStack() as stack:
            source = asyncio.subprocess.DEVNULL if content is None else asyncio.subprocess.PIPE
            stdin = stack.enter_context(content.open("rb")) if isinstance(content, Path) else source
            process = await asyncio.create_subprocess_exec(
                *(found, *arguments),
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**(env or {}), **_clients_own()},
            )
            try:
                async with asyncio.timeout(timeout):
                    out, err = await process.communicate(content if isinstance(content, bytes) else None)
            except TimeoutError:
                return EXIT_TIME_BUDGET_EXCEEDED, "", f"the client did not answer within {timeout:g} s"
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.communicate()
        return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


def _clients_own() -> dict[str, str]:
    """What of this process's environment the client needs."""
    return {name: value for name, value in os.environ.items() if name in ("PATH", "HOME") or "DOCKER" in name}
