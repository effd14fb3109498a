"""What a run does when its trainers or its rollout manager die, with stand-ins for Ray and for all that it starts."""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from slime.driver import data_side, recovery
from slime.driver.data_side import MANAGER, DataSide
from slime.driver.meanwhile import Meanwhile
from slime.driver.memory_scheduler import MemoryScheduler
from slime.driver.recovery import Recovery, snapshot_directory
from slime.driver.restarts import Goodput, Restarts
from slime.driver.run import Run
from slime.fleet.placement import Placement, Slot
from slime.fleet.train_group import Checkpoint, Saver
from slime.observability import events
from slime.observability.verdict import NO_VERDICT
from slime.ray import janitor
from slime.ray.supervision import Deadline, InputError, LostError, RunError

NUM_GPUS = 0


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Any]:
    """The run's events."""
    events.begin(str(tmp_path), "driver")
    yield lambda: [json.loads(line) for line in (tmp_path / events.FILE).read_text().splitlines()]
    events._log = None


# ---- how often


def test_parts_are_made_anew_so_often_in_an_hour() -> None:
    now = [0.0]
    restarts = Restarts(Namespace(trainer_restart_limit=2), lambda: now[0])
    for phase in ("train on rollout 1", "push weights of version 2"):
        restarts.allow("the trainers", phase, "gone")
    with pytest.raises(
        RunError, match=r"^gone\nthe trainers: made anew 2 times within an hour already \(--trainer-rest"
    ):
        restarts.allow("the trainers", "save after rollout 2", "gone")
    restarts.allow(MANAGER, "save after rollout 2", "has a budget of its own")
    now[0] = 3601.0
    restarts.allow("the trainers", "save after rollout 3", "gone")


def test_what_fails_again_in_the_same_way_is_not_tried_a_third_time() -> None:
    restarts = Restarts(Namespace(trainer_restart_limit=9))
    restarts.allow("the trainers", "train on rollout 1", "gone")
    with pytest.raises(RunError, match=r"^gone\nthe trainers: failed in the same way when made anew"):
        restarts.allow("the trainers", "train on rollout 1", "gone")
    restarts.allow("the trainers", "start trainers", "gone")
    restarts.step_is_complete(0)
    restarts.allow("the trainers", "start trainers", "gone")


@pytest.mark.parametrize("phase", ["train on rollout 2", "put the trainers to sleep"])
def test_steps_that_are_made_again_put_no_failure_behind_the_run(phase: str) -> None:
    """Of a run whose third rollout fails each time, and that goes back to its beginning each time."""
    restarts = Restarts(Namespace(trainer_restart_limit=9))
    for rollout_id in range(2):
        restarts.step_is_complete(rollout_id)
    restarts.allow("the trainers", phase, "gone")
    for rollout_id in range(2):
        restarts.step_is_complete(rollout_id)
    with pytest.raises(RunError, match="failed in the same way when made anew"):
        restarts.allow("the trainers", phase, "gone")


def test_the_same_phase_of_other_rollouts_is_another_failure() -> None:
    """On the way back to where it failed first, too."""
    restarts = Restarts(Namespace(trainer_restart_limit=9))
    for rollout_id in (39, 34, 39):
        restarts.step_is_complete(rollout_id)
        restarts.allow("the trainers", "put the trainers to sleep", "gone")


def test_goodput_counts_what_survives() -> None:
    now = [10.0]
    goodput = Goodput(lambda: now[0])
    for rollout_id in range(4):
        goodput.add(rollout_id, 100.0)
    now[0] = 20.0
    assert goodput.rate() == 40.0
    goodput.go_back(2)
    assert goodput.rate() == 20.0
    goodput.add(2, 50.0)
    assert goodput.rate() == 25.0


# ---- trainers


