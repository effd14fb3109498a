"""The functions that ask a server what a teacher thinks of a sample."""

from __future__ import annotations

import asyncio
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.data import Sample
from slime.options.learning.distillation import REWARD_PATH
from slime.rollout import on_policy_distillation as opd
from slime.rollout.groups.group import generate_and_rm
from slime.rollout.rm_hub import async_rm
from slime.utils.errors import BadInputError, SlimeError
from tests.fake_client import hook_file

NUM_GPUS = 0
SERVED = {"actor": ("10.0.0.1", 1), "reward": ("10.0.0.2", 2)}


def arguments(**options: Any) -> Namespace:
    usual = {
        "opd_type": "sglang",
        "opd_top_k": 0,
        "custom_rm_path": REWARD_PATH,
        "vocab_size": 10,
        "rm_url": None,
        "rm_type": None,
        "sglang_model_routers": SERVED,
        "sglang_router_ip": None,
    }
    others = {"reward_baseline": "mean", "reward_std": True, "overlong_buffer_len": None}
    return Namespace(**{**usual, **others, **options})


def sample(**fields: Any) -> Sample:
    return Sample(**{"index": 3, "tokens": [5, 6, 7, 8], "response_length": 2, "response": "xy", **fields})


@pytest.mark.parametrize(
    ("options", "metadata", "expected"),
    [
        ({}, {}, "http://10.0.0.2:2/generate"),
        ({"sglang_model_routers": SERVED | {"teacher": ("10.0.0.3", 3)}}, {}, "http://10.0.0.3:3/generate"),
        ({"rm_url": "http://t:9"}, {}, "http://t:9/generate"),
        ({"rm_url": "http://t:9/v2/generate"}, {}, "http://t:9/v2/generate"),
        ({"rm_url": "http://t:9"}, {"opd_teacher": "reward"}, "http://10.0.0.2:2/generate"),
        ({"rm_url": "http://judge:9", "rm_type": "remote_rm"}, {}, "http://10.0.0.2:2/generate"),
        ({"rm_url": "http://judge:9", "rm_type": "math"}, {"rm_type": "boxed_remote_rm"}, "http://10.0.0.2:2/generate"),
        ({"rm_url": "http://t:9", "rm_type": "remote_rm"}, {"rm_type": "math"}, "http://t:9/generate"),
    ],
)
def test_who_is_asked(options: dict[str, Any], metadata: dict[str, Any], expected: str) -> None:
    assert opd.teacher_url(arguments(**options), sample(metadata=metadata)) == expected


def test_a_teacher_that_nobody_serves() -> None:
    with pytest.raises(
        BadInputError, match=r"^sample 3: the teacher of on-policy .*no model 'math', served are: actor, r"
    ):
        opd.teacher_url(arguments(), sample(metadata={"opd_teacher": "math"}))


