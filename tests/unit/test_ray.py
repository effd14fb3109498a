"""What slime.ray decides without a cluster: errors, the data side's state, what is evaluated first and saved."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
from ray.exceptions import RayTaskError

from slime.backends.sglang.client import EngineError, NoAnswerError
from slime.data import Sample
from slime.data.source.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from slime.data.source.users_class import restore_source, source_state
from slime.driver.data_side import _Rollout
from slime.driver.run import Run
from slime.fleet.spec import fleet_of
from slime.fleet.train_group import Saver
from slime.observability import logs, trace
from slime.options.errors import OptionError
from slime.ray import janitor, supervision
from slime.ray.engine_actor import EngineActor, EngineNode, EnginePlan
from slime.ray.supervision import LOAD_DATA, CallError, Deadline, InputError, RunError, Supervisor, limit_of
from slime.utils.environment import as_environment
from slime.utils.errors import BadInputError, DeadlineError, HookError
from tests.small_fleet import slot_options

NUM_GPUS = 0


def test_engines_of_the_reward_model_serve_it_and_never_sleep() -> None:
    args = slot_options("colocate", train=4, rollout=4, reward=1, width=4, sglang_cli=["--x"], offload_rollout=True)
    args.random_weights, args.pushes_float8, args.seed = True, True, 7
    args.rm_sglang_cli = ["--context-length", "64"]
    actors, judges = (spec.options(args, on_gpus=True) for spec in fleet_of(args).engines)
    assert (judges.hf_checkpoint, judges.rollout_num_gpus_per_engine, judges.seed) == ("judge", 1, 7)
    assert (judges.sglang_cli, judges.offload_rollout) == (["--context-length", "64"], False)
    assert (judges.random_weights, judges.pushes_float8) == (False, False)
    assert vars(actors) == vars(args) | {"worker_type": "regular", "keeps_weights": False, "returns_routes": False}
    args.offload_rollout = None
    sleeps = [
        [spec.options(args, on_gpus).offload_rollout for spec in fleet_of(args).engines] for on_gpus in (None, True)
    ]
    assert sleeps == [[None, False], [True, False]]


def test_a_deadline_names_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Run(Namespace(data_load_timeout=0.0))
    monkeypatch.setattr(ray, "wait", lambda refs, **options: ([], refs))
    expected = r"load data: no answer within 0 s \(--data-load-timeout\) from the rollout manager"
    with pytest.raises(RunError, match=expected):
        made._data._answer(object(), LOAD_DATA, limit_of(made.args, "data_load_timeout"))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, None])
def test_an_interrupt_is_answered_before_anything_is_stopped(
    error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    made = Run(Namespace(start_rollout_id=0, num_rollout=0, placement="rollout_only", run_dir="runs/a"))
    monkeypatch.setattr(made, "_stop", lambda *_: seen.append(capsys.readouterr().err))
    made.__exit__(error, error() if error else None, None)
    expected = f"{Path(sys.argv[0]).name}: interrupted: stopping engines and trainers (up to 30 s)\n" if error else ""
    assert seen == [expected]
    done = "" if error else "done: 0 rollouts, metrics and logs in runs/a\n"
    assert capsys.readouterr().out == done


def test_environment_values_are_text() -> None:
    values = {"A": "x", "B": 1, "C": True, "D": 0.5}
    assert as_environment(values) == {"A": "x", "B": "1", "C": "true", "D": "0.5"}


def failure_of(error: Exception, phase: str) -> RunError:
    """What a driver makes of an actor's method that raised ``error``, two calls deep."""

    def deeper() -> None:
        raise error

    def outer(depth: int) -> None:
        outer(depth - 1) if depth else deeper()

    try:
        outer(5)
    except Exception as caught:
        task_error = RayTaskError("f", traceback.format_exc(), caught, "title", 1, "10.0.0.1").as_instanceof_cause()

    def fail(ref: object, timeout: float) -> None:
        raise task_error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", fail)
        with pytest.raises(RunError) as raised:
            raise Supervisor()._failure(supervision._error_of(object()), "the rollout manager", phase)
    return raised.value


