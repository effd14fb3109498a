"""`tools/pull_versions.py`: the newest version of a run reaches a server by HTTP, whole, and once."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from slime.driver.control.engine_requests import EngineRequests
from slime.driver.control.server import Control
from slime.driver.control.version_files import VersionFiles
from slime.files.control_file import read_control_file
from slime.files.exports import weights_directory
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
        no_engines: Any = None
        self.control = Control(
            str(run_dir), "127.0.0.1", EngineRequests(no_engines), dict[str, Any], VersionFiles(self.args)
        )
        self.url, self.key = read_control_file(run_dir)

    def write(self, version: int, files: dict[str, bytes] = FILES) -> Path:
        directory = weights_directory(self.args) / f"weight_v{version:06d}"
        directory.mkdir(parents=True)
        for name, content in files.items():
            (directory / name).write_bytes(content + str(version).encode())
        return directory


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
    made.answers["/model_info"] = 200, {"weight_version": "default"}
    made.answers["/update_weights_from_disk"] = 200, {"success": True}
    monkeypatch.setattr(tool.EngineControl, "load_version", _loading(made))
    yield made
    made.close()


def _loading(server: Servers) -> Any:
    load = tool.EngineControl.load_version

    def load_version(control: tool.EngineControl, path: str, version: str) -> None:
        load(control, path, version)
        server.answers["/model_info"] = 200, {"weight_version": version}

    return load_version


def pull(run: Run, server: Servers, to: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setenv("SLIME_CONTROL_KEY", run.key)
    line = [run.url, server.url, "--to", str(to), "--once", "--poll", "0.05", "--timeout", "5", *words]
    return tool.main(line)


def test_a_server_gets_each_newest_version_once(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "copies"
    for version in (3, 4):
        run.write(version)
        assert pull(run, server, to, monkeypatch) == 0
        (copy,) = to.iterdir()
        assert copy.name == f"weight_v{version:06d}"
        assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
            name: content + str(version).encode() for name, content in FILES.items()
        }
        loaded = {"model_path": str(copy), "weight_version": str(version), "flush_cache": True, "load_format": "auto"}
        assert server.posted[-1] == ("/update_weights_from_disk", loaded)
        assert f"version {version}: 2 files, 2.2 MiB" in capsys.readouterr().out
    assert pull(run, server, to, monkeypatch) == 0
    assert len(server.posted) == 2


def test_what_was_fetched_is_not_fetched_again_and_what_is_wrong_is(
    run: Run, server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, to, asked = run.write(7), tmp_path / "copies", list[tuple[str, dict[str, str]]]()
    whole = (source / "model-00001.safetensors").read_bytes()
    staging = tool.atomic_io.unfinished(to / "weight_v000007")
    staging.mkdir(parents=True)
    (staging / "model-00001.safetensors").write_bytes(whole[:1000])
    (staging / "of-another-try").write_bytes(b"x")
    ask = tool.Versions._ask

    def noting(self: tool.Versions, path: str, headers: dict[str, str]) -> requests.Response:
        asked.append((path, headers))
        return ask(self, path, headers)

    monkeypatch.setattr(tool.Versions, "_ask", noting)
    assert pull(run, server, to, monkeypatch) == 0
    assert ("/weights/7/model-00001.safetensors", {"Range": "bytes=1000-"}) in asked
    assert (to / "weight_v000007" / "model-00001.safetensors").read_bytes() == whole
    assert len(list((to / "weight_v000007").iterdir())) == 2
    shutil.rmtree(source)
    source = run.write(8)
    staging = tool.atomic_io.unfinished(to / "weight_v000008")
    staging.mkdir()
    (staging / "model-00001.safetensors").write_bytes(b"wrong")
    assert pull(run, server, to, monkeypatch) == 0
    assert "model-00001.safetensors has" in capsys.readouterr().err
    found = (to / "weight_v000008" / "model-00001.safetensors").read_bytes()
    assert found == (source / "model-00001.safetensors").read_bytes()


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
        ("/weights/1/config.json", {}, 200),
        ("/weights/1/config.json", {"Range": "bytes=1-"}, 206),
        ("/weights/1/config.json", {"Range": "bytes=99-"}, 416),
        ("/weights/1/../../../engines.json", {}, 404),
        ("/weights/1/%2e%2e%2fengines.json", {}, 404),
        ("/weights/2/config.json", {}, 404),
        ("/weights/x", {}, 404),
    ],
)
def test_only_files_of_the_version_are_given(run: Run, path: str, headers: dict[str, str], status: int) -> None:
    run.write(1)
    key = {"Authorization": f"Bearer {run.key}"}
    assert requests.get(f"{run.url}/weights/newest", timeout=10).status_code == 401
    assert requests.get(f"{run.url}/weights/newest", headers=key, timeout=10).json()["version"] == 1
    prepared = requests.Request("GET", run.url, headers=key | headers).prepare()
    prepared.url = run.url + path
    assert requests.Session().send(prepared, timeout=10).status_code == status


def test_a_version_that_is_removed_meanwhile_is_no_file(run: Run) -> None:
    directory, key = run.write(1), {"Authorization": f"Bearer {run.key}"}
    assert requests.get(f"{run.url}/weights/newest", headers=key, timeout=10).ok
    shutil.rmtree(directory)
    gone = requests.get(f"{run.url}/weights/1/config.json", headers=key, timeout=10)
    assert (gone.status_code, "was removed meanwhile" in gone.text) == (404, True)


def test_a_key_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SLIME_CONTROL_KEY", raising=False)
    with pytest.raises(SystemExit) as raised:
        tool.main(["127.0.0.1:1", "127.0.0.1:2", "--to", str(tmp_path)])
    assert raised.value.code == 2
    assert "SLIME_CONTROL_KEY is not set" in capsys.readouterr().err
