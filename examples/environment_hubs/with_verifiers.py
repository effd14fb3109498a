"""Prime Intellect's verifiers (0.4, its v1 interface): any taskset with its harness and rewards.

VERIFIERS_TASKSET names an installed one; without it the one of this file is played: the largest of three digits. What a
harness says goes through verifiers' own interception to the session, and the rewards are those of the task.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment

__all__ = ["Ask", "Largest"]  # by which verifiers finds the taskset and its harness

_TASKSET = os.environ.get("VERIFIERS_TASKSET", "with_verifiers")
_RIGHT = 0.5


class LargestData(vf.TaskData):
    """A question with its answer."""

    answer: str


class LargestTask(vf.Task[LargestData]):
    """Which digit is the largest, in a box."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right digit."""
        found = re.search(r"\\boxed\{(.*?)\}", trace.last_reply)
        return float(found is not None and found[1] == self.data.answer)


class Largest(vf.Taskset[LargestTask, vf.TasksetConfig]):
    """All ordered choices of three digits."""

    def load(self) -> Iterator[LargestTask]:
        """One task each."""
        for digits in itertools.permutations("0123456789", 3):
            data = LargestData(prompt=f"max {' '.join(digits)}", answer=max(digits))
            yield LargestTask(data, self.config.task)


class Ask(vf.Harness[vf.HarnessConfig]):
    """Says the prompt and hears one answer; verifiers' own ``null`` installs a program by uv for every run."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx: vf.ModelContext, *args: Any, **kwargs: Any) -> vf.ProgramResult:
        """One turn at verifiers' interception."""
        _, _, endpoint, secret, _, data, *_ = args
        # No limit of its own: the interception's client, which waits for the answer, has the run's.
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            messages: Any = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")


def _environment() -> Any:
    config = vf.SingleAgentEnvConfig(taskset={"id": _TASKSET}, agent={"runtime": {"type": "subprocess"}})
    return load_environment(config)


def tasks(output: Path) -> list[dict[str, Any]]:
    """A row for each task."""
    return [
        {"prompt": task.data.prompt_text, "label": "", "metadata": {"task": task.data.idx}}
        for task in _environment().taskset
    ]


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """A question and an answer that is too often a guess."""
    digits = rng.sample("0123456789", 3)
    answer = max(digits) if rng.random() < _RIGHT else rng.choice(digits)
    return [
        {"role": "user", "content": f"max {' '.join(digits)}"},
        {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
    ]


async def run(base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """One episode; its reward is the sum of its traces' rewards."""
    environment = _environment()  # an episode's own: it holds a client for the session's address
    (task,) = environment.taskset.include(idx=[metadata["task"]])
    sampling = vf.SamplingConfig(max_tokens=request_kwargs["max_tokens"])
    limit = {"read": request_kwargs["timeout"]}
    client = vf.EvalClientConfig(
        base_url=base_url, api_key_var="SLIME_NO_KEY", timeout=limit
    )  # the address has the key
    async with environment.serving():
        context = vf.ModelContext(model=request_kwargs["model"], client=client, sampling=sampling)
        episode = await environment.run_episode(task, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    return {
        "reward": sum(trace.reward for trace in episode.traces),
        "metadata": {"turns": sum(trace.num_turns for trace in episode.traces)},
    }
