"""Commands that share a host's GPUs: each has its own, for as long as anything that it started lives."""

from __future__ import annotations

import fcntl
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.ci import gpu_lock_exec
from tests.unit.test_supervisor import alive
from tests.waiting import wait_for

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests" / "ci" / "gpu_lock_exec.py")

# A command with an orphan in a session of its own. Told to end, they do (obey), do not (defy), or wait for a file
# (wait); "leave": the command ends by itself with status 5, and leaves the orphan behind.
TREE = """
import os, signal, sys, time
manner = sys.argv[1]
def note(name):
    with open(name + ".tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(name + ".tmp", name)
def finish(number, frame):
    note("told")
    while not os.path.exists("go"): time.sleep(0.02)
    os._exit(0)
handlers = {"defy": signal.SIG_IGN, "wait": finish}
signal.signal(signal.SIGTERM, handlers.get(manner, signal.SIG_DFL))
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        note("orphan")
        while True: time.sleep(1)
    os._exit(0)
while not os.path.exists("orphan"): time.sleep(0.02)
note("command")
if manner == "leave": sys.exit(5)
while True: time.sleep(1)
"""
UNTIL_RELEASED = ["sh", "-c", "until [ -e release ]; do sleep 0.02; done"]


class Host:
    """A folder of locks, and programs that use it: their working directory, with their output in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pattern = str(folder / "gpu{gpu_id}.lock")
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, flags: str, command: list[str], preexec_fn: Callable[[], object] | None = None
    ) -> subprocess.Popen[bytes]:
        hidden = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        words = [sys.executable, PROGRAM, "--lock-path-pattern", self.pattern, *shlex.split(flags), "--", *command]
        with (self.folder / f"out{len(self._started)}").open("wb") as out:
            started = subprocess.Popen(
                words, cwd=self.folder, env=env, stdout=out, stderr=subprocess.STDOUT, preexec_fn=preexec_fn
            )
        self._started.append(started)
        return started

    def said(self, program: subprocess.Popen[bytes]) -> str:
        """Its output and its command's so far."""
        return (self.folder / f"out{self._started.index(program)}").read_text()

    def run(self, flags: str, command: list[str]) -> tuple[int, str]:
        """Status and output of a program that ends."""
        program = self.start(flags, command)
        return program.wait(60), self.said(program)

    def tree(self, manner: str, flags: str = "--count 1 --total-gpus 1") -> tuple[subprocess.Popen[bytes], list[int]]:
        """A program that runs TREE, and the ids of the processes of that."""
        holder = self.start(flags, [sys.executable, "-c", TREE, manner])
        names = ("command", "orphan")
        wait_for(lambda: all((self.folder / name).exists() for name in names), "command and orphan run")
        return holder, [int((self.folder / name).read_text()) for name in names]

    def free(self, gpu: str = "0") -> bool:
        with (self.folder / f"gpu{gpu}.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def close(self) -> None:
        (self.folder / "go").touch()
        (self.folder / "release").touch()
        for program in self._started:
            program.kill()
            program.wait(60)
        locks = [path.name[3:-5] for path in self.folder.glob("gpu*.lock")]
        wait_for(lambda: all(map(self.free, locks)), "all that was started has ended")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    try:
        yield host
    finally:
        host.close()


Refusal = Callable[..., tuple[int, str]]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refusal:
    """Status and the one line of a command line that comes to nothing."""

    def get(flags: str, command: str = "-- true", pattern: str = str(tmp_path / "gpu{gpu_id}.lock")) -> tuple[int, str]:
        status = gpu_lock_exec.main(["--lock-path-pattern", pattern, *shlex.split(f"{flags} {command}")])
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("gpu_lock_exec: error: ")
        assert err.count("\n") == 1
        assert not list(tmp_path.glob("*.lock"))
        return status, err

    return get


@pytest.fixture
def probe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[[str], str]:
    """What ``--print-only`` prints."""

    def get(flags: str) -> str:
        pattern = str(tmp_path / "gpu{gpu_id}.lock")
        assert gpu_lock_exec.main(["--print-only", "--lock-path-pattern", pattern, *shlex.split(flags)]) == 0
        return capsys.readouterr().out.removeprefix("Free GPUs: ").rstrip("\n")

    return get


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an nvidia-smi of the given text of a shell script first in PATH, and unsets CUDA_VISIBLE_DEVICES."""

    def put(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return put


def test_a_command_has_its_gpus_and_status_and_none_of_the_locks(host: Host) -> None:
    """Whatever the mask of file modes: other users must be able to write to the locks."""
    script = "import os; print(os.environ['GPUS'], *sorted(os.listdir('/proc/self/fd'))); raise SystemExit(7)"
    mask = os.umask(0o077)
    try:
        status, said = host.run("--count 2 --total-gpus 4 --target-env-name GPUS", [sys.executable, "-c", script])
    finally:
        os.umask(mask)
    assert (status, said) == (7, "[gpu_lock_exec] Acquired GPUs: 0,1\n0,1 0 1 2 3\n")  # 3 is the listing's own
    locks = sorted(host.folder.glob("*.lock"))
    assert [(path.name, path.stat().st_mode & 0o777) for path in locks] == [("gpu0.lock", 0o666), ("gpu1.lock", 0o666)]
    assert host.free("0")
    assert host.free("1")


def test_a_command_killed_by_a_signal_and_one_that_cannot_run(host: Host) -> None:
    assert host.run("--count 1 --total-gpus 1", ["sh", "-c", "kill -SEGV $$"])[0] == 128 + signal.SIGSEGV
    (host.folder / "text").write_text("no program")
    (host.folder / "text").chmod(0o755)
    status, said = host.run("--count 1 --total-gpus 1", ["./text"])
    assert status == 126
    assert said.endswith("gpu_lock_exec: error: cannot run './text': Exec format error\n")
    assert host.run("--count 1 --total-gpus 1", ["./no-such-program"])[0] == 127


def test_one_that_waits_holds_nothing_and_goes_on_when_there_are_enough(host: Host) -> None:
    first = host.start("--count 2 --total-gpus 3", UNTIL_RELEASED)
    wait_for(lambda: "Acquired GPUs: 0,1\n" in host.said(first), "the first has two GPUs")
    second = host.start("--count 2 --total-gpus 3", ["true"])
    wait_for(lambda: "sleep and retry" in host.said(second), "the second waits")
    wait = host.said(second)
    assert wait.startswith("[gpu_lock_exec] try_acquire_count failed, sleep and retry (only got: 2; GPU 0 is held by ")
    assert wait.count(f"is held by pid {first.pid} (user ") == 2
    assert host.run("--devices 2 --total-gpus 3", ["true"]) == (0, "[gpu_lock_exec] Acquired GPUs: 2\n")
    assert second.poll() is None
    (host.folder / "release").touch()
    assert (first.wait(60), second.wait(60)) == (0, 0)


def test_of_many_at_once_no_two_have_the_same_gpu(host: Host) -> None:
    """Each needs two of three: they take and put back parts of what the others need."""
    script = "for gpu in ${CUDA_VISIBLE_DEVICES%,*} ${CUDA_VISIBLE_DEVICES#*,}; do mkdir used$gpu || exit 1; done; "
    script += "sleep 0.1; for gpu in ${CUDA_VISIBLE_DEVICES%,*} ${CUDA_VISIBLE_DEVICES#*,}; do rmdir used$gpu; done"
    programs = [host.start("--count 2 --total-gpus 3", ["sh", "-c", script]) for _ in range(3)]
    assert [program.wait(60) for program in programs] == [0, 0, 0], [host.said(program) for program in programs]


def test_past_the_deadline_the_holders_are_named(host: Host) -> None:
    first = host.start("--devices 1 --total-gpus 2", UNTIL_RELEASED)
    wait_for(lambda: "Acquired" in host.said(first), "the first has a GPU")
    status, said = host.run("--devices 0,1 --total-gpus 2 --timeout 0", ["true"])
    assert status == 1
    start = (
        f"gpu_lock_exec: error: --devices 0,1: not free within --timeout 0 s: GPU 1 is held by pid {first.pid} (user "
    )
    assert said.startswith(start)
    assert said.count("\n") == 1
    (host.folder / "gpu1.lock").write_text("")  # as another program's, which writes nothing into it
    said = host.run("--count 2 --total-gpus 2 --timeout 0", ["true"])[1]
    assert "GPU 1 is held by a process that left no note; wait longer" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_whole_tree(host: Host, number: signal.Signals) -> None:
    holder, tree = host.tree("obey")
    holder.send_signal(number)
    assert holder.wait(60) == 128 + number
    assert not [pid for pid in tree if alive(pid)]
    assert host.free()


def test_a_tree_that_defies_is_killed_after_the_grace_period(host: Host) -> None:
    holder, tree = host.tree("defy", "--count 1 --total-gpus 1 --grace 0.2")
    holder.terminate()
    assert holder.wait(60) == 128 + signal.SIGTERM
    assert not [pid for pid in tree if alive(pid)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait(host: Host, number: signal.Signals) -> None:
    holder = host.start("--count 1 --total-gpus 1", UNTIL_RELEASED)
    wait_for(lambda: "Acquired" in host.said(holder), "the holder has the GPU")
    waits = host.start("--count 1 --total-gpus 1", ["touch", "ran"])
    wait_for(lambda: "retry" in host.said(waits), "the other waits")
    waits.send_signal(number)
    assert waits.wait(60) == 128 + number
    assert host.said(waits).endswith(f"error: --count 1: ended by {number.name} while waiting\n")
    assert not (host.folder / "ran").exists()


def test_nohup_is_heeded(host: Host) -> None:
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    holder = host.start("--count 1 --total-gpus 1", UNTIL_RELEASED, preexec_fn=ignore)
    wait_for(lambda: "Acquired" in host.said(holder), "it runs")
    holder.send_signal(signal.SIGHUP)
    holder.send_signal(signal.SIGTERM)
    assert holder.wait(60) == 128 + signal.SIGTERM


def test_the_tree_of_a_killed_holder_ends_and_keeps_the_gpu_until_then(host: Host) -> None:
    holder, tree = host.tree("wait", "--count 1 --total-gpus 1 --grace 100")
    holder.kill()
    holder.wait(60)
    wait_for((host.folder / "told").exists, "the command is told to end")
    assert not host.free()
    assert host.run("--count 1 --total-gpus 1 --timeout 0", ["true"])[0] == 1
    (host.folder / "go").touch()
    wait_for(host.free, "the GPU is free")
    assert not [pid for pid in tree if alive(pid)]


def test_the_tree_of_a_killed_supervisor_ends(host: Host) -> None:
    holder, tree = host.tree("defy")
    (supervisor,) = psutil.Process(holder.pid).children()
    supervisor.kill()
    assert holder.wait(60) == 128 + signal.SIGKILL
    wait_for(host.free, "the GPU is free")
    assert not [pid for pid in tree if alive(pid)]


def test_what_a_command_leaves_behind_ends_with_it(host: Host) -> None:
    holder, tree = host.tree("leave")
    assert holder.wait(60) == 5
    assert not [pid for pid in tree if alive(pid)]
    assert host.free()


@pytest.mark.parametrize(
    ("visible", "flags", "gpus"),
    [
        ("2,3", "", "2,3"),
        (" 3, 02 ", "--total-gpus 8", "3,2"),
        ("0,2,5", "--devices 5,0", "5,0"),
        ("GPU-5a1b,MIG-GPU-77/1/0", "", "GPU-5a1b,MIG-GPU-77/1/0"),
        ("0,-1,1", "", "0"),
        ("", "", ""),
    ],
)
def test_gpus_that_may_be_used(
    visible: str, flags: str, gpus: str, probe: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert probe(flags) == gpus
    assert probe(f"{flags} --target-env-name HIP_VISIBLE_DEVICES") == gpus
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "5")
    assert probe("--target-env-name HIP_VISIBLE_DEVICES") == "5"


def test_a_command_gets_a_part_of_the_gpus_that_may_be_used(host: Host) -> None:
    show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    outer = [sys.executable, PROGRAM, "--lock-path-pattern", str(host.folder / "inner{gpu_id}"), "--devices", "3", "--"]
    assert host.run("--devices 3,2 --total-gpus 4", [*outer, *show])[1].splitlines()[1:] == [
        "[gpu_lock_exec] Acquired GPUs: 3",
        "3",
    ]


@pytest.mark.parametrize(
    ("script", "devices", "gpus"),
    [
        ("printf '0, GPU-aaaa\\n1, GPU-bbbb\\n2, GPU-bbcc\\n'", ["nvidia0"], "0,1,2"),
        ("echo no driver; exit 9", ["null", "nvidia0", "nvidia3", "nvidiactl"], "0,1"),
        ("echo No devices were found", ["null"], "0,1,2,3,4,5,6,7"),
    ],
)
def test_the_number_of_gpus_is_found(
    script: str,
    devices: list[str],
    gpus: str,
    driver: Callable[[str], None],
    probe: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver(script)
    monkeypatch.setattr(gpu_lock_exec.os, "listdir", lambda folder: devices)
    assert probe("") == gpus


def test_a_gpu_named_by_uuid_has_the_lock_of_its_number(
    driver: Callable[[str], None],
    probe: Callable[[str], str],
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    driver("printf '0, GPU-aaaa\\n1, GPU-bbbb\\n2, GPU-bbcc\\n'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbb,1")
    assert refusal("--count 1") == (
        2,
        "gpu_lock_exec: error: CUDA_VISIBLE_DEVICES=GPU-bbb,1 names one GPU twice: 1, GPU-bbb\n",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa,GPU-bbb,GPU-bb")
    with (tmp_path / "gpu1.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert probe("") == "GPU-aaaa,GPU-bb"


def test_a_probe_takes_nothing_and_makes_no_file(host: Host, probe: Callable[[str], str]) -> None:
    assert probe("--total-gpus 2") == "0,1"
    assert not list(host.folder.glob("*.lock"))
    holder = host.start("--devices 1 --total-gpus 3", UNTIL_RELEASED)
    wait_for(lambda: "Acquired" in host.said(holder), "it holds a GPU")
    assert probe("--total-gpus 3") == "0,2"
    assert probe("--devices 1,2 --total-gpus 3") == "2"
    with (host.folder / "gpu2.lock").open("w") as file:  # another who only looks
        fcntl.flock(file, fcntl.LOCK_SH)
        assert probe("--total-gpus 3") == "0,2"


REFUSED = [
    ("--count 9 --total-gpus 8", "--count 9: the GPUs to choose from are only 8 (--total-gpus 8)"),
    ("--total-gpus 8", "no GPUs asked for: pass --count N or --devices A,B"),
    ("--count 0", "argument --count: '0' is not a number of at least 1"),
    ("--count 1 --devices 0", "argument --devices: not allowed with argument --count"),
    ("--devices 1,4 --total-gpus 4", "--devices '1,4': must be one or more of the GPUs there are: 0, 1, 2, 3 ("),
    ("--devices , --total-gpus 4", "--devices ',': must be one or more of"),
    ("--devices 1,01 --total-gpus 4", "--devices 1,01 names one GPU twice: 1"),
    ("--count 1 --timeout nan", "argument --timeout: 'nan' is not a number of seconds"),
    ("--count 1 --target-env-name A=B", "argument --target-env-name: 'A=B' is not a name of a variable"),
    ("--count 1 --cuont 2 x", "unrecognized arguments: --cuont 2 x; flags go before --, the command after it"),
]


@pytest.mark.parametrize(("flags", "line"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_what_can_never_be_met_is_refused_at_once(
    flags: str, line: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    status, said = refusal(flags)
    assert status == 2
    assert line in said


@pytest.mark.parametrize("visible", ["2,3", "", "-1"])
def test_more_than_may_be_used_is_refused(visible: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many the host has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    status, said = refusal("--count 3 --total-gpus 8")
    assert status == 2
    number = 2 if visible == "2,3" else 0
    assert f"--count 3: the GPUs to choose from are only {number} (CUDA_VISIBLE_DEVICES={visible})" in said
    assert refusal("--devices 0 --total-gpus 8")[0] == 2


@pytest.mark.parametrize("pattern", ["/tmp/lock", "/tmp/lock{i}", "/tmp/{gpu_id}{i}", "/tmp/{gpu_id"])
def test_a_wrong_pattern_names_what_it_must_have(pattern: str, refusal: Refusal) -> None:
    status, said = refusal("--count 1", pattern=pattern)
    assert status == 2
    assert f"argument --lock-path-pattern: '{pattern}' must have {{gpu_id}}" in said


def test_no_command_and_no_folder(host: Host, refusal: Refusal) -> None:
    assert refusal("--count 1", command="")[1].endswith("write it after --, e.g. --count 1 -- python tests/test_x.py\n")
    assert refusal("--count 1", command="-- no-such-program")[0] == 127
    host.pattern = str(host.folder / "none" / "{gpu_id}")
    line = f"--lock-path-pattern: cannot open {host.folder}/none/0: No such file or directory; name a folder that all"
    status, said = host.run("--count 1 --total-gpus 1", ["true"])
    assert status == 2
    assert said.startswith(f"gpu_lock_exec: error: {line}")


AS_NOBODY = """
import os, sys
from tests.ci import gpu_lock_exec
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(gpu_lock_exec.main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_waits_for_the_same_locks_and_takes_them_next() -> None:
    folder = Path(tempfile.mkdtemp())  # tmp_path is its user's alone
    folder.chmod(0o1777)
    host = Host(folder)
    command = [
        sys.executable,
        "-c",
        AS_NOBODY,
        "--lock-path-pattern",
        host.pattern,
        "--count",
        "1",
        "--total-gpus",
        "1",
    ]
    try:
        holder = host.start("--count 1 --total-gpus 1", UNTIL_RELEASED)
        wait_for(lambda: "Acquired" in host.said(holder), "root has the GPU")
        for wanted, status in ((f"is held by pid {holder.pid} (user 0", 1), ("Acquired GPUs: 0\n", 0)):
            words = [*command, "--timeout", "0", "--", "true"]
            other = subprocess.run(words, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
            assert wanted in other.stdout + other.stderr
            assert other.returncode == status
            (folder / "release").touch()
            holder.wait(60)
        assert "(user 65534" in (folder / "gpu0.lock").read_text()
    finally:
        host.close()
        shutil.rmtree(folder)


def test_it_needs_the_standard_library_only() -> None:
    """Neither packages of any kind, nor slime on the path."""
    words = [sys.executable, "-S", PROGRAM, "--help"]
    done = subprocess.run(words, cwd="/", env={}, capture_output=True, text=True, check=True)
    assert "--print-only" in done.stdout
