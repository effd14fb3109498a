"""examples/tau-bench by its path, in the mock of its package: visits by script through the gateway."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import openai
import pytest

from slime.data import Sample, Status
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sampling import train_sampling_params
from slime.utils.misc import load_function
from tests.fake_client import FakeClient
from tests.scripted_turns import Args, Scripted, Use, end_of_rollout, held_up, turn_by_turn
from tools.make_tiny_model import TOOL_CHAT_TEMPLATE

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "tau-bench"
END = "<|im_end|>"
SAID = f"Done.{END}"


@pytest.fixture
def tau(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module, loaded as slime loads it: by the path of its file, from the checkout."""
    monkeypatch.syspath_prepend(str(FOLDER / "mock"))
    monkeypatch.chdir(ROOT)
    function = load_function("examples/tau-bench/generate_with_tau.py:generate", flag="--custom-generate-function-path")
    yield sys.modules[function.__module__]
    for name in [name for name in sys.modules if name.split(".")[0] == "tau_bench"] + [function.__module__]:
        del sys.modules[name]


@pytest.fixture
def args(
    tau: ModuleType, make_args: Args, make_tokenizer: Callable[[str | None], Path], runtime: RolloutRuntime
) -> Iterator[Namespace]:
    yield make_args(hf_checkpoint=str(make_tokenizer(TOOL_CHAT_TEMPLATE)), rollout_max_response_len=200)
    if "agent gateway" in runtime.services:
        runtime.services["agent gateway"][1].stop()


def call(name: str, /, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def task(tau: ModuleType, index: int = 3, split: str = "dev") -> tuple[str, str]:
    """Who comes, and the order that is to be cancelled."""
    task = tau.get_env("retail", "llm", "none", split).tasks[index]
    return task.user_id, task.actions[0].kwargs["order"]


def visited(tau: ModuleType, args: Namespace, client: FakeClient, use: Use) -> Sample:
    use(client)
    sample = Sample(prompt=3, index=3, metadata={"task_split": "dev"})  # type: ignore[arg-type]
    made = asyncio.run(tau.generate(args, sample, train_sampling_params(args)))
    (part,) = made
    return part  # type: ignore[no-any-return]


def turns_of(tau: ModuleType, what: str) -> tuple[list[str], list[str], float]:
    """What the model says, what it is told, and the reward."""
    name, order = task(tau)
    found, cancelled = call("find", name=name) + END, call("cancel", order=order) + END
    others = [order for order in map(str, range(10, 100)) if order != task(tau)[1]]
    wrong = next(order for order in others if int(order) not in tau.get_env("", "", "", "dev", None, 3)._known.values())
    return {
        "served": ([found, cancelled, SAID], [order, "cancelled"], 1.0),
        "by luck": ([cancelled, SAID], ["cancelled"], 1.0),
        "nothing": ([SAID], [], 0.0),
        "another order": ([call("cancel", order=wrong) + END, SAID], ["Error: no such order"], 0.0),
        "no tool": ([call("sing", song="a") + END, SAID], ["Unknown action sing"], 0.0),
        "no call": ([f"<tool_call>x{END}"], [], 0.0),
    }[what]


@pytest.mark.parametrize("what", ["served", "by luck", "nothing", "another order", "no tool", "no call"])
def test_a_visit(tau: ModuleType, args: Namespace, use: Use, what: str) -> None:
    said, told, reward = turns_of(tau, what)
    client = Scripted(args, *said)
    sample = visited(tau, args, client, use)
    assert (sample.reward, sample.status) == (reward, Status.COMPLETED)
    turns = turn_by_turn(args, sample)
    assert [text for mask, text in turns if mask] == said
    assert [text for mask, text in turns if not mask] == [
        f"\n<|im_start|>tool\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in told
    ]
    assert sample.metadata["agent"]["forks"] == 0


def test_of_several_calls_one_is_made_and_the_conversation_stays_whole(
    tau: ModuleType, args: Namespace, use: Use
) -> None:
    name, order = task(tau)
    both = f"{call('cancel', order=order)}\n{call('find', name=name)}{END}"
    sample = visited(tau, args, Scripted(args, both, SAID), use)
    assert sample.reward == 1.0
    assert sample.metadata["agent"]["forks"] == 0
    assert sample.response.count(tau.ONE_AT_A_TIME) == 1


@pytest.mark.parametrize("bound", ["max_turns", "agent_max_turns"])
def test_a_user_who_is_left_waiting(tau: ModuleType, args: Namespace, use: Use, bound: str) -> None:
    setattr(args, bound, 2)
    name, order = task(tau)
    sample = visited(tau, args, Scripted(args, call("cancel", order=order) + END, call("find", name=name) + END), use)
    assert (sample.reward, sample.status) == (0.0, Status.TRUNCATED)


def test_an_answer_is_waited_for_as_long_as_the_run_gives_it(
    tau: ModuleType, args: Namespace, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up(monkeypatch, args)
    with pytest.raises(openai.APITimeoutError):
        visited(tau, args, Scripted(args), use)


def test_half_an_answer_is_told_to_nobody(tau: ModuleType, args: Namespace, use: Use) -> None:
    args.rollout_max_response_len = 80
    cancel = call("cancel", order=task(tau)[1]) + END
    sample = visited(tau, args, Scripted(args, cancel, "Well, " * 20), use)
    assert (sample.reward, sample.status) == (0.0, Status.TRUNCATED)
    assert sample.metadata["agent"]["turns"] == 2


def test_rows_without_the_package_are_one_line() -> None:
    program = "examples/tau-bench/tau1_mock.py"
    ended = subprocess.run([sys.executable, program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("tau1_mock.py: error: No module named 'tau_bench'")


def test_rows(tau: ModuleType) -> None:
    rows = importlib.import_module("examples.tau-bench.tau1_mock").rows("retail", "dev")
    assert [row["index"] for row in rows] == list(range(16))
    name, order = task(tau)
    assert rows[3]["metadata"]["task_split"] == "dev"
    assert rows[3]["metadata"]["task"]["user_id"] == name
    assert rows[3]["metadata"]["task"]["actions"] == [{"name": "cancel", "kwargs": {"order": order}}]


def test_a_visit_that_the_rollouts_end_cuts_is_begun_anew(
    tau: ModuleType, args: Namespace, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_of_rollout(monkeypatch)
    use(Scripted(args))
    sample = Sample(prompt=3, index=3)  # type: ignore[arg-type]
    assert asyncio.run(tau.generate(args, sample, train_sampling_params(args))) is sample
    assert sample.status is Status.ABORTED
