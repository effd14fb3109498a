"""Evaluation over an in-process generate client, and its metrics by hand."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.evaluation import eval_metrics, pass_at_k
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample
from tests.fake_client import FakeClient, reply

NUM_GPUS = 0

Args = Callable[..., Namespace]


def evaluate(args: Namespace) -> tuple[RolloutFnEvalOutput, dict[str, float]]:
    output = generate_rollout(args, 0, None, evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput)
    return output, eval_metrics(output)


def test_evaluation_of_two_sets(rollout_args: Args, use: Callable[..., FakeClient], write_jsonl: Any) -> None:
    client = use(FakeClient(lambda n, ids, params: reply(str(len(ids)), "length" if len(ids) > 4 else "stop")))
    right = write_jsonl([{"prompt": "x" * n, "label": str(n)} for n in range(1, 7)], "right.jsonl")
    half = write_jsonl([{"q": "x" * n, "a": str(n if n % 2 else 0)} for n in range(1, 5)], "half.jsonl")
    args = rollout_args(rm_type="f1", eval_datasets=[("right", right)], eval_temperature=0.0, eval_max_response_len=9)
    _, metrics = evaluate(args)
    assert metrics["eval/right"] == 1.0
    assert metrics["eval/right-truncated_ratio"] == pytest.approx(2 / 6)
    assert metrics["eval/right-no_reward"] == 0
    assert metrics["eval/right/response_len/max"] == 1
    assert not any("pass@" in key for key in metrics)
    assert {(p["temperature"], p["max_new_tokens"]) for _, p, _ in client.requests} == {(0.0, 9)}
    args.eval_datasets, args.eval_input_key, args.eval_label_key = [("half", half), ("other", half)], "q", "a"
    args.n_samples_per_eval_prompt = 3
    output, metrics = evaluate(args)
    assert set(output.data) == {"half", "other"}
    assert metrics["eval/half"] == metrics["eval/half-avg@3"] == metrics["eval/half-pass@3"] == 0.5
    assert len(output.data["half"]["samples"]) == 12


def test_a_late_evaluation_names_the_weights(
    rollout_args: Args, use: Callable[..., FakeClient], write_jsonl: Any
) -> None:
    use(FakeClient(lambda *_: asyncio.sleep(60)))
    path = write_jsonl([{"prompt": "x", "label": "1"}])
    args = rollout_args(rm_type="f1", eval_datasets=[("e", path)], rollout_timeout=0.2)
    with pytest.raises(TimeoutError, match=r"evaluation of weight version 6: 0 of 1 samples finished"):
        generate_rollout(args, 6, None, evaluation=True)


def test_evaluation_without_sets(rollout_args: Args, use: Callable[..., FakeClient]) -> None:
    use(FakeClient())
    with pytest.raises(ValueError, match="--eval-prompt-data"):
        evaluate(rollout_args())


def test_eval_seeds_do_not_depend_on_the_rollout(
    rollout_args: Args, use: Callable[..., FakeClient], write_jsonl: Any
) -> None:
    path = write_jsonl([{"prompt": "x" * n, "label": "1"} for n in range(1, 4)])
    args = rollout_args(
        rm_type="f1",
        eval_datasets=[("e", path)],
        n_samples_per_eval_prompt=2,
        sglang_enable_deterministic_inference=True,
    )
    seen = []
    for rollout_id in (0, 9):
        client = use(FakeClient())
        generate_rollout(args, rollout_id, None, evaluation=True)
        seen.append(sorted((len(ids), params["sampling_seed"]) for ids, params, _ in client.requests))
    assert seen[0] == seen[1]
    assert len({seed for _, seed in seen[0]}) == 6


def test_pass_at_k_is_the_exact_probability() -> None:
    for _ in range(20):
        n = random.randrange(1, 8)
        outcomes = [random.random() < 0.4 for _ in range(n)]
        for k in range(1, n + 1):
            draws = list(itertools.combinations(outcomes, k))
            assert math.isclose(pass_at_k(n, sum(outcomes), k), sum(map(any, draws)) / len(draws), abs_tol=1e-12)


def test_eval_metrics_by_hand() -> None:
    def sample(group: int, rollout_id: int) -> Sample:
        return Sample(group_index=group, rollout_id=rollout_id, response_length=2)

    samples = [sample(0, i) for i in range(4)] + [sample(1, i) for i in (4, 5, 6, 6, 7)]
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, None]
    data = {"d": {"rewards": rewards, "truncated": [False] * 9, "samples": samples}}
    metrics = eval_metrics(RolloutFnEvalOutput(data, {"perf/eval_time": 3.0}))
    assert metrics["eval/d"] == metrics["eval/d-avg@4"] == pytest.approx(2 / 7)
    assert metrics["eval/d-no_reward"] == 1
    assert metrics["eval/d-pass@1"] == pytest.approx((0.5 + 0) / 2)
    assert metrics["eval/d-pass@2"] == pytest.approx(((1 - 1 / 6) + 0) / 2)
    assert metrics["eval/d-pass@4"] == 1.0
    assert metrics["perf/eval_time"] == 3.0
    bare = eval_metrics(RolloutFnEvalOutput({"d": {"rewards": [1.0, None], "truncated": []}}))
    assert bare == {"eval/d": 1.0, "eval/d-no_reward": 1.0}
