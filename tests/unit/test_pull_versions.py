"""`tools/pull_versions.py`: the version that a run's engines have reaches a server by HTTP, whole, and once."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from slime.driver.control import version_files
from slime.driver.control.engine_requests import EngineRequests
from slime.driver.control.server import Control
from slime.driver.control.version_files import PULLER, VersionFiles
from slime.files.control_file import read_control_file
from slime.files.exports import weights_directory
from slime.weights.disk import DiskPublisher
from tests.fake_control import FakeControl, addresses_of
from tests.fake_servers import Servers
from tools import pull_versions as tool

NUM_GPUS = 0
FILES = {"config.json": b"{}", "model-00001.safetensors": bytes(range(256)) * 9000}


class Run:
    """One that writes versions."""

    def __init__(self, run_dir: Path, transport: str = "disk") -> None:
        self.args = Namespace(
            run_dir=str(run_dir), update_weight_disk_dir=str(run_dir / "weights"), update_weight_transport=transport
        )
        self.confirmed: tuple[int, int] | None = None
        """As `Pushes.confirmed` tells."""
        self.versions = VersionFiles(self.args, lambda: self.confirmed)
        no_engines: Any = None
        self.control = Control(str(run_dir), "127.0.0.1", EngineRequests(no_engines), dict[str, Any], self.versions)
        self.url, self.key = read_control_file(run_dir)

    @property
    def directory(self) -> Path:
        """Where the versions are."""
        return weights_directory(self.args)

    def write(self, version: int, files: dict[str, bytes] = FILES) -> Path:
        """One that no engine has confirmed."""
        directory = self.directory / f"weight_v{version:06d}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for name, content in files.items():
            (directory / name).write_bytes(content + str(version).encode())
        return directory

    def push(self, version: int, files: dict[str, bytes] = FILES) -> Path:
        """One that they have, in place of all others."""
        directory = self.write(version, files)
        for other in self.directory.glob("weight_v*"):
            if other != directory:
                shutil.rmtree(other)
        self.confirmed = version, self.confirmed[1] + 1 if self.confirmed else 0
        return directory

    def ask(self, path: str, puller: str = "one", **headers: str) -> requests.Response:
        """Of ``/weights``."""
        headers |= {"Authorization": f"Bearer {self.key}", PULLER: puller}
        return requests.get(f"{self.url}/weights/{path}", headers=headers, timeout=10)

    def offered(self) -> set[str]:
        """What is kept for those who fetch."""
        return {path.name for path in self.directory.glob(".*")}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "run").mkdir()
    made = Run(tmp_path / "run")
    yield made
    made.control.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """It has the version that it was told to load last."""
    made = Servers()
    has(made, "default", "model")
    made.answers["/update_weights_from_disk"] = 200, {"success": True}
    monkeypatch.setattr(tool.EngineControl, "load_version", _loading(made))
    yield made
    made.close()


def has(server: Servers, version: str, path: str) -> None:
    """Have it say that it serves these weights."""
    server.answers["/model_info"] = 200, {"weight_version": version, "model_path": path}


def _loading(server: Servers) -> Any:
    load = tool.EngineControl.load_version

    def load_version(control: tool.EngineControl, path: str, version: str) -> None:
        load(control, path, version)
        has(server, version, path)

    return load_version


def pull(run: Run, server: Servers, to: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setenv("SLIME_CONTROL_KEY", run.key)
    line = [run.url, server.url, "--to", str(to), "--once", "--poll", "0.05", "--timeout", "5", *words]
    return tool.main(line)


def copies(to: Path) -> dict[str, dict[str, bytes]]:
    """What was fetched, whole or in part, by number of the version."""
    return {
        path.name.partition("-")[0]: {file.name: file.read_bytes() for file in path.iterdir()} for path in to.iterdir()
    }


def of(version: int, files: dict[str, bytes] = FILES) -> dict[str, bytes]:
    """What `Run.write` writes."""
    return {name: content + str(version).encode() for name, content in files.items()}


def test_a_server_gets_each_newest_version_once(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "copies"
    for version in (3, 4):
        run.push(version)
        assert pull(run, server, to, monkeypatch) == 0
        assert copies(to) == {f"weight_v{version:06d}": of(version)}
        (copy,) = to.iterdir()
        loaded = {"model_path": str(copy), "weight_version": str(version), "flush_cache": True, "load_format": "auto"}
        assert server.posted[-1] == ("/update_weights_from_disk", loaded)
        assert f"version {version}: 2 files, 2.2 MiB" in capsys.readouterr().out
    assert pull(run, server, to, monkeypatch) == 0
    assert len(server.posted) == 2


def test_it_goes_back_with_a_run_to_versions_that_were_made_anew(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers that die at 190 come back from a checkpoint after 100: its directory, of nobody now, stays."""
    to, anew = tmp_path / "copies", FILES | {"config.json": b"anew"}
    run.push(190)
    assert pull(run, server, to, monkeypatch) == 0
    run.confirmed = None
    assert pull(run, server, to, monkeypatch, "--timeout", "0.2") == 1
    assert len(server.posted) == 1, "nobody knows yet with which the run goes on"
    run.write(100, anew)
    run.confirmed = 100, 1
    assert pull(run, server, to, monkeypatch) == 0
    assert copies(to) == {"weight_v000100": of(100, anew)}
    run.push(190, anew)
    assert pull(run, server, to, monkeypatch) == 0
    assert copies(to) == {"weight_v000190": of(190, anew)}
    assert len(server.posted) == 3


