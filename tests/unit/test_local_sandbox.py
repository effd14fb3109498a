"""slime.agent.sandbox.LocalSandbox against programs that try to get out, or to take more than they may.

Every program here stops by itself soon after the limit that it tries, in case the limit fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    LocalSandbox,
    SandboxError,
    SandboxLimits,
    ensure_agent_user,
    exec_and_wait,
)
from slime.agent.sandbox.inside import cgroup
from slime.agent.sandbox.inside.confine import REFUSED
from tests.waiting import command_line, wait_for, wait_for_ends

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
SMALL = SandboxLimits(memory_mb=256, processes=48, disk_mb=16, open_files=64, output_mb=1)

Use = Callable[[LocalSandbox], Awaitable[None]]
_NUMBERS = itertools.count()


def inside(use: Use, limits: SandboxLimits = SMALL, **changes: object) -> None:
    async def run() -> None:
        async with LocalSandbox(limits, **changes) as sandbox:  # type: ignore[arg-type]
            await use(sandbox)

    asyncio.run(asyncio.wait_for(run(), 200))


@functools.cache
def why_not(jail: bool) -> str:
    """Empty where this host has this kind of sandbox."""

    async def nothing(sandbox: LocalSandbox) -> None:
        assert (await sandbox.exec("true"))[0] == 0

    try:
        inside(nothing, jail=jail)
    except SandboxError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def jailed() -> None:
    if why := why_not(True):
        pytest.skip(f"this host has no jail: {why}")


@pytest.fixture(params=[True, False], ids=["jail", "plain"])
def jail(request: pytest.FixtureRequest) -> bool:
    if why := why_not(request.param):
        pytest.skip(f"this host has no such sandbox: {why}")
    return bool(request.param)


def python(code: str) -> str:
    return f"python3 - <<'END_OF_CODE'\n{code}\nEND_OF_CODE"


# A command and its files


def test_commands_and_files(jail: bool, tmp_path: Path) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        assert await sandbox.exec("echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
        assert await sandbox.exec("echo $A$HOME; cat", env={"A": "1 "}) == (0, f"1 {await home(sandbox)}\n", "")
        assert (await sandbox.exec("kill -9 $$"))[0] == 137
        with pytest.raises(SandboxError, match=r"'false' failed with status 1"):
            await sandbox.exec("false", check=True)
        there = f"{sandbox.root}/workspace/new/file with space.txt"
        for content in ("中文\n", b"bytes", "", "x" * 300_000):
            await sandbox.write_file(there, content, user="agent")
            assert await sandbox.read_file(there) == (content if isinstance(content, str) else content.decode())
        (tmp_path / "large").write_bytes(b"ab" * 1_000_000)
        await sandbox.write_file(there, tmp_path / "large")
        assert (await sandbox.exec(f"wc -c < '{there}'"))[1] == "2000000\n"
        assert await sandbox.read_file(f"{sandbox.root}/workspace/none") == ""
        with pytest.raises(SandboxError, match="could not be written"):
            await sandbox.write_file(f"{there}/below", "a file is no directory")
        with pytest.raises(SandboxError, match="must start with"):
            await sandbox.read_file("relative")
        assert (await sandbox.exec(f"echo '{'中' * 39_000}' | wc -c"))[1] == "117001\n"
        with pytest.raises(SandboxError, match=r"takes no command and variables of .* bytes: write them to a file"):
            await sandbox.exec("true", env={"A": "x" * 900_000})
        assert (await sandbox.exec("\ud83d"))[0] == 126

    async def home(sandbox: LocalSandbox) -> str:
        return (await sandbox.exec("cd; pwd"))[1].strip()

    inside(use, jail=jail)


def test_output_beyond_the_bound_is_dropped_and_blocks_nobody(jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        code, out, err = await sandbox.exec("head -c 3000000 /dev/zero | tr '\\0' x; echo end >&2")
        assert (code, out) == (0, "x" * (1 << 20))
        assert err == "end\n\n[cut: more than 1048576 bytes]"

    inside(use, jail=jail)


def test_a_command_in_the_background_does_not_hold_the_call(jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        started = time.monotonic()
        assert (await sandbox.exec("sleep 500 & echo started"))[:2] == (0, "started\n")
        assert time.monotonic() - started < 60
        assert (await sandbox.exec("pgrep -x sleep | wc -l"))[1].strip() != "0"

    inside(use, jail=jail)


def test_a_command_that_takes_too_long_is_ended_with_its_children(seconds: str, jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        code, out, err = await sandbox.exec(f"echo so far; sleep {seconds} & sleep {seconds}", timeout=2)
        assert (code, out) == (EXIT_TIME_BUDGET_EXCEEDED, "so far\n")
        assert "ran longer than 2 s" in err
        with pytest.raises(SandboxError, match="took too long"):
            await sandbox.exec(f"sleep {seconds}", timeout=0.2, check=True)
        assert not named(seconds)

    inside(use, jail=jail)


def test_a_cancelled_command_is_ended(seconds: str, jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        task = asyncio.create_task(sandbox.exec(f"sleep {seconds}"))
        while not named(seconds):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not named(seconds)
        assert (await sandbox.exec("echo alive"))[1] == "alive\n"

    inside(use, jail=jail)


def test_many_commands_at_a_time(jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        results = await asyncio.gather(*(sandbox.exec(f"sleep 0.1; echo {n}; exit {n}") for n in range(12)))
        assert results == [(n, f"{n}\n", "") for n in range(12)]

    inside(use, jail=jail)


def test_users(jailed: None) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        assert (await sandbox.exec("id -un; pwd", user="agent"))[1].split() == ["agent", "/home/agent"]
        assert (await sandbox.exec("id -u"))[1] == "0\n"
        code, _, err = await sandbox.exec("true", user="nobody-here")
        assert (code, err) == (126, "the sandbox could not run it: there is no user 'nobody-here' here\n")
        await ensure_agent_user(sandbox, "/srv/repo")
        assert (await sandbox.exec("touch /srv/repo/mine && git -C /srv/repo init -q", user="agent"))[0] == 0
        if not sandbox.single_user:
            assert (await sandbox.exec("touch /root/x", user="agent"))[0] == 1

    inside(use, SandboxLimits())


# What takes more than it may

FORKS = """
import os, time
made = 0
try:
    while made < 300:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        made += 1
