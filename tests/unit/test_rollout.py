"""The rollout over an in-process generate client: order, tokens, seeds, limits, hooks, failures, evaluation."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.rollout import state as state_module
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.evaluation import eval_metrics, pass_at_k
from slime.rollout.hooks import HookError
from slime.rollout.loop import background_loop
from slime.rollout.sampling import eval_sampling_params, request_seed, train_sampling_params
from slime.rollout.sglang_rollout import generate, generate_and_rm, generate_rollout
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.http_utils import RequestError
from slime.utils.types import Sample, Status

NUM_GPUS = 0

Args = Callable[..., Namespace]


class FakeClient:
    """Answers like SGLang: by default with the digits of the prompt's length, after a random short time."""

    def __init__(self, reply: Callable[..., Any] | None = None, seconds: float = 0.005) -> None:
        self.requests: list[tuple[list[int], dict[str, Any], Any]] = []
        self.running = self.most_running = self.cancelled = self.closed = 0
        self._reply = reply
        self._seconds = seconds

    async def generate(self, input_ids: Any, sampling_params: Any, *, headers: Any = None) -> dict[str, Any]:
        self.requests.append((list(input_ids), dict(sampling_params), headers))
        number = len(self.requests)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self._seconds * random.random())
            if self._reply is not None:
                result = self._reply(number, input_ids, sampling_params)
                return await result if asyncio.iscoroutine(result) else result
            return reply(str(len(input_ids)))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def close(self) -> None:
        self.closed += 1


def reply(text: str, finish: str = "stop", version: int = 1, **meta: Any) -> dict[str, Any]:
    tokens = [100 + b % 100 for b in text.encode()]
    return {
        "text": text,
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": finish},
            "weight_version": str(version),
            "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(tokens)],
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "completion_tokens": len(tokens),
            **meta,
        },
    }


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeClient], FakeClient]:
    def use_client(client: FakeClient) -> FakeClient:
        monkeypatch.setattr(state_module, "make_client", lambda args: client)
        return client

    return use_client


@pytest.fixture
def make_args(rollout_args: Args, write_jsonl: Callable[..., str]) -> Args:
    def make(num_prompts: int = 12, **changes: Any) -> Namespace:
        rows = [{"prompt": "x" * (i + 1), "label": str(i + 1)} for i in range(num_prompts)]
        return rollout_args(**{"prompt_data": write_jsonl(rows), "rm_type": "f1", **changes})

    return make


def rollout(args: Namespace, rollout_id: int = 0, source: Any = None) -> RolloutFnTrainOutput:
    output = generate_rollout(args, rollout_id, source or RolloutDataSourceWithBuffer(args))
    assert isinstance(output, RolloutFnTrainOutput)
    return output


def hook_file(tmp_path: Path, code: str) -> Path:
    path = tmp_path / f"hook_{random.randrange(10**9)}.py"
    path.write_text(code)
    return path


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
    assert client.closed == 2


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
    args.eval_temperature, args.eval_min_new_tokens = 0.0, 2
    assert eval_sampling_params(args) == train_sampling_params(args) | {"temperature": 0.0, "min_new_tokens": 2}


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


def test_generate_outside_of_a_rollout(rollout_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient())
    sample = asyncio.run(generate(rollout_args(), Sample(prompt="abc"), {"max_new_tokens": 8}))
    assert (sample.response, client.closed) == ("3", 1)


def test_session_affinity_header(rollout_args: Args, use: Callable[..., FakeClient]) -> None:
    client = use(FakeClient())
    args = rollout_args()
    args.router_policy = "consistent_hashing"
    sample = asyncio.run(generate(args, Sample(prompt="abc"), {"max_new_tokens": 8}))
    assert client.requests[0][2] == {"X-SMG-Routing-Key": sample.session_id}


def test_failed_request_cancels_the_rest_and_the_next_rollout_works(
    make_args: Args, use: Callable[..., FakeClient]
) -> None:
    async def slow() -> dict[str, Any]:
        await asyncio.sleep(60)
        return reply("late")

    def fail_once(number: int, *_: Any) -> Any:
        if number == 8:
            raise RequestError("POST http://x/generate: status 400: too long", 400)
        return slow()

    client = use(FakeClient(fail_once))
    args = make_args()
    started = time.monotonic()
    with pytest.raises(RequestError, match="status 400: too long"):
        rollout(args)
    assert time.monotonic() - started < 10
    assert (client.running, client.cancelled, client.closed) == (0, 7, 1)
    use(FakeClient())
    assert len(rollout(args).samples) == 4


def test_deadline_says_what_it_waited_for(make_args: Args, use: Callable[..., FakeClient]) -> None:
    async def never() -> None:
        await asyncio.sleep(3600)

    client = use(FakeClient(lambda n, *_: reply("x") if n <= 5 else never()))
    args = make_args(rollout_timeout=0.5)
    message = (
        r"rollout 3: 5 of 8 samples finished; waiting for sample \d+ \(generating for \d s\), "
        r".* within 0.5 s \(--rollout-timeout\)"
    )
    with pytest.raises(TimeoutError, match=message):
        rollout(args, 3)
    assert (client.running, client.cancelled, client.closed) == (0, 3, 1)


