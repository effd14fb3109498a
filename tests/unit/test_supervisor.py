"""A server under its supervisor ends with its owner, whatever ends the owner, and with every process below it."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime.processes.server_process import ServerProcess
from slime.processes.supervisor import Supervisor
from tests.waiting import alive, command_line, wait_for

NUM_GPUS = 0

# A server with a child in a session of its own, whose own child is an orphan in yet another session. With `stubborn`
# every one of them ignores TERM. Each writes its pid beside the others.
TREE = """
import os, signal, sys, time
directory, stubborn = sys.argv[1], sys.argv[2] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def note(name):
    with open(os.path.join(directory, name + ".tmp"), "w") as f:
        f.write(str(os.getpid()))
    os.rename(os.path.join(directory, name + ".tmp"), os.path.join(directory, name))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            note("orphan")
            while True: time.sleep(1)
        os._exit(0)
    note("session")
    while True: time.sleep(1)
note("server")
print("hello from the server, the key is s3cret", flush=True)
while True: time.sleep(1)
"""
NAMES = ("server", "session", "orphan")

OWNER = """
import os, sys, time
from slime.processes.server_process import ServerProcess
server = ServerProcess([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], os.environ, sys.argv[2] + "/log", grace=2.0)
server.start()
if sys.argv[2].endswith("forked") and os.fork() == 0:
    time.sleep(60)
