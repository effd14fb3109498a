"""A generate client that answers in the process, and rollouts with it."""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout


class FakeClient:
    """Answers like SGLang: by default with the digits of the prompt's length, after a random short time."""

    def __init__(self, reply: Callable[..., Any] | None = None, seconds: float = 0.005) -> None:
        self.requests: list[tuple[list[int], dict[str, Any], Any]] = []
        self.running = self.most_running = self.cancelled = self.closed = 0
        self._reply = reply
        self._seconds = seconds

    async def generate(
        self, input_ids: Any, sampling_params: Any, *, headers: Any = None, rid: str | None = None
    ) -> dict[str, Any]:
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


def rollout(args: Namespace, rollout_id: int = 0, source: Any = None) -> RolloutFnTrainOutput:
    output = generate_rollout(args, rollout_id, source or RolloutDataSourceWithBuffer(args))
    assert isinstance(output, RolloutFnTrainOutput)
    return output


def hook_file(tmp_path: Path, code: str) -> Path:
    path = tmp_path / f"hook_{random.randrange(10**9)}.py"
    path.write_text(code)
    return path