@pytest.mark.parametrize("kind", [BadInputError, DeadlineError, EngineError, HookError, OptionError])
def test_an_error_that_tells_all_is_shown_without_a_traceback(kind: Callable[[str], Exception]) -> None:
    message = str(failure_of(kind("what happened"), "rollout 3"))
    assert message == "rollout 3: the rollout manager failed (weight version none yet): what happened"


@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError])
def test_a_bug_is_shown_with_the_end_of_its_traceback(kind: Callable[[str], Exception]) -> None:
    message = str(failure_of(kind("not enough values"), LOAD_DATA))
    assert message.count('File "') == supervision._FRAMES
    assert "in deeper" in message
    assert message.endswith(str(kind("not enough values")))


@pytest.mark.parametrize(
    ("error", "phase", "expected"),
    [
        (BadInputError("row 3"), LOAD_DATA, InputError),
        (OptionError("--lr"), LOAD_DATA, InputError),
        (BadInputError("another class"), supervision.RESTORE_DATA, InputError),
        (OptionError("other adapters"), supervision.START_TRAINERS, InputError),
        (BadInputError("row 3"), "rollout 3", CallError),
        (ValueError("a bug"), LOAD_DATA, CallError),
    ],
)
def test_only_bad_input_before_the_start_has_status_2(error: Exception, phase: str, expected: type) -> None:
    assert type(failure_of(error, phase)) is expected


@pytest.mark.parametrize(
    ("error", "of_user"), [(BadInputError("a"), True), (HookError("a"), True), (KeyError("a"), False)]
)
def test_an_error_of_what_the_user_gave_is_known_as_such(error: Exception, of_user: bool) -> None:
    failure = failure_of(error, "rollout 3")
    assert isinstance(failure, CallError)
    assert failure.is_of_user == of_user


def test_an_engine_that_does_not_start_ends_its_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "begin", lambda *_: None)
    monkeypatch.setattr(trace, "begin", lambda *_: None)
    args = Namespace(launch_dir=os.getcwd(), run_dir=str(tmp_path))
    actor = EngineActor(EnginePlan(args, 0, None, [EngineNode({}, None)]))

    def fail() -> None:
        raise EngineError("engine 0 ended with status 1")

    monkeypatch.setattr(actor._engine, "start", fail)
    with pytest.raises(EngineError, match="status 1"):
        actor.start()
    with pytest.raises(EngineError, match="status 1"):
        actor.watch()


def test_an_engine_leaves_groups_as_long_as_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "begin", lambda *_: None)
    monkeypatch.setattr(trace, "begin", lambda *_: None)
    args = Namespace(launch_dir=os.getcwd(), run_dir=str(tmp_path))
    actor = EngineActor(EnginePlan(args, 0, None, [EngineNode({}, None)]))
    problems: dict[str, Exception] = {"a": EngineError("it is in none"), "c": NoAnswerError("no answer within 20 s")}
    asked: list[str] = []

    def leave(name: str) -> None:
        asked.append(name)
        if name in problems:
            raise problems[name]

    control = Namespace(destroy_weights_update_group=leave)
    monkeypatch.setattr(actor._engine, "control", lambda timeout: control)
    actor.leave_groups(["a", "b", "c", "d"])
    assert asked == ["a", "b", "c"]


# ---- the data side's state


def source_args() -> Namespace:
    return Namespace(n_samples_per_prompt=2, rollout_shuffle=True, rollout_seed=3, restart_epoch=False)


PROMPTS = [Sample(prompt=str(i), tokens=[i]) for i in range(5)]


class WithOwnState(RolloutDataSourceWithBuffer):
    """What users derive who keep more than we do."""

    files: ClassVar[dict[int, str]] = {}
    more = "nothing"

    def save(self, rollout_id: int) -> None:
        self.files[rollout_id] = self.more

    def load(self, rollout_id: int | None = None) -> None:
        assert rollout_id is not None
        self.more = self.files[rollout_id]


