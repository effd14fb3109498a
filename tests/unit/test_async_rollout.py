"""Rollouts generated ahead of training: interrupted by pushes, and how old their samples are."""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Group, Sample, Status
from slime.data.source.rollout_context import rollout_context
from slime.rollout.batches.staleness import renew_stale, staleness, staleness_metrics
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine import state as state_module
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sglang_rollout import generate, generate_and_rm
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.errors import HookError
from slime.utils.http_utils import RequestError

NUM_GPUS = 0

Args = Callable[..., Namespace]
Reply = Callable[[list[int], dict[str, Any]], dict[str, Any]]


class ScriptedClient:
    """Answers each request by a function of its tokens and parameters."""

    def __init__(self, answer: Reply) -> None:
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        self._answer = answer

    async def generate(self, input_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.requests.append((list(input_ids), sampling_params))
        await asyncio.sleep(0)
        return self._answer(input_ids, sampling_params)


def reply(tokens: list[int], finish: str = "stop", version: int = 0) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": finish},
        "weight_version": str(version),
        "output_token_logprobs": [[-0.25, token, None] for token in tokens],
    }
    return {"text": "?", "meta_info": meta}


@pytest.fixture
def answer_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Reply], ScriptedClient]:
    def use(answer: Reply) -> ScriptedClient:
        client = ScriptedClient(answer)
        monkeypatch.setattr(state_module, "make_client", lambda *_: client)
        return client

    return use


@pytest.fixture
def source_args(rollout_args: Args, write_jsonl: Callable[..., str]) -> Args:
    def make(**changes: Any) -> Namespace:
        path = write_jsonl([{"prompt": f"p{i}", "label": str(i)} for i in range(7)])
        return rollout_args(**{"prompt_data": path, "rm_type": "random", "max_weight_staleness": 1} | changes)

    return make


# ---- interrupted by pushes


def test_a_request_survives_a_push_after_every_token(rollout_args: Args, answer_by: Any) -> None:
    pushes = 40  # far more than aborts are put up with that bring nothing

    def one_token(tokens: list[int], params: dict[str, Any]) -> dict[str, Any]:
        done = len(tokens) - 3
        return reply([200 + done], "abort" if done < pushes else "stop", version=done)

    client = answer_by(one_token)
    params = {"max_new_tokens": 64, "min_new_tokens": 10}
    sample = asyncio.run(generate(rollout_args(), Sample(prompt="abc"), params))
    assert sample.status is Status.COMPLETED
    assert sample.tokens[3:] == [200 + i for i in range(pushes + 1)]
    assert sample.weight_versions == [str(i) for i in range(pushes + 1)]
    assert sample.segment_lengths == [1] * (pushes + 1)
    assert [asked["max_new_tokens"] for _, asked in client.requests] == [64 - i for i in range(pushes + 1)]
    assert [asked["min_new_tokens"] for _, asked in client.requests] == [max(0, 10 - i) for i in range(pushes + 1)]


def test_no_request_is_sent_while_they_are_held(rollout_args: Args, answer_by: Any, runtime: RolloutRuntime) -> None:
    client = answer_by(lambda tokens, params: reply([1]))

    async def run() -> None:
        runtime.pause_generation()
        jobs = [asyncio.create_task(generate(rollout_args(), Sample(prompt="a"), {"max_new_tokens": 1})) for _ in "ab"]
        await asyncio.sleep(0.05)
        assert not client.requests
        await runtime.resume_generation()
        await asyncio.gather(*jobs)

    asyncio.run(run())
    assert len(client.requests) == 2


def test_waiting_through_pushes_is_no_failure_but_aborts_without_reason_are(rollout_args: Args, answer_by: Any) -> None:
    versions = iter(range(30))

    def queued(tokens: list[int], params: dict[str, Any]) -> dict[str, Any]:
        version = next(versions)
        return reply([], "abort", version) if version < 29 else reply([7], "stop", version)

    answer_by(queued)
    sample = asyncio.run(generate(rollout_args(), Sample(prompt="abc"), {"max_new_tokens": 4}))
    assert sample.weight_versions == ["29"], "no token is of an earlier version"
    client = answer_by(lambda tokens, params: reply([], "abort", 3))
    with pytest.raises(RequestError, match="aborted its request 16 times"):
        asyncio.run(generate(rollout_args(), Sample(prompt="abc"), {"max_new_tokens": 4}))
    assert len(client.requests) == 16


def test_the_text_of_an_interrupted_response_is_whole(rollout_args: Args, answer_by: Any) -> None:
    args = rollout_args()
    tokens = load_tokenizer(args.hf_checkpoint)("né, 中文 ok", add_special_tokens=False)["input_ids"]

    def one_token(given: list[int], params: dict[str, Any]) -> dict[str, Any]:
        done = len(given) - 1
        return reply(tokens[done : done + 1], "abort" if done + 1 < len(tokens) else "stop")

    answer_by(one_token)
    sample = asyncio.run(generate(args, Sample(prompt="x"), {"max_new_tokens": 64}))
    assert (sample.response, sample.tokens[1:]) == ("né, 中文 ok", tokens)


def hook(tmp_path: Path, body: str) -> str:
    path = tmp_path / f"hook_{random.randrange(10**9)}.py"
    path.write_text(f"from slime.rollout.sglang_rollout import generate as ask\nfrom slime.data import Sample\n{body}")
    return f"{path}:generate"


