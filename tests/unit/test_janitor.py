"""What a killed driver leaves is ended within seconds, and who is blamed when Ray's own processes die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from slime.driver import process
from slime.driver.preflight import places
from slime.processes import kernel
from slime.processes.kernel import Process
from slime.ray import janitor, supervision
from slime.ray.cluster import check_places
from slime.ray.supervision import Deadline, InputError, RayDownError, RunError, Supervisor
from tests.waiting import wait_for

NUM_GPUS = 0
NAMES = ("child", "grandchild", "orphan")
USERS = ("users", "child of users")
# Of three, all deaf to TERM, the child has a child of its own in another session, and the orphan leaves the tree. The
# user's script, which became the owner, had started another, which has a child as well.
LIVES = """
import os, signal, subprocess, sys, time
program, directory, name = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if name == "orphan":
    os.setsid()
    if os.fork():
        os._exit(0)
children = {"child": "grandchild", "users": "child of users"}
if name in children:
    subprocess.Popen([sys.executable, "-c", program, program, directory, children[name]], start_new_session=True)
with open(os.path.join(directory, name + ".tmp"), "w") as file:
    file.write(str(os.getpid()))
os.rename(os.path.join(directory, name + ".tmp"), os.path.join(directory, name))
while True: time.sleep(1)
"""
PARENTS = {1000010: 1, 1000011: 1000010, 1000012: 1000011, 1000013: 1000010, 1000014: 1000012}
"""Of an owner, what ran before, what that started, a child of the run, and one that has the run's mark below those."""
OWNER = """
import os, subprocess, sys, time
from slime.ray import janitor
program, directory, end = sys.argv[1:]
users = subprocess.Popen([sys.executable, "-c", program, program, directory, "users"])
while not os.path.exists(os.path.join(directory, "users")): time.sleep(0.01)
watched = janitor.start(grace=1.0)
for name in ("child", "orphan"):
    subprocess.Popen([sys.executable, "-c", program, program, directory, name])
sys.stdin.readline()
if end != "killed":
    janitor.dismiss(watched, ended_well=end == "well")
"""


@pytest.fixture
def ids(tmp_path: Path) -> Iterator[list[int]]:
    found: list[int] = []
    yield found
    for pid in found:
        kernel.send(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["killed", "ill", "well"])
def test_nothing_is_left_of_a_run_unless_it_ended_well(end: str, tmp_path: Path, ids: list[int]) -> None:
    """A daemon that a user's function has started may outlive a run that ends well, and what ran before it any."""
    command = [sys.executable, "-c", OWNER, LIVES, str(tmp_path), end]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as owner:
        wait_for(lambda: all((tmp_path / name).exists() for name in NAMES + USERS), "all of them have started")
        ids += [int((tmp_path / name).read_text()) for name in NAMES + USERS]
        (waits,) = (p for p in map(psutil.Process, children_of(owner.pid)) if "slime.ray.janitor" in p.cmdline())
        outputs = {os.readlink(f"/proc/{waits.pid}/fd/{number}") for number in (1, 2)}
        assert outputs == {os.devnull}, "who reads the owner's output to its end must not wait for the janitor"
        if end == "killed":
            owner.kill()
        assert owner.stdin is not None
        owner.stdin.close()
    wait_for(lambda: waits.pid not in kernel.running(), "the janitor has ended")
    assert set(ids) & kernel.running().keys() == set(ids if end == "well" else ids[len(NAMES) :])


def children_of(pid: int) -> list[int]:
    return [process.pid for process in kernel.running().values() if process.parent == pid]


def test_a_process_that_took_over_an_id_is_not_touched() -> None:
    parent = kernel.running()[os.getppid()]
    for known, found in ((parent, [parent]), (parent._replace(started=parent.started - 1), [])):
        tree = janitor.Tree(-1, "NONE=x", {})
        tree._known = {known.pid: known.started}
        assert tree.look() == found


def test_what_ran_before_is_spared_when_it_loses_its_parent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, before, below, ours, marked = (Process(pid, parent, 1, pid) for pid, parent in PARENTS.items())
    there = [owner, before, below, ours, marked]
    monkeypatch.setattr(kernel, "running", lambda: {process.pid: process for process in there})
    monkeypatch.setattr(kernel, "is_marked", lambda pid, mark: pid == marked.pid)
    tree = janitor.Tree(owner.pid, "NAME=x", {before.pid: before.started})
    assert sorted(tree.look()) == [ours, marked]
    there[1:3] = [below._replace(parent=owner.pid)]
    assert sorted(tree.look()) == [ours, marked]
    there.append(before._replace(started=99))
    assert sorted(tree.look()) == [there[-1], ours, marked], "another one that got its id"


# ---- the root cause


class Daemon:
    def __init__(self, status: int | None) -> None:
        self.pid, self.returncode = 77, status


class Node:
    def __init__(self, **statuses: int) -> None:
        self._statuses = statuses

    def dead_processes(self) -> list[tuple[str, Daemon]]:
        return [(name, Daemon(status)) for name, status in self._statuses.items()]

    def get_logs_dir_path(self) -> str:
        return "/tmp/ray/logs"


