"""The rollout over an in-process generate client: order, tokens, seeds, limits, failures."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from slime.data import Sample, Status
from slime.options.eval_datasets import eval_datasets
from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine.state import state_of_call
from slime.rollout.sampling import eval_sampling_params, request_seed, train_sampling_params
from slime.rollout.sglang_rollout import generate, generate_and_rm
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.errors import BadInputError
from slime.utils.http_utils import RequestError
from tests.fake_client import FakeClient, reply, rollout
from tests.waiting import skip

NUM_GPUS = 0

Args = Callable[..., Namespace]


def test_order_tokens_and_rewards(make_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient())
    args = make_args(rollout_batch_size=8, n_samples_per_prompt=4)
    source = RolloutDataSourceWithBuffer(args)
    for rollout_id in range(2):
        output = rollout(args, rollout_id, source)
        assert [[s.index for s in group] for group in output.samples] == [
            [32 * rollout_id + 4 * g + i for i in range(4)] for g in range(8)
        ]
        for sample in flatten_samples(output.samples):
            assert sample.reward == 1.0, "the reply is the prompt's length, as is the label"
            assert sample.status is Status.COMPLETED
            assert sample.weight_versions == ["1"]
            expected = [100 + b % 100 for b in sample.response.encode()]
            assert sample.tokens[-sample.response_length :] == expected
            assert sample.rollout_log_probs == [-0.5 - i for i in range(len(expected))]
            assert sample.loss_mask == [1] * len(expected)
            assert load_tokenizer(args.hf_checkpoint).decode(sample.tokens[: -len(expected)]) == sample.prompt
        assert output.metrics is not None
        assert output.metrics["rollout/prefix_cache_hit_rate"] == pytest.approx(0.4)
        assert output.metrics["perf/tokens_per_gpu_per_sec"] > 0
    assert client.made == 2


def test_what_engines_draft_is_counted(make_args: Args, use: Callable[..., FakeClient]) -> None:
    """By the names that the installed SGLang gives its counters."""
    counters = {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 4, "spec_verify_ct": 2}
    sglang = find_spec("sglang")
    assert sglang is not None
    assert sglang.origin is not None
    text = Path(sglang.origin).with_name("srt").joinpath("managers", "tokenizer_manager.py").read_text()
    assert [name for name in counters if f'meta_info["{name}"]' not in text] == []
    use(FakeClient(lambda *_: reply("12345", **counters)))
    metrics = rollout(make_args()).metrics
    assert metrics is not None
    assert metrics["rollout/spec_accept_rate"] == pytest.approx(3 / 4)
    assert metrics["rollout/spec_accept_length"] == pytest.approx(5 / 2)


def test_concurrency_is_bounded(make_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient())
    rollout(make_args(rollout_batch_size=10, n_samples_per_prompt=5, sglang_server_concurrency=3, num_engines=2))
    assert len(client.requests) == 50
    assert client.most_running == 6


def test_sampling_params(make_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient())
    args = make_args(rollout_temperature=0.7, rollout_top_p=0.9, rollout_top_k=20, rollout_stop=["END"])
    rollout(args)
    assert client.requests[0][1] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 32,
        "stop": ["END"],
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    args.eval_temperature, args.eval_min_new_tokens, args.eval_prompt_data = 0.0, 2, [["e", args.prompt_data]]
    (dataset,) = eval_datasets(args)
    assert eval_sampling_params(dataset) == train_sampling_params(args) | {"temperature": 0.0, "min_new_tokens": 2}


def test_seeds_when_deterministic(make_args: Args, use: Callable[..., FakeClient]) -> None:
    def seeds(rollout_id: int, **changes: Any) -> dict[int, list[int]]:
        client = use(FakeClient())
        rollout(make_args(sglang_enable_deterministic_inference=True, **changes), rollout_id)
        by_prompt: dict[int, list[int]] = {}
        for tokens, params, _ in client.requests:
            by_prompt.setdefault(len(tokens), []).append(params["sampling_seed"])
        return {prompt: sorted(values) for prompt, values in by_prompt.items()}

    first = seeds(0)
    assert first == seeds(0)
    everything = [
        seed for run in (first, seeds(1), seeds(0, rollout_seed=1)) for group in run.values() for seed in group
    ]
    assert len(set(everything)) == len(everything) == 24
    assert all(0 <= seed < 2**53 for seed in everything)
    assert request_seed(1, 23) != request_seed(12, 3)


def test_partial_sample_goes_on(make_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient(lambda n, ids, params: reply("abc", "abort") if n == 1 else reply("de", "length", 2)))
    args = make_args(rollout_batch_size=1, n_samples_per_prompt=1)
    (sample,) = flatten_samples(rollout(args).samples)
    assert (sample.response_length, sample.status) == (5, Status.TRUNCATED)
    assert sample.response == load_tokenizer(args.hf_checkpoint).decode(sample.tokens[-5:])
    assert (sample.weight_versions, sample.segment_lengths) == (["1", "2"], [3, 2])
    assert client.requests[1][0] == sample.tokens[:-2]
    assert client.requests[1][1]["max_new_tokens"] == 32 - 3


def test_endless_aborts_are_an_error(make_args: Args, use: Callable[..., FakeClient]) -> None:
    use(FakeClient(lambda *_: reply("", "abort"), seconds=0))
    with pytest.raises(RuntimeError, match="the engine aborted its request 16 times"):
        rollout(make_args())


def test_context_limit(make_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient())
    rollout(make_args(rollout_max_context_len=20, rollout_max_response_len=None))
    assert all(params["max_new_tokens"] == 20 - len(tokens) for tokens, params, _ in client.requests)


def test_least_tokens_fit_into_what_is_left_of_a_context(make_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient())
    room = random.randrange(1, 8)
    sample = Sample(prompt="abc")
    params = {"max_new_tokens": 30, "min_new_tokens": 4}
    asyncio.run(generate(make_args(rollout_max_context_len=3 + room), sample, params))
    sent = client.requests[0][1]
    assert (sent["max_new_tokens"], sent["min_new_tokens"]) == (room, min(room, 4))


def test_messages_need_a_template(rollout_args: Args, use: Callable[..., FakeClient]) -> None:
    use(FakeClient())
    sample = Sample(index=4, prompt=[{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="sample 4: its prompt is chat messages; add --apply-chat-template"):
        asyncio.run(generate(rollout_args(), sample, {"max_new_tokens": 1}))


def test_messages_of_an_own_data_source_are_rendered(rollout_args: Args, use: Callable[..., FakeClient]) -> None:
    client, args = use(FakeClient()), rollout_args(apply_chat_template=True)
    sample = Sample(prompt=[{"role": "user", "content": "x"}])
    asyncio.run(generate(args, sample, {"max_new_tokens": 1}))
    sent = load_tokenizer(args.hf_checkpoint).decode(client.requests[0][0])
    assert sent == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(BadInputError, match="sample 7: message 0 of its prompt is not an object with a 'role'"):
        asyncio.run(generate(args, Sample(index=7, prompt=[{"content": "x"}]), {"max_new_tokens": 1}))


def test_generate_outside_of_a_rollout(rollout_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient())
    sample = asyncio.run(generate(rollout_args(), Sample(prompt="abc"), {"max_new_tokens": 8}))
    assert (sample.response, client.made) == ("3", 1)


def test_calls_outside_of_a_rollout_open_one_session(rollout_args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(reply("ok"))

    opened: list[aiohttp.ClientSession] = []

    def open_session(**settings: Any) -> aiohttp.ClientSession:
        opened.append(make_session(**settings))
        return opened[-1]

    loops_of_runs: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def calls(loops: int) -> None:
        loops_of_runs.append(weakref.ref(asyncio.get_running_loop()))
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        args = rollout_args(sglang_router_ip="127.0.0.1", sglang_router_port=runner.addresses[0][1], rm_type="random")
        params = {"max_new_tokens": 8}
        try:
            await asyncio.gather(*(generate(args, Sample(prompt="abc"), dict(params)) for _ in range(5)))
            for _ in range(5):
                sample = await generate_and_rm(args, Sample(prompt="abc"), dict(params))
                assert sample.response == "ok"
            assert len(opened) == loops
        finally:
            await runner.cleanup()

    make_session = aiohttp.ClientSession
    monkeypatch.setattr(aiohttp, "ClientSession", open_session)
    asyncio.run(calls(loops=1))
    asyncio.run(calls(loops=2))
    assert all(session.closed for session in opened)
    opened.clear()
    gc.collect()
    assert loops_of_runs[0]() is None, "nothing refers to a loop that has ended"


@pytest.mark.parametrize("policy", ["consistent_hashing", "manual", "cache_aware"])
def test_session_affinity_header(policy: str, rollout_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient())
    args = rollout_args()
    args.router_policy = policy
    sample = asyncio.run(generate(args, Sample(prompt="abc"), {"max_new_tokens": 8}))
    expected = None if policy == "cache_aware" else {"X-SMG-Routing-Key": sample.session_id}
    assert client.requests[0][2] == expected


def test_failed_request_cancels_the_rest_and_the_next_rollout_works(
    make_args: Args, use: Callable[..., FakeClient]
) -> None:
    async def slow() -> dict[str, Any]:
        await asyncio.sleep(200)
        return reply("late")

    def fail_once(number: int, *_: Any) -> Any:
        if number == 8:
            raise RequestError("POST http://x/generate: status 401: no key", 401)
        return slow()

    client = use(FakeClient(fail_once))
    args = make_args(rollout_timeout=200.0)
    started = time.monotonic()
    with pytest.raises(RequestError, match="status 401: no key"):
        rollout(args)
    assert time.monotonic() - started < 100
    assert (client.running, client.cancelled, client.made) == (0, 7, 1)
    use(FakeClient())
    assert len(rollout(args).samples) == 4


def test_deadline_says_what_it_waited_for(make_args: Args, use: Callable[..., FakeClient]) -> None:
    async def never() -> None:
        async with state_of_call(args) as state:
            while state.num_samples_done < 5:
                await asyncio.sleep(0.01)
        skip(args.rollout_timeout)
        await asyncio.sleep(3600)

    client = use(FakeClient(lambda n, *_: reply("x") if n <= 5 else never()))
    args = make_args()
    message = (
        r"rollout 3: 5 of 8 samples finished; waiting for sample \d+ \(generating for \d+ s\), "
        r".* within 20 s \(--rollout-timeout\)"
    )
    with pytest.raises(TimeoutError, match=message):
        rollout(args, 3)
    assert (client.running, client.cancelled, client.made) == (0, 3, 1)


def test_called_from_a_running_loop(make_args: Args, use: Callable[..., FakeClient]) -> None:
    use(FakeClient())

    async def inside() -> RolloutFnTrainOutput:
        return rollout(make_args())

    assert len(asyncio.run(inside()).samples) == 4


def test_finished_samples_of_the_buffer_are_not_generated_again(
    make_args: Args, use: Callable[..., FakeClient]
) -> None:
    client = use(FakeClient())
    args = make_args(rollout_batch_size=2)
    source = RolloutDataSourceWithBuffer(args)
    done = rollout(args, 0, source).samples
    source.add_samples(done)
    again = rollout(args, 1, source).samples
    assert again == done
    assert len(client.requests) == 4


def test_wrong_number_of_groups(make_args: Args, use: Callable[..., FakeClient]) -> None:
    use(FakeClient())

    class Short(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return super().get_samples(num_samples - 1)

    args = make_args()
    with pytest.raises(ValueError, match=r"--data-source-path .*WithBuffer: get_samples\(4\) gave 3 groups"):
        rollout(args, 0, Short(args))


def test_no_router_yet(rollout_args: Args) -> None:
    with pytest.raises(ValueError, match="no router is running"):
        asyncio.run(generate(rollout_args(sglang_router_port=None), Sample(prompt="abc"), {"max_new_tokens": 1}))


def test_no_thread_or_task_piles_up(make_args: Args, use: Callable[..., FakeClient]) -> None:
    use(FakeClient())
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    rollout(args, 0, source)
    before = threading.active_count()
    for rollout_id in range(1, 21):
        rollout(args, rollout_id, source)
    # The pool of hooks' threads may still grow, and a thread that is done may still be ending.
    assert threading.active_count() < before + 10
