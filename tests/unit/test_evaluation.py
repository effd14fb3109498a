"""Evaluation over an in-process generate client, and its metrics by hand."""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.data import Sample
from slime.data.routes import asked_for
from slime.options.eval_datasets import eval_datasets
from slime.options.learning.distillation import REWARD_PATH, TASK_REWARD_PATH
from slime.options.rollout import DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT
from slime.rollout.base_types import RolloutFnEvalOutput, train_output
from slime.rollout.evaluation import eval_args, eval_metrics, evaluation_output, load_eval_prompts, warn_of_unscored
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.errors import BadInputError
from tests.fake_client import FakeClient, hook_file, reply
from tests.waiting import skip

NUM_GPUS = 0

Args = Callable[..., Namespace]


def with_sets(args: Namespace, *pairs: tuple[str, str], config: str | None = None) -> Namespace:
    """``args`` with the datasets of ``--eval-prompt-data`` and ``--eval-config``."""
    args.eval_prompt_data, args.eval_config = [list(pair) for pair in pairs], config
    args.eval_datasets = eval_datasets(args)
    return args


def evaluate(args: Namespace) -> tuple[RolloutFnEvalOutput, dict[str, float]]:
    output = generate_rollout(args, 0, None, evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput)
    return output, eval_metrics(output)


@pytest.mark.parametrize(
    ("given", "lines", "path"),
    [
        (REWARD_PATH, "", TASK_REWARD_PATH),
        (REWARD_PATH, ", rm_type: f1", None),
        ("mine.reward", "", "mine.reward"),
        (None, "", None),
    ],
)
def test_evaluations_pay_for_nothing_that_only_training_needs(
    given: str | None, lines: str, path: str | None, rollout_args: Args, write_jsonl: Any, tmp_path: Path
) -> None:
    """No routes are asked for, and no teacher."""
    config = tmp_path / "eval.yaml"
    prompts = write_jsonl([{"prompt": "x"}])
    config.write_text(f"datasets:\n  - {{name: a, path: '{prompts}'{lines}}}\n")
    args = with_sets(rollout_args(custom_rm_path=given, use_rollout_routing_replay=True), config=str(config))
    seen = eval_args(args, args.eval_datasets[0])
    assert (seen.use_rollout_routing_replay, seen.custom_rm_path) == (False, path)
    assert asked_for(seen, None, 9) == {}
    assert args.use_rollout_routing_replay


def test_evaluation_of_two_sets(rollout_args: Args, use: Callable[..., FakeClient], write_jsonl: Any) -> None:
    client = use(FakeClient(lambda n, ids, params: reply(str(len(ids)), "length" if len(ids) > 4 else "stop")))
    right = write_jsonl([{"prompt": "x" * n, "label": str(n)} for n in range(1, 7)], "right.jsonl")
    half = write_jsonl([{"q": "x" * n, "a": str(n if n % 2 else 0)} for n in range(1, 5)], "half.jsonl")
    args = rollout_args(rm_type="f1", eval_temperature=0.0, eval_max_response_len=9)
    _, metrics = evaluate(with_sets(args, ("right", right)))
    assert metrics["eval/right"] == 1.0
    assert metrics["eval/right-truncated_ratio"] == pytest.approx(2 / 6)
    assert metrics["eval/right-no_reward"] == 0
    assert metrics["eval/right/response_len/max"] == 1
    assert (metrics["eval/right/prompts"], metrics["eval/right/standard_error"]) == (6, 0.0)
    assert not any("pass@" in key for key in metrics)
    assert {(p["temperature"], p["max_new_tokens"]) for _, p, _ in client.requests} == {(0.0, 9)}
    args.eval_input_key, args.eval_label_key, args.n_samples_per_eval_prompt = "q", "a", 3
    output, metrics = evaluate(with_sets(args, ("half", half), ("other", half)))
    assert set(output.data) == {"half", "other"}
    assert metrics["eval/half"] == metrics["eval/half-avg@3"] == metrics["eval/half-pass@3"] == 0.5
    assert len(output.data["half"]["samples"]) == 12


@pytest.mark.parametrize(
    ("path", "read"),
    [(None, 1), (DEFAULT_ROLLOUT, 1), (FULLY_ASYNC_ROLLOUT, 1), ("slime.rollout.sft_rollout.generate_rollout", 0)],
)
def test_slimes_own_evaluations_are_read_before_the_run(
    path: str | None, read: int, rollout_args: Args, write_jsonl: Any
) -> None:
    args = rollout_args(rm_type="f1", eval_interval=1, eval_function_path=path)
    prompts = load_eval_prompts(with_sets(args, ("sums", write_jsonl([{"prompt": "1+1=", "label": "2"}]))))
    assert {name: len(of_set) for name, of_set in prompts.items()} == ({"sums": 1} if read else {})