while True: time.sleep(1)
"""


def tree_pids(directory: Path) -> list[int]:
    wait_for(lambda: all((directory / name).exists() for name in NAMES), f"all of {NAMES} started")
    return [int((directory / name).read_text()) for name in NAMES]


@pytest.fixture
def server(tmp_path: Path) -> ServerProcess:
    command = [sys.executable, "-c", TREE, str(tmp_path), "obedient"]
    return ServerProcess(command, os.environ, tmp_path / "log", secrets=("s3cret",), grace=200.0)


def start_owner(directory: Path, kind: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-c", OWNER, TREE, str(directory), kind]
    # What a shell starts in the background ignores interrupts, and so would the owner.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    owner = subprocess.Popen(command, start_new_session=True, preexec_fn=heed)
    return owner, tree_pids(directory)


def test_stop_ends_every_process_and_may_be_repeated(server: ServerProcess, tmp_path: Path) -> None:
    server.start()
    pids = tree_pids(tmp_path)
    assert server.poll() is None
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 100, "an obedient tree needs no KILL"
    assert not [pid for pid in pids if alive(pid)]
    assert server.poll() == 128 + signal.SIGTERM
    server.stop()


def test_a_held_server_waits_for_a_line(tmp_path: Path) -> None:
    """`let_go` sends it; to one that has ended meanwhile it is nothing."""
    waits = "import sys; print('waits', flush=True); sys.stdin.readline(); print('goes on')"
    held, ended = (
        ServerProcess([sys.executable, "-c", code], os.environ, tmp_path / name, held=True)
        for name, code in (("held", waits), ("ended", "raise SystemExit(3)"))
    )
    held.start()
    ended.start()
    wait_for(lambda: "waits" in held.tail(), "it waits")
    wait_for(lambda: ended.poll() == 3, "it has ended")
    assert held.poll() is None
    assert "goes on" not in held.tail()
    held.let_go()
    ended.let_go()
    wait_for(lambda: held.poll() == 0, "it has ended")
    assert held.tail() == "waits\ngoes on\n"
    held.stop()
    ended.stop()


def test_tail_strikes_out_secrets(server: ServerProcess, tmp_path: Path) -> None:
    server.start()
    tree_pids(tmp_path)
    wait_for(lambda: server.tail().endswith("\n"), "the server's line in the log")
    server.stop()
    assert server.tail() == "hello from the server, the key is ***\n"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_tree_ends_with_its_owner(tmp_path: Path, signum: int) -> None:
    owner, pids = start_owner(tmp_path, "obedient")
    owner.send_signal(signum)
    owner.wait(60)
    wait_for(lambda: not any(map(alive, pids)), "the tree ended")


def test_tree_that_ignores_term_is_killed(tmp_path: Path) -> None:
    owner, pids = start_owner(tmp_path, "stubborn")
    owner.kill()
    owner.wait(60)
    wait_for(lambda: not any(map(alive, pids)), "the stubborn tree was killed")


def test_owner_with_a_forked_child_that_keeps_the_pipe_open(tmp_path: Path) -> None:
    owner, pids = start_owner(tmp_path / "forked", "obedient")
    wait_for(lambda: len(psutil.Process(owner.pid).children()) == 2, "the owner forked")
    (fork,) = (p for p in psutil.Process(owner.pid).children() if "supervisor" not in command_line(p))
    try:
        owner.kill()
        owner.wait(60)
        wait_for(lambda: not any(map(alive, pids)), "the tree ended although a fork holds the pipe")
        assert fork.is_running()
    finally:
        fork.kill()


def stop_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")


@pytest.mark.parametrize("name", ["alone", "forked"])
def test_tree_ends_with_its_owner_though_the_supervisor_is_stopped(tmp_path: Path, name: str) -> None:
    """And though a fork of the owner holds the pipe."""
    owner, pids = start_owner(tmp_path / name, "stubborn")
    wait_for(lambda: len(psutil.Process(owner.pid).children()) == 1 + (name == "forked"), "the owner forked")
    children = psutil.Process(owner.pid).children()
    (supervisor,) = (p.pid for p in children if "supervisor" in command_line(p))
    (guard,) = (p.pid for p in psutil.Process(supervisor).children() if "supervisor" in command_line(p))
    stop_process(supervisor)
    try:
        owner.kill()
        owner.wait(60)
        ours = [*pids, supervisor, guard]
        wait_for(lambda: not any(map(alive, ours)), "tree, supervisor and guard ended")
    finally:
        for pid in (supervisor, *(p.pid for p in children if p.is_running())):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_stop_ends_the_tree_of_a_stopped_supervisor_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TREE, str(tmp_path), "obedient"]
    server = ServerProcess(command, os.environ, tmp_path / "log", grace=2.0)
    server.start()
    pids = tree_pids(tmp_path)
    assert server.pid is not None
    stop_process(server.pid)
    server.stop()
    assert not [pid for pid in pids if alive(pid)]
    assert server.poll() == 128 + signal.SIGTERM


def test_a_supervisor_has_time_to_end_a_stubborn_tree_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TREE, str(tmp_path), "stubborn"]
    server = ServerProcess(command, os.environ, tmp_path / "log", grace=0.5)
    server.start()
    tree_pids(tmp_path)
    server.stop()
    assert server.poll() == 128 + signal.SIGKILL, "the supervisor tells how the server ended: the guard did not kill it"


HANGS = """
import sys, time
from slime.processes import supervisor
supervisor._KILL_DEADLINE_S = 1.0
supervisor.Supervisor._end_tree = lambda self: time.sleep(600)
supervisor.Supervisor(int(sys.argv[1]), 0.5, None).run(sys.argv[2:])
"""


def test_a_supervisor_that_hangs_when_its_owner_goes_is_killed_with_its_tree(tmp_path: Path) -> None:
    waits, ours = os.pipe()
    command = [sys.executable, "-c", HANGS, str(waits), sys.executable, "-c", TREE, str(tmp_path), "stubborn"]
    with subprocess.Popen(command, pass_fds=(waits,), start_new_session=True) as supervisor:
        os.close(waits)
        pids = tree_pids(tmp_path)
        (guard,) = (p.pid for p in psutil.Process(supervisor.pid).children() if p.pid not in pids)
        os.close(ours)
        try:
            assert supervisor.wait(60) == -signal.SIGKILL
        finally:
            supervisor.kill()
    wait_for(lambda: not any(map(alive, [*pids, guard])), "tree and guard ended")


def test_a_process_that_took_over_the_supervisors_id_gets_no_signal() -> None:
    with subprocess.Popen(["sleep", "100"]) as other:
        guard = Supervisor.__new__(Supervisor)
        guard._pid = other.pid
        guard._send_to_supervisor(signal.SIGKILL)
        other.terminate()
        assert other.wait(60) == -signal.SIGTERM


def test_the_whole_tree_dies_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Those too that have left the server's session, and those that ignore TERM."""
    server = ServerProcess([sys.executable, "-c", TREE, str(tmp_path), "stubborn"], os.environ, tmp_path / "log")
    server.start()
    pids = tree_pids(tmp_path)
    assert server.pid is not None
    (guard,) = (p for p in psutil.Process(server.pid).children() if "supervisor" in command_line(p))
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not any(map(alive, [*pids, guard.pid])), "the tree, and the guard that ended it, are gone")
    assert server.poll() == -signal.SIGKILL
    server.stop()


def test_a_server_without_its_guard_still_ends_in_order(server: ServerProcess, tmp_path: Path) -> None:
    server.start()
    pids = tree_pids(tmp_path)
    (guard,) = (p for p in psutil.Process(server.pid).children() if "supervisor" in command_line(p))
    guard.kill()
    server.stop()
    assert not [pid for pid in pids if alive(pid)]
    assert server.poll() == 128 + signal.SIGTERM


