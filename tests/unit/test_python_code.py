"""Python that a model wrote, run by slime.agent.sandbox.python_code, against programs that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from examples.retool.tool_sandbox import PROBES, probe
from slime.agent.sandbox import SandboxError, python_code
from slime.agent.sandbox.inside.confine import REFUSED
from slime.agent.sandbox.python_code import Limits, Result, run_python
from tests.waiting import command_line

NUM_GPUS = 0
SYSTEM_PYTHON = Path("/usr/bin/python3")
SMALL = {"wall_s": 200.0, "cpu_s": 1, "memory_mb": 128, "disk_mb": 1, "output_chars": 500}

Run = Callable[..., Result]


def permitted(jail: bool) -> bool:
    try:
        return asyncio.run(run_python("", Limits(wall_s=60.0, jail=jail))).ok
    except SandboxError:
        return False


@pytest.fixture(scope="module", params=[True, False], ids=["jail", "limits only"])
def jail(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both kinds of sandbox, as far as this host permits them; one of them has to work."""
    with pytest.MonkeyPatch.context() as patch:
        # Without a jail root's programs run as nobody, who often cannot read root's Python, but the system's.
        if not permitted(request.param) and SYSTEM_PYTHON.exists():
            patch.setattr(sys, "executable", str(SYSTEM_PYTHON))
        if not permitted(request.param):
            assert permitted(not request.param), "neither kind of sandbox works here"
            pytest.skip("this host or user cannot have this kind of sandbox")
        yield bool(request.param)


@pytest.fixture
def run(jail: bool) -> Run:
    def run(code: str, **changes: float) -> Result:
        return asyncio.run(run_python(code, Limits(jail=jail, **{**SMALL, **changes})))  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize(
    ("code", "output", "ok"),
    [
        ("print(6*7)", "42", True),
        ("x = 1", "", True),
        ("import math, fractions, statistics; print(math.pi)", "3.141592653589793", True),
        ("import sys; print('a'); print('b', file=sys.stderr)", "a\nb", True),
        ("print('中文')", "中文", True),
        ("import sys; sys.exit(3)", "", False),
        ("input()", 'File "<code>", line 1, in <module>\n    input()\nEOFError: EOF when reading a line', False),
        ("1/0", "ZeroDivisionError: division by zero", False),
        ("import numpy", "No module named 'numpy'", False),
        ("def f(:", "SyntaxError: invalid syntax", False),
        ("import os; os.write(1, b'\\xff\\n')", "\ufffd", True),
        ("raise SystemExit('bye')", "bye", False),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", False),
        ("import os; os.kill(0, 2)", "[ended by signal 2]", False),
    ],
)
def test_output(run: Run, code: str, output: str, ok: bool) -> None:
    result = run(code)
    assert result.ok == ok, result
    assert result.output == output if ok else output in result.output
    assert str(Path(__file__).parents[2]) not in result.output, "no path of the host"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("while True: pass", "TimeoutError: more than 1 s of CPU time"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "ended by signal 9"),
        ("a = []\nwhile True: a.append('x' * 10**6)", "MemoryError"),
        ("bytearray(10**12)", "MemoryError"),
        ("while True: print('x' * 100)", "[cut: more than 500 characters]"),
        ("print('x' * 10**7)", "[cut: more than 500 characters]"),
        ("import os\nwhile True: os.fork()", "BlockingIOError"),
        ("import subprocess\nsubprocess.run(['/bin/ls'])", "Error"),
        ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
        ("open('big', 'wb').write(b'x' * 10**8)", "File too large"),
        ("files = [open(f'f{i}', 'w') for i in range(100)]", "Too many open files"),
        ("open('/usr/lib/sandbox-was-here', 'w')", "Error"),
        ("import os; os.abort()", "ended by signal 6"),
        ("import os; os.kill(os.getpid(), 15)", "ended by signal 15"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_limits(run: Run, code: str, says: str) -> None:
    started = time.monotonic()
    result = run(code)
    assert says in result.output
    assert not result.ok
    assert len(result.output) < 1200
    assert time.monotonic() - started < 100


def test_wall_time(run: Run) -> None:
    started = time.monotonic()
    result = run("import time\nprint('so far')\ntime.sleep(600)", wall_s=2.0)
    assert result == Result("so far\n\n[ended: it ran longer than 2 s]", False)
    assert time.monotonic() - started < 100


def test_a_flood_of_output_does_not_outlast_its_program(jail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio reads no further while more than twice `limit` is unread, and its `wait` needs the end of the pipe."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", functools.partial(asyncio.create_subprocess_exec, limit=1))
    limits = Limits(**{**SMALL, "jail": jail})  # type: ignore[arg-type]
    result = asyncio.run(asyncio.wait_for(run_python("print('x' * 10**7)", limits), 60))
    assert "[cut: more than 500 characters]" in result.output


def test_a_killed_process_that_does_not_end_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Endless:
        pid = 4321

        def __init__(self) -> None:
            self.stdout = self

        async def read(self, size: int) -> bytes:
            return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(python_code, "_GONE_S", 0)
    asyncio.run(python_code._gone(Endless()))  # type: ignore[arg-type]
    assert caplog.messages == ["process 4321 was killed and has not ended within 0 s"]


# As far as it is permitted: without a jail the program leads its session and cannot leave it.
LEAVES = """
import contextlib, ctypes, os, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
with contextlib.suppress(PermissionError):
    os.setsid()
time.sleep(300)
"""


def test_a_program_that_leaves_its_process_group_is_ended_all_the_same(run: Run) -> None:
    started = time.monotonic()
    assert run(LEAVES, wall_s=2.0) == Result("[ended: it ran longer than 2 s]", False)
    assert time.monotonic() - started < 100


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
@pytest.mark.parametrize("status", [1, 129, 200, 255])
def test_an_exit_status_is_no_signal(run: Run, how: str, status: int) -> None:
    assert run(f"import os, sys; {how}({status})") == Result("", False)


def test_the_process_around_a_program_is_out_of_its_reach(run: Run, jail: bool) -> None:
    if not jail:
        pytest.skip("there is none without a jail")
    ptrace = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.ptrace(0x4206, 1, 0, 0))"
    assert run(f"{ptrace}; print(ctypes.get_errno())") == Result("-1\n1", True)


