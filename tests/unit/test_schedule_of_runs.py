"""A run that is over ends before anything is started for it; one that has something left does not."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.driver import data_side
from slime.driver import start as starting
from slime.driver.process import run_driver
from slime.driver.run import Run
from slime.driver.schedule import NothingLeftError, check_remaining, is_due, times_due
from slime.entry.arguments import parse_args
from slime.files.exports import mark_export
from slime.fleet.placement import Placement, Slot
from slime.fleet.spec import fleet_of
from slime.utils.errors import BadInputError
from tests.command_line import command, write_checkpoint, write_model, write_rows

NUM_GPUS = 0
OVER = "the checkpoint in {load} is after rollout 3 of 3: nothing is left to do; a larger --num-rollout goes on\n"
EVALUATES = "--eval-interval 2 --eval-prompt-data add data.jsonl"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test: a model, prompt data, and the checkpoint after three rollouts."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "data.jsonl")
    write_checkpoint(tmp_path / "ckpt", "2", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(words: str, without: str = "") -> bool:
    """Whether `run_driver` calls a driver's loop with these flags."""
    calls: list[Namespace] = []

    def train(args: Namespace) -> None:
        args.num_rollout, args.start_rollout_id = 3, 3
        calls.append(args)

    run_driver(train, parse_args(command(f"--run-dir run {words}", without)))
    return bool(calls)


def evaluated(directory: Path, version: int) -> None:
    """Have the run's directory say that these weights were scored."""
    (directory / "run").mkdir(exist_ok=True)
    (directory / "run" / "metrics.jsonl").write_text(json.dumps({"eval/step": version, "eval/add": 0.5}) + "\n")


def test_times_are_counted_as_they_come() -> None:
    for last, first, interval in itertools.product(range(8), range(9), (None, 1, 2, 3, 9)):
        due = [rollout for rollout in range(first, last) if is_due(rollout, interval, last)]
        assert times_due(first, interval, last) == len(due), (first, interval, last)
    assert times_due(1, 1, 2**62) == 2**62 - 1


def test_bad_input_that_shows_late_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    def train(args: Namespace) -> None:
        raise BadInputError("--use-wandb: no key")

    with pytest.raises(SystemExit) as stop:
        run_driver(train, parse_args(command("--run-dir run")))
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(": error: --use-wandb: no key\n")


