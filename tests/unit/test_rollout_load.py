"""Hundreds of requests at once through the rollout path, against the stub engine of tools/bench_rollout_load.py."""

from __future__ import annotations

import asyncio
import gc
import json
from argparse import Namespace
from collections.abc import Callable

import pytest

from slime.data import Sample
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine import state
from slime.rollout.sglang_rollout import generate_rollout
from tests.fake_client import FakeClient
from tools.benchmarks import load
from tools.benchmarks.report import BenchError
from tools.benchmarks.stub_engine import FAULTS, reply_key

NUM_GPUS = 0

GROUPS, GROUP, TOKENS = 63, 8, 24
SAMPLES = GROUPS * GROUP


@pytest.fixture
def args(rollout_args: Callable[..., Namespace], write_jsonl: Callable[..., str]) -> Namespace:
    """Options of a rollout of which all samples may be in flight at once, each with a seed of its own."""
    return rollout_args(
        prompt_data=write_jsonl(load.prompt_rows(GROUPS)),
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=GROUP,
        rollout_max_response_len=TOKENS,
        sglang_server_concurrency=SAMPLES,
        sglang_enable_deterministic_inference=True,
        custom_rm_path="tools.benchmarks.load.reward",
        rollout_timeout=60.0,
        request_timeout=60.0,
    )


@pytest.mark.parametrize("error_rate", [0.0, 0.05])
def test_all_are_in_flight_at_once_and_come_back_once_with_their_own_tokens(args: Namespace, error_rate: float) -> None:
    with load.stub_engine(SAMPLES, error_rate) as port:
        done, _ = load.run(args, port, rollout_id=0)
    assert done.counts["most_in_flight"] == SAMPLES
    faults = [done.counts.get(fault, 0) for fault in FAULTS]
    assert all(faults) if error_rate else not any(faults)


def test_a_lost_sample_and_a_mix_up_are_seen(args: Namespace) -> None:
    args.rollout_batch_size = 2
    with load.stub_engine(hold_until=1) as port:
        args.sglang_router_port = port
        output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert isinstance(output, RolloutFnTrainOutput)
    groups: list[list[Sample]] = output.samples
    load.check(args, 0, groups)
    with pytest.raises(BenchError, match="16 samples were to come back once; 15 came, 15 of them"):
        load.check(args, 0, [groups[0][1:], groups[1]])
    with pytest.raises(BenchError, match="16 samples were to come back once; 16 came, 8 of them"):
        load.check(args, 0, [groups[0], groups[0]])
    one, other = groups[0][1:3]
    one.tokens, other.tokens = other.tokens, one.tokens
    with pytest.raises(BenchError, match=r"sample 1 came back with another's tokens$"):
        load.check(args, 0, groups)
    with pytest.raises(BenchError, match="16 samples and 1 faults do not add up"):
        load.check_counts({"requests": 18, "answered": 17, "reset": 1}, 16)


def test_the_stub_answers_in_the_form_of_an_engine() -> None:
    script, key = load.script(), reply_key([1, 2, 3], seed=7)
    reply = json.loads(script.reply(key, 5, prompt_length=3, rid="abc"))
    meta = reply["meta_info"]
    assert reply["output_ids"] == script.tokens[key : key + 5] == [pair[1] for pair in meta["output_token_logprobs"]]
    assert [pair[0] for pair in meta["output_token_logprobs"]] == script.log_probs[key : key + 5]
    assert reply["text"] == "".join(script.texts[key : key + 5])
    assert (meta["id"], meta["finish_reason"], meta["prompt_tokens"]) == ("abc", {"type": "length", "length": 5}, 3)
    assert key != reply_key([1, 2, 3], seed=8)


def test_a_rollout_lets_garbage_collection_look_rarely(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    monkeypatch.setattr(state, "make_client", lambda *_: FakeClient())

    async def threshold() -> int:
        async with state.rollout_state(args):
            return gc.get_threshold()[0]

    try:
        for at_first, within in ((700, 100_000), (200_000, 200_000), (0, 0)):
            gc.set_threshold(at_first)
            assert asyncio.run(threshold()) == within, "raised, never lowered, and left alone where there is none"
    finally:
        gc.set_threshold(*before)
