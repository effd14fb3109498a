"""What the verdict says of planted faults, and that it is silent on a healthy run."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.observability.history import PROBE, REWARD, History, Trend, history_of
from slime.observability.metrics import MetricsLogger
from slime.observability.scores import Score
from slime.observability.verdict import NEEDED, VerdictFile, judge, verdict_lines
from slime.observability.verdict_rules import HINTS, SIGMAS, STOPS, Facts, scores_fall

NUM_GPUS = 0
RECORDED = json.loads((Path(__file__).parents[1] / "data" / "recorded_runs.json").read_text())
"""Figures of real runs, to four digits, a row a rollout: the soak's, two examples', and three rollouts of a 0.6B."""
ROLLOUT_LINE = {
    REWARD: 0.25, "rollout/varied_groups_ratio": 0.5, "rollout/truncated_ratio": 0.05, "rollout/num_samples": 128.0,
    "rollout/engines_alive": 1.0, "rollout/push_probe_abs_diff": 3.08e-08, "rollout/response_len/mean": 5.75,
}  # fmt: skip
TRAIN_LINE = {
    "train/loss": -3.26e-09, "train/pg_clipfrac": 0.0, "train/ppo_kl": 0.0, "train/entropy_loss": 0.6277,
    "train/train_rollout_logprob_abs_diff": 2.46e-07, "train/grad_norm": 0.178, "train/lr-pg_0": 0.0003,
    "perf/trained_tokens": 736.0, "train/bad_steps": 0.0,
}  # fmt: skip
Lines = list[tuple[str, dict[str, float]]]
Plant = Callable[[int, dict[str, float]], None]


def healthy(count: int = 24, plant: Plant = lambda step, line: None) -> Lines:
    """A run as it logs, of a quick start's figures: rewards rise beyond their noise; ``plant`` changes its lines."""
    chance = random.Random(3)
    lines: Lines = []
    for step in range(count):
        taken = ROLLOUT_LINE | {REWARD: 0.2 + 0.02 * step + chance.gauss(0, 0.02)}
        trained = TRAIN_LINE | {
            "train/grad_norm": chance.uniform(0.1, 0.3),
            "train/train_rollout_logprob_abs_diff": chance.uniform(2e-7, 3e-7),
        }
        pushed = {"perf/update_weights_time": 0.4, "perf/step_time": 2.5}
        for axis, line in (("rollout/step", taken), ("train/step", trained), ("rollout/step", pushed)):
            line = dict(line)
            plant(step, line)
            lines.append((axis, {axis: step, **line}))
    return lines


def folded(lines: Lines) -> History:
    history = History()
    for axis, line in lines:
        history.add(line, axis, int(line[axis]))
    return history


def setting(**values: float) -> Plant:
    """Overwrites figures of the lines that have them."""

    def plant(step: int, line: dict[str, float]) -> None:
        line |= {key: value for key, value in as_keys(values).items() if key in line}

    return plant


def as_keys(values: dict[str, float]) -> dict[str, float]:
    return {key.replace("__", "/"): value for key, value in values.items()}


NO_VARIANCE = {"rollout__varied_groups_ratio": 0.0}


def never_pushed(step: int, line: dict[str, float]) -> None:
    line.pop("perf/update_weights_time", None)


def drifting(step: int, line: dict[str, float]) -> None:
    if "train/train_rollout_logprob_abs_diff" in line:
        line["train/train_rollout_logprob_abs_diff"] = 0.002 + 0.02 * step


def each_group_alike(step: int, line: dict[str, float]) -> None:
    if REWARD in line:
        line |= {REWARD: 0.25 + 0.25 * (step % 3), "rollout/varied_groups_ratio": 0.0}


def mostly_cut(step: int, line: dict[str, float]) -> None:
    if REWARD in line:
        line |= {REWARD: 0.1 + 0.01 * (step % 2), "rollout/varied_groups_ratio": 0.2, "rollout/truncated_ratio": 0.9}