except OSError as error:
    print(error.errno)
print(made)
"""


@pytest.mark.parametrize("user", ["root", "agent"])
def test_a_fork_bomb(jail: bool, user: str) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        code, out, err = await sandbox.exec(python(FORKS), user=user, timeout=100)
        number, made = map(int, out.split())
        assert (code, number) == (0, 11), err
        assert made <= SMALL.processes
        await sandbox.exec("kill -9 -1", user=user)
        assert (await sandbox.exec("echo again", user=user))[1] == "again\n"

    inside(use, jail=jail)


def test_two_sandboxes_do_not_count_each_others_processes(jailed: None) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        async with LocalSandbox(SMALL) as other:
            fill = "for i in $(seq 30); do sleep 30 & done; echo $(jobs -r | wc -l)"
            assert [(await each.exec(fill))[1] for each in (sandbox, other)] == ["30\n", "30\n"]

    inside(use)


def test_memory_of_one_program(jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        code, _, err = await sandbox.exec("python3 -c 'bytearray(400 << 20)'")
        assert code == 1
        assert "MemoryError" in err

    inside(use, jail=jail)


TOGETHER = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        kept = bytearray(b'x' * (90 << 20))
        time.sleep(30)
        os._exit(0)
for _ in range(5):
    os.wait()
"""
SHARED = """
import mmap, os, time
kept = mmap.mmap(-1, 200 << 20)
for i in range(0, 200 << 20, 4096): kept[i] = 1
more = [os.fork() for _ in range(1)]
if more == [0]:
    kept = mmap.mmap(-1, 200 << 20)
    for i in range(0, 200 << 20, 4096): kept[i] = 1
    time.sleep(30)
os.wait()
"""


