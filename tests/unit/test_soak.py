"""The soak's parts: what is planned, who is who, how strikes and events are matched, and what adds up."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.observability import events
from slime.processes import kernel
from tests.waiting import wait_for
from tools.soaking import hooks, injector, ledger, processes
from tools.soaking.injector import Injector, listening_at
from tools.soaking.plan import EXTERNAL, KINDS, LEAST, PHASES, Fault, draw, draw_kinds, kinds_of
from tools.soaking.processes import OverError, Run, limit_files, strike
from tools.soaking.running import Running, TimeUpError
from tools.soaking.watching import Lines, Watcher, noticed, returned
from tools.soaking.workspace import Workspace

NUM_GPUS = 0
_SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


# ---- the plan


def test_a_plan_has_the_least_of_each_kind_and_depends_on_its_seed_alone() -> None:
    kinds = kinds_of({"use_fault_tolerance"})
    drawn = draw_kinds(3, 100, kinds)
    assert len(drawn) == 100
    assert len(kinds) >= 10
    assert set(Counter(drawn)) == set(kinds)
    assert min(Counter(drawn).values()) >= LEAST == 5
    assert drawn == draw_kinds(3, 100, kinds)
    assert drawn != draw_kinds(4, 100, kinds)


@pytest.mark.parametrize("count", [1, 7, 18, 40])
def test_a_short_plan_has_as_many_kinds_as_it_can(count: int) -> None:
    kinds = kinds_of(())
    assert len(set(draw_kinds(0, count, kinds))) == min(count, len(kinds))


def test_external_engines_are_struck_only_where_a_run_can_have_them() -> None:
    assert EXTERNAL not in kinds_of({"hf_checkpoint"})
    assert EXTERNAL in kinds_of({"rollout_external_engine_addrs"})


def test_kinds_are_told_of_by_events_that_the_run_has() -> None:
    for name, kind in KINDS.items():
        assert set(kind.told) <= set(events.KINDS), name
        assert kind.back in {"step", "join", *events.KINDS}, name
        assert kind.phases
        assert set(kind.phases) <= set(PHASES), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_one_that_its_kind_allows_and_another_at_the_next_try(kind: str) -> None:
    faults = [draw(5, number, kind, attempt) for number in range(20) for attempt in range(3)]
    assert faults == [draw(5, number, kind, attempt) for number in range(20) for attempt in range(3)]
    assert {fault.subject for fault in faults} == set(KINDS[kind].subjects)
    assert {fault.phase for fault in faults} == set(KINDS[kind].phases)
    assert all(0 <= fault.depth <= 1 for fault in faults)
    assert len({fault.depth for fault in faults}) > 30


# ---- a soak's directory


def test_a_later_shard_goes_on_with_the_plan_of_the_first(tmp_path: Path) -> None:
    place = Workspace(tmp_path, 1)
    kinds = place.plan(6, ["engine_killed", "driver_killed"])
    assert Workspace(tmp_path, 1).plan(6, ["driver_killed", "engine_killed"]) == kinds
    for seed, count, others in ((2, 6, kinds), (1, 7, kinds), (1, 6, ["router_killed"])):
        first = r"plan\.json is of --seed 1 --faults 6 --kinds driver_killed engine_killed: go on with these"
        with pytest.raises(ValueError, match=first):
            Workspace(tmp_path, seed).plan(count, sorted(set(others)))


def test_what_has_not_bitten_is_drawn_again_and_what_has_is_done(tmp_path: Path) -> None:
    place, kinds = Workspace(tmp_path, 1), ["engine_killed", "driver_killed", "router_killed"]
    lines = [{"number": 0, "bit": False}, {"number": 1, "bit": True}, {"number": 0, "bit": False}]
    place.injected.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert place.left(kinds) == [draw(1, 0, "engine_killed", 2), draw(1, 2, "router_killed", 0)]


def test_the_end_is_chosen_once(tmp_path: Path) -> None:
    assert [Workspace(tmp_path, 1).num_rollout(wanted) for wanted in (12, 30)] == [12, 12]


def test_a_run_that_has_saved_goes_on_from_there(tmp_path: Path) -> None:
    place = Workspace(tmp_path, 1)
    assert "--load" not in place.command(place.run_dir)
    (place.run_dir / "iter_0000004").mkdir(parents=True)
    (place.run_dir / "latest_checkpointed_iteration.txt").write_text("4")
    command = place.command(place.run_dir, 9, "127.0.0.1:4711")
    assert command[command.index("--rollout-external-engine-addrs") + 1] == "127.0.0.1:4711"
    assert command[command.index("--load") + 1] == str(place.run_dir)
    assert command[command.index("--num-rollout") + 1] == "9"
    assert f"{place.run_dir}/hf_{{rollout_id}}" in command


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    names = [f"iter_{number:07d}" for number in range(7)]
    for name in [*names, "iter_0000007.tmp"]:
        (tmp_path / name).mkdir()
    Workspace(tmp_path, 1).prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names[3:], "iter_0000007.tmp"]


# ---- processes


def test_a_process_is_struck_and_no_other_of_its_id() -> None:
    with subprocess.Popen(_SLEEPS) as child:
        process = kernel.with_id(child.pid)
        assert process is not None
        assert not strike(process._replace(started=process.started + 1), signal.SIGKILL)
        assert not limit_files(process._replace(started=process.started + 1), 1)
        assert limit_files(process, 4096)
        assert resource.prlimit(child.pid, resource.RLIMIT_FSIZE)[0] == 4096
        assert strike(process, signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
    assert not strike(process, signal.SIGKILL)


def test_logs_say_who_is_who_among_the_processes_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with subprocess.Popen(_SLEEPS) as own:
        run, others = Run(os.getpid(), tmp_path), Run(own.pid, tmp_path)
        assert run.of_log("trainer_0") is None
        line = "2026 slime.observability.logs INFO trainer_0: process {} on a-host\n"
        (tmp_path / "logs" / "trainer_0.log").write_text(line.format(1) + line.format(own.pid))
        (tmp_path / "logs" / "engine_1.log").write_text(f"INFO:     Started server process [{own.pid}]\n")
        found = run.of_log("trainer_0"), run.server("engine 1")
        assert [process and process.pid for process in found] == [own.pid, own.pid]
        assert run.server("engine 0") is None
        assert others.of_log("trainer_0") is None, "not below that launcher"
        own.kill()
    assert run.of_log("trainer_0") is None


_ROUTER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"


def test_the_router_is_below_its_supervisor_which_says_where_it_listens(tmp_path: Path) -> None:
    words = ["slime.processes.supervisor", "--", "slime.backends.sglang.launch_router"]
    line = [sys.executable, "-c", f"{_ROUTER}time.sleep(60)", *words, "--host", "127.0.0.1", "--port", "4711", "-x"]
    launch = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *line]
    with subprocess.Popen(launch) as launcher:  # below this process there may be another test's router
        run = Run(launcher.pid, tmp_path)
        wait_for(run.router, "the router")
        found = run.router()
        assert found is not None
        supervisor = kernel.with_id(found.parent)
        assert supervisor is not None
        assert supervisor.parent == launcher.pid
        assert run.router_address() == ("127.0.0.1", 4711)
        strike(found, signal.SIGKILL)
        strike(supervisor, signal.SIGKILL)


def test_what_is_started_in_an_engines_place_is_known_by_its_seed(tmp_path: Path) -> None:
    run, own = Run(os.getpid(), tmp_path, 31), kernel.with_id(os.getpid())
    assert own is not None
    words = ["slime.backends.sglang.launch", "--random-seed", "32", "-x"]
    with (
        subprocess.Popen([*_SLEEPS, *words]) as server,
        subprocess.Popen([*_SLEEPS, "supervisor", *words[1:]]) as other,
    ):
        wait_for(lambda: run.newer_server("engine 1", own), "the server")
        found = run.newer_server("engine 1", own)
        assert found is not None
        assert found.pid == server.pid
        assert run.newer_server("engine 1", found) is None, "not newer than itself"
        assert run.newer_server("engine 0", own) is None
        server.kill()
        other.kill()


def test_whoever_comes_first_listens_at_a_port() -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        with listening_at(owner.getsockname(), 0.1) as held:
            assert not held
        address = owner.getsockname()
    with listening_at(address, 5) as held:
        assert held
        with listening_at(address, 0.1) as again:
            assert not again


def test_what_is_left_of_a_run_is_found_and_ended(tmp_path: Path) -> None:
    leaves = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], **{})"
    command = [sys.executable, "-c", leaves.format("{'start_new_session': True}")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.soaking.running._LEFT_S", 1.0)
        with Running(command, tmp_path / "log") as running:
            wait_for(lambda: running._launcher.poll() is not None, "its end", 20)
            with pytest.raises(OverError, match="the run has ended with status 0"):
                running.check(float("inf"))
    (left,) = running.left
    pid = int(left.split()[0])
    wait_for(lambda: kernel.with_id(pid) is None, "the end of what was left", 10)
    with Running(_SLEEPS, tmp_path / "log") as running, pytest.raises(TimeUpError):
        running.check(0.0)
    assert not running.left


# ---- what a run tells


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "file")
    assert lines.new() == []
    (tmp_path / "file").write_text('{"a": 1}\n{"a"')
    assert lines.new() == [{"a": 1}]
    with (tmp_path / "file").open("a") as file:
        file.write(": 2}\n")
    assert lines.new() == [{"a": 2}]


def span(name: str, start: float, seconds: float, **fields: Any) -> str:
    return json.dumps({"name": f"driver/{name}", "start": start, "seconds": seconds, **fields}) + "\n"


def event(kind: str, subject: str, when: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "subject": subject, "time": when, "phase": "", "cause": "", "seconds": None, **fields}


def test_spans_that_have_ended_say_in_which_phase_a_run_is(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    watcher, file = Watcher(tmp_path), tmp_path / "trace" / "driver.jsonl"
    assert watcher.look().phase == ""
    steps = [
        (span("push_weights", 10, 1, version=3), "generate", 3, 0),
        (span("wait_for_rollout", 11, 4, rollout=3), "generate", 3, 0),
        (span("hand_over", 15, 0.5, rollout=3), "train", 3, 0),
        (span("train", 15.5, 2, rollout=3), "save", 3, 0),
        (span("save", 17.5, 0.5, rollout=3), "push", 3, 1),
        (span("push_weights", 18, 0.5, version=4, error="LostError"), "", 4, 0),
        (span("push_weights", 30, 2, version=4), "generate", 4, 4),
    ]
    for line, phase, rollout, lasted in steps:
        with file.open("a") as trace:
            trace.write(line)
        moment = watcher.look()
        assert (moment.phase, moment.rollout, moment.lasted) == (phase, rollout, lasted)
    assert watcher.pushes == [(10, 11), (30, 32)], "one that failed is none"
    assert watcher.steps_since(12) == [32]


def test_what_is_lost_is_so_until_it_is_back(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path)
    file = tmp_path / "events.jsonl"
    for kind, subject, lost in (
        ("engine_died", "engine 1", ["engine 1"]),
        ("router_died", "router", ["engine 1", "router"]),
        ("trainer_died", "trainer 0", ["engine 1", "router"]),
        ("engine_back", "engine 1", ["router"]),
        ("router_back", "router", []),
        ("engine_hangs", "engine 0", ["engine 0"]),
        ("driver_died", "the driver", []),
        ("engine_hangs", "engine 1", ["engine 1"]),
    ):
        with file.open("a") as told:
            told.write(json.dumps(event(kind, subject, 1.0)) + "\n")
        watcher.look()
        assert watcher.lost() == lost
    watcher.forget("engine 1")
    assert watcher.lost() == [], "another has taken its place"
    with file.open("a") as told:
        told.write(json.dumps(event("engine_died", "engine 1", 1.0)) + "\n")
    watcher.look()
    assert watcher.lost() == ["engine 1"], "of that name in another life of the driver"
    assert Watcher(tmp_path).lost() == [], "of the shard before"


def fault(kind: str, subject: str | None = None) -> Fault:
    return Fault(0, kind, 0, KINDS[kind].subjects[0] if subject is None else subject, KINDS[kind].phases[0], 0.5)


@pytest.mark.parametrize(
    ("kind", "subject", "told", "is_it"),
    [
        ("engine_killed", "engine 1", event("engine_died", "engine 1", 101), True),
        ("engine_killed", "engine 1", event("engine_died", "engine 0", 101), False),
        ("engine_killed", "engine 1", event("engine_died", "engine 1", 99), False),
        ("engine_killed", "engine 1", event("engine_died", "engine 1", 161), False),
        ("engine_killed", "engine 1", event("engine_back", "engine 1", 101), False),
        ("engine_killed_in_push", "engine 1", event("engine_died", "engine 1", 101, phase="rollout 3"), False),
        ("engine_killed_in_push", "engine 1", event("engine_died", "engine 1", 101, phase="push of version 3"), True),
        ("trainer_killed", "trainer 1", event("trainer_died", "trainer 0, trainer 1", 130, seconds=20), True),
        ("trainer_killed", "trainer 1", event("trainer_died", "trainer 10", 130, seconds=20), False),
        ("reward_slow", "sample 7", event("reward_failed", "sample 7", 105, cause="it took longer than 4 s"), True),
        ("reward_slow", "sample 7", event("reward_failed", "sample 8", 105, cause="it took longer than 4 s"), False),
        ("reward_raises", "sample 7", event("reward_failed", "sample 7", 105, cause="it took longer than 4 s"), False),
        ("router_port_taken", "router", event("router_died", "router", 103, cause="it ended with status 137"), False),
        ("router_port_taken", "router", event("router_died", "router", 103, cause="it ended with status 1"), True),
        ("disk_full", "trainer 1", event("save_failed", "the trainers", 103, cause="--save /x: too large"), True),
    ],
)
def test_an_event_is_of_a_fault_by_kind_subject_words_and_time(
    kind: str, subject: str, told: dict[str, Any], is_it: bool
) -> None:
    assert noticed(fault(kind), subject, 100.0, [told]) == (told if is_it else None)


def test_all_is_well_again_when_the_run_says_so(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path)
    died, back = event("engine_died", "engine 1", 101), event("engine_back", "engine 1", 120, seconds=19.0)
    early = event("engine_back", "engine 1", 90)
    assert returned(fault("engine_killed"), "engine 1", died, [early, died], watcher) is None
    assert returned(fault("engine_killed"), "engine 1", died, [early, died, back], watcher) == 120
    first, second = event("trainer_died", "trainer 1", 110), event("trainer_died", "trainer 1", 130, seconds=29.0)
    assert returned(fault("trainer_killed"), "trainer 1", first, [first], watcher) is None
    assert returned(fault("trainer_killed"), "trainer 1", first, [first, second], watcher) == 130
    gone = event("driver_died", "the driver", 105)
    watcher.pushes = [(102, 103), (150, 152)]
    assert returned(fault("engine_killed"), "engine 1", died, [died, gone], watcher) == 152, "started anew with all"
    told = event("driver_died", "the driver", 101)
    watcher.pushes = [(99, 100)]
    assert returned(fault("driver_killed"), "the driver", told, [told], watcher) is None
    watcher.pushes += [(150, 152)]
    assert returned(fault("driver_killed"), "the driver", told, [told], watcher) == 152


@pytest.mark.parametrize(
    ("told", "is_it"),
    [
        (event("engine_died", "engine 1", 101), True),
        (event("engine_back", "engine 1", 120), True),
        (event("engine_hangs", "engine 1", 149), True),
        (event("engine_hangs", "engine 1", 151), False),
        (event("engine_hangs", "engine 1", 99), False),
        (event("engine_hangs", "engine 0", 110), False),
        (event("router_died", "router", 110), False),
        (event("driver_died", "the driver", 205), True),
        (event("save_failed", "the trainers", 203), True),
        (event("driver_died", "the driver", 105), False),
        (event("reward_failed", "sample 3", 301), False),
        (event("router_died", "router", 301), False),
    ],
)
def test_events_that_nobody_has_caused_are_found(told: dict[str, Any], is_it: bool) -> None:
    strikes = [
        {"kind": "engine_killed", "subject": "engine 1", "struck": 100.0, "back_s": 20.0},
        {"kind": "disk_full", "subject": "trainer 1", "struck": 200.0, "back_s": None},
        *(
            {"kind": kind, "subject": None, "struck": 300.0, "back_s": None}
            for kind in ("reward_slow", "router_killed")
        ),
    ]
    _, good, figures = ledger.explained([told], strikes)
    assert (good, figures.startswith(f"1 events, {int(not is_it)} others")) == (is_it, True)


# ---- hooks


def test_a_switch_is_taken_once_and_says_by_whom(tmp_path: Path) -> None:
    parser = ArgumentParser()
    hooks.add_arguments(parser)
    args = parser.parse_args(["--soak-switches", str(tmp_path)])
    (tmp_path / "reward_raises").touch()
    samples = [Sample(index=3), Sample(index=4)]
    assert [hooks._takes(args, "reward_raises", sample) for sample in samples] == [True, False]
    (line,) = [json.loads(text) for text in (tmp_path / hooks.TAKEN).read_text().splitlines()]
    assert (line["kind"], line["sample"]) == ("reward_raises", 3)


async def _reward(args: Namespace, sample: Sample) -> float:
    return await hooks.reward_func(args, sample)


def test_rewards_are_of_the_response_and_of_both_kinds(tmp_path: Path) -> None:
    import asyncio

    args = Namespace(soak_switches=str(tmp_path), reward_timeout=0.01)
    samples = [Sample(index=index, response=text) for index in range(8) for text in ("1", "22")]
    first, again = ([asyncio.run(_reward(args, sample)) for sample in samples] for _ in range(2))
    assert first == again
    assert set(first) == {0.0, 1.0}
    (tmp_path / "reward_raises").touch()
    with pytest.raises(RuntimeError, match="the judge is out of order"):
        asyncio.run(_reward(args, samples[0]))
    assert asyncio.run(_reward(args, samples[0])) == first[0]


# ---- injecting


class _NoRun(Run):
    def server(self, engine: str) -> processes.Process | None:
        return None


def begun(run_dir: Path) -> tuple[Watcher, Callable[[], None]]:
    """Watches a run that has pushed twice, and what is called while it is watched: the third time it trains."""
    (run_dir / "trace").mkdir()
    file = run_dir / "trace" / "driver.jsonl"
    file.write_text(span("push_weights", 10, 1, version=0) + span("push_weights", 12, 1, version=1))
    watcher, count = Watcher(run_dir), 0
    watcher.began = 0.0

    def check() -> None:
        nonlocal count
        count += 1
        if count == 3:
            with file.open("a") as trace:
                trace.write(span("hand_over", 15, 0.5, rollout=1))

    return watcher, check


def test_where_nobody_is_to_strike_nothing_has_bitten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, check = begun(tmp_path)
    struck = Injector(_NoRun(os.getpid(), tmp_path), watcher, tmp_path, check)
    outcome = struck.inject(Fault(4, "engine_killed", 1, "engine 0", "train", 0.0))
    assert not outcome.bit
    line = json.loads(outcome.as_line())
    assert line | {"number": 4, "attempt": 1, "subject": None, "phase": "train", "bit": False} == line
    assert (line["told"], line["noticed_s"], line["back_s"]) == ([], None, None)
    monkeypatch.setattr(injector, "_PHASE_S", 0.05)
    with pytest.raises(OverError, match=r"waited 0\.05 s in vain for the phase 'train'"):
        struck.inject(Fault(4, "engine_killed", 2, "engine 0", "train", 0.0))


class _OneTrainer(Run):
    """A run whose trainers are this process."""

    def __init__(self, pid: int, run_dir: Path) -> None:
        super().__init__(os.getpid(), run_dir)
        self._trainer = kernel.with_id(pid)

    def of_log(self, role: str) -> processes.Process | None:
        return self._trainer


def test_a_disk_that_was_not_found_full_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, check = begun(tmp_path)
    monkeypatch.setitem(KINDS, "disk_full", replace(KINDS["disk_full"], within=0.05))  # type: ignore[arg-type]
    full: list[int] = []

    with subprocess.Popen(_SLEEPS) as child:

        def look() -> None:
            check()
            full.append(resource.prlimit(child.pid, resource.RLIMIT_FSIZE)[0])

        before = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
        struck = Injector(_OneTrainer(child.pid, tmp_path), watcher, tmp_path, look)
        outcome = struck.inject(Fault(0, "disk_full", 0, "trainer 0", "train", 0.0))
        assert outcome is not None
        assert (outcome.subject, outcome.bit) == ("trainer 0", False)
        assert full[-1] == 1 << 16, "it was, for as long as it might be noticed"
        assert resource.prlimit(child.pid, resource.RLIMIT_FSIZE) == before
        child.kill()


class _OneServer(Run):
    """A run whose engines have this process for their server."""

    def __init__(self, pid: int, run_dir: Path) -> None:
        super().__init__(os.getpid(), run_dir)
        self._server = kernel.with_id(pid)

    def server(self, engine: str) -> processes.Process | None:
        return self._server


def test_while_an_engine_is_away_other_faults_are_done_and_its_return_ends_it(tmp_path: Path) -> None:
    told = tmp_path / "events.jsonl"
    watcher, trains = begun(tmp_path)

    def check() -> None:
        trains()
        if child.poll() is not None and not told.exists():
            told.write_text(json.dumps(event("engine_died", "engine 0", time.time())) + "\n")

    engine, other = Fault(0, "engine_killed", 0, "engine 0", "train", 0.0), fault("engine_stopped", "engine 1")
    other, reward = replace(other, number=1), replace(fault("reward_slow"), number=2)
    with subprocess.Popen(_SLEEPS) as child:
        struck = Injector(_OneServer(child.pid, tmp_path), watcher, tmp_path, check)
        assert struck.choose([engine, other, reward], in_haste=False) == engine
        assert struck.choose([engine, other, reward], in_haste=True) == reward
        assert struck.inject(engine) is None
    assert struck.settled() == []
    assert [outcome.fault for outcome in struck.unfinished()] == [engine]
    assert struck.choose([engine, other, reward], in_haste=False) == reward
    assert struck.choose([engine, other], in_haste=False) is None
    with told.open("a") as file:
        file.write(json.dumps(event("engine_back", "engine 0", time.time() + 20, seconds=20.0)) + "\n")
    (outcome,) = struck.settled()
    assert outcome.bit
    assert [one["kind"] for one in outcome.told] == ["engine_died", "engine_back"]
    assert 19 < json.loads(outcome.as_line())["back_s"] < 60
    assert (struck.settled(), struck.unfinished()) == ([], [])
    assert struck.choose([other], in_haste=False) == other


# ---- what adds up


def made(num_rollout: int) -> list[list[dict[str, Any]]]:
    return [
        [
            {"index": 16 * rollout + i, "weight_versions": [str(rollout)], "tokens": [1, i], "reward": 0.0}
            for i in range(16)
        ]
        for rollout in range(num_rollout)
    ]


@pytest.mark.parametrize(
    ("change", "figures"),
    [
        (lambda batches: None, "48 samples: 0 lost, 0 trained twice, 0 by"),
        (lambda batches: batches[1].pop(), "47 samples: 1 lost, 0 trained twice, 0 by"),
        (lambda batches: batches[2].append(batches[0][0] | {"weight_versions": ["2"]}), "0 lost, 1 trained twice, 0"),
        (lambda batches: batches[1][3].update(weight_versions=["0", "1"]), "0 lost, 0 trained twice, 1 by"),
    ],
)
def test_samples_are_trained_once_and_by_the_newest_weights(change: Any, figures: str) -> None:
    batches = made(3)
    change(batches)
    _, good, text = ledger.samples(batches, 3)
    assert figures in text
    assert good == (figures.startswith("48 samples: 0 lost, 0 trained twice"))


def test_runs_with_other_tokens_or_rewards_are_not_the_same() -> None:
    assert ledger.same_samples(made(2), made(2))[1:] == (True, "2 of 2 rollouts")
    for change in ({"tokens": [1, 99]}, {"reward": 1.0}):
        other = made(2)
        other[1][5] |= change
        assert ledger.same_samples(made(2), other)[1:] == (False, "1 of 2 rollouts")
    assert not ledger.same_samples([], [])[1]


def accounts(step: int, read: int, **parts: int) -> dict[str, float]:
    values = {"trained": 4 * (step + 1), "dropped": 0, "buffered": 0, "in_flight": 0} | parts
    return {"rollout/step": step, "rollout/prompts_read": read} | {
        f"rollout/prompts_{part}": value for part, value in values.items()
    }


def test_prompts_are_somewhere_after_every_rollout() -> None:
    good = [accounts(0, 4), accounts(1, 12, in_flight=4), accounts(1, 8), {"train/loss": 0.1}]
    assert ledger.prompts(good, 2)[1]
    assert not ledger.prompts([accounts(0, 4), accounts(1, 9)], 2)[1]
    assert not ledger.prompts([accounts(0, 4), accounts(1, 8, trained=4, dropped=4)], 2)[1]
    assert not ledger.prompts(good, 3)[1], "a rollout of which nothing was told"


def test_weights_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {"a": torch.ones(3), "b": torch.zeros(2)}
    others = {"same": tensors, "near": {**tensors, "a": torch.ones(3) + 3e-7}, "far": {**tensors, "b": torch.ones(2)}}
    for name, content in {**others, "less": {"a": tensors["a"]}}.items():
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors")
    found = {name: ledger.weights(tmp_path / name, tmp_path / "same") for name in ("same", "near", "far", "less")}
    assert {name: good for name, (_, good, _) in found.items()} == {
        **{"same": True, "near": True},
        **{"far": False, "less": False},
    }
    assert "the same bits" in found["same"][2]
    assert "the same bits" not in found["near"][2]


def test_a_table_has_a_row_a_kind_with_what_bit_and_how_long_it_took() -> None:
    line = {"kind": "engine_killed", "subject": "engine 0", "phase": "train", "bit": True}
    line |= {"noticed_s": 1.0, "back_s": 20.0}
    lines = [line, line | {"phase": "save", "noticed_s": 3.0, "back_s": 31.0}]
    missed = line | {"bit": False, "noticed_s": None, "back_s": None}
    lines += [missed, missed | {"subject": None}]
    assert ledger.table(lines)[2:] == ["| `engine_killed` | 3 | 2 | save, train | 2.0 / 3.0 | 25.5 / 31.0 |"]