class Part:
    """Notes what it is asked, with the others, in one list."""

    def __init__(self, name: str, log: list[tuple[Any, ...]], **answers: Any) -> None:
        self._name, self._log, self._answers = name, log, answers

    def __getattr__(self, method: str) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            self._log.append((f"{self._name}.{method}", *values, *named.items()))
            answer = self._answers.get(method)
            if isinstance(answer, list):
                answer = answer.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


PLACEMENT = Placement([], [Slot(0, "here", None), Slot(1, "here", None)], [])


def make_recovery(log: list[tuple[Any, ...]], **changes: Any) -> Recovery:
    """Of a run of 9 rollouts whose trainers come back after rollout 3; ``changes`` are options, or parts' answers."""
    options: dict[str, Any] = {
        "use_fault_tolerance": True,
        "trainer_restart_limit": 4,
        "num_rollout": 9,
        "start_rollout_id": 0,
        "save_interval": 2,
        "eval_interval": 2,
        "skip_eval_before_train": False,
        "asynchronous": False,
        "checkpoint_timeout": 5.0,
        "use_critic": False,
        "on_bad_step": "stop",
    }
    answers: dict[str, Any] = {
        "start": 4,
        "take_state": {"cursor": 1},
        "newest": Checkpoint("kept", None, 3),
        "has_written": True,
        "clean_up": (),
        "scored": {0, 2, 4},
    }
    args = Namespace(**{name: changes.pop(name, value) for name, value in options.items()})
    answers |= changes
    verbs = Part("run", log)
    verbs.scored = answers["scored"]
    return Recovery(
        args,
        verbs,  # type: ignore[arg-type]
        Namespace(version="5"),  # type: ignore[arg-type]
        Part("trainers", log, **answers),  # type: ignore[arg-type]
        PLACEMENT,
        Part("data", log),  # type: ignore[arg-type]
        Part("memory", log),  # type: ignore[arg-type]
        Part("pushes", log),  # type: ignore[arg-type]
        Part("saver", log, **answers),  # type: ignore[arg-type]
        Restarts(args),
    )


LOST = LostError("train on rollout 5: the process of trainer 1 died", ["trainer 1"], "train on rollout 5")


def test_trainers_come_back_where_the_newest_checkpoint_is(told: Any) -> None:
    log: list[tuple[Any, ...]] = []
    assert make_recovery(log).bring_back(LOST) == 4
    assert log == [
        ("trainers.kill",),
        ("saver.clean_up",),
        ("data.cancel",),
        ("pushes.go_back",),
        ("memory.to_new_trainers",),
        ("saver.newest",),
        ("trainers.create", PLACEMENT, Checkpoint("kept", None, 3)),
        ("trainers.start", 9),
        ("trainers.take_state",),
        ("data.rewind", 3, {"cursor": 1}),
        ("saver.has_written", 3),
        ("run.push_weights", 4),
        ("data.resume_generation", 4),
    ]
    (event,) = told()
    assert (event["kind"], event["subject"], event["version"]) == ("trainer_died", "trainer 1", "5")
    assert event["action"] == "made anew from kept after rollout 3; going on with rollout 4"


def test_what_the_step_had_left_to_do_is_done() -> None:
    log: list[tuple[Any, ...]] = []
    make_recovery(log, has_written=False, scored=set()).bring_back(LOST)
    assert log[-5:] == [
        ("run.save", 3),
        ("run.push_weights", 4),
        ("data.resume_generation", 4),
        ("run.begin_evaluation", 4),
        ("run.finish_evaluation",),
    ]
    log.clear()
    make_recovery(log, scored=set(), asynchronous=True).bring_back(LOST)
    assert log[-3:] == [("run.push_weights", 4), ("data.resume_generation", 4), ("run.begin_evaluation", 4)]


def test_without_a_checkpoint_they_begin_as_the_run_began() -> None:
    log: list[tuple[Any, ...]] = []
    assert make_recovery(log, newest=None, start=0, take_state=None, scored=set()).bring_back(LOST) == 0
    assert ("trainers.create", PLACEMENT, None) in log
    assert ("data.rewind", -1, None) in log
    assert not [call for call in log if call[0] == "run.save"]
    assert log[-2:] == [("run.begin_evaluation", 0), ("run.finish_evaluation",)]


