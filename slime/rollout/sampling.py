"""What one generation request asks for: sampling parameters, and a seed where generation is to be reproducible."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from typing import Any

from slime.options.eval_datasets import EvalDataset

_PARAMS = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "skip_special_tokens")
_FIXED = {"spaces_between_special_tokens": False}
_SEED_BITS = 53
"""JSON readers that hold numbers as doubles keep such a seed exact."""


def train_sampling_params(args: Namespace) -> dict[str, Any]:
    """SGLang's ``sampling_params`` for training rollouts."""
    # The text must show the tokens that were trained on, the stop string included.
    own = {"max_new_tokens": args.rollout_max_response_len, "no_stop_trim": True}
    return {name: getattr(args, f"rollout_{name}") for name in _PARAMS} | own | _FIXED


def eval_sampling_params(dataset: EvalDataset) -> dict[str, Any]:
    """SGLang's ``sampling_params`` for an evaluation dataset; temperature 0 is greedy."""
    params = {name: getattr(dataset, name) for name in (*_PARAMS, "no_stop_trim")}
    further = {name: getattr(dataset, name) for name in ("min_new_tokens", "repetition_penalty")}
    params |= {name: value for name, value in further.items() if value is not None}
    return params | {"max_new_tokens": dataset.max_response_len} | _FIXED


def request_seed(*parts: int | str) -> int:
    """A seed in [0, 2**53) that depends on every part and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def seeded(args: Namespace, params: dict[str, Any], *parts: int | str | None) -> dict[str, Any]:
    """``params`` with a ``sampling_seed`` of run and ``parts`` where the engine is deterministic, else unchanged."""
    if not getattr(args, "sglang_enable_deterministic_inference", False):
        return params
    return params | {"sampling_seed": request_seed(args.rollout_seed, *(str(part) for part in parts))}
