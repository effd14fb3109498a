"""Sandboxes of E2B, or of a service that speaks its protocol (package e2b, key E2B_API_KEY)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, ExecResult, SandboxError, needed, setting
from slime.agent.sandbox.service import ServiceSandbox

_FILE_S = 600


class E2BSandbox(ServiceSandbox):
    """A sandbox of the template ``image``; with an image key, of the default template, ``{key: image}`` its metadata.

    Args:
        timeout: seconds that it lives, as ``lifetime_sec``; upstream's name.
        metadata: what a gateway routes by; SLIME_AGENT_SANDBOX_METADATA_FILE, or SLIME_AGENT_SANDBOX_METADATA_JSON.
        image_metadata_key: SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY.
    """

    kind = "e2b"
    # The last is what envd's proxy answers with when it cannot be asked; those below it have names of their own.
    transient = frozenset({"SandboxUnreachableException", "RateLimitException", "ServiceBusyException"})

    def __init__(
        self,
        image: str,
        *,
        timeout: int | None = None,
        metadata: dict[str, str] | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
    ) -> None:
        super().__init__(image, lifetime_sec=timeout, rpc_retries=rpc_retries)
        self.metadata = _metadata() if metadata is None else dict(metadata)
        self.image_metadata_key = image_metadata_key or setting(
            "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "SWE_SANDBOX_IMAGE_METADATA_KEY"
        )
        self._box: Any = None

    def _is_transient(self, error: BaseException) -> bool:
        # Its errors of no class of their own are those of the way there, too.
        if type(error).__name__ == "SandboxException":
            return not any(word in str(error) for word in ("does not exist", "STOPPED state"))
        return super()._is_transient(error)

    async def _start(self) -> str:
        e2b = needed("e2b", "e2b")
        if not os.environ.get("E2B_API_KEY"):
            raise SandboxError("e2b: E2B_API_KEY is not set")
        template = None if self.image_metadata_key else self.image
        metadata = dict(self.metadata)
        if self.image_metadata_key:
            metadata.setdefault(self.image_metadata_key, self.image)
        self._box = await e2b.AsyncSandbox.create(template=template, timeout=self.lifetime_sec, metadata=metadata)
        return str(self._box.sandbox_id)

    async def _stop(self) -> None:
        if self._box is not None:
            await self._box.kill()

    async def _exec(self, cmd: str, user: str, env: dict[str, str], timeout: float) -> ExecResult:
        e2b = needed("e2b", "e2b")
        try:
            done = await self._box.commands.run(cmd, user=user, envs=env, timeout=timeout)
        except e2b.CommandExitException as ended:
            done = ended
        except e2b.TimeoutException as error:
            if type(error) is not e2b.TimeoutException:  # a sandbox that is gone, or cannot be reached
                raise
            return EXIT_TIME_BUDGET_EXCEEDED, "", f"[ended: it ran longer than {timeout:g} s]"
        return done.exit_code, done.stdout or "", done.stderr or ""

    async def _write(self, path: str, content: bytes | Path, user: str) -> None:
        options = {"user": user, "use_octet_stream": True, "request_timeout": _FILE_S}
        if isinstance(content, bytes):
            await self._box.files.write(path, content, **options)
            return
        with content.open("rb") as file:
            await self._box.files.write(path, file, **options)

    async def _read(self, path: str, user: str) -> bytes | None:
        e2b = needed("e2b", "e2b")
        try:
            return bytes(await self._box.files.read(path, format="bytes", user=user))
        except e2b.FileNotFoundException:
            return None


def _metadata() -> dict[str, str]:
    """Of the environment.

    Raises:
        SandboxError: what it names cannot be read, or is no JSON object.
    """
    path = setting("SLIME_AGENT_SANDBOX_METADATA_FILE", "SWE_SANDBOX_METADATA_FILE")
    source = path or "SLIME_AGENT_SANDBOX_METADATA_JSON"
    try:
        default = setting("SLIME_AGENT_SANDBOX_METADATA_JSON", "SWE_SANDBOX_METADATA_JSON", default="{}")
        found = json.loads(Path(path).read_text() if path else default)
    except (OSError, ValueError) as error:
        raise SandboxError(f"e2b: the metadata of {source}: {error}") from error
    if not isinstance(found, dict):
        raise SandboxError(f"e2b: the metadata of {source} must be a JSON object")
    return {str(name): str(value) for name, value in found.items()}
