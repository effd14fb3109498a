"""slime's rollout over a real engine and router: aborted, partial and cut responses, filters; every prompt counted."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from slime.data import Sample, Status
from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.batches.metrics import accounting
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sglang_rollout import generate_rollout
from tests.integration.tiny import KEYS, Service, log_probs_of

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_SHORT, _LONG = 4, 400

_HOOKS = f"""
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sglang_rollout import generate as ask

def length(sample):
    return {_LONG} if sample.group_index % 3 == 2 else {_SHORT}

async def by_group(args, sample, params):
    return await ask(args, sample, params | {{"max_new_tokens": length(sample), "ignore_eos": True}})

async def cut(args, sample, params):
    import copy
    first = await ask(args, sample, params | {{"max_new_tokens": {_SHORT}, "ignore_eos": True}})
    second = copy.deepcopy(first)
    second.loss_mask = [0] * second.response_length
    return [first, await ask(args, second, params | {{"max_new_tokens": 2 * {_SHORT}, "ignore_eos": True}})]

def coin(args, sample):
    return float((sample.rollout_id % 2) if sample.group_index % 2 else 1)
"""


@pytest.fixture
def served(service: Service, tiny_model_dir: Path, tmp_path: Path) -> Iterator[Namespace]:
    """Options of small rollouts over the session's engine, which has the weights on disk."""
    hooks = tmp_path / "hooks.py"
    hooks.write_text(_HOOKS)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{i:03d}?", "label": ""}) + "\n" for i in range(30)))
    service.control.flush_cache()
    service.control.update_weights_from_disk(str(tiny_model_dir))
    host, port = service.router.url.removeprefix("http://").rsplit(":", 1)
    changes: dict[str, Any] = {
        "prompt_data": str(prompts),
        "label_key": "label",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": _LONG,
        "rollout_timeout": 120.0,
        "rollout_num_gpus": 1,
        "custom_generate_function_path": f"{hooks}:by_group",
        "custom_rm_path": f"{hooks}:coin",
    }
    derived = {"num_engines": 1, "sglang_router_ip": host, "sglang_router_port": int(port)}
    derived |= {"sglang_router_api_key": KEYS[0], "sglang_enable_deterministic_inference": False}
    args = Namespace(**{**vars(service.args), **changes, **derived})
    runtime = RolloutRuntime(args)
    runtime.set_engines([service.engine.url], KEYS[1])
    with runtime.active():
        yield args


def train_on(args: Namespace, rollout_id: int, source: RolloutDataSourceWithBuffer) -> RolloutFnTrainOutput:
    output = generate_rollout(args, rollout_id, source)
    assert isinstance(output, RolloutFnTrainOutput)
    source.count_trained(flatten_samples(output.samples))
    accounting(args, source, source.num_in_flight(after=rollout_id))
    return output


def groups_of(output: RolloutFnTrainOutput) -> list[Any]:
    return [flatten_samples(group)[0].group_index for group in output.samples]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_partial_responses_go_on_and_their_log_probs_are_the_models(
    served: Namespace, tiny_model_dir: Path, asynchronous: bool
) -> None:
    served.over_sampling_batch_size, served.partial_rollout, served.asynchronous = 6, True, asynchronous
    for _ in range(5):  # on a busy machine the long ones may be over when they are to be ended
        source = RolloutDataSourceWithBuffer(served)
        first = train_on(served, 0, source)
        partial = flatten_samples(source.buffer)
        if all(s.status is Status.ABORTED for s in partial):
            break
    assert groups_of(first) == [0, 1, 3, 4]
    assert [s.group_index for s in partial] == [2, 2, 5, 5]
    assert all(s.status is Status.ABORTED and 0 < s.response_length < _LONG for s in partial)
    had = {s.index: (s.response_length, list(s.tokens)) for s in partial}

    served.over_sampling_batch_size = None
    second = train_on(served, 1, source)
    assert groups_of(second) == [2, 5, 6, 7]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    for sample in (s for s in flatten_samples(second.samples) if s.index in had):
        length, tokens = had[sample.index]
        assert sample.tokens[: len(tokens)] == tokens
        assert (sample.response_length, sample.status) == (_LONG, Status.TRUNCATED)
        assert sample.segment_lengths == [length, _LONG - length]
        expected = log_probs_of(model, sample.tokens[:-_LONG], sample.tokens[-_LONG:]).tolist()
        assert sample.rollout_log_probs is not None
        assert max(abs(a - b) for a, b in zip(sample.rollout_log_probs, expected, strict=True)) < 1e-4


def test_filter_cut_rollouts_and_surplus(served: Namespace) -> None:
    served.custom_generate_function_path = served.custom_generate_function_path.replace("by_group", "cut")
    served.dynamic_sampling_filter_path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    served.over_sampling_batch_size = 10
    source = RolloutDataSourceWithBuffer(served)
    trained: list[Any] = []
    for rollout_id in range(2):
        output = train_on(served, rollout_id, source)
        trained += groups_of(output)
        for sample_parts in (parts for group in output.samples for parts in group):
            one, two = sample_parts if isinstance(sample_parts, list) else (None, None)
            if one is None or two is None:  # it came from the buffer, where a group is flat
                continue
            assert (one.rollout_id, one.response_length, two.response_length) == (two.rollout_id, _SHORT, 2 * _SHORT)
            assert two.tokens[: len(one.tokens)] == one.tokens
            assert two.loss_mask == [0] * _SHORT + [1] * _SHORT
    assert all(index % 2 for index in trained), "groups of equal rewards are dropped"
    assert len(set(trained)) == 8
    assert source.num_dropped["filter_zero_std_1"] >= 4


def test_a_prompt_that_the_engine_refuses_costs_its_group_alone(served: Namespace) -> None:
    source = RolloutDataSourceWithBuffer(served)
    drawn = source.get_samples(4)
    for sample in drawn[1]:
        sample.tokens = [5] * 600
    source.add_samples(drawn)
    served.on_sample_error = "drop"
    output = train_on(served, 0, source)
    assert groups_of(output) == [0, 2, 3, 4]
    assert source.num_dropped == {"generate_error": 1}
    assert all(isinstance(sample, Sample) and sample.reward is not None for sample in flatten_samples(output.samples))