def test_those_that_fail_in_their_turn_are_made_again_and_each_is_told_of(told: Any) -> None:
    log: list[tuple[Any, ...]] = []
    again = LostError("start trainers: no answer", ["trainer 0", "trainer 1"], "start trainers")
    assert make_recovery(log, start=[again, 4]).bring_back(LOST) == 4
    assert [call[0] for call in log].count("trainers.kill") == 2
    assert [event["subject"] for event in told()] == ["trainer 1", "trainer 0, trainer 1"]
    with pytest.raises(RunError, match="failed in the same way when made anew"):
        make_recovery(log, start=[again, again, 4]).bring_back(LOST)


@pytest.mark.parametrize(
    ("lost", "changes"),
    [
        (LostError("rollout 5: no answer", [MANAGER], "rollout 5"), {}),
        (LostError("engine 0 does not answer", ["engine 0"], "put the engines to sleep"), {}),
        (LOST, {"use_fault_tolerance": False}),
    ],
)
def test_others_end_the_run(lost: LostError, changes: dict[str, Any]) -> None:
    log: list[tuple[Any, ...]] = []
    with pytest.raises(LostError) as raised:
        make_recovery(log, **changes).bring_back(lost)
    assert raised.value is lost
    assert not log


def test_the_loop_goes_on_with_the_rollout_that_trainers_come_back_to() -> None:
    run = Run(Namespace(start_rollout_id=2, num_rollout=6))
    run._recovery = Namespace(bring_back=lambda lost: comes_back.pop())  # type: ignore[assignment]
    run._end_step = lambda rollout_id: trained.append(rollout_id)  # type: ignore[method-assign]
    comes_back, trained, gone_back = [6, 3, 2], list[int](), list[int]()
    run.when_going_back(gone_back.append)
    ends = [LOST]
    run.finish_evaluation = lambda: None  # type: ignore[method-assign]
    with run.first_push():
        raise LOST
    dies_at = [4, 5]
    for rollout_id in run.rollouts():
        with run.step(rollout_id):
            if dies_at[:1] == [rollout_id]:
                dies_at.pop(0)
                raise LOST
    assert (trained, gone_back) == ([2, 3, 3, 4], [2, 3, 6])
    assert ends


def test_trainers_that_die_while_the_last_scores_are_waited_for_come_back_too() -> None:
    run, waits = Run(Namespace(start_rollout_id=0, num_rollout=2)), [True, False]
    run._recovery = Namespace(bring_back=lambda lost: 1)  # type: ignore[assignment]
    run._end_step = lambda rollout_id: None  # type: ignore[method-assign]

    def finish() -> None:
        if waits.pop(0):
            raise LOST

    run.finish_evaluation = finish  # type: ignore[method-assign]
    assert list(run.rollouts()) == [0, 1, 1]


def test_a_step_in_which_engines_and_trainers_were_lost_has_what_both_took(capsys: pytest.CaptureFixture[str]) -> None:
    run, lines = Run(Namespace(start_rollout_id=0, num_rollout=9, asynchronous=False, rollout_timeout=5.0)), []
    run._session._metrics = Namespace(log=lambda *line: lines.append(line), verdict=NO_VERDICT)  # type: ignore[assignment]
    run._data = Namespace(  # type: ignore[assignment]
        wait_for_rollout=lambda rollout_id, limit: (["batch"], {"rollout/reward": 1.0}, 0.0),
        hand_over=lambda rollout_id, limit: {"rollout/prompts_read": 4.0},
    )
    took = [{"rollout/engines_alive": 2.0, "perf/recovery_time": 30.0}, {"rollout/engines_alive": 2.0}]
    run.engines.metrics = lambda: took.pop(0)  # type: ignore[method-assign]
    for seconds in (12.0, 0.0):
        with run.step(3):
            run.take_rollout(3)
            run._restarts.seconds += seconds
    recovered = [values["perf/recovery_time"] for values, *_ in lines if "perf/recovery_time" in values]
    assert recovered == [42.0], "in one line, once"
    assert [values.get("rollout/engines_alive") for values, *_ in lines] == [2.0, None] * 2


