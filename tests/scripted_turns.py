"""What tests of the turns of examples/ share: engine replies by script, options, and a response by its mask."""

from __future__ import annotations

import argparse
import asyncio
from argparse import Namespace
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import pytest

from slime.agent.in_rollout import InRollout
from slime.agent.session import Generated, SessionError
from slime.data import Sample
from slime.rollout.sampling import train_sampling_params
from slime.rollout.tokenizer import load_tokenizer
from tests.fake_client import FakeClient

Args = Callable[..., Namespace]
Use = Callable[[FakeClient], FakeClient]


class Scripted(FakeClient):
    """Gives these texts in order, as the tokenizer's tokens; a text that ends in ABORT was cut by a weight update."""

    ABORT = "#abort"

    def __init__(self, args: Namespace, *texts: str) -> None:
        super().__init__(lambda number, ids, params: self._next(number, params), seconds=0)
        self._tokenizer, self._texts = load_tokenizer(args.hf_checkpoint), texts

    def _next(self, number: int, params: dict[str, Any]) -> dict[str, Any]:
        text = self._texts[number - 1]
        finish = "abort" if text.endswith(self.ABORT) else "stop"
        ids = self._tokenizer(text.removesuffix(self.ABORT), add_special_tokens=False)["input_ids"]
        if len(ids) > params["max_new_tokens"]:
            ids, finish = ids[: params["max_new_tokens"]], "length"
        pairs = [[-0.5, token, None] for token in ids]
        meta = {"finish_reason": {"type": finish}, "weight_version": str(number), "output_token_logprobs": pairs}
        text = self._tokenizer.decode(ids)
        for stop in params.get("stop") or []:  # as SGLang's no_stop_trim: the text ends there, the tokens need not
            text = text[: text.find(stop) + len(stop)] if stop in text else text
        return {"text": text, "output_ids": ids, "meta_info": meta}


def example_args(make_args: Args, module: ModuleType, **changes: Any) -> Namespace:
    """Options of a rollout, with the example's own at their defaults but for ``changes``."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    own = vars(parser.parse_args([]))
    args = make_args(**{k: v for k, v in changes.items() if k not in own} | {"rollout_max_response_len": 400})
    if "rollout_max_response_len" in changes:
        args.rollout_max_response_len = changes["rollout_max_response_len"]
    return Namespace(**vars(args) | own | {k: v for k, v in changes.items() if k in own})


def end_of_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each turn of an agent's is refused, as the rollout has enough samples."""

    async def refuse(engine: InRollout, *_: Any) -> Generated:
        engine.aborted = True
        raise SessionError(503, "the rollout has enough samples")

    monkeypatch.setattr(InRollout, "generate", refuse)


def held_up(monkeypatch: pytest.MonkeyPatch, args: Namespace) -> None:
    """From now on each turn of an agent's waits, as for a push, for longer than the run gives its rollouts."""
    monkeypatch.setattr(InRollout, "generate", lambda *_: asyncio.sleep(60))
    args.rollout_timeout = 0.2


def turn_by_turn(args: Namespace, sample: Sample) -> list[tuple[int, str]]:
    """The response as (mask, text) wherever the mask changes, from the tokens alone."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    parts: list[tuple[int, list[int]]] = []
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    for token, mask in zip(response, sample.loss_mask or [], strict=True):
        if not parts or parts[-1][0] != mask:
            parts.append((mask, []))
        parts[-1][1].append(token)
    return [(mask, tokenizer.decode(ids)) for mask, ids in parts]


def one(module: ModuleType, args: Namespace, sample: Sample | None = None) -> Coroutine[Any, Any, Any]:
    return module.generate(args, sample or Sample(prompt="q", label="Oslo", index=7), train_sampling_params(args))