class Teacher:
    """Answers as an SGLang server does, from ``logprob_start_len`` on."""

    def __init__(self, **changes: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self._changes = changes

    async def __call__(self, url: str, payload: dict[str, Any], **_: Any) -> Any:
        self.asked.append(payload)
        ids = payload["input_ids"][payload["logprob_start_len"] :]
        scored = [[None if i == 0 else -float(token), token, None] for i, token in enumerate(ids)]
        return {"text": "", "meta_info": {"input_token_logprobs": scored, **self._changes}}


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> Teacher:
    made = Teacher()
    monkeypatch.setattr(opd, "post", made)
    return made


@pytest.mark.parametrize(
    ("options", "fields", "reward"),
    [
        ({}, {}, 0.0),
        ({"rm_type": "math"}, {"response": r"\boxed{4}", "label": "4"}, 1.0),
        ({"rm_type": "math"}, {"response": "a b", "label": "a b", "metadata": {"rm_type": "f1"}}, 1.0),
    ],
)
def test_the_teachers_log_probs_and_the_reward_of_the_task(
    options: dict[str, Any], fields: dict[str, Any], reward: float, teacher: Teacher
) -> None:
    scored = sample(**fields)
    assert asyncio.run(opd.reward_func(arguments(**options), scored)) == reward
    column = scored.columns["teacher_log_probs"]
    assert (column.dtype, column.tolist()) == (np.float32, [-7.0, -8.0])
    assert scored.teacher_log_probs is column
    scored.check()
    (asked,) = teacher.asked
    assert asked["sampling_params"]["max_new_tokens"] == 0
    assert (asked["input_ids"], asked["return_logprob"], asked["logprob_start_len"]) == ([5, 6, 7, 8], True, 1)


def test_the_likeliest_ids_of_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    top = [None, [[-0.1, 4, None], [-2.5, 9, None]], [[-0.5, 8, None], [-1.0, 0, None]]]
    answers = Teacher(input_top_logprobs=top)
    monkeypatch.setattr(opd, "post", answers)
    scored = sample()
    asyncio.run(opd.reward_func(arguments(opd_top_k=2), scored))
    assert answers.asked[0]["top_logprobs_num"] == 2
    assert scored.columns.keys() == {"teacher_top_ids", "teacher_top_log_probs"}
    assert scored.columns["teacher_top_ids"].tolist() == [[4, 9], [8, 0]]
    assert np.allclose(scored.columns["teacher_top_log_probs"], [[-0.1, -2.5], [-0.5, -1.0]])
    monkeypatch.setattr(opd, "post", Teacher(input_top_logprobs=[*top[:2], top[2][:1]]))
    with pytest.raises(BadInputError, match=r"is no SGLang server|did not give the 2 likeliest ids of every response"):
        asyncio.run(opd.reward_func(arguments(opd_top_k=2), sample()))
    monkeypatch.setattr(opd, "post", Teacher(input_top_logprobs=top))
    with pytest.raises(BadInputError, match=r"did not give the 3 likeliest ids .* sample 3, but .* shape \[2, 2\]"):
        asyncio.run(opd.reward_func(arguments(opd_top_k=3), sample()))


def test_ids_that_the_student_does_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary that is padded further: no logit of the student's belongs to them."""
    top = [None, [[-0.1, 4, None]], [[-0.5, 9, None]]]
    monkeypatch.setattr(opd, "post", Teacher(input_top_logprobs=top))
    asyncio.run(opd.reward_func(arguments(opd_top_k=1), sample()))
    with pytest.raises(
        BadInputError, match="finds id 9 likely in sample 3, and the student has 9 ids: the teacher's v"
    ):
        asyncio.run(opd.reward_func(arguments(opd_top_k=1, vocab_size=9), sample()))


@pytest.mark.parametrize(
    ("options", "fields", "lacks"),
    [
        ({}, {}, True),
        ({}, {"columns": {"teacher_log_probs": [-1.0, -2.0]}}, False),
        ({}, {"teacher_log_probs": [-1.0, -2.0]}, False),
        ({"opd_top_k": 2}, {"teacher_log_probs": [-1.0, -2.0]}, True),
        ({"opd_type": "megatron"}, {}, False),
        ({"custom_rm_path": "mine.reward"}, {}, False),
        ({}, {"custom_rm_path": "mine.reward"}, False),
        ({}, {"tokens": [5, 6], "response_length": 0}, False),
    ],
)
def test_which_samples_are_still_to_be_scored(options: dict[str, Any], fields: dict[str, Any], lacks: bool) -> None:
    assert opd.lacks_teacher(arguments(**options), sample(**fields)) is lacks


def test_a_sample_that_has_its_reward_is_scored_and_keeps_it(teacher: Teacher) -> None:
    """As of an agent, or of a generate function that sets it."""
    scored = sample(reward=0.25)
    assert asyncio.run(opd.reward_func(arguments(rm_type="math"), scored)) == 0.25
    assert scored.columns["teacher_log_probs"].tolist() == [-7.0, -8.0]


@pytest.mark.parametrize(("evaluation", "of_group"), [(False, False), (False, True), (True, False)])
def test_a_generate_function_that_rewards_leaves_the_teacher_to_be_asked(
    evaluation: bool, of_group: bool, make_args: Callable[..., Namespace], teacher: Teacher, tmp_path: Path
) -> None:
    code = (
        "def own(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response_length, sample.response = [5, 6, 7, 8], 2, 'xy'\n"
        "    sample.reward = 0.25\n"
        "    return sample\n"
    )
    hook = f"{hook_file(tmp_path, code)}:own"
    args = make_args(
        custom_rm_path=REWARD_PATH, custom_generate_function_path=hook, opd_type="sglang", group_rm=of_group
    )
    args.sglang_model_routers = SERVED
    group = [Sample(prompt="x", index=i, group_index=0, rollout_id=i) for i in range(2)]
    made = asyncio.run(generate_and_rm(args, group, {}, evaluation=evaluation))
    assert [each.reward for each in made] == [0.25, 0.25]
    assert [("teacher_log_probs" in each.columns) for each in made] == [not evaluation] * 2


@pytest.mark.parametrize(("options", "reward"), [({}, 0.0), ({"rm_type": "math"}, 1.0)])
def test_evaluations_have_the_reward_alone(options: dict[str, Any], reward: float, teacher: Teacher) -> None:
    seen = sample(response=r"\boxed{4}", label="4")
    assert asyncio.run(opd.task_reward(arguments(**options), seen)) == reward
    assert not teacher.asked


def test_sglang_calls_the_last_id_of_the_vocabulary_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opd, "post", Teacher(input_token_logprobs=[[None, 6, None], [-1.0, 0, None], [-2.0, 8, None]]))
    scored = sample()
    asyncio.run(opd.reward_func(arguments(), scored))
    assert scored.columns["teacher_log_probs"].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("sglang", {"tokens": [5, 6], "response_length": 0, "response": ""}), ("megatron", {})],
)
def test_a_sample_without_a_response_or_of_another_teacher_is_not_scored(
    kind: str, fields: dict[str, Any], teacher: Teacher
) -> None:
    left = sample(**fields)
    assert asyncio.run(opd.reward_func(arguments(opd_type=kind), left)) == 0.0
    assert (teacher.asked, left.columns) == ([], {})


