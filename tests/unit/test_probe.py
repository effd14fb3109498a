"""The probe after a push: who is asked, and what becomes of a difference."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import pytest

from slime.driver import probe as module
from slime.driver.probe import DIFFERENCE, Probe, mean_difference
from slime.fleet.membership import Member
from slime.fleet.spec import EngineSpec, ModelSpec
from slime.ray.supervision import RunError

NUM_GPUS = 0

OURS = [-1.0, -2.0, -3.0]


class Engine:
    """The actor of an engine, which makes ``scores`` of what it is asked; without any it dies."""

    def __init__(self, scores: list[float] | None) -> None:
        self.scores, self.asked = scores, [[0]]
        self.score = self

    def remote(self, tokens: list[int]) -> list[float] | None:
        self.asked.append(tokens)
        return self.scores


class Supervisor:
    def wait(self, calls: Mapping[str, Any], phase: str, limit: Any) -> list[Any]:
        assert phase == "probe weights of version 3"
        return [answer for answer in calls.values() if answer is not None]


def member(number: int, scores: list[float] | None, worker_type: str = "regular") -> Member:
    model = ModelSpec("actor", "to generate", "m", trained=True, tolerates_loss=True, generates=True)
    spec = EngineSpec(model, 1, 1, 8, "--rollout-num-gpus", worker_type=worker_type)
    return Member(f"engine {number}", spec, f"http://e{number}", Engine(scores), ())


class Probed:
    """What was warned of, and a probe."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.warnings: list[str] = []
        self.made = 0
        monkeypatch.setattr(module, "warn", self.warnings.append)
        args = Namespace(
            **{"mismatch_threshold": 0.1, "stop_on_mismatch": False, "weight_update_timeout": 5.0} | changes
        )
        self.probe = Probe(args, Supervisor(), self._make)  # type: ignore[arg-type]

    def _make(self) -> list[int]:
        self.made += 1
        return [5, 6, 7, 8]

    def compare(self, *members: Member) -> dict[str, float]:
        return self.probe.compare(3, OURS, members)


def test_the_worst_engine_counts_and_the_prompt_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = Probed(monkeypatch)
    members = [member(0, OURS), member(1, [-1.0, -2.03, -3.0]), member(2, None)]
    for _ in range(2):
        figures = probed.compare(*members)
        assert figures == {DIFFERENCE: pytest.approx(0.01)}
    assert probed.made == 1
    assert members[0].actor.asked[1:] == [[5, 6, 7, 8]] * 2
    assert probed.warnings == []


def test_nobody_is_asked_who_answers_half(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = Probed(monkeypatch)
    assert probed.compare(member(0, OURS, "prefill"), member(1, OURS, "decode")) == {}
    assert probed.compare(member(0, None)) == {}
    assert probed.made == 1


@pytest.mark.parametrize("scores", [[-1.0, -2.0, -3.6], [-1.0, math.nan, -3.0], [-1.0, -2.0]], ids=str)
def test_a_difference_above_the_threshold_is_warned_of_or_ends_the_run(
    scores: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = Probed(monkeypatch)
    probed.compare(member(0, [-1.0, -2.0, -3.1]), member(1, scores))
    (warning,) = probed.warnings
    assert "\n" not in warning
    assert "weights of version 3: the trainer's and engine 1's log-probs of the probe prompt differ by" in warning
    stopping = Probed(monkeypatch, stop_on_mismatch=True)
    with pytest.raises(RunError, match=r"engine 1's .* \(--mismatch-threshold 0.1\)"):
        stopping.compare(member(0, OURS), member(1, scores))


def test_means() -> None:
    assert mean_difference([1.0, 2.0], [2.0, 0.0]) == 1.5
    assert math.isnan(mean_difference([], []))