def test_rewards_of_a_dataset_that_cannot_be_given_are_found_when_it_is_read(
    rollout_args: Args, write_jsonl: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": "p", "label": {"a": 1}}, {"prompt": "p", "label": "1", "metadata": {"rm_type": "bogus"}}]
    rows += [{"prompt": "p", "label": "1", "metadata": {"rm_type": "dapo"}}]
    path = write_jsonl(rows, "odd.jsonl")
    args = rollout_args(rm_type="math", eval_interval=1)
    told = (
        "line 1: 'label' ",
        "line 2: 'metadata' ",
        "unknown rm_type 'bogus'",
        "line 3: ",
        "names rm_type dapo, which ",
    )
    with pytest.raises(BadInputError, match="(?s)" + ".*".join((*told, "--eval-reward-key must be"))):
        load_eval_prompts(with_sets(args, ("odd", path)))
    config = tmp_path / "eval.yaml"
    config.write_text(f"datasets: [{{name: odd, path: {path}, rm_type: random}}]")
    assert len(load_eval_prompts(with_sets(args, config=str(config)))["odd"]) == 3, "its own comes before the rows'"
    args.custom_rm_path = "mine.reward_func"
    assert len(load_eval_prompts(with_sets(args, ("odd", path)))["odd"]) == 3, "a user's function judges anything"


def test_a_column_that_is_not_there_is_told_by_who_named_it(
    rollout_args: Args, write_jsonl: Any, tmp_path: Path
) -> None:
    """The dataset and the key of its file, or a flag."""
    path, config = write_jsonl([{"prompt": "p", "label": "1"}], "sums.jsonl"), tmp_path / "eval.yaml"
    args = rollout_args(rm_type="f1", eval_interval=1)

    def told(settings: str, **flags: str) -> str:
        config.write_text(f"defaults: {{tool_key: t}}\ndatasets: [{{name: sums, path: {path}, {settings}}}]")
        with pytest.raises(BadInputError) as error:
            load_eval_prompts(with_sets(Namespace(**vars(args) | flags), config=str(config)))
        return str(error.value)

    where, keys = f"--eval-config {config}: sums {path}, line 1: there is no key", "the keys are 'label', 'prompt'"
    for key in ("label_key", "input_key"):
        assert told(f"{key}: answer").startswith(f"{where} 'answer' ({key}); {keys}")
        for flag in (key, f"eval_{key}"):
            named = f"--{flag.replace('_', '-')}"
            assert told("", **{flag: "answer"}).startswith(f"{where} 'answer' ({named}); {keys}")
    with pytest.raises(BadInputError, match=r"'answer' \(--eval-label-key\)"):
        load_eval_prompts(with_sets(Namespace(**vars(args) | {"eval_label_key": "answer"}), ("sums", path)))


_HOOKS = """
async def reward_func(args, sample, **kwargs):
    return 0.25

def generate(args, sample, sampling_params, evaluation=False):
    assert evaluation
    failed = sample.rollout_id % 2 == 1
    sample.status = sample.Status.FAILED if failed else sample.Status.COMPLETED
    sample.tokens = sample.tokens + [7]
    sample.append_response_tokens(tokens=[8], log_probs=[0.0])
    sample.metadata["seen"] = args.rollout_skip_special_tokens, sampling_params["stop"]
    return sample

async def judge(args, sample, **kwargs):
    if sample.status is sample.Status.FAILED:
        return None
    return 1.0
"""

_CONFIG = """
eval:
  defaults:
    n_samples_per_eval_prompt: 2
    metadata_overrides: {level: hard}
  datasets:
    exact:
      path: %(path)s
      rm_type: f1
      n_samples_per_eval_prompt: 3
      temperature: 0.5
      repetition_penalty: 1.25
      no_stop_trim: false
    training_reward: {path: %(path)s, top_k: 5}
    own_code:
      path: %(path)s
      custom_rm_path: %(hooks)s:judge
      custom_generate_function_path: %(hooks)s
      skip_special_tokens: true
      stop: END
"""


def test_every_dataset_has_its_own_settings(
    rollout_args: Args, use: Callable[..., FakeClient], write_jsonl: Any, tmp_path: Path
) -> None:
    """One is judged by its own rm_type, one as training is, and one generates and judges by code of its own."""
    client = use(FakeClient())
    rows = [{"prompt": "x" * n, "label": str(n), "metadata": {"rm_type": "random", "n": n}} for n in (1, 2)]
    values = {"path": write_jsonl(rows), "hooks": hook_file(tmp_path, _HOOKS)}
    config = tmp_path / "eval.yaml"
    config.write_text(_CONFIG % values)
    args = rollout_args(custom_rm_path=f"{values['hooks']}:reward_func", rm_type="random")
    output, metrics = evaluate(with_sets(args, config=str(config)))
    assert metrics["eval/exact"] == metrics["eval/exact-avg@3"] == 1.0, "neither the run's reward nor the row's"
    assert metrics["eval/training_reward"] == metrics["eval/training_reward-avg@2"] == 0.25
    assert metrics["eval/own_code"] == 1.0
    assert metrics["eval/own_code-no_reward"] == 2.0, "reported, and averaged nowhere"
    assert metrics["eval/own_code-avg@2"] == metrics["eval/own_code-pass@1"] == 1.0
    assert "eval/own_code-pass@2" not in metrics, "no prompt has two responses with rewards"
    counts = {name: len(result["samples"]) for name, result in output.data.items()}
    assert counts == {"exact": 6, "training_reward": 4, "own_code": 4}
    for sample in output.data["own_code"]["samples"]:
        assert sample.metadata["level"] == "hard"
        assert sample.metadata["n"] == len(sample.prompt)
        assert sample.metadata["seen"] == (True, ["END"])
    asked = {
        (p["temperature"], p["top_k"], p.get("repetition_penalty"), p["no_stop_trim"]) for _, p, _ in client.requests
    }
    assert asked == {(0.5, -1, 1.25, False), (1.0, 5, None, True)}
    assert args.custom_rm_path, "training's options are what they were"


def test_a_late_evaluation_names_the_weights(
    rollout_args: Args, use: Callable[..., FakeClient], write_jsonl: Any
) -> None:
    async def never() -> None:
        skip(args.rollout_timeout)
        await asyncio.sleep(60)

    use(FakeClient(lambda *_: never()))
    path = write_jsonl([{"prompt": "x", "label": "1"}])
    args = with_sets(rollout_args(rm_type="f1"), ("e", path))
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
    args = rollout_args(rm_type="f1", n_samples_per_eval_prompt=2, sglang_enable_deterministic_inference=True)
    args = with_sets(args, ("e", path))
    seen = []
    for rollout_id in (0, 9):
        client = use(FakeClient())
        generate_rollout(args, rollout_id, None, evaluation=True)
        seen.append(sorted((len(ids), params["sampling_seed"]) for ids, params, _ in client.requests))
    assert seen[0] == seen[1]
    assert len({seed for _, seed in seen[0]}) == 6


def test_a_dataset_without_any_reward_says_so_and_nothing_else() -> None:
    samples = [Sample(group_index=0, rollout_id=i, response_length=1) for i in range(3)]
    data = {"d": {"rewards": [None] * 3, "truncated": [], "samples": samples}}
    metrics = eval_metrics(RolloutFnEvalOutput(data))
    assert metrics.pop("eval/d-no_reward") == 3.0
    assert metrics.pop("eval/d/repetition_frac") == 0.0
    assert all("/response_len/" in key for key in metrics)


def test_a_dataset_without_any_reward_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    lost = Sample(failure="reward_error: --custom-rm-path my.rm raised KeyError: 'x'")
    data = {
        "failed": {"rewards": [None] * 2, "samples": [Sample(), lost]},
        "none": {"rewards": [None]},
        "scored": {"rewards": np.array([0.0, 0.0])},
        "partly": {"rewards": [None, 0.0], "samples": [lost, Sample()]},
        "empty": {"rewards": []},
    }
    warn_of_unscored(4, RolloutFnEvalOutput(data))
    assert caplog.messages == [
        "evaluation of weight version 4: none of the 2 responses to failed has a reward, so it has no score: "
        "reward_error: --custom-rm-path my.rm raised KeyError: 'x'",
        "evaluation of weight version 4: none of the 1 responses to none has a reward, so it has no score: the reward "
        "function gave None",
    ]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "an evaluation must return RolloutFnEvalOutput(data={name: {"),
        ([0.5], "not [0.5]"),
        (RolloutFnEvalOutput(data=None), "not None"),  # type: ignore[arg-type]
        ({"a": [0.5]}, 'an evaluation must give a {"rewards": [...]}, not [0.5]'),
        ({"a": {"reward": [0.5]}}, "not {'reward': [0.5]}"),
        ({"a": {"rewards": [0.5], "samples": [Sample(), Sample()]}}, "of a has 2 samples and 1 rewards"),
    ],
)
def test_what_is_no_evaluation_is_said(returned: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        evaluation_output(returned)


def test_data_alone_are_an_evaluation() -> None:
    assert evaluation_output({"a": {"rewards": [1.0]}}) == RolloutFnEvalOutput(data={"a": {"rewards": [1.0]}})


@pytest.mark.parametrize("returned", [None, "text", [[Sample()], None], {"samples": []}, [3]])
def test_what_is_no_rollout_is_said(returned: Any) -> None:
    with pytest.raises(TypeError, match=r"^samples, or lists of them, are expected, not "):
        train_output(returned)


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
    assert (metrics["eval/d/prompts"], metrics["eval/d/max_reward"]) == (2, 1.0)
    assert metrics["eval/d/standard_error"] == pytest.approx(0.25)  # of means of 0.5 and 0: 0.3536 over the root of 2
    assert metrics["perf/eval_time"] == 3.0
    assert "eval/d-pass@8" not in metrics
    bare = eval_metrics(RolloutFnEvalOutput({"d": {"rewards": [1.0, None], "truncated": []}}))
    assert bare == {"eval/d": 1.0, "eval/d-no_reward": 1.0}
