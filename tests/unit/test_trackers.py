"""Trackers of packages that slime does not bring: by their documented calls, and by themselves where they are."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime.observability import trackers
from slime.observability.metrics import MetricsLogger
from slime.options.debug import check_trackers
from slime.options.errors import OptionError
from tests.unit.test_observability import make_args, read_lines

NUM_GPUS = 0
NONE = {
    "mlflow_tracking_uri": None, "mlflow_experiment_name": None, "mlflow_run_name": None, "swanlab_mode": None,
    "swanlab_project": None, "swanlab_workspace": None, "swanlab_experiment_name": None, "trackio_project": None,
    "trackio_run_name": None, "trackio_space_id": None, "judge_secret": "yaml-secret", "lr": 0.25,
}  # fmt: skip


class Package(ModuleType):
    """A tracker's package, which notes what it is called with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.threads: set[threading.Thread] = set()
        self.fails_at: set[str] = set()
        self.takes_s = 0.0

    def __getattr__(self, function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)

        def call(*args: Any, **kwargs: Any) -> Package:
            self.calls.append((function, args, kwargs))
            self.threads.add(threading.current_thread())
            time.sleep(self.takes_s)
            if function in self.fails_at:
                raise ConnectionError(f"{function}:\n no route")
            return self

        return call

    def named(self, function: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for name, args, kwargs in self.calls if name == function]


@pytest.fixture
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package(request.param)
    monkeypatch.setitem(sys.modules, request.param, made)
    return made


def args_of(run_dir: Path, name: str, **changes: Any) -> Any:
    return make_args(run_dir, **NONE | {f"use_{name}": True} | changes)


def log_two_lines(args: Any) -> MetricsLogger:
    log = MetricsLogger(args)
    log.log({"rollout/raw_reward": 0.5, "eval/sums-pass@8": 0.25}, "rollout/step", 3)
    log.log({"train/loss": math.nan, "train/grad_norm": 1.5}, "train/step", 7)
    return log


@pytest.mark.parametrize("package", ["swanlab"], indirect=True)
def test_swanlab_is_called_as_it_documents(package: Package, tmp_path: Path) -> None:
    changes = {"swanlab_project": "sums", "swanlab_experiment_name": "one", "swanlab_mode": "local"}
    log_two_lines(args_of(tmp_path, "swanlab", **changes)).close()
    ((_, begun),) = package.named("init")
    asked = {"project": "sums", "workspace": None, "experiment_name": "one", "mode": "local"}
    assert {name: begun[name] for name in asked} == asked
    assert (begun["config"]["lr"], begun["config"]["judge_secret"]) == (0.25, "<redacted>")
    assert package.named("log") == [
        (({"rollout/raw_reward": 0.5, "eval/sums-pass@8": 0.25},), {"step": 3}),
        (({"train/grad_norm": 1.5},), {"step": 7}),
    ]
    assert len(package.named("finish")) == 1


@pytest.mark.parametrize("package", ["trackio"], indirect=True)
def test_trackio_is_called_as_it_documents(package: Package, tmp_path: Path) -> None:
    log_two_lines(args_of(tmp_path, "trackio", trackio_run_name="one")).close()
    ((_, begun),) = package.named("init")
    assert (begun["project"], begun["name"], begun["space_id"]) == ("slime", "one", None)
    (first, _) = package.named("log")
    assert first == (({"rollout/raw_reward": 0.5, "eval/sums-pass@8": 0.25, "rollout/step": 3},), {"step": 3})
    assert len(package.named("finish")) == 1


@pytest.mark.parametrize("package", ["trackio"], indirect=True)
@pytest.mark.parametrize("at", ["init", "log", "finish"])
def test_what_fails_is_said_in_one_line_and_ends_nothing(
    package: Package, tmp_path: Path, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    package.fails_at = {at}
    log_two_lines(args_of(tmp_path, "trackio")).close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"--use-trackio: ConnectionError: {at}: no route; the run goes on" in said
    assert len(read_lines(tmp_path)) == 2


@pytest.mark.parametrize("package", ["trackio"], indirect=True)
def test_one_that_does_not_answer_holds_nothing_up(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "_FINISH_S", 0.1)
    monkeypatch.setattr(trackers, "_MOST_LINES", 3)
    package.takes_s = 2.0
    log = MetricsLogger(args_of(tmp_path, "trackio"))
    began = time.monotonic()
    for step in range(8):
        log.log({"train/loss": 1.0}, "train/step", step)
    assert time.monotonic() - began < 1
    log.close()
    assert time.monotonic() - began < 1.5
    assert capsys.readouterr().err.count("--use-trackio: it has not taken 3 lines") == 1
    assert threading.current_thread() not in package.threads


def test_a_package_that_is_not_there_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"use_mlflow": True, "use_swanlab": False, "use_trackio": True}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        OptionError, match=r"^--use-mlflow, --use-trackio: not installed here: pip install mlflow trackio$"
    ):
        check_trackers(make_args(tmp_path, **asked))
    check_trackers(make_args(tmp_path, **dict.fromkeys(asked, False)))


def test_mlflow_itself_keeps_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_two_lines(args_of(tmp_path, "mlflow", mlflow_run_name="one")).close()
    client = mlflow.tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("slime")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    assert run.data.params["lr"] == "0.25"
    assert run.data.params["judge_secret"] == "<redacted>"
    (point,) = client.get_metric_history(run.info.run_id, "eval/sums-pass_8")
    assert (point.value, point.step) == (0.25, 3)
    assert run.data.metrics["train/grad_norm"] == 1.5


def test_trackio_itself_keeps_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    log_two_lines(args_of(tmp_path, "trackio", trackio_run_name="one")).close()
    api = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    rows = api.get_logs("slime", "one")
    assert [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row] == [0.5]
    assert [row["step"] for row in rows] == [3, 7]
    assert b"yaml-secret" not in b"".join(file.read_bytes() for file in (tmp_path / "trackio").rglob("*.db"))


def test_swanlab_itself_takes_what_was_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("swanlab")
    log_two_lines(args_of(tmp_path, "swanlab", swanlab_mode="offline")).close()
    assert "the run goes on" not in capsys.readouterr().err
    files = [file for file in (tmp_path / "swanlab").rglob("*") if file.is_file()]
    assert any(b"raw_reward" in file.read_bytes() for file in files), json.dumps([str(file) for file in files])