def test_a_server_that_has_the_same_number_of_another_run_gets_this_ones(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "copies"
    for left in (to / "weight_v000020", to / "weight_v000020-0123456789abcdef", to / ".weight_v000007-0.tmp"):
        left.mkdir(parents=True)
        (left / "config.json").write_bytes(b"of another run")
    has(server, "20", str(to / "weight_v000020-0123456789abcdef"))
    assert pull(run, server, to, monkeypatch, "--timeout", "0.2") == 1, "--once waits for the first version"
    assert server.posted == []
    run.push(20)
    assert pull(run, server, to, monkeypatch) == 0
    assert copies(to) == {"weight_v000020": of(20)}


def test_a_server_that_was_started_again_gets_the_copy_which_is_checked(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "copies"
    run.push(5)
    assert pull(run, server, to, monkeypatch) == 0
    (copy,) = to.iterdir()
    for damage in (b"", b"damaged"):
        with (copy / "config.json").open("ab") as file:
            file.write(damage)
        has(server, "default", "model")
        assert pull(run, server, to, monkeypatch) == 0
        assert copies(to) == {"weight_v000005": of(5)}
        assert ("config.json has" in capsys.readouterr().err) == bool(damage)
    assert len(server.posted) == 3


def test_only_what_engines_have_confirmed_is_offered_and_as_it_is_then(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's function changes the files in place after the directory has its name, and engines may refuse them."""
    to = tmp_path / "copies"
    run.push(1)
    written = run.write(2)
    assert pull(run, server, to, monkeypatch) == 0
    assert copies(to) == {"weight_v000001": of(1)}
    for content in (b"half", b"quantised"):
        (written / "config.json").write_bytes(content)
        assert run.ask("newest").json()["version"] == 1
    run.confirmed = 2, 1
    assert pull(run, server, to, monkeypatch) == 0
    assert copies(to) == {"weight_v000002": of(2) | {"config.json": b"quantised"}}
    # An engine that came back gets the version anew: it is written again, and changed again.
    run.confirmed = None
    run.write(2, {"other": b"plain"})
    assert pull(run, server, to, monkeypatch, "--timeout", "0.2") == 1
    run.confirmed = 2, 2
    assert pull(run, server, to, monkeypatch) == 0
    assert copies(to) == {"weight_v000002": of(2, {"other": b"plain"})}
    assert "SHA-256" not in capsys.readouterr().err


def test_a_users_function_has_changed_all_that_is_offered(run: Run, tmp_path: Path) -> None:
    """By the publisher that writes versions, which names a directory before that function has it."""
    seen: list[list[Any]] = []
    (tmp_path / "mine.py").write_text(
        "import pathlib\n"
        "def quantise(args, version_dir, rollout_engines):\n"
        "    file = pathlib.Path(version_dir, 'config.json')\n"
        "    for text in ('half', 'quantised'):\n"
        "        file.write_text(text)\n"
        "        args.look(version_dir)\n"
    )
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "config.json").write_text("{}")
    values: dict[str, Any] = {"hf_checkpoint": str(tmp_path / "origin"), "random_weights": False}
    values |= {"update_weight_disk_keep_files": False}
    values |= {"custom_update_weight_post_write_path": f"{tmp_path}/mine.py:quantise", "asynchronous": False}
    values |= {"check_weight_update_equal": False, "weight_update_timeout": 100.0}
    values |= {"look": lambda directory: seen.append([Path(directory).is_dir(), run.ask("newest").json()["version"]])}
    publisher = DiskPublisher(Namespace(**vars(run.args) | values), 0)
    engines = addresses_of([FakeControl()])
    for version in (1, 2):
        publisher.publish(version, [[("a", torch.ones(3))]], engines)
        run.confirmed = version, 0
        told = run.ask("newest").json()
        assert told["version"] == version
        assert run.ask(f"{told['digest']}/config.json").text == "quantised"
    assert seen == [[True, None]] * 2 + [[True, 1]] * 2


@pytest.mark.parametrize("links", [True, False])
def test_a_version_that_is_replaced_while_it_is_read_is_not_offered(
    run: Run, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.push(1)
    within: Any = version_files.os if links else version_files
    name = "link" if links else "_described"
    done = getattr(within, name)

    def replaced(*args: Any) -> Any:
        run.push(1, {"other": b"x"})
        return done(*args)

    if not links:
        monkeypatch.setattr(version_files.os, "link", refuse_links)
    with monkeypatch.context() as patch:
        patch.setattr(within, name, replaced)
        assert run.ask("newest").status_code == 404
    assert run.offered() == set()
    assert [file["name"] for file in run.ask("newest").json()["files"]] == ["other"]


def refuse_links(*_: Any) -> None:
    raise PermissionError("Operation not permitted")


def test_on_a_file_system_without_links_the_runs_own_files_are_sent(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_files.os, "link", refuse_links)
    directory = run.push(1)
    assert pull(run, server, tmp_path / "copies", monkeypatch) == 0
    assert copies(tmp_path / "copies") == {"weight_v000001": of(1)}
    assert run.offered() == set()
    digest = run.ask("newest").json()["digest"]
    shutil.rmtree(directory)
    gone = run.ask(f"{digest}/config.json")
    assert (gone.status_code, "was removed meanwhile" in gone.text) == (404, True)
    assert (run.ask("newest").status_code, run.ask("newest", "other").status_code) == (200, 200), "one is offered still"
    run.control.close()
    assert directory.parent.is_dir()


def test_a_slow_one_gets_its_version_whole_while_the_run_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(version_files.time, "monotonic", lambda: now[0])

    def newest(puller: str) -> tuple[int, str]:
        told = run.ask("newest", puller).json()
        return told["version"], told["digest"]

    def whole(digest: str, version: int, puller: str = "slow") -> bool:
        now[0] += 100
        return run.ask(f"{digest}/config.json", puller).content == of(version)["config.json"]

    run.push(1)
    slow = newest("slow")[1]
    for later in (2, 3):
        run.push(later)
        assert whole(slow, 1)
    assert newest("other")[0] == 3
    run.push(4)
    assert newest("third")[0] == 3, "no more than two are kept"
    assert len(run.offered()) == 2
    assert whole(slow, 1)
    assert newest("slow")[0] == 4, "it has asked for another: it has the first, or wants it no more"
    assert run.ask(f"{slow}/config.json", "slow").status_code == 404
    now[0] += 130  # the others are gone
    run.push(5)
    assert newest("slow")[0] == 5
    assert len(run.offered()) == 1
    now[0] += 130
    run.push(6)
    run.versions._sweep()
    assert run.offered() == set(), "nobody asks any more"
    newest("slow")
    assert len(run.offered()) == 1
    run.control.close()
    assert run.offered() == set()


def test_a_slow_ones_version_goes_with_the_history_that_it_is_of(run: Run) -> None:
    run.push(190)
    digest = run.ask("newest").json()["digest"]
    run.push(100)
    assert run.ask("newest", "other").json()["version"] == 100
    assert run.ask(f"{digest}/config.json").status_code == 404
    assert len(run.offered()) == 1


def test_links_that_a_killed_driver_left_are_removed(run: Run) -> None:
    run.push(1)
    assert run.ask("newest").ok
    assert len(run.offered()) == 1
    VersionFiles(run.args, lambda: None)
    assert run.offered() == set()


def test_what_was_fetched_is_not_fetched_again_and_what_is_wrong_is(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, to, asked = run.push(7), tmp_path / "copies", list[tuple[str, dict[str, str]]]()
    whole, ask = of(7)["model-00001.safetensors"], tool.Versions._ask
    digest = run.ask("newest").json()["digest"]
    staging = to / f".weight_v000007-{digest[:16]}.tmp"
    staging.mkdir(parents=True)
    (staging / "model-00001.safetensors").write_bytes(whole[:1000])
    (staging / "of-another-try").write_bytes(b"x")

    def noting(self: tool.Versions, path: str, headers: dict[str, str], timeout: float) -> requests.Response:
        asked.append((path, headers))
        return ask(self, path, headers, timeout)

    monkeypatch.setattr(tool.Versions, "_ask", noting)
    assert pull(run, server, to, monkeypatch) == 0
    assert (f"{digest}/model-00001.safetensors", {"Range": "bytes=1000-"}) in asked
    assert copies(to) == {"weight_v000007": of(7)}
    shutil.rmtree(source)
    run.push(8)
    digest = run.ask("newest").json()["digest"]
    staging = to / f".weight_v000008-{digest[:16]}.tmp"
    staging.mkdir()
    (staging / "model-00001.safetensors").write_bytes(b"wrong")
    assert pull(run, server, to, monkeypatch) == 0
    assert "model-00001.safetensors has" in capsys.readouterr().err
    assert copies(to) == {"weight_v000008": of(8)}


def test_a_fetch_that_was_interrupted_goes_on_with_its_version_as_long_as_the_run_keeps_it(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to, ask, failed = tmp_path / "copies", tool.Versions._ask, list[str]()

    def cut(self: tool.Versions, path: str, headers: dict[str, str], timeout: float) -> requests.Response:
        if "model" in path and len(failed) < 2:
            failed.append(path)
            run.push(len(failed) + 1)
            if len(failed) == 2:
                run.versions._fetching.clear()  # it has been away for long
                assert run.ask("newest", "other").json()["version"] == 3
            raise tool.PullError("cut")
        return ask(self, path, headers, timeout)

    run.push(1)
    monkeypatch.setattr(tool.Versions, "_ask", cut)
    assert pull(run, server, to, monkeypatch) == 0
    assert failed[0] == failed[1], "of version 1, when 2 was there"
    assert "no longer" in capsys.readouterr().err
    assert copies(to) == {"weight_v000003": of(3)}
    assert len(server.posted) == 1


@pytest.mark.parametrize(
    ("transport", "message"),
    [("distributed", "the run writes no versions: --update-weight-transport is not disk"), ("disk", "")],
)
def test_without_a_version_it_ends_in_time(
    server: Servers,
    tmp_path: Path,
    transport: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(tmp_path, transport)
    try:
        assert pull(run, server, tmp_path / "copies", monkeypatch, "--timeout", "0.3") == 1
        assert message in capsys.readouterr().err
        assert server.posted == []
    finally:
        run.control.close()
    assert pull(run, server, tmp_path / "copies", monkeypatch, "--timeout", "0.3") == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("{digest}/config.json", {}, 200),
        ("{digest}/config.json", {"Range": "bytes=1-"}, 206),
        ("{digest}/config.json", {"Range": "bytes=99-"}, 416),
        ("{digest}/../../../engines.json", {}, 404),
        ("{digest}/%2e%2e%2fengines.json", {}, 404),
        ("1/config.json", {}, 404),
        ("x", {}, 404),
    ],
)
def test_only_files_of_the_version_are_given(run: Run, path: str, headers: dict[str, str], status: int) -> None:
    run.push(1)
    key = {"Authorization": f"Bearer {run.key}"}
    assert requests.get(f"{run.url}/weights/newest", timeout=10).status_code == 401
    digest = run.ask("newest").json()["digest"]
    prepared = requests.Request("GET", run.url, headers=key | headers).prepare()
    prepared.url = f"{run.url}/weights/{path.replace('{digest}', digest)}"
    assert requests.Session().send(prepared, timeout=10).status_code == status


@pytest.mark.parametrize("name", ["../engines.json", "", "..", "/etc/passwd"])
def test_a_run_cannot_have_it_write_elsewhere(name: str) -> None:
    file = {"name": name, "size": 1, "sha256": "0"}
    with pytest.raises(tool.PullError, match="is not the name of a file"):
        tool.Version.of({"version": 1, "digest": "0", "files": [file]})
    with pytest.raises(tool.PullError, match="does not answer as this release's"):
        tool.Version.of({"version": 1, "files": [file]})


def test_a_version_that_is_removed_meanwhile_is_told(run: Run) -> None:
    shutil.rmtree(run.push(1))
    gone = run.ask("newest")
    assert (gone.status_code, "was removed meanwhile" in gone.text) == (404, True)


def test_a_key_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SLIME_CONTROL_KEY", raising=False)
    with pytest.raises(SystemExit) as raised:
        tool.main(["127.0.0.1:1", "127.0.0.1:2", "--to", str(tmp_path)])
    assert raised.value.code == 2
    assert "SLIME_CONTROL_KEY is not set" in capsys.readouterr().err
