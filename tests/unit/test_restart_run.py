"""A driver that fails is started again from its newest checkpoint, and only where that may help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.files.checkpoints import LATEST
from slime.options.checks.checkpoint_rules import starting_point
from tests.command_line import Parse, command, write_checkpoint, write_model
from tests.recorder import SCRIPTS
from tests.shipped import ROOT
from tests.waiting import wait_for
from tools.restart_run import Before, resuming, value_of

NUM_GPUS = 0
_WAIT_S = 60.0
# Of a driver: notes its flags, saves a checkpoint a start where it is to, and ends as the next of its statuses says.
_DRIVER = """
import json, os, pathlib, subprocess, sys, time
directory = pathlib.Path(__file__).parent
flags, statuses = sys.argv[1:], json.loads((directory / "statuses").read_text())
with open(directory / "starts", "a") as file:
    file.write(json.dumps(flags) + "\\n")
count = len((directory / "starts").read_text().splitlines())
if "--save" in flags and not (directory / "saves_nothing").exists():
    save = pathlib.Path(flags[flags.index("--save") + 1])
    save.mkdir(exist_ok=True)
    (save / "latest_checkpointed_iteration.txt").write_text(str(10 + count))
status = statuses[min(count, len(statuses)) - 1]
if status == "waits":
    (directory / "waits").touch()
    time.sleep(600)
if status == "killed":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"], start_new_session=True)
    os.kill(os.getpid(), 9)