class Foreign(DataSource):
    """A source of its own making."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return []

    def add_samples(self, samples: list[list[Sample]]) -> None:
        pass

    def __len__(self) -> int:
        return 1


def test_a_subclass_saves_and_loads_what_is_its_own_as_well() -> None:
    source = WithOwnState(PROMPTS, source_args())
    source.count_trained([group[0] for group in source.get_samples(3)])
    source.more = "something"
    state = source_state(source, 4)
    resumed = WithOwnState(PROMPTS, source_args())
    restore_source(resumed, 4, state)
    assert resumed.more == "something"
    assert [g[0].prompt for g in resumed.get_samples(4)] == [g[0].prompt for g in source.get_samples(4)]


def test_a_state_of_another_kind_of_class_is_named() -> None:
    ours, foreign = RolloutDataSource(PROMPTS, source_args()), Foreign()
    restore_source(foreign, 0, source_state(foreign, 0))
    for then, now in ((ours, foreign), (foreign, ours)):
        expected = rf"made with \S+\.{type(then).__name__}, and --data-source-path is now \S+\.{type(now).__name__}"
        with pytest.raises(BadInputError, match=expected):
            restore_source(now, 0, source_state(then, 0))
    with pytest.raises(BadInputError, match="made with no data source"):
        restore_source(ours, 0, source_state(None, 0))
    restore_source(None, 0, source_state(ours, 0))


# ---- the first evaluation


class Answers:
    """Stands in for the manager and for waiting: the manager's answer is there at once."""

    def __init__(self, answer: Any) -> None:
        self.evaluate = self.num_cancels = self
        self._answer = answer
        self.waited: list[tuple[str, Deadline]] = []

    def remote(self, *values: Any) -> Any:
        return self._answer

    def expect(self, who: str, call: Any, phase: str) -> None:
        self.expected = who, call, phase

    def wait(self, calls: dict[str, Any], phase: str, limit: Deadline, until: object = None) -> list[Any]:
        self.waited.append((phase, limit))
        return list(calls.values())


def make_run(run_dir: Path, start: int, scores: dict[str, float], *, asynchronous: bool = False) -> Run:
    from slime.observability.metrics import MetricsLogger

    args = Namespace(
        run_dir=str(run_dir),
        eval_interval=2,
        skip_eval_before_train=False,
        start_rollout_id=start,
        num_rollout=9,
        rollout_timeout=1.0,
        asynchronous=asynchronous,
        use_tensorboard=False,
        use_wandb=False,
    )
    made = Run(args)
    made._session._metrics = MetricsLogger(args)
    made._data.actor = made._data._supervisor = Answers(scores | {"perf/eval_time": 2.5})  # type: ignore[assignment]
    return made


def test_the_first_evaluation_has_a_line_and_is_not_repeated_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run(tmp_path, 0, {"eval/add": 0.25})
    assert first.scores_its_start()
    first.evaluate(0)
    assert capsys.readouterr().out == "rollout 0/9 | eval/add 0.250 | 2.5 s | bound by evaluation (2.5 s)\n"
    first.evaluate(4)
    assert not capsys.readouterr().out, "the step's line will have it"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"rollout/step": 4, "half')
    assert not make_run(tmp_path, 4, {}).scores_its_start()
    assert make_run(tmp_path, 0, {}).scores_its_start(), "another run from the beginning, in the same directory"
    assert make_run(tmp_path, 5, {}).scores_its_start(), "a run that ended before it could evaluate"
    skipping = make_run(tmp_path, 5, {})
    skipping.args.skip_eval_before_train = True
    assert not skipping.scores_its_start()


def test_scores_from_the_background_are_those_of_their_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, 0, {"eval/add": 0.25}, asynchronous=True)
    run.finish_evaluation()
    run.begin_evaluation(3)
    assert run._data._supervisor.expected[2] == "evaluation of weight version 3"  # type: ignore[attr-defined]
    run._step = {"rollout/raw_reward": 0.5}  # of rollout 4, meanwhile
    run.finish_evaluation()
    run.finish_evaluation()
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (line["eval/step"], line["eval/add"], line["perf/eval_time"]) == (3, 0.25, 2.5)
    with run.step(4):
        pass
    scores, step = capsys.readouterr().out.splitlines()
    assert scores == "rollout 3/9 | eval/add 0.250 | 2.5 s | bound by evaluation (2.5 s)"
    assert step.startswith("rollout 5/9 | reward 0.500 | ")
    assert "bound by" not in step, "of the step only what it waited"