def test_the_manager_hears_the_version_of_every_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells of faults as well."""
    run, heard = Run(Namespace(weight_update_timeout=5.0)), list[str]()
    run._session._metrics = Namespace(log=lambda *line: None, verdict=NO_VERDICT)  # type: ignore[assignment]
    monkeypatch.setattr(run._data, "note_version", lambda: heard.append(run._supervisor.version))
    monkeypatch.setattr(run._data, "ask", lambda *asked: None)
    run._memory = Namespace(figures=dict)  # type: ignore[assignment]

    def push(version: int) -> dict[str, float]:
        run._supervisor.version = str(version)
        return {}

    def catch_up() -> int:
        push(5)
        return 5

    run._pushes = Namespace(  # type: ignore[assignment]
        push=push, catch_up=catch_up, may_catch_up=lambda: True, trained=5, is_ahead=True
    )
    monkeypatch.setattr(run.engines, "expects_weights", lambda: True)
    run._trainers.actors = [None]
    run.push_weights(4)
    requests = Namespace(serve=lambda: None, pending=False)
    Meanwhile(run._pushes, requests, run._data).do()  # type: ignore[arg-type]
    assert heard == ["4", "5"]


# ---- checkpoints and snapshots


class Group:
    """Trainers that write what they are told to, or fail."""

    def __init__(self) -> None:
        self.actors, self.fails, self.version = [0, 1], False, "4"
        self.error: RunError = LOST

    def call_each(self, phase: str, method: str, limit: Deadline, values: Any) -> None:
        for rollout_id, state, *places in values:
            for place in () if self.fails else places:
                directory = Path(place, f"iter_{rollout_id:07d}")
                directory.mkdir(parents=True, exist_ok=True)
                Path(place, "latest_checkpointed_iteration.txt").write_text(str(rollout_id))
            assert (state is not None) or method == "save"
        if self.fails:
            raise self.error


def make_saver(tmp_path: Path, **changes: Any) -> tuple[Saver, Group]:
    values = {"save": str(tmp_path / "kept"), "critic_save": str(tmp_path / "kept" / "critic"), "use_critic": False}
    values |= {"save_hf": None, "save_lora": None, "checkpoint_timeout": 5.0}
    group = Group()
    return Saver(Namespace(**values | changes), group), group  # type: ignore[arg-type]


def test_the_newest_is_one_of_the_runs_own(tmp_path: Path) -> None:
    older = tmp_path / "kept"
    (older / "iter_0000099").mkdir(parents=True)
    (older / "latest_checkpointed_iteration.txt").write_text("99")
    saver, group = make_saver(tmp_path)
    assert saver.newest() is None, "another run has written that one"
    memory = str(tmp_path / "memory")
    saver.snapshot(0, {}, memory)
    assert saver.newest() == Checkpoint(memory, None, 0)
    saver.save(1, {})
    assert saver.newest() == Checkpoint(str(older), str(older / "critic"), 1)
    assert saver.has_written(1)
    assert not saver.has_written(99)
    saver.snapshot(2, {}, memory)
    assert saver.newest() == Checkpoint(memory, None, 2)
    assert [path.name for path in Path(memory).glob("iter_*")] == ["iter_0000002"], "only the newest is kept"
    group.fails = True
    with pytest.raises(LostError):
        saver.snapshot(3, {}, memory)
    assert saver.newest() == Checkpoint(memory, None, 2)


def test_what_could_not_be_saved_is_told_of_unless_a_trainer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_log", None)
    events.begin(str(tmp_path), "driver")
    saver, group = make_saver(tmp_path)
    group.fails = True
    with pytest.raises(LostError):
        saver.save(3, {})
    assert not (tmp_path / events.FILE).exists()
    group.error = RunError("save after rollout 3: trainer 1 failed: --save /kept: the disk is full")
    with pytest.raises(RunError, match="the disk is full"):
        saver.save(3, {})
    (line,) = [json.loads(text) for text in (tmp_path / events.FILE).read_text().splitlines()]
    assert (line["kind"], line["subject"], line["phase"]) == ("save_failed", "the trainers", "save after rollout 3")
    assert line["version"] == "4"
    assert line["cause"] == str(group.error)
    assert "iter_0000003 is as it was before" in line["action"]


def test_a_critic_has_snapshots_of_its_own(tmp_path: Path) -> None:
    saver, _ = make_saver(tmp_path, use_critic=True)
    saver.snapshot(4, {}, str(tmp_path / "memory"))
    saver.snapshot(5, {}, str(tmp_path / "memory"))
    newest = saver.newest()
    assert newest == Checkpoint(str(tmp_path / "memory"), str(tmp_path / "memory" / "critic"), 5)
    assert sorted(path.parent.name for path in tmp_path.rglob("iter_0000005")) == ["critic", "memory"]
    assert not list(tmp_path.rglob("iter_0000004"))


def test_snapshots_are_refused_where_they_have_no_room_or_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "MEMORY", str(tmp_path))
    monkeypatch.setenv(janitor.RUN_MARK, "abc")
    monkeypatch.setattr(recovery, "expected_checkpoint_bytes", lambda args: 1 << 20)
    args = Namespace(trainer_snapshot_interval=2)
    assert snapshot_directory(args, PLACEMENT, "here") == f"{tmp_path}/slime-abc"
    assert (tmp_path / "slime-abc").stat().st_mode & 0o777 == 0o700
    apart = Placement([], [Slot(0, "here", None), Slot(1, "there", None)], [])
    with pytest.raises(
        InputError, match=r"--trainer-snapshot-interval: .* host, here, and the trainers are on here, there"
    ):
        snapshot_directory(args, apart, "here")
    monkeypatch.setattr(recovery, "expected_checkpoint_bytes", lambda args: 1 << 60)
    with pytest.raises(InputError, match=r"two snapshots of about .* each have to fit"):
        snapshot_directory(args, PLACEMENT, "here")
    assert snapshot_directory(Namespace(trainer_snapshot_interval=None), PLACEMENT, "here") is None


# ---- the memory of both sides


def test_engines_give_way_to_new_trainers_whatever_they_hold() -> None:
    log: list[Any] = []
    engines: Any = Namespace(
        call=lambda phase, method, limit, *values: log.append((method, *values)),
        hold_starts=lambda: None,
        allow_starts=lambda: None,
    )
    trainers: Any = Namespace(call=lambda phase, method, limit, *values: log.append((method, *values)) or [])
    scheduler = MemoryScheduler(trainers, engines, Deadline(5.0), offload_train=True, offload_rollout=True)
    scheduler.make_room()
    scheduler.to_new_trainers()
    assert log[-1] == ("release_memory",), "they were awake"
    log.clear()
    scheduler.to_new_trainers()
    assert not log, "they were asleep"
    with contextlib.suppress(LostError), scheduler.pushing():
        log.clear()
        raise LOST
    scheduler.to_new_trainers()
    assert log == [("resume_memory", ["kv_cache", "cuda_graph"]), ("release_memory",)], "they had their weights only"
    log.clear()
    with scheduler.pushing():
        pass
    assert log[:2] == [("sleep", True), ("resume_memory", ["weights"])], "as after a training step"


# ---- the rollout manager


class Actor:
    """A manager: what it was asked, and the references to its answers."""

    def __init__(self, number: int, log: list[tuple[Any, ...]]) -> None:
        self._number, self._log = number, log

    def __getattr__(self, name: str) -> Any:
        def remote(*values: Any) -> Any:
            self._log.append((self._number, name, *values))
            ref = (self._number, name)
            return [ref] * self._returns if self._returns > 1 else ref

        def options(*, num_returns: int) -> Any:
            self._returns = num_returns
            return Namespace(remote=remote)

        self._returns = 1
        return Namespace(remote=remote, options=options)


class Death:
    """A supervisor of managers that answer until they die, at the call of a method."""

    def __init__(self, *dies_at: tuple[int, str], answers: dict[str, Any]) -> None:
        self.version, self._dies_at, self._answers = "3", list(dies_at), answers
        self.dead, self.expected = False, list[Any]()
        self.cause = "the process of the rollout manager died"

    def watch(self, name: str, actor: Any, on_death: Any) -> None:
        self._on_death = on_death

    def forget(self, name: str) -> None:
        self.dead, self.expected = False, []

    def expect(self, who: str, call: Any, phase: str) -> None:
        self.expected.append(call)

    def dismiss(self, call: Any) -> None:
        self.expected.remove(call)

    def wait(self, calls: dict[str, Any], phase: str, limit: Deadline, until: Any = None) -> list[Any]:
        (call,) = calls.values()
        if call in self._dies_at and not self.dead:
            self._dies_at.remove(call)
            self._on_death(phase, f"{phase}: {self.cause}")
            self.dead = True
        return [] if self.dead else [self._answers.get(call[1], 7)]


def make_data_side(
    monkeypatch: pytest.MonkeyPatch, *dies_at: tuple[int, str], keeps_state: bool = True, **changes: Any
) -> tuple[DataSide, list[tuple[Any, ...]], Death]:
    log: list[tuple[Any, ...]] = []
    made: list[Actor] = []

    def create(*_: Any) -> Actor:
        made.append(Actor(len(made), log))
        return made[-1]

    monkeypatch.setattr(data_side, "create_manager", create)
    monkeypatch.setattr(ray, "put", lambda state: ("put", state))
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    timeouts = ("data_load_timeout", "checkpoint_timeout", "rollout_timeout", "weight_update_timeout")
    values = dict.fromkeys(timeouts, 5.0) | {"use_fault_tolerance": True, "trainer_restart_limit": 3}
    args = Namespace(**values | {"asynchronous": False} | changes)
    supervisor = Death(*dies_at, answers={"hand_over": ({"rollout/prompts_read": 4.0}, keeps_state)})
    engines: Any = Namespace(
        serve=lambda actor, opened: log.append(("serve", opened)), manager_is_away=lambda: log.append(("away",))
    )
    side = DataSide(args, supervisor, engines, Restarts(args))  # type: ignore[arg-type]
    assert side.start(None, ["a model"]) == 7  # type: ignore[list-item]
    side.serve(side.open_routers())
    log.clear()
    return side, log, supervisor


_ANEW = [("away",), (1, "load_data"), (1, "note_version", "3"), (1, "open_routers")]
_SERVED = [("serve", (1, "open_routers")), (1, "cancel")]


def test_a_manager_that_dies_while_it_generates_does_it_again(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    side, log, _ = make_data_side(monkeypatch, (0, "generate"))
    side.begin_rollout(0, dp_size=2)
    batches, figures, _ = side.wait_for_rollout(0, Deadline(5.0))
    assert log[2:] == [*_ANEW, *_SERVED, (1, "draw", 0), (1, "generate", 0, 2, (1, "draw"))]
    assert (batches, figures) == ([(1, "generate")] * 2, 7)
    (event,) = told()
    assert (event["kind"], event["phase"]) == ("manager_died", "rollout 0")
    assert event["action"] == "made anew with its state as the run began; rollouts under way: [0]"


def test_a_manager_goes_on_from_its_state_after_the_last_rollout_that_was_handed_over(
    monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    side, log, supervisor = make_data_side(monkeypatch, (0, "state"), asynchronous=True)
    side.begin_rollout(0, dp_size=1)
    side.begin_rollout(1, dp_size=1)
    side.wait_for_rollout(0, Deadline(5.0))
    assert side.hand_over(0, Deadline(5.0)) == {"rollout/prompts_read": 4.0}
    side.begin_evaluation(1)
    log.clear()
    assert side.ask("save the data source", Deadline(5.0), "state", 0) == 7
    state = (0, "hand_over")
    restored = [*_ANEW, (1, "restore", 0, state), *_SERVED, (1, "resume_generation", 3)]
    under_way = [(1, "draw", 1), (1, "generate", 1, 1, (1, "draw")), (1, "num_cancels")]
    assert log == [(0, "state", 0), *restored, *under_way, (1, "evaluate", 1, (1, "num_cancels")), (1, "state", 0)]
    assert supervisor.expected == [(1, "note_version"), (1, "open_routers"), (1, "generate"), (1, "evaluate")]
    assert side.finish_evaluation(Deadline(5.0)) == 7
    assert told()[0]["action"] == "made anew with its state after rollout 0; rollouts under way: [1]"


def test_a_rollout_whose_manager_dies_when_it_is_handed_over_is_generated_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, log, _ = make_data_side(monkeypatch, (0, "hand_over"))
    side.begin_rollout(0, dp_size=1)
    side.wait_for_rollout(0, Deadline(5.0))
    assert side.hand_over(0, Deadline(5.0)) is None
    assert log[-2:] == [(1, "draw", 0), (1, "generate", 0, 1, (1, "draw"))]
    assert side.wait_for_rollout(0, Deadline(5.0))[0] == [(1, "generate")]
    assert side.hand_over(0, Deadline(5.0)) == {"rollout/prompts_read": 4.0}


def test_one_that_dies_while_it_is_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side, log, _ = make_data_side(monkeypatch, (0, "generate"), (1, "cancel"))
    side.begin_rollout(0, dp_size=1)
    assert side.wait_for_rollout(0, Deadline(5.0))[0] == [(2, "generate")]
    assert [call for call in log if call[1:2] == ("draw",)] == [(0, "draw", 0), (2, "draw", 0)]


def test_a_manager_whose_state_is_not_whole_or_that_may_not_come_back_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, _, _ = make_data_side(monkeypatch, (0, "state"), keeps_state=False)
    side.begin_rollout(0, dp_size=1)
    side.hand_over(0, Deadline(5.0))
    with pytest.raises(RunError, match="its data source keeps its state by itself"):
        side.ask("save the data source", Deadline(5.0), "state", 0)
    side, _, _ = make_data_side(monkeypatch, (0, "state"), use_fault_tolerance=False)
    with pytest.raises(RunError, match=r"^save the data source: the process of the rollout manager died$"):
        side.ask("save the data source", Deadline(5.0), "state", 0)
    side, _, supervisor = make_data_side(monkeypatch, (0, "state"))
    supervisor.cause = "the rollout manager failed (weight version 3): router at http://a hangs"
    with pytest.raises(RunError, match="router at http://a hangs"):
        side.ask("save the data source", Deadline(5.0), "state", 0)


def test_what_is_under_way_is_given_up_when_trainers_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    side, log, supervisor = make_data_side(monkeypatch)
    side.begin_rollout(3, dp_size=1)
    side.begin_evaluation(3)
    side.cancel()
    assert supervisor.expected == [(0, "open_routers")]
    side.rewind(1, {"cursor": 2})
    assert log[-2:] == [(0, "cancel"), (0, "rewind", 1, {"cursor": 2})]
    assert side.evaluates is None
    assert side._state == (1, ("put", {"cursor": 2}))  # type: ignore[comparison-overlap]
