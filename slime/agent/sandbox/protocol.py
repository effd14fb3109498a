"""What a sandbox is to an agent's rollout: a machine to run commands on, and files to write and read there."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Protocol, Self, runtime_checkable

EXIT_TIME_BUDGET_EXCEEDED = -1
"""In place of an exit status: the command was ended as its time was over. A program's own is 0 to 255."""
ExecResult = tuple[int, str, str]
"""Exit status (of a signal 128 and its number), standard output, standard error."""
FileContent = str | bytes | Path
"""What a file is to hold; a path is a file of this host."""


class SandboxError(RuntimeError):
    """The sandbox itself failed, or a command that was to succeed did not."""


@runtime_checkable
class Sandbox(Protocol):
    """A machine of its own for one rollout, open inside of ``async with`` and gone after it."""

    sandbox_id: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

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
        """Run a shell command to its end.

        Args:
            timeout: seconds; a command that takes longer is ended, with status `EXIT_TIME_BUDGET_EXCEEDED`.
            check: raise unless the status is 0.
            idempotent: whether it may be sent again where it is unknown if it has run; False sends it once.

        Raises:
            SandboxError: the sandbox failed; with ``check``, the command did.
        """
        ...

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        """Make a file, with the directories it is in.

        Raises:
            SandboxError: it could not be written.
        """
        ...

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """What a file holds, as UTF-8; empty where there is no such file.

        Raises:
            SandboxError: it is there and could not be read.
        """
        ...


def place(sandbox: Sandbox, path: str) -> str:
    """Where an absolute path of a machine is in this sandbox: the same, but for one without a root of its own."""
    return f"{getattr(sandbox, 'root', '')}{path}"


def checked(result: ExecResult, cmd: str, sandbox_id: str, check: bool) -> ExecResult:
    """The result.

    Raises:
        SandboxError: with ``check``, where the status is not 0.
    """
    code, out, err = result
    if check and code != 0:
        how = "took too long" if code == EXIT_TIME_BUDGET_EXCEEDED else f"failed with status {code}"
        raise SandboxError(f"sandbox {sandbox_id}: {cmd[:200]!r} {how}: {(err or out).strip()[-500:]}")
    return result


def setting(*names: str, default: str = "") -> str:
    """The first variable of the environment that is not empty: slime's name, then older ones."""
    return next((value for name in names if (value := os.environ.get(name, "").strip())), default)


def needed(name: str, package: str) -> ModuleType:
    """An optional package's module.

    Raises:
        SandboxError: it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SandboxError(f"this kind of sandbox needs the package {package}: pip install {package}") from error


def as_written(content: FileContent) -> bytes | Path:
    """A file's content; TypeError for what is none."""
    if isinstance(content, str):
        return content.encode()
    if not isinstance(content, bytes | Path):
        raise TypeError(f"a file holds text, bytes, or what a Path of this host does, not {content!r:.80}")
    return content


def writing(path: str) -> str:
    """A shell command that writes its standard input to a file, and makes the directories it is in."""
    return f'mkdir -p "$(dirname {shlex.quote(path)})" && cat > {shlex.quote(path)}'
