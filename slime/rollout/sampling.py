"""What one generation request asks for: sampling parameters, and a seed where generation is to be reproducible."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from typing import Any

from slime.options.eval_datasets import EvalDataset

_SEED_BITS = 53
"""JSON readers that hold numbers as doubles keep such a seed exact."""


def train_sampling_params(args: Namespace) -> dict[str, Any]:
    """SGLang's ``sampling_params`` for training rollouts."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        # The text must show the tokens that were trained on, the stop string included.
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def eval_sampling_params(dataset: EvalDataset) -> dict[str, Any]:
    """SGLang's ``sampling_params`` for an evaluation dataset; temperature 0 is greedy."""
    params = {
        "temperature": dataset.temperature,
        "top_p": dataset.top_p,
        "top_k": dataset.top_k,
        "max_new_tokens": dataset.max_response_len,
        "stop": dataset.stop,
        "stop_token_ids": dataset.stop_token_ids,
        "skip_special_tokens": dataset.skip_special_tokens,
        "no_stop_trim": dataset.no_stop_trim,
        "spaces_between_special_tokens": False,
    }
    further = {"min_new_tokens": dataset.min_new_tokens, "repetition_penalty": dataset.repetition_penalty}
    return params | {name: value for name, value in further.items() if value is not None}


def request_seed(*parts: int | str) -> int:
    """A seed in [0, 2**53) that depends on every part and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def seeded(args: Namespace, params: dict[str, Any], *parts: int | str | None) -> dict[str, Any]:
    """``params`` with a ``sampling_seed`` of run and ``parts`` where the engine is deterministic, else unchanged."""
    if not getattr(args, "sglang_enable_deterministic_inference", False):
        return params
    return params | {"sampling_seed": request_seed(args.rollout_seed, *(str(part) for part in parts))}