sys.exit(status)
"""


def write(directory: Path, *statuses: Any) -> list[str]:
    """A driver that ends with these, one a start; the words that start it."""
    (directory / "driver.py").write_text(_DRIVER)
    (directory / "statuses").write_text(json.dumps(statuses))
    return [sys.executable, str(directory / "driver.py")]


def start(restarts: int, command: list[str]) -> subprocess.Popen[str]:
    words = [sys.executable, str(ROOT / "tools/restart_run.py"), str(restarts), "--", *command]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def run(restarts: int, command: list[str]) -> tuple[int, list[str]]:
    """The status, and what was said."""
    process = start(restarts, command)
    said = process.communicate(timeout=_WAIT_S)[1]
    return process.returncode, said.splitlines()


def starts(directory: Path) -> list[list[str]]:
    return [json.loads(line) for line in (directory / "starts").read_text().splitlines()]


def test_a_failed_run_goes_on_from_what_it_has_saved(tmp_path: Path) -> None:
    save = str(tmp_path / "kept")
    spans = [{"name": "driver/push_weights", "version": version} for version in (10, 11)]
    spans += [{"name": "driver/push_weights", "version": 12, "error": "LostError"}, {"name": "driver/train"}]
    trace = Path(save, "trace", "driver.jsonl")
    trace.parent.mkdir(parents=True)
    trace.write_text("".join(f"{json.dumps(span)}\n" for span in spans) + '{"name": "driver/pu')
    status, said = run(3, [*write(tmp_path, 1, "killed", 0), "--lr", "1", "--save", save])
    assert status == 0
    resumed = ["--lr", "1", "--save", save, "--load", save]
    assert starts(tmp_path) == [["--lr", "1", "--save", save], resumed, resumed]
    goes_on = f"the run is started again, from the checkpoint after rollout %d in {save}; %d of 3 restarts left"
    assert said == [
        f"launch: the run ended with status 1: {goes_on % (11, 3)} (--max-restarts)",
        f"launch: the run ended with status 137: {goes_on % (12, 2)} (--max-restarts)",
    ]
    events = [json.loads(line) for line in Path(save, "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["cause"], event["version"]) for event in events] == [
        ("driver_died", "ended with status 1", "11"),
        ("driver_died", "ended with status 137", "11"),
    ]


def test_restarts_have_an_end(tmp_path: Path) -> None:
    status, said = run(2, write(tmp_path, 7))
    assert (status, len(starts(tmp_path))) == (7, 3)
    assert said[-1] == (
        "launch: the run ended with status 7: it is not started again; 0 of 2 restarts left (--max-restarts)"
    )


@pytest.mark.parametrize("status", [0, 2])
def test_neither_success_nor_bad_input_is_tried_again(tmp_path: Path, status: int) -> None:
    assert run(3, write(tmp_path, status)) == (status, [])
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_driver_and_is_no_failure(tmp_path: Path, number: signal.Signals) -> None:
    process = start(3, write(tmp_path, "waits"))
    wait_for((tmp_path / "waits").exists, "the driver")
    process.send_signal(number)
    said = process.communicate(timeout=_WAIT_S)[1]
    assert process.returncode == 128 + number
    assert "launch:" not in said
    assert len(starts(tmp_path)) == 1


def test_a_driver_does_not_outlive_what_restarts_it(tmp_path: Path) -> None:
    process = start(3, write(tmp_path, "waits"))
    wait_for((tmp_path / "waits").exists, "the driver")
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate(timeout=_WAIT_S)
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the driver's end")


def test_what_a_killed_driver_leaves_has_ended_before_the_next_begins(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    text = f"import pathlib, time; time.sleep(2); pathlib.Path({str(ended)!r}).touch()"
    driver = write(tmp_path, "killed", 0)
    path = Path(driver[1])
    path.write_text(path.read_text().replace('"import time; time.sleep(1)"', repr(text)))
    path.write_text(
        path.read_text().replace("status = ", f"assert count == 1 or os.path.exists({str(ended)!r})\nstatus = ", 1)
    )
    assert run(1, driver)[0] == 0


def test_checkpoints_of_another_run_are_not_resumed(tmp_path: Path) -> None:
    save = tmp_path / "kept"
    save.mkdir()
    (save / "latest_checkpointed_iteration.txt").write_text("99")
    (tmp_path / "saves_nothing").touch()
    status, said = run(1, [*write(tmp_path, 1, 0), "--save", str(save)])
    assert (status, starts(tmp_path)) == (0, [["--save", str(save)]] * 2)
    assert "the run is started again, from its beginning" in said[0]


@pytest.mark.parametrize(
    ("words", "began", "expected"),
    [
        ("--save kept", "model", {}),
        ("--save=kept", "model", {}),
        ("--load first --save kept", "first/iter_0000004", {}),
        ("--load=first --save=kept", "first/iter_0000004", {}),
        ("--load first --ckpt-step 4 --save kept", "first/iter_0000004", {"ckpt_step": 9}),
        ("--load kept --save kept", "model", {}),
        ("--load converted --save kept", "converted", {"ref_load": "converted/release"}),
        ("--load converted --ref-load converted --save kept", "converted", {"ref_load": "converted"}),
        (
            "--load converted --initial-megatron-checkpoint converted --save kept",
            "converted",
            {"ref_load": "converted"},
        ),
        ("--ref-load ref --save kept", "ref", {"ref_load": "ref"}),
        ("--load first --ref-load ref --save kept", "first/iter_0000004", {"ref_load": "ref"}),
        (
            "--save kept --advantage-estimator ppo --critic-load ref",
            "model",
            {"critic_load": "kept/critic", "critic_save": "kept/critic", "critic_source": None},
        ),
        (
            "--load first --save kept --advantage-estimator ppo --critic-load first/critic --critic-save values",
            "first/iter_0000004",
            {"critic_load": "values", "critic_save": "values", "critic_source": None},
        ),
    ],
)
def test_what_a_restart_adds_is_taken_and_has_the_run_go_on_with_its_own(
    words: str, began: str, expected: dict[str, Any], launch_directory: Path, parse: Parse
) -> None:
    """By train.py's own options, which refuse to save among another run's checkpoints."""
    write_model(launch_directory / "ref")
    write_checkpoint(launch_directory / "converted", "release", {})
    for place in ("first", "first/critic"):
        write_checkpoint(launch_directory / place, "4", {})
    before = Before.of(command(words))
    args = parse(words)
    assert resuming(command(words), before) == []
    assert starting_point(args).rpartition("from ")[2].startswith(f"{launch_directory}/{began} ")
    for place in (launch_directory / "kept", Path(args.critic_save or "kept/critic")):
        write_checkpoint(place, "9", {})
    args = parse(" ".join([words, *resuming(command(words), before)]))
    assert args.load == args.save == str(launch_directory / "kept")
    assert starting_point(args) == f"training goes on from {launch_directory}/kept/iter_0000009 (--load)"
    found = {name: getattr(args, name) for name in expected}
    places = {name: str(launch_directory / value) for name, value in expected.items() if isinstance(value, str)}
    assert found == expected | places


def test_what_was_converted_stays_the_reference_of_a_run_that_saves_beside_it(
    launch_directory: Path, parse: Parse
) -> None:
    write_checkpoint(launch_directory / "kept", "release", {})
    words = "--load kept --save kept"
    before = Before.of(command(words))
    assert parse(words).ref_load == str(launch_directory / "kept")
    write_checkpoint(launch_directory / "kept", "9", {})
    args = parse(" ".join([words, *resuming(command(words), before)]))
    assert (args.load, args.ref_load) == (str(launch_directory / "kept"), str(launch_directory / "kept" / "release"))


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("--save kept --load first", "from the checkpoint after rollout 4 in first"),
        ("--save kept --load converted", "from its beginning"),
        ("--save kept --load kept", "from the checkpoint after rollout 7 in kept"),
        ("--save kept", "from its beginning"),
        ("", "from its beginning"),
    ],
)
def test_what_is_said_of_a_run_that_has_saved_nothing_itself(
    words: str, begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saves_nothing").touch()
    for place, latest in (("first", "4"), ("converted", "release"), ("kept", "7")):
        (tmp_path / place).mkdir()
        (tmp_path / place / LATEST).write_text(latest)
    status, said = run(1, [*write(tmp_path, 1, 0), *words.split()])
    goes_on = f"the run is started again, {begins}; 1 of 1 restarts left (--max-restarts)"
    assert (status, said) == (0, [f"launch: the run ended with status 1: {goes_on}"])
    assert starts(tmp_path) == [words.split()] * 2


def test_settings_of_a_file_count_as_they_do_for_the_run(launch_directory: Path, parse: Parse) -> None:
    write_checkpoint(launch_directory / "first", "4", {})
    (launch_directory / "c.yaml").write_text("save: kept\n")
    words = "--load first --save other --custom-config-path c.yaml"
    before = Before.of(command(words))
    assert parse(words).save == str(launch_directory / "kept")
    write_checkpoint(launch_directory / "kept", "9", {})
    args = parse(" ".join([words, *resuming(command(words), before)]))
    assert args.load == args.save == str(launch_directory / "kept")


def test_where_no_flag_can_have_it_go_on_it_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("load: first\n")
    status, said = run(3, [*write(tmp_path, 1), "--save", "kept", "--custom-config-path", "c.yaml"])
    assert (status, len(starts(tmp_path))) == (1, 1)
    assert "not started again: --load of --custom-config-path would count more than what it has saved" in said[0]


def test_the_last_of_a_flag_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    words = ["--save", "a", "--save", "b", "--save-hf", "c", "--load=~/d"]
    assert (value_of(words, "--save"), value_of(words, "--load"), value_of(words, "--lr")) == ("b", "/root/d", None)


@pytest.mark.parametrize("words", [["--max-restarts", "4", "--lr", "1"], ["--lr", "1", "--max-restarts=4"]])
def test_launch_takes_the_flag_or_the_variable(words: list[str]) -> None:
    tool = f"{ROOT}/tools/restart_run.py"
    for given, variables in ((words, {}), (["--lr", "1"], {"MAX_RESTARTS": "4"})):
        assert launched(given, variables) == f"{tool} 4 -- echo {ROOT}/train.py --lr 1"
    assert launched(["--lr", "1"], {"MAX_RESTARTS": "0"}) == f"{ROOT}/train.py --lr 1"


def test_launch_refuses_what_is_no_number() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        launched(["--max-restarts", "many"], {})
    assert failed.value.returncode == 2
    assert "--max-restarts many is not a whole number" in failed.value.stderr


def launched(words: list[str], variables: dict[str, str]) -> str:
    """What `launch` makes of a command line."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": "echo"} | variables
    command = ["bash", "-c", f'source {SCRIPTS}/launch.sh; launch train.py "$@"', "bash", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_WAIT_S, env=environment)
    return done.stdout.strip()