def test_blocked_loop_is_noticed(
    make_args: Args, use: Callable[..., FakeClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.rollout.loop._GRACE_S", 0.2)
    use(FakeClient())
    hook = hook_file(tmp_path, "import time\nasync def generate(args, sample, params):\n    time.sleep(2)  # blocks\n")
    args = make_args(custom_generate_function_path=str(hook), rollout_timeout=0.2)
    loop = background_loop()
    with pytest.raises(TimeoutError, match=r"the event loop is blocked here:[\s\S]*time.sleep\(2\)"):
        rollout(args)
    assert background_loop() is not loop
    assert len(rollout(make_args()).samples) == 4


def test_called_from_a_running_loop(make_args: Args, use: Callable[..., FakeClient]) -> None:
    use(FakeClient())

    async def inside() -> RolloutFnTrainOutput:
        return rollout(make_args())

    assert len(asyncio.run(inside()).samples) == 4


def test_custom_generate(make_args: Args, use: Callable[..., FakeClient], tmp_path: Path) -> None:
    client = use(FakeClient())
    hook = hook_file(
        tmp_path,
        "from slime.rollout.sglang_rollout import generate as one_turn\n"
        "async def generate(args, sample, sampling_params):\n"
        "    sample = await one_turn(args, sample, sampling_params)\n"
        "    sample.append_response_tokens(tokens=[1, 2], trainable=False, text=' tool ')\n"
        "    return await one_turn(args, sample, sampling_params)\n",
    )
    args = make_args(rm_type="random", custom_generate_function_path=f"{hook}:generate")
    for sample in flatten_samples(rollout(args).samples):
        assert " tool " in sample.response
        assert sample.loss_mask is not None
        assert sample.loss_mask.count(0) == 2
        sample.check()
    assert client.most_running <= 8
    assert client.closed == 1, "the hook's requests use the rollout's own client"


def test_custom_generate_fan_out_and_evaluation(
    make_args: Args, use: Callable[..., FakeClient], tmp_path: Path
) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "import copy\n"
        "async def generate(args, sample, sampling_params, evaluation=False):\n"
        "    parts = [copy.deepcopy(sample) for _ in range(1 + sample.index % 3)]\n"
        "    for i, part in enumerate(parts):\n"
        "        part.rollout_id = None\n"
        "        part.append_response_tokens(tokens=[i], log_probs=[-1.0], text=f'{evaluation}')\n"
        "    return parts\n",
    )
    args = make_args(custom_generate_function_path=str(hook), rm_type="random")
    output = rollout(args)
    assert [len(flatten_samples(group)) for group in output.samples] == [3, 4, 5, 3]
    for group in output.samples:
        for parts in group:
            assert len({part.rollout_id for part in parts}) == 1
            assert all(part.response == "False" for part in parts)
    result = asyncio.run(generate_and_rm(args, Sample(index=0, rollout_id=0, prompt="x"), {}, evaluation=True))
    assert result[0].response == "True"


BAD_HOOKS = [
    ("    raise KeyError('boom')\n", r"--custom-generate-function-path .* raised KeyError: 'boom'[\s\S]*Traceback"),
    ("    return None\n", "must return a Sample or a non-empty list of Sample, not None"),
    ("    return []\n", "must return a Sample or a non-empty list of Sample"),
    ("    sample.response_length = 99\n    return sample\n", "returned an inconsistent sample: .*response_length 99"),
    (
        "    import copy\n    a, b = copy.copy(sample), copy.copy(sample)\n    b.rollout_id = 77\n    return [a, b]\n",
        "cut one rollout into samples of different rollout_id",
    ),
]


@pytest.mark.parametrize(("body", "message"), BAD_HOOKS)
def test_bad_custom_generate(
    body: str, message: str, make_args: Args, use: Callable[..., FakeClient], tmp_path: Path
) -> None:
    use(FakeClient())
    hook = hook_file(tmp_path, f"async def generate(args, sample, sampling_params):\n{body}")
    with pytest.raises(HookError, match=message):
        rollout(make_args(custom_generate_function_path=str(hook)))


def test_sample_names_its_own_functions(make_args: Args, use: Callable[..., FakeClient], tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(
        tmp_path,
        "async def generate(args, sample, params):\n"
        "    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], text='own')\n"
        "    return sample\n"
        "def rm(args, sample, **kwargs): return 7\n",
    )
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    group[0].generate_function_path, group[0].custom_rm_path = f"{hook}:generate", f"{hook}:rm"
    source.add_samples([group])
    first, second, *_ = flatten_samples(rollout(args, 0, source).samples)
    assert (first.response, first.reward) == ("own", 7.0)
    assert second.response == "1"


def test_missing_reward_is_an_error(make_args: Args, use: Callable[..., FakeClient], tmp_path: Path) -> None:
    use(FakeClient())
    hook = hook_file(tmp_path, "def rm(args, sample, **kwargs): return None if sample.index == 5 else 1.0\n")
    with pytest.raises(HookError, match=r"rollout 0: sample 5 has no reward \(status completed\)"):
        rollout(make_args(custom_rm_path=f"{hook}:rm"))


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
    with pytest.raises(ValueError, match="gave 3 groups, asked for 4"):
        rollout(args, 0, Short(args))


def test_no_router_yet(rollout_args: Args) -> None:
    with pytest.raises(ValueError, match="no router is running"):
        asyncio.run(generate(rollout_args(sglang_router_port=None), Sample(prompt="abc"), {"max_new_tokens": 1}))


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


def test_no_thread_or_task_piles_up(make_args: Args, use: Callable[..., FakeClient]) -> None:
    use(FakeClient())
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    rollout(args, 0, source)
    before = threading.active_count()
    for rollout_id in range(1, 5):
        rollout(args, rollout_id, source)
    assert threading.active_count() == before
