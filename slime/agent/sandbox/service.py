"""What sandboxes of a service have in common: calls that are tried again, errors of one kind, a lifetime, an end."""

from __future__ import annotations

import asyncio
import logging
import shlex
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, TypeVar

from slime.agent.sandbox.protocol import ExecResult, FileContent, SandboxError, as_written, checked, setting

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LIFETIME_S, _RETRIES = 3600, 3
_FIRST_PAUSE_S = 1.0
_END_S = 60.0
_NETWORK_ERRORS = frozenset(
    {
        *("ProtocolError", "LocalProtocolError", "RemoteProtocolError", "WriteError", "ReadError", "ConnectError"),
        *("ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout", "SSLError", "ClientConnectionError"),
        *("ConnectionError", "ServerDisconnectedError", "StreamTerminatedError"),
    }
)
"""Names of errors of the packages' HTTP and gRPC clients, of a connection and not of what was asked."""


class ServiceSandbox(ABC):
    """A sandbox made from an image by somebody else.

    Args:
        image: the image, template or snapshot, as the service names it.
        lifetime_sec: after which the service ends it, whatever became of the run; SLIME_AGENT_SANDBOX_LIFETIME_SEC,
            or 3600.
        rpc_retries: how often a call is made at most; SLIME_AGENT_SANDBOX_RPC_RETRIES, or 3.
    """

    kind: ClassVar[str]
    transient: ClassVar[frozenset[str]] = frozenset()
    """Names of further errors after which a call is made again."""

    def __init__(self, image: str, *, lifetime_sec: int | None = None, rpc_retries: int | None = None) -> None:
        self.image = image
        self.sandbox_id = ""
        self.lifetime_sec = lifetime_sec or _number("SANDBOX_LIFETIME_SEC", _LIFETIME_S)
        self.rpc_retries = rpc_retries or _number("RPC_RETRIES", _RETRIES)

    async def __aenter__(self) -> Self:
        """Start it.

        Raises:
            SandboxError: it could not be started, or the package or the key is missing.
        """
        try:
            self.sandbox_id = await self._start()
        except SandboxError:
            raise
        except Exception as error:
            raise SandboxError(f"{self.kind}: no sandbox of {self.image!r}: {_told(error)}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await self._stop()
        except Exception as failure:
            logger.warning("sandbox %s may live on for %d s: %s", self._name, self.lifetime_sec, _told(failure))

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
        """As `Sandbox.exec`."""
        tries = self.rpc_retries if idempotent else 1
        result = await self._call(f"{cmd[:60]!r}", lambda: self._exec(cmd, user, dict(env or {}), timeout), tries)
        return checked(result, cmd, self._name, check)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        """As `Sandbox.write_file`."""
        data = as_written(content)
        await self._call(f"writing {path}", lambda: self._write(path, data, user), self.rpc_retries)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """As `Sandbox.read_file`."""
        data = await self._call(f"reading {path}", lambda: self._read(path, user), self.rpc_retries)
        return "" if data is None else data.decode(errors="replace")

    @property
    def _name(self) -> str:
        return f"{self.kind} {self.sandbox_id}".strip()

    async def _call(self, what: str, call: Callable[[], Awaitable[T]], tries: int) -> T:
        if not self.sandbox_id:
            raise SandboxError(f"{self.kind}: the sandbox of {self.image!r} is not open")
        for left in reversed(range(tries)):
            try:
                return await call()
            except SandboxError:
                raise
            except Exception as error:
                if not left or not self._is_transient(error):
                    raise SandboxError(f"sandbox {self._name}: {what}: {_told(error)}") from error
                logger.debug("sandbox %s: %s: once more after %s", self._name, what, _told(error))
            await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (tries - 1 - left))
        raise AssertionError("unreachable")

    def _is_transient(self, error: BaseException) -> bool:
        names = {each.__name__ for each in type(error).__mro__}
        return not names.isdisjoint(_NETWORK_ERRORS | self.transient)

    @abstractmethod
    async def _start(self) -> str:
        """Its id."""

    @abstractmethod
    async def _stop(self) -> None:
        """Also of one that was started in part, or not at all."""

    @abstractmethod
    async def _exec(self, cmd: str, user: str, env: dict[str, str], timeout: float) -> ExecResult: ...

    @abstractmethod
    async def _write(self, path: str, content: bytes | Path, user: str) -> None: ...

    @abstractmethod
    async def _read(self, path: str, user: str) -> bytes | None:
        """None where there is no such file."""


def by_bash(cmd: str, user: str) -> str:
    """A command line for a service that runs everything as root: bash's, as that user."""
    bash = f"bash -c {shlex.quote(cmd)}"
    if user == "root":
        return bash
    home = f'HOME="$(getent passwd {shlex.quote(user)} | cut -d: -f6)"'
    return f"runuser -u {shlex.quote(user)} -- env {home} USER={shlex.quote(user)} {bash}"


def _number(name: str, default: int) -> int:
    """A whole number of the environment, under slime's name or upstream's older one.

    Raises:
        SandboxError: it is none.
    """
    ours = name if name.startswith("SANDBOX_") else f"SANDBOX_{name}"
    text = setting(f"SLIME_AGENT_{ours}", f"SWE_{name}", default=str(default))
    if not text.isdigit() or int(text) < 1:
        raise SandboxError(f"SLIME_AGENT_{ours}={text} must be a whole number of at least 1")
    return int(text)


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
