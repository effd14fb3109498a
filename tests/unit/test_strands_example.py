"""examples/strands_sglang: sessions by script through the gateway, by strands-agents where it is installed."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from slime.agent.sandbox import SandboxError
from slime.agent.sandbox.python_code import Result
from slime.data import Sample, Status
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sampling import train_sampling_params
from slime.utils.errors import BadInputError
from slime.utils.misc import load_function
from tests import fake_strands
from tests.scripted_turns import Args, Scripted, Use, end_of_rollout, held_up, turn_by_turn
from tools.make_tiny_model import TOOL_CHAT_TEMPLATE

NUM_GPUS = 0
MODULE = "examples.strands_sglang.generate_with_strands"
END = "<|im_end|>"


def call(code: str) -> str:
    arguments = {"name": "execute_python_code", "arguments": {"code": code}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's module; programs are not run."""
    if find_spec("strands") is None:
        for name, module in fake_strands.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    module = importlib.import_module(MODULE)

    async def run_python(code: str, limits: Any) -> Result:
        if code == "broken":
            raise SandboxError("no namespaces")
        return Result(f"said {code}", True)

    monkeypatch.setattr(module, "run_python", run_python)
    yield module
    del sys.modules[MODULE]


@pytest.fixture
def args(make_args: Args, make_tokenizer: Callable[[str | None], Path], runtime: RolloutRuntime) -> Iterator[Namespace]:
    args = make_args(hf_checkpoint=str(make_tokenizer(TOOL_CHAT_TEMPLATE)), rollout_max_response_len=200)
    args.max_turns = 3
    yield args
    if "agent gateway" in runtime.services:
        runtime.services["agent gateway"][1].stop()


def answered(example: Any, args: Namespace, use: Use, *turns: str) -> tuple[Sample, float]:
    """The one sample of a session in which the model says these turns, and its reward."""
    use(Scripted(args, *turns))

    async def run() -> tuple[Sample, float]:
        sample = Sample(prompt=[{"role": "user", "content": "6*7="}], label="42", index=3)
        (part,) = await example.generate(args, sample, train_sampling_params(args))
        return part, await example.reward_func(args, part)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("turns", "told", "reward", "status"),
    [
        ([f"\\boxed{{42}}{END}"], [], 1.0, Status.COMPLETED),
        ([f"Answer: 42{END}"], [], 1.0, Status.COMPLETED),
        ([f"\\boxed{{41}}{END}"], [], -1.1, Status.COMPLETED),
        ([call("a") + END, f"\\boxed{{42}}{END}"], [["said a"]], 1.0, Status.COMPLETED),
        ([call("a") + END, f"\\boxed{{41}}{END}"], [["said a"]], -1.05, Status.COMPLETED),
        ([f"{call('a')}\n{call('b')}{END}", f"no{END}"], [["said a", "said b"]], -1.05, Status.COMPLETED),
        ([call("a") + END] * 3, [["said a"]] * 2, -0.95, Status.TRUNCATED),
        ([call("a") + END, "42 " * 80], [["said a"]], -1.05, Status.TRUNCATED),
    ],
)
def test_what_the_model_says_is_trained_and_what_the_tool_says_is_not(
    example: Any, args: Namespace, use: Use, turns: list[str], told: list[list[str]], reward: float, status: Status
) -> None:
    sample, got = answered(example, args, use, *turns)
    assert got == pytest.approx(reward)
    assert sample.status is status
    parts = turn_by_turn(args, sample)
    assert [text for mask, text in parts if mask] == [turn[:200] for turn in turns]
    opening = "\n<|im_start|>tool\n{}<|im_end|>"
    assert [text for mask, text in parts if not mask] == [
        "".join(opening.format(each) for each in results) + "\n<|im_start|>assistant\n" for results in told
    ]
    assert sample.metadata["tool_iterations"] == sum("<tool_call>" in turn for turn in turns)
    assert sample.metadata["agent"]["forks"] == 0


def test_an_answer_is_waited_for_as_long_as_the_run_gives_it(
    example: Any, args: Namespace, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up(monkeypatch, args)
    with pytest.raises(openai.APITimeoutError):
        answered(example, args, use)


def test_a_sandbox_that_fails_is_no_failure_of_the_models(example: Any, args: Namespace, use: Use) -> None:
    with pytest.raises(SandboxError, match="no namespaces"):
        answered(example, args, use, call("broken") + END, f"\\boxed{{42}}{END}")


@pytest.mark.skipif(find_spec("strands") is not None, reason="strands-agents is installed")
def test_without_the_package_the_run_does_not_begin() -> None:
    with pytest.raises(BadInputError, match=r"No module named 'strands'; this example needs strands-agents: .*README"):
        load_function(f"{MODULE}.generate", flag="--custom-generate-function-path")


def test_a_session_that_the_rollouts_end_cuts_is_begun_anew(
    example: Any, args: Namespace, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_of_rollout(monkeypatch)
    use(Scripted(args))
    sample = Sample(prompt="6*7=", index=3)
    assert asyncio.run(example.generate(args, sample, train_sampling_params(args))) is sample
    assert sample.status is Status.ABORTED
