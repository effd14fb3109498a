"""Sandboxes of Modal (package modal, keys MODAL_TOKEN_ID and MODAL_TOKEN_SECRET)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
from pathlib import Path
from typing import Any

from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, ExecResult, SandboxError, needed, setting
from slime.agent.sandbox.service import ServiceSandbox, by_bash


class ModalSandbox(ServiceSandbox):
    """A sandbox of a registry's image, in the app SLIME_AGENT_MODAL_APP (``slime-agent``), which is made if missing."""

    kind = "modal"
    transient = frozenset({"ServiceError", "InternalError", "ResourceExhaustedError"})

    def __init__(self, image: str, *, lifetime_sec: int | None = None, rpc_retries: int | None = None) -> None:
        super().__init__(image, lifetime_sec=lifetime_sec, rpc_retries=rpc_retries)
        self._box: Any = None

    async def _start(self) -> str:
        modal = needed("modal", "modal")
        name = setting("SLIME_AGENT_MODAL_APP", default="slime-agent")
        app = await modal.App.lookup.aio(name, create_if_missing=True)
        image = modal.Image.from_registry(self.image)
        self._box = await modal.Sandbox.create.aio("sleep", "infinity", app=app, image=image, timeout=self.lifetime_sec)
        return str(self._box.object_id)

    async def _stop(self) -> None:
        if self._box is not None:
            await self._box.terminate.aio()

    async def _exec(self, cmd: str, user: str, env: dict[str, str], timeout: float) -> ExecResult:
        seconds = max(1, math.ceil(timeout))
        process = await self._box.exec.aio("bash", "-c", by_bash(cmd, user), env=env, timeout=seconds)
        out, err = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio())
        code = await process.wait.aio()
        if code == EXIT_TIME_BUDGET_EXCEEDED:  # its own number for that, too
            err += f"\n[ended: it ran longer than {timeout:g} s]"
        return int(code), out, err

    async def _write(self, path: str, content: bytes | Path, user: str) -> None:
        files = self._box.filesystem
        if isinstance(content, bytes):
            await files.write_bytes.aio(content, path)
        else:
            await files.copy_from_local.aio(str(content), path)
        if user != "root":
            code, _, err = await self._exec(f"chown {shlex.quote(user)} {shlex.quote(path)}", "root", {}, 60)
            if code != 0:
                raise SandboxError(f"sandbox {self._name}: {path}: {err.strip()[-300:]}")

    async def _read(self, path: str, user: str) -> bytes | None:
        with contextlib.suppress(needed("modal.exception", "modal").SandboxFilesystemNotFoundError):
            return bytes(await self._box.filesystem.read_bytes.aio(path))
        return None