@pytest.mark.parametrize(
    ("scored", "expected"),
    [
        ([[None, 6, None], [-1.0, 7, None], [-2.0, 9, None]], "did not score the response tokens of sample 3"),
        ([[None, 6, None], [-1.0, 0, None]], "did not score the response tokens of sample 3"),
        ([[None, 8, None]], "is no SGLang server|did not score"),
        (
            [[None, 6, None], [-1.0, 7, None], [float("-inf"), 8, None]],
            "gives response token 1 of sample 3, id 8, the log-prob -inf",
        ),
        ("nothing", "is no SGLang server that scores prompts"),
    ],
)
def test_answers_that_score_other_tokens(scored: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opd, "post", Teacher(input_token_logprobs=scored))
    with pytest.raises(BadInputError, match=rf"^http://t:9/generate ({expected})"):
        asyncio.run(opd.reward_func(arguments(rm_url="http://t:9"), sample()))


@pytest.mark.parametrize(
    ("strike", "expected"),
    [
        ("hangs", r"^the reward of sample 3 by --custom-rm-path .* took longer than 0\.5 s \(--reward-timeout\)"),
        ("dies", r"^--custom-rm-path .*the teacher of on-policy distillation: .*http://127\.0\.0\.1:"),
    ],
)
def test_a_teacher_elsewhere_that_does_not_answer(strike: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is waited for longer than for a reward, whatever the deadline of requests."""
    monkeypatch.setattr(opd, "_TRIES", 0)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it takes connections, and answers nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if strike == "dies":
            server.close()
        own = {"custom_rm_path": REWARD_PATH, "group_rm": False, "reward_timeout": 0.5, "request_timeout": 60.0}
        began = time.monotonic()
        with pytest.raises(SlimeError, match=expected):
            asyncio.run(async_rm(arguments(rm_url=url, **own), sample()))
        assert time.monotonic() - began < 20


def test_rewards_are_those_without_the_flag() -> None:
    samples = [sample(index=i, group_index=0, reward=float(i == 0)) for i in range(4)]
    raw, rewards = opd.post_process_rewards(arguments(), samples)
    assert raw == [1.0, 0.0, 0.0, 0.0]
    assert np.allclose(rewards, [1.5, -0.5, -0.5, -0.5], atol=1e-5)