ASK = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, number in NUMBERS.items():
    ctypes.set_errno(0)
    status = libc.syscall(number, 0, 0, 0, 0, 0, 0)
    if status != -1 or ctypes.get_errno() != 1:
        print(name, status, ctypes.get_errno())
"""


def test_system_calls_that_no_limit_counts_are_refused(run: Run) -> None:
    """Memory beside the process's own, keyrings, other processes, namespaces, io_uring and the like."""
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = {name: columns[column] for name, columns in REFUSED.items()}
    assert {"shmget", "memfd_create", "keyctl", "io_uring_setup", "unshare", "mount", "bpf"} <= set(numbers)
    assert len(set(numbers.values())) == len(numbers)
    assert run(f"NUMBERS = {numbers}\n{ASK}") == Result("", True)


TAKES = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
for _ in range(60):
    segment = libc.shmget(0, 10 << 20, 0o1600)
    address = libc.shmat(segment, None, 0) if segment >= 0 else -1
    if address in (-1, None, 2**64 - 1):
        raise MemoryError(f"errno {ctypes.get_errno()}")
    ctypes.memset(address, 1, 10 << 20)
    libc.shmdt(ctypes.c_void_p(address))
"""


def test_shared_memory_does_not_pass_the_limit(run: Run) -> None:
    """600 MB with a limit of 128, a segment attached at a time."""
    result = run(TAKES)
    assert "MemoryError: errno 1" in result.output
    assert not result.ok


def test_another_machines_calls_are_no_way_out(run: Run) -> None:
    if os.uname().machine != "x86_64":
        return  # x32 is x86_64's alone
    result = run("import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 39)")
    assert result == Result("[ended by signal 31]", False)


def test_each_program_starts_in_an_empty_directory_and_leaves_nothing(run: Run) -> None:
    where = run("import os; open('left', 'w'); print(os.getcwd(), os.listdir())").output
    assert where.endswith("['left']")
    assert run("import os; print(os.listdir())").output == "[]"
    deep = "import os\nfor i in range(900): os.mkdir('d'); os.chdir('d')\nprint(i)"
    assert run(deep).output == "899"
    directory = where.split()[0]
    assert directory == "/tmp" or not os.path.exists(directory)


def test_the_environment_of_the_host_is_not_passed_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-of-the-host")
    assert "secret" not in run("import os; print(dict(os.environ))").output


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_cancelling_ends_the_program(jail: bool, leaves: bool) -> None:
    code = LEAVES if leaves else "import time; time.sleep(600)"

    async def cancel() -> None:
        task = asyncio.create_task(run_python(code, Limits(wall_s=600, jail=jail)))
        while len(sessions()) < 1 + (leaves and jail):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancel(), 60))
    assert not sandboxes()


def sessions() -> set[int]:
    """Of the live processes of sandboxes."""
    found = set()
    for process in sandboxes():
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getsid(process.pid))
    return found


def sandboxes() -> list[psutil.Process]:
    """Live processes of sandboxes that this process started."""
    return [p for p in psutil.Process().children(recursive=True) if "sandbox/inside code " in command_line(p)]


def test_what_is_possible_inside(jail: bool) -> None:
    found = asyncio.run(probe(Limits(wall_s=60.0, jail=jail)))
    always = ("start a process", "start a thread", "take 1 GiB of memory", "take memory that is not counted")
    always += ("share memory", "make namespaces")
    assert not any(found[name] for name in (PROBES if jail else always)), found
    if jail:
        assert "etc" not in asyncio.run(run_python("import os; print(os.listdir('/'))", Limits(wall_s=60.0))).output
    else:
        assert found["read /etc/passwd"], "the probes themselves work"


def test_a_sandbox_that_cannot_be_made_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_code, "INSIDE", Path("/nonexistent.py"))
    with pytest.raises(SandboxError, match="did not start"):
        asyncio.run(run_python("print(1)", Limits(wall_s=60.0)))


def test_code_whose_owner_has_gone_does_not_run(tmp_path: Path) -> None:
    """Nobody would end it: the kernel was to be asked for that after the owner's end."""
    settings = json.dumps(asdict(Limits(jail=False)) | {"directory": str(tmp_path), "owner": -1})
    command = [sys.executable, "-I", "-S", str(python_code.INSIDE), "code", settings]
    done = subprocess.run(command, input="print('ran')", capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
