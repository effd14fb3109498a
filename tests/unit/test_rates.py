"""Times and rates of a rollout and of a step: of requests, tools and matrix products, and text that repeats itself."""

from __future__ import annotations

import random
import string
from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from slime.data import Sample
from slime.driver.rates import flop_rates, operations, step_figures
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.batches.metrics import repetition, request_metrics, speed_metrics
from slime.rollout.evaluation import eval_metrics

NUM_GPUS = 0
REPLIES = [
    {"e2e_latency": 1.0, "queue_time": 0.25, "decode_throughput": 30.0},
    {"e2e_latency": 4.0},
    {"e2e_latency": 2.5, "queue_time": 0.75, "decode_throughput": 50.0},
]
ANSWER = "".join(random.Random(0).choices(string.ascii_letters + string.digits, k=12_000))


def test_requests_are_told_of_by_their_engines_times() -> None:
    replies = list(REPLIES)
    assert request_metrics(replies) == {
        "perf/request/count": 3.0,
        "perf/request/profiled_count": 2.0,
        "perf/request/e2e_latency/mean": 2.5,
        "perf/request/e2e_latency/median": 2.5,
        "perf/request/e2e_latency/max": 4.0,
        "perf/request/queue_time/mean": 0.5,
        "perf/request/queue_time/median": 0.5,
        "perf/request/queue_time/max": 0.75,
        "perf/decode/throughput/mean": 40.0,
    }
    assert replies == [], "the next rollout's are not counted twice"
    assert request_metrics(replies) == {}


def test_what_samples_spent_on_tools_is_taken_off_the_longest_one() -> None:
    spent = (2.0, 6.0, 0.0)
    samples = [Sample(response_length=n, loss_mask=[1] * n) for n in (80, 80, 10)]
    for sample, seconds in zip(samples, spent, strict=True):
        sample.non_generation_time = seconds
    metrics = speed_metrics(Namespace(rollout_num_gpus=1), samples, 12.0)
    found = {name: metrics[f"perf/non_generation_time/{name}"] for name in ("mean", "median", "max", "min")}
    assert found == {"mean": pytest.approx(8 / 3), "median": 2.0, "max": 6.0, "min": 0.0}
    assert metrics["perf/longest_sample_non_generation_time"] == 4.0
    assert metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] == 10.0
    for sample in samples:
        sample.non_generation_time = 0.0
    assert not [name for name in speed_metrics(Namespace(rollout_num_gpus=1), samples, 12.0) if "non_gen" in name]


@pytest.mark.parametrize(
    ("response", "repeats"),
    [
        (ANSWER + "I see. " * 2000, True),
        ("I see. " * 2000 + ANSWER, False),
        ("I see. " * 100, False),
        (ANSWER, False),
        ("", False),
    ],
    ids=["at its end", "before its end", "too short to say", "text", "nothing"],
)
def test_text_that_goes_round_in_circles(response: str, repeats: bool) -> None:
    other = Sample(response="yes")
    assert repetition([Sample(response=response), other]) == (0.5 if repeats else 0.0)


def test_evaluations_count_prompts_of_equal_rewards() -> None:
    samples = [Sample(group_index=i // 2, rollout_id=i, response_length=1) for i in range(12)]
    rewards = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1 / 3, 1 / 3, 0.33333334, 0.33333334]
    metrics = eval_metrics(RolloutFnEvalOutput({"d": {"rewards": rewards, "samples": samples}}))
    counted = {key: value for key, value in metrics.items() if "zero_std" in key}
    assert counted == {
        f"eval/d/zero_std/count_{reward}": count for reward, count in (("1", 1), ("0", 2), ("0.3333", 2))
    }
    single = {
        "rewards": [1.0, 0.0],
        "samples": [Sample(group_index=i, rollout_id=i, response_length=1) for i in (0, 1)],
    }
    assert not [key for key in eval_metrics(RolloutFnEvalOutput({"d": single})) if "zero_std" in key]


@pytest.mark.parametrize(("lora_rank", "step"), [(None, 15.0), (8, 10.0)])
def test_operations_a_second_are_those_of_each_rank(lora_rank: int | None, step: float) -> None:
    args = Namespace(actor_num_nodes=2, actor_num_gpus_per_node=4, lora_rank=lora_rank)
    trained = {"perf/log_probs_time": 2.0, "perf/actor_train_time": 4.0, "perf/train_time": 9.0}
    found = flop_rates(args, trained, {"rollout/forward_tflop": 160.0})
    assert found == {"perf/log_probs_tflops": 10.0, "perf/actor_train_tflops": step}
    assert flop_rates(args, trained, {}) == {}


def test_operations_of_a_rollout_are_those_of_its_rows() -> None:
    """One layer of hidden size 4, a head of width 4, an MLP of 8, 10 words: a token meets four matrices of 4 x 4, three
    of 4 x 8 and one of 4 x 10, and a causal pair four numbers for its score and as many for the sum."""
    shape = {"num_layers": 1, "hidden_size": 4, "ffn_hidden_size": 8, "num_attention_heads": 1, "num_query_groups": 1}
    none = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    args = Namespace(**shape, **dict.fromkeys(none), kv_channels=4, vocab_size=10, moe_layer_freq=1)
    args.multi_latent_attention, args.debug_rollout_only = False, False
    batches = [Namespace(lengths=np.array([3])), Namespace(lengths=np.array([1, 2]))]
    wanted = sum(2 * n * (4 * 4 * 4 + 3 * 4 * 8 + 4 * 10) + 2 * n * (n + 1) * 4 for n in (3, 1, 2))
    assert operations(args, batches) == {"rollout/forward_tflop": pytest.approx(wanted / 1e12)}  # type: ignore[arg-type]
    args.debug_rollout_only = True
    assert operations(args, batches) == {}  # type: ignore[arg-type]


def test_the_share_that_trainers_waited() -> None:
    metrics: dict[str, Any] = {"perf/wait_for_rollout_time": 3.0}
    assert step_figures(metrics, 4.0) == {"perf/step_time": 4.0, "perf/wait_time_ratio": 0.75}
    assert step_figures({}, 4.0) == {"perf/step_time": 4.0}