@pytest.mark.parametrize("words", ["", f"{EVALUATES} --skip-eval-before-train"])
def test_a_run_that_is_over_says_so_and_ends(words: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not begun(f"--load ckpt {words}")
    assert capsys.readouterr().out == OVER.format(load=directory / "ckpt")
    assert not (directory / "run").exists()


@pytest.mark.parametrize(
    ("first", "words"),
    [(3, ""), (3, "--load ckpt"), (4, "--load ckpt --save-hf hf"), (3, "--save-hf hf"), (3, "--debug-rollout-only")],
)
def test_a_run_that_starts_after_its_last_rollout_is_over(
    first: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed one writes what is missing after its checkpoint's rollout, and after no other."""
    assert not begun(f"--start-rollout-id {first} {words}")
    assert capsys.readouterr().out == (
        f"--start-rollout-id {first}, counted from 0, is after the last of 3 rollouts: nothing is left to do; a larger "
        "--num-rollout goes on\n"
    )


def test_weights_are_scored_once_before_a_run_is_over(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--load ckpt {EVALUATES}"
    assert begun(words), "nothing was scored"
    evaluated(directory, 2)
    assert begun(words), "other weights were scored"
    evaluated(directory, 3)
    capsys.readouterr()
    assert not begun(words)
    assert capsys.readouterr().out == OVER.format(load=directory / "ckpt")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (EVALUATES, "scoring these weights"),
        ("--save-hf hf", "writing the exports that are missing"),
        (f"{EVALUATES} --save-hf hf", "scoring these weights and writing the exports that are missing"),
        ("--start-rollout-id 2", None),
    ],
)
def test_what_a_run_without_rollouts_does_is_said_first(directory: Path, words: str, expected: str | None) -> None:
    line = OVER.format(load=directory / "ckpt").replace("nothing is left to do", f"nothing is left but {expected}")
    said = check_remaining(parse_args(command(f"--run-dir run --load ckpt {words}")))
    assert said == (line.strip() if expected else "")


@pytest.mark.parametrize("place", [pytest.param("hf", marks=pytest.mark.full), "hf_{rollout_id}"])
def test_a_run_is_not_over_without_its_last_export(directory: Path, place: str) -> None:
    """Asked for later, or the run ended between the checkpoint and it."""
    words = f"--load ckpt --save-hf {place}"
    assert begun(words)
    export = directory / place.format(rollout_id=2)
    args = parse_args(command(f"--run-dir run {words}"))
    export.mkdir()
    (export / "model.safetensors").touch()
    others = Namespace(**{**vars(args), "load": str(directory / "others")})
    for run, rollout_id in ((args, 1), (others, 2)):
        mark_export(export, run, rollout_id)
        assert begun(words), "this is that of an earlier rollout, or another run's"
    mark_export(export, args, 2)
    assert not begun(words)
    (export / "model.safetensors").unlink()
    assert begun(words)


@pytest.mark.parametrize(
    ("words", "without"),
    [
        ("--load ckpt --num-rollout 4", "--num-rollout"),
        ("--load ckpt --num-rollout 0", "--num-rollout"),
        ("--load ckpt --num-epoch 1", "--num-rollout"),
        ("--load ckpt --start-rollout-id 1", ""),
        ("--start-rollout-id 2", ""),
        ("--load ckpt --start-rollout-id 3 --save-hf hf", ""),
        (f"--start-rollout-id 3 {EVALUATES}", ""),
        ("--start-rollout-id 3 --num-epoch 1", "--num-rollout"),
        ("--load ckpt --debug-rollout-only", ""),
        ("--load new --save new", ""),
        ("", ""),
    ],
)
def test_a_run_with_something_left_begins(words: str, without: str) -> None:
    assert begun(words, without)


class _Manager:
    """Stands in for the rollout manager and for what waits for it: the prompts make so many rollouts."""

    def __init__(self, num_rollout: int) -> None:
        self.load_data = self
        self.num_rollout = num_rollout

    def remote(self) -> int:
        return self.num_rollout

    def watch(self, who: str, actor: Any, on_death: Any) -> None:
        pass

    def wait(self, calls: dict[str, int], phase: str, limit: Any) -> list[int]:
        return list(calls.values())


class _PlacedError(Exception):
    """Where a run that is not over has come to."""


def _place(*_: object) -> None:
    raise _PlacedError


@pytest.mark.parametrize(
    ("words", "num_rollout", "ends"),
    [("", 3, NothingLeftError), ("", 4, _PlacedError), ("--save-hf hf", 3, _PlacedError)],
)
def test_epochs_are_counted_before_anything_is_placed_on_a_cluster(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    num_rollout: int,
    ends: type[Exception],
) -> None:
    args = parse_args(command(f"--load ckpt --run-dir run --num-epoch 1 {words}", "--num-rollout"))
    (directory / "run").mkdir()
    monkeypatch.setattr(starting, "running_address", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(starting, "place", _place)
    manager = _Manager(num_rollout)
    monkeypatch.setattr(data_side, "create_manager", lambda *_: manager)
    run = Run(args)
    run._data._supervisor = manager  # type: ignore[assignment]
    with pytest.raises(ends):
        run.start()
    assert ("rollout 3 of 3: nothing is left but writing" in capsys.readouterr().out) == bool(words)


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_no_model_is_loaded_before_the_data_and_no_slot_of_a_cluster_taken(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have the cluster's slots: a bad row is to be told of without them."""
    done: list[str] = []

    def noted(what: str, result: Any = None) -> Any:
        return lambda *_: (done.append(what), result)[1]

    start = Run(parse_args(command("--run-dir run")))._start
    monkeypatch.setattr(starting, "running_address", lambda: address)
    monkeypatch.setattr(starting, "place", noted("place", Placement([], [Slot(0, "host", None)], [])))
    monkeypatch.setattr(start, "_load_data", noted("load the data"))
    monkeypatch.setattr(start._engines, "create", noted("make engines"))
    monkeypatch.setattr(start._engines, "begin", lambda method: (done.append(method), {})[1])
    monkeypatch.setattr(start._trainers, "create", noted("make trainers"))
    start._create(fleet_of(start.args), None)
    made = ["place", "make engines", "prepare", "make trainers"]
    assert done == (["load the data", *made] if address else [*made, "load the data"])