def actor_error(text: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = text
    return error


WORKER_DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: TrainActor
\tactor_id: ab
\tpid: 123
\tip: 10.0.0.7
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) OOM"""
NODE_DIED = "The actor died because its node has died. Node Id: ab\n\tpid: 123\n\tip: 10.0.0.7\n\tunexpectedly: health"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            actor_error(WORKER_DIED),
            "the process of trainer 0 died (123 on 10.0.0.7): Worker unexpectedly exits with a ",
        ),
        (actor_error(NODE_DIED), "the host of trainer 0 (123 on 10.0.0.7) has left Ray's cluster: its raylet was "),
        (
            OutOfMemoryError("Task was killed due to the node running low on memory.\nMemory on"),
            "Ray ended the process",
        ),
    ],
)
def test_a_death_is_told_in_one_line(error: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_RAY_GRACE_S", 0.0)
    line = str(Supervisor()._failure(error, "trainer 0", "train"))
    assert line.startswith(f"train: {expected}")
    assert line.endswith("(weight version none yet)")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("dead", "expected"),
    [
        ({"raylet": -9}, "Ray's raylet on this host, process 77, was ended by signal 9, and the run cannot go on"),
        (
            {"log_monitor": 0, "gcs_server": 1},
            r"Ray's head \(gcs_server\) on this host, process 77, ended with status 1",
        ),
    ],
)
def test_the_death_of_rays_own_processes_is_not_blamed_on_ours(
    dead: dict[str, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision.worker, "_global_node", Node(**dead))
    with pytest.raises(RayDownError, match=f"^rollout 3: {expected}"):
        raise Supervisor()._failure(actor_error(WORKER_DIED), "the rollout manager", "rollout 3")
    with pytest.raises(RayDownError, match=f"^train: {expected}"):
        Supervisor().wait({"trainer 0": object()}, "train", Deadline(60.0))  # type: ignore[dict-item]


def test_without_its_log_monitor_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision.worker, "_global_node", Node(log_monitor=-9))
    assert supervision.ray_failure() is None
    monkeypatch.setattr(supervision.worker, "_global_node", None)
    assert supervision.ray_failure() is None


def test_processes_that_the_kernel_ended_for_memory_are_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vmstat").write_text(f"nr_free 5\noom_kill {supervision._BEFORE}\n")
    monkeypatch.setattr(supervision, "_KERNEL_COUNTS", tmp_path / "vmstat")
    assert supervision.memory_hint() == ""
    (tmp_path / "vmstat").write_text(f"nr_free 5\noom_kill {supervision._BEFORE + 2}\n")
    assert "the kernel has ended 2 processes of this host for want of memory" in supervision.memory_hint()


def test_a_driver_whose_ray_is_down_says_so_and_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[int] = []

    def train(args: Namespace) -> None:
        raise RayDownError("train: Ray's raylet")

    for check in ("check_patches", "check_remaining"):
        monkeypatch.setattr(process, check, lambda *_: "")
    monkeypatch.setattr(process.os, "_exit", left.append)
    process.run_driver(train, Namespace(dry_run=False))
    assert left == [RunError.exit_status]
    assert "error: train: Ray's raylet\n" in capsys.readouterr().err


# ---- the places of a local Ray


def set_places(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR", *places._CACHES):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_temporary_directory_with_too_long_a_name(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 107 - len(f"/ray/session_2025-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store")
    set_places(monkeypatch, **{variable: "/" + "x" * most})
    with pytest.raises(
        InputError, match=rf"^{variable}=/x+: Ray's sockets .* set RAY_TMPDIR to .* at most {most}, such"
    ):
        check_places()


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR", "HOME"])
def test_a_place_that_cannot_be_written_to_is_named(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_places(monkeypatch)
    check_places()
    set_places(monkeypatch, **{variable: "/dev/null/x"})
    to_set = {"HOME": "set HOME"}.get(variable, "set RAY_TMPDIR")
    with pytest.raises(InputError, match=rf"^{variable}=/dev/null/x: .*/dev/null is not a directory: {to_set}"):
        check_places()


@pytest.mark.parametrize("variable", places._CACHES)
def test_a_cache_that_can_only_be_read_is_no_reason_to_refuse_a_run(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_places(monkeypatch, **{variable: "/proc"})
    check_places()
    (warning,) = places.place_warnings()
    assert warning.startswith(f"{variable}=/proc: a library has its cache there, and no directory can be made in it")


def test_a_disk_that_is_nearly_full_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    set_places(monkeypatch)
    usage = places.shutil.disk_usage("/tmp")._replace(total=100 << 30, free=50 << 30)
    monkeypatch.setattr(places.shutil, "disk_usage", lambda path: usage)
    assert places.place_warnings() == []
    usage = usage._replace(free=4 << 30)
    (warning,) = places.place_warnings()
    assert warning.startswith("4 GiB of 100 GiB are free in /tmp, where Ray writes")
