"""Long commands over calls that fail, users, and the pool: against a sandbox whose calls are a shell of this host."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import pytest

from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ExecResult,
    FileContent,
    LocalSandbox,
    Sandbox,
    SandboxError,
    SandboxPool,
    ensure_agent_user,
    exec_and_wait,
)
from slime.agent.sandbox.protocol import as_written, needed, setting
from slime.processes import kernel
from tests.waiting import wait_for

NUM_GPUS = 0


class Shell:
    """Calls are commands of this host, below a directory; each spawn is sent ``times`` times, as a service's client may
    that does not know whether its first call arrived."""

    sandbox_id = "shell"

    def __init__(self, root: Path, times: int = 1) -> None:
        self.root = str(root)
        self.times = times
        self.sent: list[str] = []
        self.fails: dict[str, Exception] = {}
        (root / "tmp").mkdir()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

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
        self.sent.append(cmd)
        for word, error in self.fails.items():
            if word in cmd:
                raise error
        result: tuple[int, str, str] = (0, "", "")
        for _ in range(self.times if "setsid" in cmd else 1):
            process = await asyncio.create_subprocess_exec(
                *("bash", "-c", cmd),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": "/usr/bin:/bin", **(env or {})},
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(), timeout)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.communicate()
            result = process.returncode or 0, out.decode(), err.decode()
        return result

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        assert isinstance(content, str)
        Path(path).write_text(content)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        return Path(path).read_text()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def wait(sandbox: Shell, cmd: str, seconds: float = 60.0, **more: Any) -> tuple[int, str]:
    return asyncio.run(exec_and_wait(sandbox, cmd=cmd, time_budget_sec=seconds, tag="job", want_output=True, **more))


def test_they_are_sandboxes(shell: Shell) -> None:
    assert isinstance(shell, Sandbox)
    assert isinstance(LocalSandbox(), Sandbox)


@pytest.mark.parametrize(
    ("cmd", "code", "output"),
    [
        ("echo $A", 0, "1\n"),
        ("exit 3", 3, ""),
        ("echo a; false || exit 4; echo b", 4, "a\n"),
        ("cat <<'END'\nhere\nEND", 0, "here\n"),
        ("echo to stderr >&2 # and a comment", 0, "to stderr\n"),
        ("cd /tmp; read x", 1, ""),
    ],
)
def test_a_long_command(shell: Shell, cmd: str, code: int, output: str) -> None:
    assert wait(shell, cmd, env={"A": "1"}, workdir=shell.root) == (code, output)


@pytest.mark.parametrize("tag", ["", "a/b", "a b", "a;reboot"])
def test_a_tag_that_can_be_no_file_is_refused(shell: Shell, tag: str) -> None:
    """The command would not be found again, and be taken for one whose time is over."""
    with pytest.raises(ValueError, match="tag must be letters, digits, dots, underscores and hyphens, not"):
        asyncio.run(exec_and_wait(shell, cmd="true", time_budget_sec=9, tag=tag))
    assert shell.sent == []


def test_a_spawn_that_is_sent_twice_runs_once_and_a_tag_can_be_used_again(tmp_path: Path) -> None:
    """The guard must swallow the repetition of one spawn, and not the next command of that name."""
    shell = Shell(tmp_path, times=3)
    for number in (1, 2):
        assert wait(shell, f"echo x >> {tmp_path}/ran; exit {number}") == (number, "")
        assert (tmp_path / "ran").read_text() == "x\n" * number


def group_of(shell: Shell) -> int:
    return int(Path(shell.root, "tmp/.job.pid").read_text())


def alive_in(group: int) -> list[int]:
    """Processes of a group, but those that have ended and nobody asked for."""
    return [pid for pid, process in kernel.running().items() if process.session == group]


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM; "])
@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_its_time_is_over(shell: Shell, stubborn: str, seconds: float) -> None:
    code, _ = wait(shell, f"{stubborn}sleep 30 & sleep 30; sleep 30", seconds)
    assert code == EXIT_TIME_BUDGET_EXCEEDED
    wait_for(lambda: not alive_in(group_of(shell)), "the end of the whole group")


def test_it_is_cancelled(shell: Shell) -> None:
    async def run() -> None:
        task = asyncio.create_task(exec_and_wait(shell, cmd="sleep 30", time_budget_sec=60, tag="job"))
        await asyncio.to_thread(wait_for, Path(shell.root, "tmp/.job.pid").exists, "its start")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    wait_for(lambda: not alive_in(group_of(shell)), "the end of a cancelled command")


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_cleanup_that_fails_hides_nothing(shell: Shell, cancelled: bool, caplog: pytest.LogCaptureFixture) -> None:
    shell.fails = {"kill -TERM": RuntimeError("the line is cut")}

    async def run() -> None:
        work = exec_and_wait(shell, cmd="sleep 5", time_budget_sec=20 if cancelled else 0, tag="job")
        task = asyncio.create_task(work)
        if not cancelled:
            assert await task == (EXIT_TIME_BUDGET_EXCEEDED, "")
            return
        await asyncio.to_thread(wait_for, Path(shell.root, "tmp/.job.pid").exists, "its start")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    why = "cancellation" if cancelled else "timeout"
    assert f"sandbox shell: process-group cleanup after {why} failed: the line is cut" in caplog.text


def test_polling_gets_slower(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    assert wait(shell, "sleep 2")[0] == 0
    assert time.monotonic() - started < 30
    assert sum("test -f" in cmd for cmd in shell.sent) <= 7


def test_the_agents_user(shell: Shell, tmp_path: Path) -> None:
    """Of a machine: made where it is missing, the owner of the work. A sandbox without a root of its own has none."""
    asyncio.run(ensure_agent_user(shell, f"{tmp_path}/new"))
    assert (tmp_path / "new").is_dir()
    shell.root = ""
    shell.fails = {"useradd": SandboxError("not here")}
    with pytest.raises(SandboxError, match="not here"):
        asyncio.run(ensure_agent_user(shell, "/work of mine"))
    assert "chown -R agent:agent /home/agent '/work of mine'" in shell.sent[-1]
    assert "git config --system --add safe.directory '*'" in shell.sent[-1]


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD", "2")
    monkeypatch.setenv("EMPTY", " ")
    assert [setting("EMPTY", "OLD", default="3"), setting("EMPTY", default="3"), setting("NONE")] == ["2", "3", ""]


def test_what_no_file_can_hold_is_said_in_words() -> None:
    with pytest.raises(TypeError, match="a file holds text, bytes, or what a Path of this host does, not 5"):
        as_written(cast("str", 5))


def test_a_package_that_is_missing() -> None:
    assert needed("json", "any") is sys.modules["json"]
    with pytest.raises(SandboxError, match=r"needs the package some-cloud: pip install some-cloud"):
        needed("no_such_module_here", "some-cloud")


# The pool


class Counted:
    """Notes how many are open."""

    open, most, made, closed = 0, 0, 0, 0

    def __init__(self, fails: int = 0, slow: float = 0.0, close_fails: bool = False) -> None:
        self.sandbox_id = f"counted-{type(self).made}"
        type(self).made += 1
        self.fails = type(self).made <= fails
        self.slow = slow
        self.close_fails = close_fails

    async def __aenter__(self) -> Self:
        type(self).open += 1
        type(self).most = max(type(self).most, type(self).open)
        await asyncio.sleep(self.slow)
        if self.fails:
            raise OSError("no machine")
        return self

    async def __aexit__(self, *_: object) -> None:
        type(self).open -= 1
        type(self).closed += 1
        await asyncio.sleep(0)
        if self.close_fails:
            raise OSError("not closed")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("slime.agent.sandbox.pool._FIRST_PAUSE_S", 0.0)
    return type("Counted", (Counted,), {})


def test_no_more_at_a_time_than_the_limit(counted: Any) -> None:
    async def run() -> None:
        async with SandboxPool(counted, limit=3) as pool:

            async def one() -> None:
                async with pool.sandbox():
                    await asyncio.sleep(0.01)

            await asyncio.gather(*(one() for _ in range(10)))

    asyncio.run(run())
    assert (counted.most, counted.made, counted.closed, counted.open) == (3, 10, 10, 0)


@pytest.mark.parametrize(("fails", "retries", "opened"), [(0, 0, True), (2, 2, True), (3, 2, False), (1, 0, False)])
def test_boots_are_tried_again(counted: Any, fails: int, retries: int, opened: bool) -> None:
    async def run() -> bool:
        pool = SandboxPool(counted, limit=1, boot_retries=retries)
        async with pool.sandbox(fails=fails):
            return True

    if opened:
        assert asyncio.run(run())
    else:
        with pytest.raises(SandboxError, match=f"^no sandbox after {retries + 1} boots: no machine$"):
            asyncio.run(run())
    assert counted.made == min(fails, retries) + 1
    assert counted.open == 0, "those whose boot failed are closed, too"


def test_a_boot_that_takes_too_long(counted: Any) -> None:
    async def run() -> None:
        pool = SandboxPool(counted, limit=1, boot_retries=0, boot_timeout_s=0.05)
        with pytest.raises(SandboxError, match=r"not within 0.05 s"):
            async with pool.sandbox(slow=100):
                pass

    asyncio.run(run())
    assert counted.open == 0


@pytest.mark.parametrize("during", ["boot", "use"])
def test_cancelling_closes(counted: Any, during: str) -> None:
    async def run() -> None:
        async def one() -> None:
            async with pool.sandbox(slow=100 if during == "boot" else 0):
                await asyncio.sleep(100)

        pool = SandboxPool(counted, limit=1)
        task = asyncio.create_task(one())
        while counted.open == 0:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counted.open == 0
        async with pool.sandbox():
            pass  # its place is free

    asyncio.run(run())


def test_cancelling_twice_closes_too(counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a deadline and the rollout's end come together."""
    closing, closed = asyncio.Event(), []

    async def close(sandbox: Counted, *_: object) -> None:
        closing.set()
        await asyncio.sleep(0.1)
        closed.append(sandbox)

    async def run() -> None:
        async def one() -> None:
            async with SandboxPool(counted, limit=1) as pool, pool.sandbox():
                await asyncio.sleep(100)

        task = asyncio.create_task(one())
        while counted.open == 0:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait_for(closing.wait(), 60)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(closed) == 1

    monkeypatch.setattr(counted, "__aexit__", close)
    asyncio.run(run())


def test_closing_the_pool_closes_what_others_have(counted: Any) -> None:
    async def run() -> None:
        pool = SandboxPool(counted, limit=2)
        entered = [await pool.sandbox().__aenter__() for _ in range(2)]
        await pool.close()
        assert (counted.open, len(entered)) == (0, 2)

    asyncio.run(run())

    async def closed() -> None:
        pool = SandboxPool(counted, limit=1)
        await pool.close()
        with pytest.raises(SandboxError, match="was closed"):
            async with pool.sandbox():
                pass

    asyncio.run(closed())


def test_a_close_that_fails_ends_no_run(counted: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> str:
        async with SandboxPool(counted, limit=1) as pool, pool.sandbox(close_fails=True):
            return "done"

    assert asyncio.run(run()) == "done"
    assert "sandbox counted-0 could not be closed: not closed" in caplog.text


@pytest.mark.parametrize(("limit", "retries"), [(0, 1), (1, -1)])
def test_a_pool_of_nothing(limit: int, retries: int) -> None:
    with pytest.raises(ValueError, match="at least 1 and 0"):
        SandboxPool(Counted, limit=limit, boot_retries=retries)