def test_a_hook_that_asks_through_slime_sees_no_abort(rollout_args: Args, answer_by: Any, tmp_path: Path) -> None:
    finishes = iter(["abort", "stop", "abort", "abort", "stop"])
    answer_by(lambda tokens, params: reply([len(tokens)], next(finishes)))
    body = (
        "async def generate(args, sample, sampling_params):\n"
        "    for _ in range(2):\n"
        "        sample = await ask(args, sample, sampling_params)\n"
        "        assert sample.status is Sample.Status.COMPLETED\n"
        "    return sample\n"
    )
    args = rollout_args(custom_generate_function_path=hook(tmp_path, body), rm_type="random")
    sample = asyncio.run(generate_and_rm(args, Sample(prompt="abc", index=0, rollout_id=0), {"max_new_tokens": 9}))
    assert sample.tokens[3:] == [3, 4, 5, 6, 7]


def test_a_hook_that_reports_an_abort_begins_anew(rollout_args: Args, tmp_path: Path) -> None:
    body = (
        "calls = []\n"
        "async def generate(args, sample, sampling_params):\n"
        "    calls.append(sample)\n"
        "    assert (sample.tokens, sample.metadata) == ([1], {}), 'what another call did to it'\n"
        "    sample.metadata['seen'] = True\n"
        "    sample.append_response_tokens(tokens=[len(calls)], log_probs=[-1.0])\n"
        "    aborted = len(calls) < sampling_params['aborts'] + 1\n"
        "    sample.status = Sample.Status.ABORTED if aborted else Sample.Status.COMPLETED\n"
        "    return [sample]\n"
    )
    args = rollout_args(custom_generate_function_path=hook(tmp_path, body), rm_type="random")
    given = {"tokens": [1], "index": 0, "rollout_id": 5, "group_index": 2}
    (sample,) = asyncio.run(generate_and_rm(args, Sample(**given), {"aborts": 3}))
    assert (sample.tokens, sample.rollout_id, sample.reward in (0, 1)) == ([1, 4], 5, True)
    changes = {"custom_generate_function_path": hook(tmp_path, body), "rm_type": "random", "on_sample_error": "stop"}
    args = rollout_args(**changes)
    with pytest.raises(HookError, match="returned sample 0 as aborted 16 times; slime's `generate` goes on"):
        asyncio.run(generate_and_rm(args, Sample(**given), {"aborts": 99}))


# ---- how old samples are


def aged(group_index: int, *versions: str, **fields: Any) -> Sample:
    sample = Sample(group_index=group_index, tokens=[1, 2], reward=1.0, status=Status.COMPLETED, **fields)
    for version in versions:
        sample.append_response_tokens(tokens=[3, 4], log_probs=[-1.0, -1.0], meta_info={"weight_version": version})
    return sample


def test_staleness_is_of_the_oldest_segment() -> None:
    assert staleness(aged(0, "4", "6", "5"), 7) == 3
    assert staleness(aged(0, "7"), 7) == 0
    assert staleness(aged(0), 7) is None
    assert staleness(aged(0, "default"), 7) is None
    samples = [aged(0, "6", "7"), aged(0, "7"), aged(1, "5"), aged(1)]
    by_hand = aged(2, "6")
    by_hand.weight_versions.append("7")  # as hooks do, so that lengths are not known
    assert staleness_metrics(7, [*samples, by_hand]) == {
        "rollout/weight_staleness_mean": (1 + 0 + 2 + 1) / 4,
        "rollout/weight_staleness_max": 2.0,
        "rollout/older_version_tokens": 2.0 + 2.0,
        "rollout/multi_version_samples": 2.0,
    }
    assert staleness_metrics(7, [aged(0)]) == {}


def test_groups_that_are_too_old_are_generated_anew_or_replaced(source_args: Args, answer_by: Any) -> None:
    answer_by(lambda tokens, params: reply([9, 9], version=6))
    args = source_args(n_samples_per_prompt=2)
    source = RolloutDataSourceWithBuffer(args)
    with rollout_context(7):
        groups: list[Group] = source.get_samples(3)
    for group, versions in zip(groups, (("6", "5"), ("6", "6"), ("3", "7")), strict=True):
        for sample, version in zip(group, versions, strict=True):
            sample.reward, sample.status = 1.0, Status.COMPLETED
            sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={"weight_version": version})
    unknown = [aged(99, "4", index=50, rollout_id=50)]
    samples = [sample for group in [*groups, unknown] for sample in group]
    kept, counts = renew_stale(args, 7, samples, source)
    assert counts == {"rollout/stale_groups_regenerated": 2.0, "rollout/stale_groups_dropped": 1.0}
    assert kept[:2] == groups[1], "the group that is new enough is left alone"
    renewed = {sample.index: sample for sample in kept[2:]}
    assert sorted(renewed) == [0, 1, 4, 5, 6, 7], "two groups again, and a new one for the one that nobody knows"
    for sample in renewed.values():
        assert (sample.tokens[-2:], sample.response_length, sample.weight_versions) == ([9, 9], 2, ["6"])
        assert sample.rollout_log_probs == [-0.25, -0.25]
        assert sample.reward in (0, 1)
    source.count_trained(kept)
    assert source.num_in_flight() == 0


def test_what_a_checkpoint_brought_back_half_done_begins_anew_when_too_old(source_args: Args, answer_by: Any) -> None:
    answer_by(lambda tokens, params: reply([9], version=6))
    args = source_args(n_samples_per_prompt=1, rollout_batch_size=1)
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    group[0].append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={"weight_version": "2"})
    source.add_samples([group])
    (again,) = source.get_samples(1)
    (sample,), counts = renew_stale(args, 7, again, source)
    assert counts["rollout/stale_groups_regenerated"] == 1
    assert (sample.response_length, sample.weight_versions, sample.loss_mask) == (1, ["6"], [1])
