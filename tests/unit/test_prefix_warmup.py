"""``--rollout-prefix-warmup``: a group's prompt is sent once, before its responses."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Group, Sample, Status
from slime.entry.arguments import parse_args
from slime.rollout.base_types import flatten_samples
from slime.rollout.batches.warmup_log import WarmupLog
from slime.rollout.engine.loop import background_loop
from slime.rollout.groups.group import GroupRun
from slime.rollout.sglang_rollout import generate_and_rm_group
from slime.utils.http_client import RequestError
from tests.command_line import Fails, command
from tests.fake_client import FakeClient, hook_file, reply, rollout

NUM_GPUS = 0

LogCapture = pytest.LogCaptureFixture
Args = Callable[..., Namespace]
Use = Callable[..., FakeClient]
SUPERVISED = "slime.rollout.sft_rollout.generate_rollout"


def group_of(*samples: Sample) -> Group:
    for index, sample in enumerate(samples):
        sample.index, sample.group_index, sample.prompt, sample.label = index, 0, "xxx", "3"
    return list(samples)


def generated(args: Namespace, group: Group, params: dict[str, Any]) -> list[Any]:
    made: list[Any] = background_loop().run(generate_and_rm_group(args, group, params), timeout=60, what="a group")
    return made


def test_each_prompt_is_computed_before_its_responses(make_args: Args, use: Use) -> None:
    client = use(FakeClient())
    args = make_args(rollout_prefix_warmup=True, n_samples_per_prompt=3, rollout_max_response_len=50)
    samples = flatten_samples(rollout(args).samples)
    by_prompt: dict[int, list[int]] = {}
    for tokens, params, _ in client.requests:
        by_prompt.setdefault(len(tokens), []).append(params["max_new_tokens"])
    assert list(by_prompt.values()) == [[1, 50, 50, 50]] * 4
    assert [sample.reward for sample in samples] == [1.0] * 12
    assert {sample.response_length for sample in samples} == {1}


def test_without_the_flag_nothing_more_is_sent(make_args: Args, use: Use) -> None:
    client = use(FakeClient())
    rollout(make_args(n_samples_per_prompt=3))
    assert len(client.requests) == 12


def test_the_token_that_is_dropped_is_drawn_as_the_responses_are(make_args: Args, use: Use) -> None:
    """Where one request is greedy, or has a top-k of its own, SGLang draws all others of its batch in another way."""
    client = use(FakeClient())
    args = make_args(rollout_prefix_warmup=True)
    params = {"max_new_tokens": 40, "min_new_tokens": 8, "temperature": 0.7, "top_k": -1}
    generated(args, group_of(Sample(), Sample()), params)
    first, *others = (params for _, params, _ in client.requests)
    assert first == {"max_new_tokens": 1, "temperature": 0.7, "top_k": -1}
    assert others == [params] * 2


@pytest.mark.parametrize(("num_begun", "num_warm_ups"), [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_only_where_several_responses_are_yet_to_begin(
    num_begun: int, num_warm_ups: int, make_args: Args, use: Use
) -> None:
    """Not again for a group that comes back from the buffer; a partial response goes on with a prefix of its own."""
    client = use(FakeClient())
    samples = [Sample() for _ in range(3)]
    for sample, status in zip(samples[:num_begun], (Status.COMPLETED, Status.ABORTED, Status.COMPLETED), strict=False):
        sample.tokens, sample.status, sample.response = [5, 6, 7], status, "3"
        sample.append_response_tokens(tokens=[8], log_probs=[-1.0])
    generated(make_args(rollout_prefix_warmup=True), group_of(*samples), {"max_new_tokens": 40})
    assert [params["max_new_tokens"] for _, params, _ in client.requests].count(1) == num_warm_ups


def test_a_failure_is_left_to_the_responses(make_args: Args, use: Use) -> None:
    """An engine that dies then is found by them, and what they do about it is done."""

    def answer(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if params["max_new_tokens"] == 1:
            raise RequestError("the engine is gone", status=503)
        return reply(str(len(input_ids)))

    client = use(FakeClient(answer))
    args = make_args(rollout_prefix_warmup=True, on_sample_error="stop", rollout_max_response_len=50)
    samples = flatten_samples(rollout(args).samples)
    assert [sample.reward for sample in samples] == [1.0] * 8
    assert len(client.requests) == 12


def test_one_that_a_push_aborts_is_sent_again(make_args: Args, use: Use) -> None:
    def answer(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return reply("" if number == 1 else "3", finish="abort" if number == 1 else "stop")

    client = use(FakeClient(answer))
    generated(make_args(rollout_prefix_warmup=True), group_of(Sample(), Sample()), {"max_new_tokens": 40})
    assert [params["max_new_tokens"] for _, params, _ in client.requests] == [1, 1, 40, 40]


def test_responses_do_not_wait_for_an_engine_that_is_silent(make_args: Args, use: Use) -> None:
    """A twentieth of ``--request-timeout``: they have all of it for themselves."""

    async def answer(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if params["max_new_tokens"] == 1:
            await asyncio.sleep(1000)
        return reply(str(len(input_ids)))

    client = use(FakeClient(answer))
    args = make_args(rollout_prefix_warmup=True, request_timeout=2.0)
    made = generated(args, group_of(Sample(), Sample()), {"max_new_tokens": 40})
    assert [sample.reward for sample in made] == [1.0] * 2
    assert client.cancelled == 1


def test_groups_that_stand_in_line_are_warmed_up_too(make_args: Args, use: Use) -> None:
    """Of one request at a time the last group waits for longer than a warm-up may take."""

    async def answer(number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return reply(str(len(input_ids)))

    client = use(FakeClient(answer))
    args = make_args(rollout_prefix_warmup=True, request_timeout=4.0, sglang_server_concurrency=1, rollout_batch_size=8)
    rollout(args)
    assert [params["max_new_tokens"] for _, params, _ in client.requests].count(1) == 8
    assert client.cancelled == 0


@pytest.mark.parametrize(
    ("sample", "changes"),
    [
        ({}, {"rollout_max_context_len": 3}),
        ({"multimodal_inputs": {"image": 1}}, {}),
        ({"prompt": [{"role": "user", "content": "3"}]}, {}),
    ],
    ids=["no room", "media", "messages that a function renders"],
)
def test_nothing_is_sent_that_no_response_begins_with(
    sample: dict[str, Any], changes: dict[str, Any], make_args: Args, use: Use, tmp_path: Path
) -> None:
    client = use(FakeClient())
    hook = hook_file(
        tmp_path,
        "async def generate(args, sample, params):\n"
        "    sample.tokens = [5]\n"
        "    sample.append_response_tokens(tokens=[7], log_probs=[-1.0])\n"
        "    sample.response = '3'\n"
        "    return sample\n",
    )
    group = group_of(Sample(), Sample())
    for member in group:
        for name, value in sample.items():
            setattr(member, name, value)
    args = make_args(rollout_prefix_warmup=True, custom_generate_function_path=f"{hook}:generate", **changes)
    made = generated(args, group, {"max_new_tokens": 40})
    assert [member.reward for member in made] == [1.0] * 2
    assert client.requests == []


def test_a_prompt_of_a_custom_function_too(make_args: Args, use: Use, tmp_path: Path) -> None:
    """Its first request is mostly that of the prompt."""
    client = use(FakeClient())
    hook = hook_file(
        tmp_path,
        "from slime.rollout.sglang_rollout import generate as plain\n"
        "async def generate(args, sample, sampling_params):\n"
        "    return await plain(args, sample, sampling_params)\n",
    )
    args = make_args(rollout_prefix_warmup=True, custom_generate_function_path=f"{hook}:generate")
    rollout(args)
    assert len(client.requests) == 12


def test_not_once_the_rollout_ends(make_args: Args, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    client = use(FakeClient())
    whole = GroupRun.run

    async def late(run: GroupRun, **how: Any) -> Any:
        run._state.ending = True
        return await whole(run, **how)

    monkeypatch.setattr(GroupRun, "run", late)
    generated(make_args(rollout_prefix_warmup=True), group_of(Sample(), Sample()), {"max_new_tokens": 40})
    assert 1 not in [params["max_new_tokens"] for _, params, _ in client.requests]


@pytest.mark.usefixtures("launch_directory")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--deterministic-mode", "and --deterministic-mode do not go together: engines then keep nothing of a prompt"),
        ("--sglang-disable-radix-cache", "and --sglang-disable-radix-cache do not go together"),
        ("--router-policy round_robin", "needs --router-policy cache_aware: others do not send"),
        (
            "--n-samples-per-prompt 1 --disable-rewards-normalization",
            "has no effect without --n-samples-per-prompt above 1 or --n-samples-per-eval-prompt above 1: a prompt is "
            "computed once anyway",
        ),
        (f"--rollout-function-path {SUPERVISED}", f"is for slime's own rollouts: --rollout-function-path {SUPERVISED}"),
    ],
)
def test_where_it_could_do_nothing_it_is_refused(words: str, told: str, fails: Fails) -> None:
    assert f"--rollout-prefix-warmup {told}" in fails(f"--rollout-prefix-warmup {words}")
    assert parse_args(command("--rollout-prefix-warmup")).rollout_prefix_warmup


@pytest.mark.usefixtures("launch_directory")
@pytest.mark.parametrize(
    "words",
    ["--eval-config eval.yaml --eval-interval 1", "--data-source-path own.py:Source", "--n-samples-per-eval-prompt 4"],
)
def test_single_samples_are_no_reason_where_groups_may_have_more(words: str, launch_directory: Path) -> None:
    (launch_directory / "own.py").write_text("class Source:\n    def __init__(self, args): pass\n")
    rows = launch_directory / "rows.jsonl"
    rows.write_text('{"prompt": "3", "label": "3"}\n')
    (launch_directory / "eval.yaml").write_text(
        f"eval: {{datasets: [{{name: a, path: {rows}, n_samples_per_eval_prompt: 4}}]}}\n"
    )
    single = "--rollout-prefix-warmup --n-samples-per-prompt 1 --disable-rewards-normalization --rm-type math"
    assert parse_args(command(f"{single} {words}")).rollout_prefix_warmup


@pytest.mark.parametrize(
    ("hits", "told"),
    [([0.0] * 5, [0, 1, 3]), ([0.2, 0.0], [1]), ([None], [])],
    ids=["nothing found", "once", "not known"],
)
def test_what_was_no_use_is_told_of(hits: list[float | None], told: list[int], caplog: LogCapture) -> None:
    log, args = WarmupLog(), Namespace(rollout_prefix_warmup=True, n_samples_per_prompt=2)
    for number, rate in enumerate(hits):
        log.check(args, number, {} if rate is None else {"rollout/prefix_cache_hit_rate": rate})
    for other in (
        Namespace(rollout_prefix_warmup=False, n_samples_per_prompt=2),
        Namespace(rollout_prefix_warmup=True, n_samples_per_prompt=1),
    ):
        log.check(other, 9, {"rollout/prefix_cache_hit_rate": 0.0})
    begin = "--rollout-prefix-warmup was no use: engines had nothing of any prompt"
    assert [text.partition(begin)[0] for text in caplog.messages] == [f"rollout {number}: " for number in told]