@pytest.mark.parametrize("code", [TOGETHER, SHARED], ids=["private", "shared"])
def test_memory_of_all_programs_together(jail: bool, code: str) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        status, _, err = await sandbox.exec(python(code), timeout=100)
        assert status == 137
        assert "took more than 256 MB of memory" in err
        assert await sandbox.exec("kill -9 $$") == (137, "", ""), "which is another's doing"
        assert (await sandbox.exec("echo alive"))[1] == "alive\n"

    # Of one program it must be allowed: its parts are.
    inside(use, replace(SMALL, address_space_mb=800), jail=jail)


INHERITED = """
import os, time
kept = bytearray(b'x' * (60 << 20))
for _ in range(6):
    if os.fork() == 0:
        time.sleep(2)
        os._exit(0)
for _ in range(6):
    os.wait()
print(len(kept))
"""


def test_memory_that_processes_share_counts_once(jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        assert await sandbox.exec(python(INHERITED)) == (0, f"{60 << 20}\n", "")

    inside(use, jail=jail)


def test_files_fill_no_more_than_their_place(jailed: None) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        for there in ("/tmp", "/dev/shm", "/opt"):
            code, _, err = await sandbox.exec(f"head -c 15M /dev/zero > {there}/a; head -c 9M /dev/zero > {there}/b")
            assert code == 1
            assert "No space left" in err
            assert (await sandbox.exec(f"rm {there}/a {there}/b"))[0] == 0
        many = "import os\nfor n in range(5000): open(f'/tmp/{n}', 'w').close()"
        assert "No space left" in (await sandbox.exec(python(many)))[2]

    inside(use)


def test_files_of_plain_processes_are_looked_at(jail: bool) -> None:
    if jail:
        return  # tried above

    async def use(sandbox: LocalSandbox) -> None:
        command = "for i in 1 2 3 4; do head -c 9M /dev/zero > $i; done; sleep 30"
        assert "took more than 16 MB of files" in (await sandbox.exec(command, timeout=100))[2]

    inside(use, jail=False)


def test_open_files(jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        assert "Too many open files" in (await sandbox.exec("python3 -c '[open(\"/dev/null\") for _ in range(99)]'"))[2]

    inside(use, replace(SMALL, open_files=32), jail=jail)


def test_a_limit_cannot_be_raised(jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        for limit in ("-u 4096", "-n 99999", "-v unlimited"):
            assert "cannot modify limit" in (await sandbox.exec(f"ulimit {limit}"))[2]

    inside(use, jail=jail)


# What gets out


def test_the_runs_keys(jail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, its own and of other processes: the run's have them from their start."""
    if not jail and os.getuid() != 0:
        pytest.skip("without a jail a user's programs can read that user's processes: docs/agents.md says so")
    monkeypatch.setenv("MY_API_KEY", "secret-of-the-host")
    child = subprocess.Popen(["sleep", "100"])
    try:

        async def use(sandbox: LocalSandbox) -> None:
            for user in ("root", "agent"):
                looked = await sandbox.exec(
                    "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'", user=user
                )
                assert "HOME=" in looked[1]
                assert "secret-of-the-host" not in looked[1]

        inside(use, jail=jail)
    finally:
        child.kill()
        child.wait()


def test_other_processes(jailed: None) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        assert (await sandbox.exec(f"kill -0 {os.getpid()}"))[0] == 1
        numbers = (await sandbox.exec("ls /proc | grep '^[0-9]' | sort -n"))[1].split()
        assert numbers[0] == "1"
        assert len(numbers) < 8
        # Its first process outlives what programs send it, and cannot be looked into.
        assert (await sandbox.exec("kill -9 1; kill -TERM 1; kill -INT 1; cat /proc/1/environ /proc/1/maps"))[0] == 1
        assert (await sandbox.exec("ls -l /proc/1/fd /proc/1/root /proc/1/cwd"))[0] != 0
        assert (await sandbox.exec("echo alive"))[1] == "alive\n"

    inside(use)


def test_files_of_the_host(jailed: None, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("of the host")

    async def use(sandbox: LocalSandbox) -> None:
        for path in ("/etc/shadow", str(tmp_path / "data"), str(ROOT / "train.py"), f"{Path.home()}/.ssh", "/sys"):
            assert (await sandbox.exec(f"ls {path}"))[0] != 0, path
        assert "etc" in (await sandbox.exec("ls /.. /proc/self/root"))[1]
        for path in ("/usr/bin/sandbox-was-here", "/etc/ssl/certs/here", f"{sys.base_prefix}/here"):
            assert "Read-only file system" in (await sandbox.exec(f"touch {path}"))[2] + "Read-only file system" * (
                not Path(path).parent.exists()
            )
        assert not (await sandbox.exec("mknod /tmp/disk b 8 0 2>/dev/null && echo made"))[1]
        assert (await sandbox.exec("cat /dev/kmsg /dev/mem /proc/kcore"))[0] == 1
        assert sorted((await sandbox.exec("ls /proc/self/fd"))[1].split()) == ["0", "1", "2", "3"]

    inside(use)


def test_what_is_shown_is_read_only(jailed: None, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("of the host")
    tmp_path.chmod(0o755)

    async def use(sandbox: LocalSandbox) -> None:
        assert await sandbox.read_file(str(tmp_path / "data"), user="agent") == "of the host"
        assert (await sandbox.exec(f"echo x > {tmp_path}/data"))[0] == 1
        assert (await sandbox.exec(f"rm {tmp_path}/data; mv {tmp_path} /tmp/elsewhere"))[0] == 1

    inside(use, read_only=[tmp_path])
    assert (tmp_path / "data").read_text() == "of the host"


CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
CLONE, CLONE3 = NUMBERS.pop('clone'), NUMBERS.pop('clone3')
for name, number in NUMBERS.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:
        print(name, ctypes.get_errno())
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    ctypes.set_errno(0)
    status = libc.syscall(CLONE, flag | 17, 0, 0, 0, 0)
    if status == 0:
        os._exit(0)
    if status != -1 or ctypes.get_errno() != 1:
        print(hex(flag), status, ctypes.get_errno())
libc.syscall(CLONE3, 0, 0)
print('clone3', ctypes.get_errno())
"""


@pytest.mark.parametrize("user", ["root", "agent"])
def test_system_calls(jail: bool, user: str) -> None:
    """New namespaces and mounts, other processes' memory, memory that nobody counts, further parts of the kernel."""
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = {name: both[column] for name, both in REFUSED.items()} | {"clone": (56, 220)[column], "clone3": 435}

    async def use(sandbox: LocalSandbox) -> None:
        assert await sandbox.exec(python(f"NUMBERS = {numbers}\n{CALLS}"), user=user) == (0, "clone3 38\n", "")
        assert (await sandbox.exec("unshare -Ur true", user=user))[0] != 0

    inside(use, jail=jail)


def test_capabilities(jailed: None) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        for user, expected in (("root", "4fb"), ("agent", "4fb" if sandbox.single_user else "0")):
            status = (await sandbox.exec("cat /proc/self/status", user=user))[1]
            values = {line.split(":")[0]: line.split(":")[1].strip() for line in status.splitlines()}
            assert {values[name].lstrip("0") or "0" for name in ("CapPrm", "CapEff", "CapBnd")} == {expected}
            assert (values["NoNewPrivs"], values["Seccomp"]) == ("1", "2")

    inside(use)


# The network


@contextlib.contextmanager
def echo_server(host: str = "127.0.0.1") -> Iterator[int]:
    """Answers each connection with what it sends, in capitals, after its end."""
    program = (
        "import socket\ns = socket.create_server(('%s', 0))\nprint(s.getsockname()[1], flush=True)\n"
        "while True:\n c = s.accept()[0]\n d = b''\n while b := c.recv(65536): d += b\n c.sendall(d.upper()); c.close()"
    )
    server = subprocess.Popen([sys.executable, "-c", program % host], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline())
    finally:
        server.kill()
        server.wait()


def ask(host: str, port: int, size: int = 3) -> str:
    return python(
        f"import socket\ns = socket.create_connection(({host!r}, {port}), timeout=20)\n"
        f"s.sendall(b'a' * {size}); s.shutdown(socket.SHUT_WR)\n"
        "d = b''\nwhile b := s.recv(65536): d += b\nprint(len(d), d[:3])"
    )


def test_no_network(jailed: None) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        with echo_server() as port:
            for host, there in (("127.0.0.1", port), ("192.0.2.1", 9), (own_address(), port)):
                assert (await sandbox.exec(ask(host, there)))[0] == 1
        assert (await sandbox.exec("cat /proc/net/dev | grep -c :"))[1] == "1\n"

    inside(use)


def own_address() -> str:
    """An address of this host that is not its loopback's, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def test_one_address_can_be_reached(jailed: None) -> None:
    """Under the name or address that it has outside, also from several connections, large ones, and no other port."""
    for host, address in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), (own_address(),) * 2):
        with echo_server(address) as port, echo_server(address) as other:

            async def use(sandbox: LocalSandbox, host: str = host, port: int = port, other: int = other) -> None:
                answers = await asyncio.gather(
                    *(sandbox.exec(ask(host, port, 500_000), user="agent") for _ in range(4))
                )
                assert answers == [(0, "500000 b'AAA'\n", "")] * 4
                assert (await sandbox.exec(ask(host, other)))[0] == 1
                assert (await sandbox.exec(ask(host, port)))[1] == "3 b'AAA'\n"

            inside(use, reach=f"http://{host}:{port}/v1")


@pytest.mark.parametrize("reach", ["somewhere", "http://[::1]:80", ""])
def test_an_address_to_reach_is_checked(reach: str) -> None:
    if not reach:
        assert LocalSandbox(reach=reach)
        return
    with pytest.raises(ValueError, match="reach="):
        LocalSandbox(reach=reach)


# Its end


@pytest.fixture
def seconds() -> str:
    """What a command of this test sleeps, and no other on this host, by which it is found."""
    return f"{os.getpid()}{next(_NUMBERS):04d}"


def named(word: str) -> list[psutil.Process]:
    """Live processes with that word in their command line."""
    return [
        process
        for process in psutil.process_iter()
        if word in command_line(process).split() and process.status() != psutil.STATUS_ZOMBIE
    ]


LEAVES = "setsid nohup sleep {0} > /dev/null 2>&1 & (setsid sleep {0} &) ; sleep 0.5"


def test_nothing_is_left(seconds: str, jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        ids.append(sandbox.sandbox_id)
        await sandbox.exec(LEAVES.format(seconds))
        assert len(named(seconds)) == 2

    ids: list[str] = []
    inside(use, jail=jail)
    assert not named(seconds)
    assert not [path for path in Path("/tmp").glob("slime-sandbox-*") if ids[0] in path.name]


OWNER = """
import asyncio, os, sys, time
from slime.agent.sandbox import LocalSandbox
async def main():
    async with LocalSandbox(jail=sys.argv[1] == "True") as sandbox:
        await sandbox.exec(os.environ["COMMAND"])
        print(sandbox._process.pid, flush=True)
        await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("forked", [False, True])
def test_nothing_is_left_when_its_owner_is_killed(seconds: str, jail: bool, forked: bool) -> None:
    """Also where a child of the owner's holds all that the owner had open."""
    fork = "        if os.fork() == 0: time.sleep(5); os._exit(0)\n"
    code = OWNER.replace("        print(", f"{fork}        print(") if forked else OWNER
    env = os.environ | {"COMMAND": LEAVES.format(seconds), "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", code, str(jail)], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert owner.stdout is not None
        starter = psutil.Process(int(owner.stdout.readline()))
        left = named(seconds)
        assert len(left) == 2
    finally:
        owner.kill()
        owner.wait()
    wait_for_ends([starter, *left], "the sandbox of a killed owner")


def test_what_starts_it_is_killed(seconds: str, jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        await sandbox.exec(LEAVES.format(seconds))
        waiting = asyncio.create_task(sandbox.exec(f"sleep {seconds}"))
        await asyncio.sleep(0.5)
        assert sandbox._process is not None
        sandbox._process.kill()
        with pytest.raises(SandboxError, match="has ended"):
            await waiting
        with pytest.raises(SandboxError, match="has ended"):
            await sandbox.exec("true")
        left.append(Path(f"/tmp/slime-sandbox-{sandbox.sandbox_id}"))

    left: list[Path] = []
    inside(use, jail=jail)
    wait_for(lambda: not named(seconds), "the end of what a killed sandbox ran")
    assert not left[0].exists()


def test_a_lifetime(seconds: str, jail: bool) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        with pytest.raises(SandboxError, match="ended after its 1 s"):
            await sandbox.exec(f"sleep {seconds}")
        await asyncio.to_thread(wait_for, lambda: not named(seconds), "the end of what it ran")

    inside(use, replace(SMALL, lifetime_s=1.0), jail=jail)


def test_it_is_open_inside_of_its_block_only() -> None:
    async def run() -> None:
        sandbox = LocalSandbox()
        with pytest.raises(SandboxError, match="is not open"):
            await sandbox.exec("true")

    asyncio.run(run())


# Hosts that permit less

NESTED = """
import asyncio
from slime.agent.sandbox import LocalSandbox, SandboxError
async def main():
    try:
        async with LocalSandbox(): print("made")
    except SandboxError as error:
        print(error)
    async with LocalSandbox(jail=False) as sandbox:
        print((await sandbox.exec("echo $((6 * 7)); echo x > $HOME/y; cat $HOME/y"))[1])
asyncio.run(main())
"""


def test_a_host_without_namespaces(jailed: None) -> None:
    """As the inside of a jail is: there is no jail, the error says so, and plain processes are asked for explicitly."""

    async def use(sandbox: LocalSandbox) -> None:
        command = f"PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1 {sys.base_prefix}/bin/python3 - <<'END'\n{NESTED}\nEND"
        code, out, err = await sandbox.exec(command)
        assert code == 0, err
        assert out.splitlines()[1:3] == ["42", "x"]
        assert "the sandbox did not start: [Errno 1] unshare: Operation not permitted; where the host forbids" in out

    inside(use, SandboxLimits(), read_only=[ROOT])


@pytest.mark.skipif(os.getuid() != 0, reason="it is tried as another user, which only root can become")
def test_a_user_without_rights_can_have_one(jailed: None, tmp_path: Path) -> None:
    """One id only, where the kernel lets users make namespaces."""
    system = Path("/usr/bin/python3")
    if not system.exists():
        pytest.skip("another user cannot read root's Python")
    code = (
        "import asyncio\nfrom slime.agent.sandbox import LocalSandbox, SandboxLimits, ensure_agent_user\n"
        "async def main():\n  async with LocalSandbox(SandboxLimits(processes=40)) as s:\n"
        "    await ensure_agent_user(s, '/workspace/r')\n"
        f"    print(s.single_user, (await s.exec({python(FORKS)!r}, user='agent'))[1].split())\n"
        "asyncio.run(main())"
    )
    copied = tmp_path / "slime"
    subprocess.run(["cp", "-r", str(ROOT / "slime"), str(copied)], check=True, timeout=60)
    for each in (tmp_path, *tmp_path.parents):
        if each.is_relative_to(tempfile.gettempdir()) and each != Path(tempfile.gettempdir()):
            each.chmod(0o755)
    done = subprocess.run(
        [str(system), "-c", code], cwd="/", user=12345, group=12345, extra_groups=[], timeout=200, text=True,
        capture_output=True, env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"users cannot make namespaces here: {done.stderr.splitlines()[-1]}")
    single, number, made = done.stdout.replace("[", "").replace("]", "").replace("'", "").replace(",", "").split()
    assert (single, number) == ("True", "11"), done.stderr
    assert int(made) <= 40


@pytest.mark.skipif(os.getuid() != 0, reason="root gives a right up")
def test_a_root_that_cannot_be_another_outside_has_no_jail(jailed: None) -> None:
    """Its programs would be the host's root, to whom files of /proc/sys are writable."""
    code = (
        "import asyncio\nfrom slime.agent.sandbox import LocalSandbox\n"
        "async def main():\n  async with LocalSandbox(): pass\nasyncio.run(main())"
    )
    command = ["setpriv", "--bounding-set", "-setuid,-setgid", sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=200
    )
    assert b"the sandbox did not start: root here may not map ids" in done.stderr


@pytest.mark.parametrize(
    ("passed_on", "own", "made"),
    [
        ("memory pids cpu", "/", True),
        ("cpu", "/", False),
        ("memory pids", "/slice/task", True),
        ("", "/slice/task", False),
    ],
)
def test_a_control_group(tmp_path: Path, passed_on: str, own: str, made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the nearest group that passes memory and pids on; a directory stands for the kernel's here."""
    task = tmp_path / own.strip("/")
    task.mkdir(parents=True, exist_ok=True)
    (task / "cgroup.subtree_control").write_text(passed_on if own == "/" else "")
    (task.parent / "cgroup.subtree_control").write_text(passed_on) if own != "/" else None
    found = cgroup.make("local-1", 100, 20, str(tmp_path), own)
    assert (found is not None) == made
    if found:
        names = ("memory.max", "memory.swap.max", "pids.max")
        assert [int(Path(found, name).read_text()) for name in names] == [100 << 20, 0, 20]
        assert Path(found).parent == (tmp_path if own == "/" else task.parent)
    monkeypatch.setenv(cgroup.PARENT, str(tmp_path / "none"))
    with pytest.raises(OSError, match=r"SLIME_AGENT_CGROUP=.*none: "):
        cgroup.make("local-1", 100, 20, str(tmp_path), own)


def test_exec_and_wait_in_one(seconds: str, jail: bool) -> None:
    """The whole of it, with real processes; the cases are in test_sandbox_protocol.py."""

    async def use(sandbox: LocalSandbox) -> None:
        there = f"{sandbox.root}/workspace"
        arguments = {"tag": "job", "user": "agent", "workdir": there, "want_output": True}
        run = lambda cmd, budget=60: exec_and_wait(sandbox, cmd=cmd, time_budget_sec=budget, **arguments)  # noqa: E731
        assert await run("pwd; exit 7") == (7, f"{there}\n")
        assert await run("echo again >&2") == (0, "again\n")
        stubborn = f"trap '' TERM; echo on; sleep {seconds} & while true; do sleep {seconds}; done"
        assert await run(stubborn, 1) == (EXIT_TIME_BUDGET_EXCEEDED, "on\n")
        await asyncio.to_thread(wait_for, lambda: not named(seconds), "the end of what was killed")
        assert await exec_and_wait(sandbox, cmd="true", time_budget_sec=9, tag="x", workdir="/nowhere") == (125, "")

    inside(use, jail=jail)