FAULTS: dict[str, tuple[str, Plant, tuple[str, ...]]] = {
    "all rewards equal": (
        "all rewards are equal", setting(rollout__raw_reward=1.0, **NO_VARIANCE), ("had reward 1", "--rm-type"),
    ),
    "reward of format only": (
        "all rewards are equal", setting(rollout__raw_reward=0.1, **NO_VARIANCE), ("reward 0.1", "format alone"),
    ),
    "equal within groups": (
        "rewards are equal in every group", each_group_alike, ("same reward", "--dynamic-sampling-filter-path"),
    ),
    "labels wrong": (
        "all rewards are 0", setting(rollout__raw_reward=0.0, **NO_VARIANCE),
        ("reward 0", "95% of them ended by themselves", "--label-key"),
    ),
    "labels wrong, with -1 for wrong": (
        "all rewards are 0", setting(rollout__raw_reward=-1.0, **NO_VARIANCE), ("reward -1", "--label-key"),
    ),
    "mask empty": ("the loss mask is empty", setting(perf__trained_tokens=0.0), ("24", "loss_mask was 0")),
    "learning rate 0": (
        "the learning rate is 0", setting(**{"train__lr-pg_0": 0.0}), ("0 in the last 8 rollouts", "--lr"),
    ),
    "truncation": ("responses are cut off", mostly_cut, ("90%", "20% of groups", "--rollout-max-response-len")),
    "truncation, and all rewards 0": (
        "responses are cut off",
        setting(rollout__raw_reward=0.0, rollout__truncated_ratio=1.0, **NO_VARIANCE), ("100%", "0% of groups"),
    ),
    "no push": ("weights do not reach the engines", never_pushed, ("No weights were pushed",)),
    "push that arrives wrong": (
        "weights do not reach the engines", setting(rollout__push_probe_abs_diff=0.8),
        ("differed by 0.8 nats", "--check-weight-update-equal"),
    ),
    "engines of old weights": ("weights do not reach the engines", drifting, ("by 0.442 nats", "by 0.022 at first")),
    "no gradient": ("the gradient is 0", setting(train__grad_norm=0.0), ("exactly 0",)),
    "steps left out": ("steps are left out", setting(perf__trained_tokens=0.0, **{"train__bad_steps": 1.0}), ("--lr",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    name, plant, words = FAULTS[fault]
    if fault == "mask empty":
        words = ("8 of the last 8", "loss_mask was 0")
    verdict = judge(folded(healthy(plant=plant)), Facts())
    assert verdict.word == "not learning"
    assert verdict.short == f"NOT LEARNING: {name}"
    for each in words:
        assert each in verdict.sentences[0].text
    assert verdict.sentences[0].keys


def test_every_cause_has_a_fault_that_shows_it() -> None:
    with_scores = "the reward is not the score"  # below
    assert {name for name, *_ in FAULTS.values()} | {with_scores} == set(STOPS)


def test_a_healthy_run_is_learning_and_nothing_else_is_said() -> None:
    lines = healthy(40)
    for end in range(len(lines) + 1):
        history = folded(lines[:end])
        for find in (*STOPS.values(), *HINTS):
            assert find(history, Facts()) is None, (end, find)
    verdict = judge(history, Facts())
    assert verdict.word == "learning"
    assert verdict.short.startswith("learning (reward +0.02 ±")
    assert [sentence.keys[0] for sentence in verdict.sentences] == [REWARD, "rollout/varied_groups_ratio"]


WORDS = {
    "soak": "no trend", "reproducibility": "too early", "on_policy_distillation": "learning", "qwen3-0.6B": "too early",
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_nothing_is_said_of_recorded_runs(name: str) -> None:
    history, columns = History(), RECORDED[name]["columns"]
    for step, row in enumerate(RECORDED[name]["rows"]):
        figures = {key: value for key, value in zip(columns, row, strict=True) if value is not None}
        history.add({"rollout/num_samples": 1.0, "perf/update_weights_time": 0.1}, "rollout/step", step)
        history.add(figures, "train/step", step)
        assert not [find for find in (*STOPS.values(), *HINTS) if find(history, Facts())], step
    assert judge(history, Facts()).word == WORDS[name]


def evaluated(name: str, scores: dict[int, float], *, prompts: int, **others: Any) -> Lines:
    """Lines of evaluations, by version; rewards of 0 and 1 unless ``errors`` are given, by version too."""
    errors, lines = others.get("errors", {}), []
    for version, score in scores.items():
        error = errors.get(version, math.sqrt(score * (1 - score) / (prompts - 1)))
        spread = {"prompts": float(prompts), "standard_error": error, "max_reward": others.get("highest", 1.0)}
        row = {f"eval/{name}": score, f"eval/{name}-truncated_ratio": 0.0}
        row |= {f"eval/{name}/{key}": value for key, value in spread.items()}
        lines.append(("eval/step", {"eval/step": version, **row}))
    return lines


def merged(*evaluations: Lines) -> Lines:
    """Of several data sets, in one line each, as a run logs them."""
    rows: dict[float, dict[str, float]] = {}
    for _, row in itertools.chain(*evaluations):
        rows[row["eval/step"]] = rows.get(row["eval/step"], {}) | row
    return [("eval/step", row) for row in rows.values()]


def risen(first: float, now: float, count: int = 20) -> Lines:
    """A run whose reward rises from about ``first`` to about ``now``."""
    chance = random.Random(1)

    def plant(step: int, line: dict[str, float]) -> None:
        if REWARD in line:
            line[REWARD] = first + (now - first) * step / (count - 1) + chance.gauss(0, 0.01)

    return healthy(count, plant=plant)


SOLVED = 0.9875
"""Of 48 prompts whose responses all had reward 1, one got 0.4: what a run of 20 rollouts logged."""
CANNOT_TELL = {
    "solved, and one prompt lost": evaluated("easy", {0: 1.0, 20: SOLVED}, prompts=48, errors={20: 0.0125}),
    "solved": evaluated("easy", {0: 1.0, 20: 1.0}, prompts=48),
    "solved but for one prompt": evaluated("easy", {0: SOLVED, 20: SOLVED}, prompts=48, errors={0: 0.0125, 20: 0.0125}),
    "nothing right": evaluated("hard", {0: 0.0, 20: 0.0}, prompts=48, highest=0.0),
    "few prompts": evaluated("sums", {0: 0.3, 20: 0.2}, prompts=10),
    "unknown how many": [("eval/step", {"eval/step": float(version), "eval/sums": 0.3}) for version in (0, 20)],
    "begins late": evaluated("sums", {18: 0.7, 20: 0.69}, prompts=500),
}


@pytest.mark.parametrize("case", CANNOT_TELL)
def test_what_an_evaluation_cannot_tell_is_no_verdict(case: str) -> None:
    verdict = judge(folded(risen(0.581, 0.749) + CANNOT_TELL[case]), Facts())
    assert verdict.word == "learning"
    assert REWARD in verdict.sentences[0].keys, verdict.sentences[0].text


def test_a_reward_that_rose_before_the_first_evaluation_is_none_that_scores_lack() -> None:
    def saturates(step: int, line: dict[str, float]) -> None:
        if REWARD in line:
            line[REWARD] = min(0.2 + 0.05 * step, 0.7) + 0.01 * (step % 2)

    scores = evaluated("sums", {20: 0.7, 40: 0.69}, prompts=500)
    assert judge(folded(healthy(40, plant=saturates) + scores), Facts()).word != "not learning"
    from_the_start = evaluated("sums", {0: 0.7, 40: 0.69}, prompts=500)
    verdict = judge(folded(healthy(40, plant=saturates) + from_the_start), Facts())
    assert verdict.short == "NOT LEARNING: the reward is not the score"


def test_of_several_evaluations_those_count_that_can_tell() -> None:
    solved = evaluated("easy", {0: 1.0, 20: SOLVED}, prompts=48, errors={20: 0.0125})
    level = evaluated("hard", {0: 0.41, 20: 0.40}, prompts=1000)
    verdict = judge(folded(risen(0.581, 0.749) + merged(solved, level)), Facts())
    assert verdict.short == "NOT LEARNING: the reward is not the score"
    assert "eval/hard went from 0.410 to 0.400" in verdict.sentences[0].text
    assert "eval/easy" not in verdict.sentences[0].text
    better = evaluated("hard", {0: 0.41, 20: 0.43}, prompts=1000)
    assert judge(folded(risen(0.581, 0.749) + merged(solved, better)), Facts()).word == "learning"


COLLAPSED = merged(
    evaluated("easy", {0: 1.0, 4: 0.6375, 8: 0.4708}, prompts=48, errors={4: 0.0528, 8: 0.0661}),
    evaluated("hard", {0: 0.9125, 4: 0.9047, 8: 0.4203}, prompts=48, errors={0: 0.0204, 4: 0.0341, 8: 0.0548}),
)
"""Evaluations of an asynchronous run with too high a rate."""


def test_evaluations_that_fall_are_a_hint() -> None:
    def no_trend(step: int, line: dict[str, float]) -> None:
        if REWARD in line:
            line[REWARD] = 0.45 + 0.07 * (step % 2)

    lines = healthy(8, plant=no_trend) + COLLAPSED
    verdict = judge(folded(lines), Facts(asynchronous=True))
    hint = verdict.sentences[0]
    assert verdict.word == "no trend"
    assert hint.text.startswith(
        "eval/easy fell from 1.000 to 0.471 (48 prompts), eval/hard fell from 0.912 to 0.420 (48 prompts), by more "
        "than chance: "
    )
    assert all(word in hint.text for word in ("Lower --lr", PROBE, "--use-tis", "--max-weight-staleness"))
    assert hint.keys[:2] == ("eval/easy", "eval/hard")
    assert "--max-weight-staleness" not in judge(folded(lines), Facts()).sentences[0].text


def test_a_rising_reward_and_falling_evaluations_are_both_said() -> None:
    said = [each.text for each in judge(folded(risen(0.376, 0.479, 8) + COLLAPSED), Facts()).sentences]
    assert said[0].startswith("The reward rose from 0.3")
    assert said[1].startswith("eval/easy fell from 1.000 to 0.471")


@pytest.mark.parametrize("scores", [{0: 0.3, 10: 0.9, 20: 0.4}, {0: 0.9, 20: 0.4}])
def test_a_fall_is_from_the_best_evaluation(scores: dict[int, float]) -> None:
    lines = healthy(20) + evaluated("sums", scores, prompts=100)
    assert any("eval/sums fell from 0.900 to 0.400" in each.text for each in judge(folded(lines), Facts()).sentences)


@pytest.mark.parametrize(("prompts", "falls"), [(10, False), (48, False), (500, True)])
def test_a_fall_within_what_the_prompts_give_by_chance_is_none(prompts: int, falls: bool) -> None:
    """0.1 of 0.6 is 3.2 standard errors of 500 prompts, and 1 of 48."""
    lines = healthy(20) + evaluated("sums", {0: 0.6, 20: 0.5}, prompts=prompts)
    assert (scores_fall(folded(lines), Facts()) is not None) is falls


@pytest.mark.parametrize(("first", "then", "count"), [(0.6, 0.5, 500), (1.0, 0.0, 4), (1.0, 0.9, 10)])
def test_the_noise_of_two_scores_is_that_of_two_proportions(first: float, then: float, count: int) -> None:
    def score(value: float) -> Score:
        return Score(value, count, math.sqrt(value * (1 - value) / count), 1.0)

    pooled = (first + then) / 2
    expected = math.sqrt(pooled * (1 - pooled) * 2 / count)
    assert score(first).noise(score(then)) == pytest.approx(expected)


def test_scores_of_the_same_weights_fall_as_rarely_as_is_said() -> None:
    """20 evaluations on the same 48 prompts, after each of which one looks: in 2% of runs."""
    chance = np.random.default_rng(0)
    falling = 0
    for _ in range(300):
        chances, lines = chance.random(48), []
        for version in range(20):
            rewards = (chance.random(48) < chances).astype(float)
            error = {version: float(rewards.std(ddof=1) / math.sqrt(48))}
            lines += evaluated("sums", {version: float(rewards.mean())}, prompts=48, errors=error)
        falling += any(scores_fall(folded(lines[:end]), Facts()) is not None for end in range(2, 21))
    assert falling <= 15


def test_rewards_of_kept_groups_are_called_so() -> None:
    filters = Facts(filters=True)
    verdict = judge(folded(healthy(40)), filters)
    assert verdict.short.startswith("learning (reward of the kept groups +0.02 ±")
    assert verdict.sentences[0].text.startswith("The reward of the kept groups changes by")
    assert "kept groups with rewards that differ 0.5" in verdict.sentences[-1].text
    level = evaluated("sums", {0: 0.31, 20: 0.30}, prompts=200)
    said = judge(folded(healthy() + level), filters).sentences[0].text
    assert said.startswith("The reward of the kept groups rose from")


def test_rewards_that_rise_where_evaluations_do_not_are_of_format_alone() -> None:
    lines = healthy(30) + evaluated("sums", {0: 0.31, 10: 0.28, 20: 0.30, 30: 0.29}, prompts=200)
    verdict = judge(folded(lines), Facts())
    assert verdict.short == "NOT LEARNING: the reward is not the score"
    assert "eval/sums went from 0.310 to 0.290" in verdict.sentences[0].text
    lines += evaluated("sums", {40: 0.52}, prompts=200)
    verdict = judge(folded(lines), Facts())
    assert verdict.word == "learning"
    assert "Evaluations of version 0 and 40: eval/sums from 0.310 to 0.520." in [
        each.text for each in verdict.sentences
    ]


HINTED = {
    "Only 5.0% of groups": setting(rollout__varied_groups_ratio=0.05),
    "80% of tokens were clipped": setting(train__pg_clipfrac=0.8),
}


@pytest.mark.parametrize("words", HINTED)
def test_what_keeps_a_run_from_learning_well_is_a_hint(words: str) -> None:
    verdict = judge(folded(healthy(plant=HINTED[words])), Facts())
    assert verdict.word == "learning"
    assert words in verdict.sentences[0].text


UNLEARNT: dict[str, Callable[[int], dict[str, float]]] = {
    "nats a token from the policy that generated": lambda step: {"train/ppo_kl": 1.5},
    "nats a token from the reference": lambda step: {"train/kl_loss": 3.0},
    "Entropy fell from 0.488 to 0.00692 nats": lambda step: {"train/entropy_loss": 0.6 * 0.8 ** min(step, 20)},
    "norm grew from": lambda step: {"train/grad_norm": 0.1 * 1.5**step},
}


@pytest.mark.parametrize("words", UNLEARNT)
def test_what_is_a_hint_only_where_the_reward_does_not_rise(words: str) -> None:
    def plant(step: int, line: dict[str, float]) -> None:
        if "train/grad_norm" in line:
            line |= UNLEARNT[words](step)

    def and_level(step: int, line: dict[str, float]) -> None:
        plant(step, line)
        if REWARD in line:
            line[REWARD] = 0.2 + 0.05 * (step % 2)

    said = [sentence.text for sentence in judge(folded(healthy(plant=and_level)), Facts()).sentences]
    assert any(words in text for text in said), said
    said = [sentence.text for sentence in judge(folded(healthy(plant=plant)), Facts()).sentences]
    assert not any(words in text for text in said)


def test_a_teacher_teaches_where_all_rewards_are_0() -> None:
    def taught(step: int, line: dict[str, float]) -> None:
        line |= {key: 0.0 for key in (REWARD, "rollout/varied_groups_ratio") if key in line}
        if "train/grad_norm" in line:
            line["train/opd_reverse_kl"] = 1.5 - 0.05 * step

    verdict = judge(folded(healthy(plant=taught)), Facts())
    assert verdict.word == "learning"
    assert "distance to the teacher" in verdict.short


@pytest.mark.parametrize(
    ("facts", "silent"),
    [
        (Facts(rewards_teach=False), "all rewards equal"),
        (Facts(compares=False), "equal within groups"),
        (Facts(asynchronous=True), "engines of old weights"),
        (Facts(push_interval=20), "no push"),
    ],
)
def test_options_that_make_a_fault_none(facts: Facts, silent: str) -> None:
    name, plant, _ = FAULTS[silent]
    assert STOPS[name](folded(healthy(plant=plant)), Facts()) is not None
    assert STOPS[name](folded(healthy(plant=plant)), facts) is None


def test_facts_are_those_of_the_options() -> None:
    args = argparse.Namespace(loss_type="policy_loss", reward_baseline=None, asynchronous=True, mismatch_threshold=0.3)
    assert Facts.of(args) == Facts(compares=False, asynchronous=True, mismatch=0.3)
    assert Facts.of(argparse.Namespace(dynamic_sampling_filter_path="a.b")) == Facts(filters=True)
    hook = argparse.Namespace(custom_advantage_function_path="a.b", update_weights_interval=3)
    assert Facts.of(hook) == Facts(rewards_teach=False, push_interval=3)


def test_the_slope_and_its_error_are_those_of_least_squares() -> None:
    chance = np.random.default_rng(5)
    points = [(x, 0.03 * x + float(chance.normal(0, 0.1))) for x in (*range(10), *range(14, 40))]
    x, y = np.array(points).T
    design = np.stack([np.ones_like(x), x], axis=1)
    fitted, (squares,), *_ = np.linalg.lstsq(design, y, rcond=None)
    error = math.sqrt(squares / (len(x) - 2) * np.linalg.inv(design.T @ design)[1, 1])
    trend = Trend.of(points, [value for _, value in points[:16]], 1)
    assert (trend.slope, trend.error) == (pytest.approx(fitted[1]), pytest.approx(error))


def test_noise_alone_is_a_trend_as_often_as_its_error_says() -> None:
    """Of runs without a trend 5% are beyond the quantile of Student's t for 18 degrees of freedom, 2.101."""
    chance = np.random.default_rng(1)
    runs = [Trend.of(list(enumerate(chance.normal(0, 1, 20))), [0.0], 1) for _ in range(1000)]
    assert 30 < sum(abs(run.beyond_noise(2.101)) for run in runs) < 70
    assert sum(abs(run.beyond_noise(SIGMAS)) for run in runs) < 20


def test_there_is_no_verdict_before_enough_rollouts() -> None:
    lines = healthy(NEEDED - 1)
    verdict = judge(folded(lines), Facts())
    assert (verdict.word, verdict.short) == ("too early", "")
    assert judge(folded(healthy(NEEDED)), Facts()).word == "learning"
    assert judge(folded([line for line in lines if line[0] != "train/step"]), Facts()).sentences == ()


def test_a_run_that_unlearns_gets_worse_and_one_that_is_done_has_learnt() -> None:
    def falls(step: int, line: dict[str, float]) -> None:
        if REWARD in line:
            line[REWARD] = 0.8 - 0.01 * step

    assert judge(folded(healthy(plant=falls)), Facts()).word == "getting worse"
    chance = random.Random(0)

    def saturates(step: int, line: dict[str, float]) -> None:
        if REWARD in line:
            line[REWARD] = min(0.2 + 0.05 * step, 0.9) + chance.gauss(0, 0.01)

    done = judge(folded(healthy(400, plant=saturates)), Facts())
    assert done.word == "learnt, now level"


def test_a_rollout_that_is_trained_anew_replaces_what_came_of_it() -> None:
    history = folded(healthy(10))
    history.add(ROLLOUT_LINE | {REWARD: 0.75}, "rollout/step", 6)
    assert list(history.rollouts) == [0, 1, 2, 3, 4, 5, 6]
    assert history.column(REWARD)[-1] == 0.75


def args_of(run_dir: Path) -> argparse.Namespace:
    return argparse.Namespace(run_dir=str(run_dir), use_tensorboard=False, use_wandb=False)


def test_the_file_is_whole_after_every_rollout_and_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    log = MetricsLogger(args_of(tmp_path))
    lines = healthy(20, plant=setting(**{"train__lr-pg_0": 0.0}))
    for axis, line in lines[:30]:
        log.log({key: value for key, value in line.items() if key != axis}, axis, int(line[axis]))
    assert log.verdict.short == "NOT LEARNING: the learning rate is 0"
    log.close()
    found: dict[str, Any] = json.loads((tmp_path / "verdict.json").read_text())
    assert found["verdict"] == "not learning"
    assert found["sentences"][0]["keys"] == ["train/lr-pg_0"]
    assert found["sentences"][0]["sentence"].startswith("The learning rate was 0 in the last 8 rollouts")
    resumed = MetricsLogger(args_of(tmp_path))
    for axis, line in lines[30:]:
        resumed.log({key: value for key, value in line.items() if key != axis}, axis, int(line[axis]))
    assert "over the last 20 rollouts" in "".join(each.text for each in resumed.verdict.sentences)
    assert list(history_of(tmp_path).rollouts) == list(range(20))
    assert verdict_lines(resumed.verdict)[0] == "is it learning? not learning"


def test_no_error_of_it_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    log = MetricsLogger(args_of(tmp_path))
    monkeypatch.setattr("slime.observability.verdict.judge", lambda *_: 1 / 0)
    for axis, line in healthy(3):
        log.log(line, axis, int(line[axis]))
    log.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 9
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1
    assert log.verdict.word == ""


def test_it_takes_no_time_that_a_step_would_notice(tmp_path: Path) -> None:
    sink, lines = VerdictFile(args_of(tmp_path)), healthy(600)
    began = time.process_time()
    for axis, line in lines:
        sink.write(line, axis, int(line[axis]))
    assert (time.process_time() - began) / 600 < 0.02, "seconds a rollout, of the most that are kept"