def test_handing_over_has_the_time_that_prompts_may_take() -> None:
    class Manager:
        def __init__(self) -> None:
            self.hand_over = self

        def options(self, *, num_returns: int) -> Manager:
            assert num_returns == 2
            return self

        def remote(self, rollout_id: int) -> tuple[Any, str]:
            return ({"rollout/prompts_read": 4.0 + rollout_id}, True), "its state"

    made, supervisor = Run(Namespace(rollout_timeout=1000.0, asynchronous=False)), Answers(None)
    made._data._supervisor, made._data.actor = supervisor, Manager()  # type: ignore[assignment]
    logged: list[dict[str, float]] = []
    made._session._metrics = Namespace(log=lambda values, *_: logged.append(values))  # type: ignore[assignment]
    made._data._rollouts = {3: _Rollout({}, ["batch"], 1, 0.0)}  # type: ignore[arg-type, list-item]
    assert made.take_rollout(3) == ["batch"]
    assert made._data._state == (3, "its state")  # type: ignore[comparison-overlap]
    assert supervisor.waited == [
        ("rollout 3", Deadline(1060.0, "--rollout-timeout")),
        ("hand over rollout 3, after the prompts that are being drawn", Deadline(1060.0, "--rollout-timeout")),
    ]
    assert logged[0]["rollout/prompts_read"] == 7.0


# ---- saving


def test_only_rank_0_is_sent_the_data_sides_state() -> None:
    class Actor:
        def __init__(self) -> None:
            self.saved: list[Any] = []
            self.save = self.state = self

        def remote(self, *values: Any) -> Any:
            self.saved.append(values)
            return {"cursor": 5}

    trainers, manager = [Actor(), Actor()], Actor()
    made = Run(Namespace(save="somewhere", use_critic=False, save_hf=None, save_lora=None, checkpoint_timeout=1234.0))
    supervisor = Answers(None)
    made._data._supervisor = made._trainers._supervisor = supervisor  # type: ignore[assignment]
    made._session._metrics = Namespace(log=lambda *values: None)  # type: ignore[assignment]
    made._trainers.actors, made._data.actor = trainers, manager
    made.save(7)
    assert [actor.saved for actor in trainers] == [
        [(7, {"cursor": 5, "optimizer_steps": 0}, "somewhere")],
        [(7, None, "somewhere")],
    ]
    assert {limit for _, limit in supervisor.waited} == {Deadline(1234.0, "--checkpoint-timeout")}


def test_a_disk_that_fails_again_at_the_end_neither_hides_the_error_nor_keeps_the_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stale(type(tmp_path)):  # type: ignore[misc]
        def exists(self, **options: Any) -> bool:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    made = Run(Namespace(save="x", use_critic=False, save_hf=None, save_lora=None, checkpoint_timeout=9.0))
    actor = Namespace(remote=lambda *values: {})
    made._trainers.actors, made._data.actor = [Namespace(save=actor)], Namespace(state=actor)
    made._session._metrics = None

    def wait(calls: dict[str, Any], phase: str, limit: Deadline) -> list[Any]:
        if phase == "save after rollout 7":
            raise RunError("save after rollout 7: the disk fails")
        return [{}]

    for owner in (made._data, made._trainers):
        monkeypatch.setattr(owner, "_supervisor", Namespace(wait=wait, version="7"))
    monkeypatch.setattr(made, "_stop_actors", lambda: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(f"{Saver.__module__}.checkpoint_directory", lambda *_: Stale(tmp_path / "iter_0000007"))
    watches, made._session._janitor = os.pipe()
    made._session._run_locks = [os.open(tmp_path, os.O_RDONLY)]
    with pytest.raises(RunError, match="the disk fails") as failed:
        made.save(7)
    made.__exit__(RunError, failed.value, None)
    os.set_blocking(watches, False)
    assert os.read(watches, 9) == b"", "the janitor is told"
    os.close(watches)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made._session._run_locks[0])
    (warning,) = capsys.readouterr().err.splitlines()
    assert re.search(r"warning: .*iter_0000007: Stale file handle; what .*\.iter_0000007\.replaced$", warning)


def test_a_killed_janitor_leaves_nothing_to_tell_and_nothing_open() -> None:
    janitors_end, ours = os.pipe()
    os.close(janitors_end)
    janitor.dismiss(ours, ended_well=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)
