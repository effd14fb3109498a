"""A generate client that answers in the process, rollouts with it, and their accounts."""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from slime.data import Sample
from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.batches.metrics import accounting
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.engine.loop import background_loop
from slime.rollout.runtime import RolloutRuntime, current
from slime.rollout.sglang_rollout import generate_rollout


class FakeClient:
    """Answers like SGLang: by default with the digits of the prompt's length, after a random short time."""

    def __init__(self, reply: Callable[..., Any] | None = None, seconds: float = 0.005) -> None:
        self.requests: list[tuple[list[int], dict[str, Any], Any]] = []
        self.running = self.most_running = self.cancelled = self.made = 0
        self._reply = reply
        self._seconds = seconds

    async def generate(
        self,
        input_ids: Any,
        sampling_params: Any,
        *,
        headers: Any = None,
        rid: str | None = None,
        on_tokens: Any = None,
    ) -> dict[str, Any]:
        self.requests.append((list(input_ids), dict(sampling_params), headers))
        number = len(self.requests)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self._seconds * random.random())
            if self._reply is not None:
                made = self._reply(number, input_ids, sampling_params)
                result: dict[str, Any] = await made if asyncio.iscoroutine(made) else made
            else:
                result = reply(str(len(input_ids)))
            if on_tokens is not None:
                on_tokens(result["output_ids"])
            return result
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def make(self, *_: Any) -> FakeClient:
        """Stands in for `slime.rollout.engine.state.make_client`, and counts."""
        self.made += 1
        return self


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


def rollout(args: Namespace, rollout_id: int = 0, source: Any = None) -> RolloutFnTrainOutput:
    output = generate_rollout(args, rollout_id, source or RolloutDataSourceWithBuffer(args))
    assert isinstance(output, RolloutFnTrainOutput)
    return output


def push(version: int) -> None:
    """Have the rollouts' event loop know of new weights, as train_async.py's driver does."""
    runtime = current()
    assert runtime is not None
    runtime.pause_generation()
    background_loop().run(runtime.resume_generation(version), timeout=60, what="push")


def hook_file(tmp_path: Path, code: str) -> Path:
    path = tmp_path / f"hook_{random.randrange(10**9)}.py"
    path.write_text(code)
    return path


class Engine:
    """Prompts longer than ``longest`` are under way until an abort, and then have ``made`` as their response."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, longest: int, made: str = "so") -> None:
        self.longest, self.made, self.version = longest, made, 1
        self.aborted: asyncio.Event | None = None
        self.asked: list[list[str] | None] = []
        monkeypatch.setattr(RolloutRuntime, "abort_requests", lambda runtime, rids: self.abort(rids))

    async def abort(self, rids: Iterable[str] | None) -> bool:
        self.asked.append(None if rids is None else list(rids))
        if self.aborted is not None:
            self.aborted.set()
        return True

    async def __call__(self, number: int, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if len(input_ids) <= self.longest:
            return reply(str(len(input_ids)), version=self.version)
        self.aborted = self.aborted or asyncio.Event()
        await self.aborted.wait()
        return reply(self.made, finish="abort", version=self.version)

    def go_on(self) -> None:
        """From now on all are answered."""
        self.longest, self.aborted = 10**6, None


def accounts(args: Namespace, source: RolloutDataSource, samples: list[Sample]) -> dict[str, float]:
    """The figures of a rollout that the trainers take; raises where they do not add up."""
    source.count_trained(samples)
    return accounting(args, source, source.num_in_flight(after=0))


def indices(groups: Iterable[Any]) -> list[int | None]:
    return [flatten_samples(group)[0].group_index for group in groups]
