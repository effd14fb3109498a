"""The probe after a push: who is asked, and what becomes of a difference."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import pytest

from slime.driver import probe as module
from slime.driver.probe import Probe, mean_difference
from slime.fleet.membership import Member
from slime.fleet.spec import EngineSpec, ModelSpec
from slime.ray.supervision import RunError

NUM_GPUS = 0

OURS = [-1.0, -2.0, -3.0]


class Engine:
    """The actor of an engine, which makes ``scores`` of what it is asked; without any it dies."""

    def __init__(self, scores: list[float] | None) -> None:
        self.scores, self.asked = scores, list[list[int]]()
        self.score = self

    def remote(self, tokens: list[int]) -> list[float] | None:
        self.asked.append(tokens)
        return self.scores


class Supervisor:
    """Calls are answered at once; those of the dead never."""

    def wait(self, calls: Mapping[str, Any], phase: str, limit: Any) -> list[Any]:
        return list(self.answers(calls, phase, limit).values())

    def answers(self, calls: Mapping[str, Any], phase: str, limit: Any) -> dict[str, Any]:
        assert phase.startswith("probe weights of version ")
        dead = [name for name, answer in calls.items() if answer is None and name.startswith("engine")]
        return {name: answer for name, answer in calls.items() if name not in dead}


class Trainers:
    """Two ranks, of which the last one knows."""

    def __init__(self, scores: list[float] | None) -> None:
        self.scores = scores
        self.asked: list[tuple[str, list[int]]] = []

    def begin(self, method: str, tokens: list[int]) -> dict[str, Any]:
        self.asked.append((method, tokens))
        return {"trainer 0": None, "trainer 1": self.scores}


def member(number: int, scores: list[float] | None, worker_type: str = "regular") -> Member:
    model = ModelSpec("actor", "to generate", "m", trained=True, tolerates_loss=True, generates=True)
    spec = EngineSpec(model, 1, 1, 8, "--rollout-num-gpus", worker_type=worker_type)
    return Member(f"engine {number}", spec, f"http://e{number}", Engine(scores), ())


class Probed:
    """What was warned of, and a probe."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ours: list[float] | None = OURS, **changes: Any) -> None:
        self.warnings: list[str] = []
        self.made = 0
        monkeypatch.setattr(module, "warn", self.warnings.append)
        values = {"mismatch_threshold": 0.1, "stop_on_mismatch": False, "weight_update_timeout": 5.0}
        self.trainers: Any = Trainers(ours)
        supervisor: Any = Supervisor()
        self.probe = Probe(Namespace(**values | changes), supervisor, self.trainers, self._make)

    def _make(self) -> list[int]:
        self.made += 1
        return [5, 6, 7, 8]

    def ask(self, *members: Member, version: int = 3) -> None:
        self.probe.ask_trainers(version)
        self.probe.ask_engines(members)


def test_the_worst_engine_counts_and_the_prompt_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = Probed(monkeypatch)
    members = [member(0, OURS), member(1, [-1.0, -2.03, -3.0]), member(2, None)]
    for _ in range(2):
        probed.ask(*members)
        assert probed.probe.finish() == pytest.approx(0.01)
        assert probed.probe.finish() is None
    assert probed.made == 1
    assert members[0].actor.asked == [[5, 6, 7, 8]] * 2
    assert probed.trainers.asked == [("score", [5, 6, 7, 8])] * 2
    assert probed.warnings == []


def test_of_several_pushes_the_worst_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine came back before the number was wanted."""
    probed = Probed(monkeypatch)
    probed.ask(member(0, [-1.0, -2.06, -3.0]))
    probed.ask(member(1, OURS))
    assert probed.probe.finish() == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("ours", "members"),
    [
        (OURS, [member(0, OURS, "prefill"), member(1, OURS, "decode")]),
        (OURS, [member(0, None)]),
        (OURS, []),
        (None, [member(0, OURS)]),
    ],
    ids=["parts", "dead", "none", "no text"],
)
def test_where_nobody_tells_there_is_no_number(
    ours: list[float] | None, members: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = Probed(monkeypatch, ours)
    probed.ask(*members)
    assert probed.probe.finish() is None
    assert probed.warnings == []


def test_trainers_that_are_made_anew_were_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = Probed(monkeypatch)
    probed.ask(member(0, [0.0]))
    probed.probe.forget()
    assert probed.probe.finish() is None


@pytest.mark.parametrize("scores", [[-1.0, -2.0, -3.6], [-1.0, math.nan, -3.0], [-1.0, -2.0]], ids=str)
def test_a_difference_above_the_threshold_is_warned_of_or_ends_the_run(
    scores: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = Probed(monkeypatch)
    probed.ask(member(0, [-1.0, -2.0, -3.1]), member(1, scores))
    difference = probed.probe.finish()
    assert difference is not None
    assert not difference <= 0.1
    (warning,) = probed.warnings
    assert "\n" not in warning
    assert "push of version 3: the trainer's and engine 1's log-probs of the probe prompt differ by" in warning
    stopping = Probed(monkeypatch, stop_on_mismatch=True)
    stopping.ask(member(0, OURS), member(1, scores))
    with pytest.raises(RunError, match=r"engine 1's .* \(--mismatch-threshold 0.1\)"):
        stopping.probe.finish()


def test_means() -> None:
    assert mean_difference([1.0, 2.0], [2.0, 0.0]) == 1.5
    assert math.isnan(mean_difference([], []))
