"""tools/doctor.py in environments that are broken in one way each: what it finds, and its exit status."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.driver import process
from slime.ray import cluster
from tests.proxy import RecordingProxy
from tools import doctor
from tools.doctoring import gpus, host, nodes, packages, places, self_test, table
from tools.doctoring.findings import Check, Finding, Level, Setting, stops
from tools.website.patches_page import TABLES

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
_GPUS = "NVIDIA H100 80GB HBM3, 580.95.05, 81559\nNVIDIA H100 80GB HBM3, 580.95.05, 81559\n"
_TORCH = '{"cuda": "13.0", "count": 2, "usable": true, "nccl": [2, 28, 9], "release": "2.11.0"}'
_TOPOLOGY = """	GPU0	GPU1	CPU Affinity
GPU0	 X 	NV18	0-31
GPU1	NV18	 X 	0-31
"""


def said(found: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(finding.level.value, finding.text) for finding in found]


def told(found: Iterator[Finding], level: Level) -> str:
    return "\n".join(finding.text for finding in found if finding.level is level)


def with_gpus(**changes: str | None) -> Setting:
    """A host with two GPUs; ``changes`` are the answers to words of the commands."""
    answers: dict[str, str | None] = {"-L": "GPU 0\nGPU 1", "name,driver": _GPUS, "import json, torch": _TORCH}
    answers |= {"topo": _TOPOLOGY} | changes

    def answer(words: list[str], timeout: float = 0.0) -> str | None:
        line = " ".join(words)
        return next((text for part, text in answers.items() if part in line), None)

    return Setting(printed_by=answer, version_of=lambda name: "1")


# ---- packages


def versions_as(**others: str | None) -> Callable[[str], str | None]:
    """The tested releases of the CPU set, but for ``others``, whose names have ``_`` for ``-``."""
    wanted = packages.pins(Setting(), "constraints-cpu.txt")
    wanted |= {name.replace("_", "-"): version for name, version in others.items()}  # type: ignore[misc]
    return lambda name: wanted.get(re.sub(r"[-_.]+", "-", name).lower())


def test_the_tested_releases_are_as_they_should_be() -> None:
    wanted = len(packages.pins(Setting(), "constraints-cpu.txt"))
    (found,) = packages.versions(Setting(version_of=versions_as(torch="2.13.0+cpu")))
    assert found == Finding(Level.FINE, f"{wanted - 1} of {wanted} packages of the CPU set are the tested releases")


@pytest.mark.parametrize(
    ("others", "level", "text"),
    [
        ({"sglang": "0.5.16"}, Level.STOPS, r"sglang 0\.5\.16, tested is 0\.5\.17: a run refuses it"),
        (
            {"ray": "2.40.0", "megatron_core": "0.15"},
            Level.STOPS,
            r"megatron-core 0\.15, .*\n.*ray 2\.40\.0, tested is",
        ),
        ({"torch": None}, Level.STOPS, r"not installed for .*: torch$"),
        ({"numpy": "1.0"}, Level.NOTE, r"numpy 1\.0, tested is"),
        ({"wandb": "0.1"}, Level.WARNING, r"wandb 0\.1, tested is"),
        ({"rich": "1.0", "zipp": "0.1"}, Level.NOTE, r"other releases than the tested ones: rich 1\.0, tested is"),
    ],
)
def test_wrong_releases(others: dict[str, str | None], level: Level, text: str) -> None:
    found = list(packages.versions(Setting(version_of=versions_as(**others))))
    assert re.search(text, told(iter(found), level)), found


def test_another_torch_is_refused_on_a_host_without_gpus() -> None:
    setting = Setting(version_of=versions_as(torch="2.4.0"), printed_by=lambda *_: None)
    assert "torch 2.4.0, tested is 2.13.0" in told(packages.versions(setting), Level.STOPS)
    with_cuda = Setting(version_of=versions_as(torch="2.4.0"), printed_by=lambda *_: "GPU 0: H100")
    assert "torch 2.4.0, tested is 2.11.0" in told(packages.versions(with_cuda), Level.STOPS)


def test_releases_that_a_run_refuses_are_those_of_the_patches() -> None:
    assert {patch.package for patches in TABLES.values() for patch in patches} <= set(packages.PATCHED)


def test_what_goes_without_a_package() -> None:
    found = told(packages.optional(Setting(version_of=lambda name: None)), Level.NOTE)
    assert "wandb is not installed: it is for --use-wandb" in found
    assert found.count("is not installed") == len(packages.OPTIONAL)
    assert not told(packages.optional(Setting(version_of=lambda name: "1")), Level.NOTE)


@pytest.mark.parametrize(("version", "level"), [((3, 10, 1), Level.STOPS), ((3, 12, 1), Level.FINE)])
def test_the_interpreter(version: tuple[int, int, int], level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert f"Python {'.'.join(map(str, version))}" in told(packages.python(Setting()), level)


# ---- GPUs


def test_gpus_that_torch_finds() -> None:
    assert said(gpus.devices(with_gpus())) == [
        ("ok", "2 GPUs, NVIDIA H100 80GB HBM3 with 79 GiB, driver 580.95.05"),
        ("ok", "torch 2.11.0 with CUDA 13.0 and NCCL 2.28.9 finds 2 GPUs"),
    ]
    assert said(gpus.links(with_gpus()))[:1] == [("ok", "GPUs reach each other by NV18")]


@pytest.mark.parametrize(
    ("torch", "driver", "text"),
    [
        (None, "580.95.05", "torch cannot be imported"),
        (_TORCH.replace('"13.0"', "null"), "580.95.05", "is built without CUDA, beside 2 GPUs"),
        (_TORCH.replace("true", "false"), "550.54.15", "it wants driver 580 or later, and this is 550.54.15"),
        (_TORCH.replace("true", "false"), "580.95.05", "finds no GPU: see CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_torch_does_not_find(torch: str | None, driver: str, text: str) -> None:
    answers = {"import json, torch": torch, "name,driver": _GPUS.replace("580.95.05", driver)}
    assert text in told(gpus.devices(with_gpus(**answers)), Level.STOPS)


def test_gpus_of_two_kinds_and_slow_links() -> None:
    setting = with_gpus(topo=_TOPOLOGY.replace("NV18", "SYS"), **{"name,driver": _GPUS.replace("H100", "A100", 1)})
    assert "several kinds" in told(gpus.devices(setting), Level.WARNING)
    assert "GPUs reach each other by SYS: not all by NVLink" in told(gpus.links(setting), Level.NOTE)


def test_a_host_without_gpus() -> None:
    setting = Setting(printed_by=lambda *_: None)
    assert said(gpus.devices(setting)) == [("note", "no GPU: runs compute on the CPU (nvidia-smi lists none)")]
    assert not list(gpus.links(setting)) + list(gpus.strangers(setting))


@pytest.mark.parametrize(("used", "level"), [(300, None), (5000, "warning"), (70000, "STOPS")])
def test_memory_that_others_have(used: int, level: str | None) -> None:
    apps = f"uuid-1, {os.getpid()}, /usr/bin/python3\nuuid-0, 1, init\n"
    setting = with_gpus(**{"index,memory": f"1, {used}, 81559, uuid-1\n", "compute-apps": apps})
    found = said(gpus.strangers(setting))
    assert [each for each, _ in found] == ([level] if level else [])
    assert all(f"taken by process {os.getpid()} (python3)" in text for _, text in found)
    hidden = said(gpus.strangers(with_gpus(**{"index,memory": f"1, {used}, 81559, uuid-1\n"})))
    assert all("processes that nvidia-smi does not show" in text for _, text in hidden)


# ---- the host


@pytest.mark.parametrize(("free", "level"), [(1 << 20, "STOPS"), (256 << 20, "warning"), (8 << 30, "ok")])
def test_shared_memory_of_several_sizes(free: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: type("", (), {"free": free, "total": 64 << 30}))
    assert [each for each, _ in said(host.shared_memory(Setting()))] == [level]


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in told(host.shared_memory(Setting(shared_memory=tmp_path / "none")), Level.STOPS)


def test_a_tiny_dev_shm_ends_a_run() -> None:
    """Really: in a mount namespace whose /dev/shm is of 1 MiB."""
    script = f"mount -t tmpfs -o size=1m none /dev/shm && exec {sys.executable} tools/doctor.py"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"needs a mount namespace: {done.stderr.strip()}")
    assert done.returncode == 1
    assert "STOPS    /dev/shm: 1 MiB of 1 MiB are free in /dev/shm" in done.stdout
    assert "docker run --ipc=host" in done.stdout


@pytest.mark.parametrize(
    ("bounds", "level"), [((256, 1024), "STOPS"), ((1024, 20000), "warning"), ((1024, 1 << 20), "ok")]
)
def test_limits_of_open_files(bounds: tuple[int, int], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: bounds)
    assert said(host.limits(Setting()))[0] == (level, said(host.limits(Setting()))[0][1])


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        (tmp_path / "config.yaml").write_text(f"groups:\n  agent_port: {taken}\n  sglang_router_port: null\n")
        found = told(host.ports(Setting(ports=(taken,))), Level.STOPS)
        assert found == f"port {taken} (--port): Address already in use"
        of_run = told(host.ports(Setting(run_dir=tmp_path)), Level.STOPS)
        assert of_run == f"port {taken} (--agent-port): Address already in use"
    assert f"port {taken} (--port) is free" in told(host.ports(Setting(ports=(taken,))), Level.FINE)


def test_proxies_dead_and_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = RecordingProxy()
    for name, value in proxy.variables.items():
        monkeypatch.setenv(name, value.replace("//", "//user:pw@") if "//" in value else value)
    assert said(host.proxies(Setting())) == [
        ("ok", f"the proxy {proxy.url.replace('//', '//<redacted>@')} takes connections")
    ]
    proxy.close()
    found = told(host.proxies(Setting()), Level.WARNING)
    assert "does not answer (Connection refused): downloads, trackers and judges" in found
    assert "pw" not in found
    monkeypatch.setenv("no_proxy", "*")
    assert not said(host.proxies(Setting()))


# ---- directories


def test_directories_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(
        f"checkpoint:\n  save: {tmp_path}/save\n  save_hf: '{tmp_path}/hf_{{rollout_id}}'\n"
    )
    found = said(places.directories(Setting(run_dir=tmp_path, directories=(tmp_path,))))
    flags = [text.split()[0] for _, text in found if "writes" in text]
    assert flags == ["--directory", "--save", "--save-hf"]
    assert not list(tmp_path.glob(".slime*"))
    monkeypatch.setattr(places, "disk_speed", lambda _: (1e6, 1e9))
    assert "checkpoints will take long" in told(places.directories(Setting(directories=(tmp_path,))), Level.WARNING)


def test_directories_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "run"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 60)))
    monkeypatch.setenv("HF_HOME", str(place))
    monkeypatch.setenv("HOME", str(place))
    found = told(places.directories(Setting(directories=(place,))), Level.STOPS)
    assert "is not a directory" in found
    assert "the paths of Ray's sockets there are longer" in found
    assert "HF_HOME" in told(places.caches(Setting()), Level.WARNING)
    assert "HOME" in told(places.caches(Setting()), Level.STOPS)


def test_rays_share_of_a_path_is_as_a_run_has_it() -> None:
    assert len(cluster._RAYS_SHARE.format(pid=4194304)) == places.SESSION_BYTES


# ---- Ray's nodes, the self-test


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        ('[["10.0.0.1", 0.001, 0.002]]', Level.FINE, "the clock of 10.0.0.1 is 0.001 s ahead of this one's"),
        ('warnings\n[["10.0.0.2", -9.5, 0.1]]', Level.WARNING, "10.0.0.2 is 9.500 s behind this one's (to 0.050 s)"),
        (None, Level.STOPS, "no Ray answers there"),
    ],
)
def test_clocks(answer: str | None, level: Level, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert text in told(nodes.clocks(Setting(printed_by=lambda *_: answer, version_of=lambda _: "1")), level)


def test_a_run_of_its_own_has_no_other_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert [each for each, _ in said(nodes.clocks(Setting()))] == ["note"]


def test_a_self_test_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    program = "import sys\nprint('one')\nprint('no room for it')\nsys.exit(3)\n"
    (tmp_path / "tools" / "make_tiny_model.py").write_text(program)
    found = told(self_test.run_in_small(Setting(root=tmp_path)), Level.STOPS)
    assert found == "the self-test ended with status 3: one / no room for it"
    (tmp_path / "tools" / "make_tiny_model.py").write_text("")
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    setting = Setting(root=tmp_path, self_test_s=0.2, printed_by=lambda *_: None)
    assert "took longer than 0.2 s" in told(self_test.run_in_small(setting), Level.STOPS)
    (tmp_path / "train.py").write_text("")
    setting.self_test_s = 30
    assert "trained nothing: it logged 0 pushes" in told(self_test.run_in_small(setting), Level.STOPS)


# ---- the program


def test_each_check_is_a_row_with_advice_and_none_fails_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [check.name for check in (*table.CHECKS, table.SELF_TEST)]
    assert len(set(names)) == len(names)
    assert all(check.advice for check in table.CHECKS)

    def broken(setting: Setting) -> Iterator[Finding]:
        yield stops("first")
        raise KeyError("x")

    check = Check("odd", broken, "do this")
    lines = list(table.lines_of([(check, table.findings_of(check, Setting()))]))
    assert lines == [
        "STOPS    odd: first",
        "warning  odd: this check could not be made: KeyError: 'x'",
        "         -> do this",
    ]


@pytest.mark.parametrize(("found", "status"), [([], 0), ([stops("gone")], 1)])
def test_the_exit_status(
    found: list[Finding], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (Check("one", lambda _: found, "do"),))
    assert doctor.main([]) == status
    assert ("STOPS    one: gone" in capsys.readouterr().out) == bool(status)


def test_a_bare_clone_is_told_what_is_missing(tmp_path: Path) -> None:
    """A Python without site-packages, as of a new host."""
    command = [sys.executable, "-S", "tools/doctor.py", "--directory", str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1, done.stderr
    assert not done.stderr
    missing = re.search(r"STOPS    packages: not installed for .*: (.*)", done.stdout)
    assert missing is not None
    assert set(missing[1].split(", ")) == set(packages.NEEDED)
    assert "bash scripts/install.sh" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/run"], "/no/such/run: no such directory"),
        (["--port", "70000"], "'70000' is no port"),
        (["--bundle", "/no/such/dir/b.tar.gz"], "--bundle /no/such/dir/b.tar.gz: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", ())
    try:
        status: Any = doctor.main(words)
    except SystemExit as ended:
        status = ended.code
    assert (status, message in capsys.readouterr().err) == (2, True)


def test_a_bundle_has_no_secrets_and_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, secret = tmp_path / "run", "hunter2-of-the-judge"
    monkeypatch.setenv("JUDGE_API_KEY", secret)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MY_OWN", "value-of-my-own")
    for name, text in {
        "config.yaml": "save: /data\n",
        "logs/driver.log": f"asks https://me:{secret}@judge/?token=abcdefgh12\nBearer abc.def.ghi\n",
        "logs/engine_0.log": f"{'y' * 1023}\n" * 400,
        "rollout_data/0.pt": "prompt and response",
        "run.lock": "",
    }.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(text)
    monkeypatch.setattr(doctor, "CHECKS", (Check("one", lambda _: [stops(f"key {secret}")], "do"),))
    file = tmp_path / "b.tar.gz"
    assert doctor.main([str(run_dir), "--bundle", str(file)]) == 1
    with tarfile.open(file) as archive:
        members = archive.getmembers()
        texts = {m.name.removeprefix("slime-doctor/"): archive.extractfile(m).read().decode() for m in members}  # type: ignore[union-attr]
    assert {name for name in texts if name.startswith("run/")} == {
        *("run/config.yaml", "run/logs/driver.log", "run/logs/engine_0.log"),
    }
    everything = "\n".join(texts.values())
    assert not any(
        text in everything for text in (secret, "abcdefgh12", "abc.def.ghi", "value-of-my-own", "prompt and")
    )
    assert "JUDGE_API_KEY" in texts["environment.txt"]
    assert "NCCL_DEBUG=INFO" in texts["environment.txt"]
    assert f"pytest=={importlib.metadata.version('pytest')}" in texts["packages.txt"]
    assert len(texts["run/logs/engine_0.log"]) <= 256 << 10
    assert texts["report.txt"].startswith("STOPS    one: key <redacted>")


def test_a_failed_run_names_it(tmp_path: Path) -> None:
    from argparse import Namespace

    hint = process.doctor_hint(Namespace(run_dir=str(tmp_path)))
    command = hint.partition(": ")[2].split()
    assert command[0] == "python3"
    assert Path(command[1]).resolve() == ROOT / "tools" / "doctor.py"
    assert command[2:] == [str(tmp_path)]
