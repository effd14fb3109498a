"""Sandboxes of Daytona (package daytona, key DAYTONA_API_KEY)."""

from __future__ import annotations

import contextlib
import math
import secrets
import shlex
from pathlib import Path
from typing import Any

from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, ExecResult, SandboxError, needed
from slime.agent.sandbox.service import ServiceSandbox, by_bash

_START_S = 300


class DaytonaSandbox(ServiceSandbox):
    """A sandbox of a registry's image, or of one of Daytona's snapshots where the name has ``snapshot:`` before it."""

    kind = "daytona"
    transient = frozenset(
        {
            *("DaytonaConnectionError", "DaytonaRateLimitError", "DaytonaBadGatewayError"),
            "DaytonaServiceUnavailableError",
        }
    )

    def __init__(self, image: str, *, lifetime_sec: int | None = None, rpc_retries: int | None = None) -> None:
        super().__init__(image, lifetime_sec=lifetime_sec, rpc_retries=rpc_retries)
        self._client: Any = None
        self._box: Any = None

    async def _start(self) -> str:
        daytona = needed("daytona", "daytona")
        minutes = math.ceil(self.lifetime_sec / 60)
        # Deleted as soon as it stops, and at the latest then.
        options = {"os_user": "root", "ephemeral": True, "ttl_minutes": minutes, "auto_stop_interval": minutes}
        name, snapshot = self.image.removeprefix("snapshot:"), self.image.startswith("snapshot:")
        if snapshot:
            params = daytona.CreateSandboxFromSnapshotParams(snapshot=name, **options)
        else:
            params = daytona.CreateSandboxFromImageParams(image=name, **options)
        self._client = daytona.AsyncDaytona()
        self._box = await self._client.create(params, timeout=_START_S)
        return str(self._box.id)

    async def _stop(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self._box is not None:
                await client.delete(self._box)
        finally:
            await client.close()

    async def _exec(self, cmd: str, user: str, env: dict[str, str], timeout: float) -> ExecResult:
        # It has one text for both outputs: standard error comes after a mark that the program cannot know.
        mark, held = secrets.token_hex(16), f"/tmp/.slime-{secrets.token_hex(8)}"
        script = f"{by_bash(cmd, user)} 2> {held}; code=$?; printf %s {mark}; cat {held}; rm -f {held}; exit $code"
        try:
            line = f"bash -c {shlex.quote(script)}"
            done = await self._box.process.exec(line, env=env, timeout=max(1, math.ceil(timeout)))
        except Exception as error:
            if not _is_timeout(error):
                raise
            return EXIT_TIME_BUDGET_EXCEEDED, "", f"[ended: it ran longer than {timeout:g} s]"
        out, _, err = (done.result or "").partition(mark)
        return int(done.exit_code), out, err

    async def _write(self, path: str, content: bytes | Path, user: str) -> None:
        folder = shlex.quote(str(Path(path).parent))
        await self._checked(f"mkdir -p {folder}", user)
        await self._box.fs.upload_file(content if isinstance(content, bytes) else str(content), path)
        if user != "root":
            await self._checked(f"chown {shlex.quote(user)} {shlex.quote(path)}", "root")

    async def _checked(self, cmd: str, user: str) -> None:
        code, _, err = await self._exec(cmd, user, {}, 60)
        if code != 0:
            raise SandboxError(f"sandbox {self._name}: {cmd}: {err.strip()[-300:]}")

    async def _read(self, path: str, user: str) -> bytes | None:
        with contextlib.suppress(needed("daytona", "daytona").DaytonaNotFoundError):
            return bytes(await self._box.fs.download_file(path))
        return None


def _is_timeout(error: Exception) -> bool:
    """Of the command, and not of the way there."""
    names = {each.__name__ for each in type(error).__mro__}
    return "DaytonaTimeoutError" in names and "DaytonaConnectionError" not in names