GUARDED = """
import os, signal, sys, time
from slime.processes import supervisor
sent, start = [], supervisor.Supervisor._start_guard
def start_guard(self):
    ours = start(self)
    global guard
    guard = self._guard
    if sys.argv[1] == "gone":
        os.kill(guard, signal.SIGKILL)
    return ours
def send(pid, number):
    sent.append(pid)
    os.kill(pid, number)
supervisor.Supervisor._start_guard, supervisor.send = start_guard, send
supervisor.tree_of = lambda session, mark: time.sleep(600)
waits, ours = os.pipe()
assert supervisor.Supervisor(waits, 1.0, None).run([sys.executable, "-c", ""]) == 0
print(sent == [guard])
"""


@pytest.mark.parametrize("guard", ["busy", "gone"])
def test_a_servers_end_does_not_wait_for_its_guard_and_nothing_is_sent_to_one_that_has_gone(guard: str) -> None:
    command = [sys.executable, "-c", GUARDED, guard]
    done = subprocess.run(command, timeout=60, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == f"{guard == 'busy'}\n"


LATE = """
import multiprocessing, os, runpy, sys, time
from pathlib import Path
def work(path):
    Path(path).write_text(str(os.getpid()))
    while True: time.sleep(1)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1] + "/child",))
    child.start()
    child.join()
"""


def test_children_of_a_server_ask_for_their_parents_death_before_they_import(tmp_path: Path) -> None:
    """What `launch` does at its top, which SGLang's own processes run again, before it imports anything else."""
    top = Path(launch_file()).read_text().split("import importlib", 1)[0]
    script = tmp_path / "server.py"
    script.write_text(top.split('"""', 2)[2] + LATE)
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    wait_for((tmp_path / "child").exists, "the child runs")
    wait_for(lambda: (tmp_path / "child").read_text(), "its id")
    parent.kill()
    parent.wait(60)
    wait_for(lambda: not alive(int((tmp_path / "child").read_text())), "the child died with it")


def launch_file() -> str:
    spec = importlib.util.find_spec("slime.backends.sglang.launch")
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


def test_ctrl_c_in_the_terminal_reaches_the_owner_only(server: ServerProcess, tmp_path: Path) -> None:
    server.start()
    tree_pids(tmp_path)
    assert server.pid is not None
    assert os.getsid(server.pid) != os.getsid(0)
    assert os.getpgid(server.pid) != os.getpgid(0)
    server.stop()


def test_exit_status_and_leftovers_of_a_server_that_ends_by_itself(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys; "
        f"child = subprocess.Popen(['sleep', '100'], start_new_session=True); open({str(tmp_path / 'pid')!r}, 'w')"
        ".write(str(child.pid)); print('boom', flush=True); os._exit(7)"
    )
    server = ServerProcess([sys.executable, "-c", code], os.environ, tmp_path / "log")
    server.start()
    wait_for(lambda: server.poll() is not None, "the supervisor ended")
    assert server.poll() == 7
    assert server.tail() == "boom\n"
    assert not alive(int((tmp_path / "pid").read_text()))
    server.stop()


MAPPING = """
import mmap, sys, time
with open(sys.argv[1] + "mine", "wb+") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
with open(sys.argv[1] + "closed", "w"):
    pass
time.sleep(100)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_scratch_files_go_with_their_server_and_nobody_elses(killed: bool, tmp_path: Path) -> None:
    prefix = str(tmp_path / "loads_")
    mine, others, closed = (Path(prefix + name) for name in ("mine", "others", "closed"))
    others.write_bytes(bytes(16))
    server = ServerProcess(
        [sys.executable, "-c", MAPPING, prefix], os.environ, tmp_path / "log", grace=2.0, scratch=prefix
    )
    server.start()
    wait_for(closed.exists, "the server mapped its file")
    if killed:
        supervisor = psutil.Process(server.pid)
        waits = supervisor.num_ctx_switches().voluntary
        # It looks between two waits. The present one may have begun, and one more may be another's than its loop's.
        wait_for(lambda: supervisor.num_ctx_switches().voluntary >= waits + 3, "the supervisor has looked")
        (process,) = (child for child in supervisor.children() if child.cmdline()[1] == "-c")
        process.kill()
        wait_for(lambda: server.poll() is not None, "the supervisor ended")
    assert mine.exists() != killed
    server.stop()
    assert [path.exists() for path in (mine, others, closed)] == [False, True, True]
