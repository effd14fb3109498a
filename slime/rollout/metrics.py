"""What a rollout says about its speed, and lengths that training and evaluation report alike."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from slime.utils.types import Sample


def length_stats(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Mean, median, maximum and minimum of response lengths, in tokens."""
    if not samples:
        return {}
    lengths = np.array([sample.response_length for sample in samples])
    return {
        f"{prefix}/mean": float(lengths.mean()),
        f"{prefix}/median": float(np.median(lengths)),
        f"{prefix}/max": float(lengths.max()),
        f"{prefix}/min": float(lengths.min()),
    }


def speed_metrics(args: Namespace, samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Response tokens a second and slot, and of the longest sample; *effective* tokens count in the loss.

    Args:
        seconds: wall time of the rollout.
    """
    slots = max(1, args.rollout_num_gpus or 1)
    lengths = [sample.response_length for sample in samples]
    effective = [sample.effective_response_length for sample in samples]
    return {
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(lengths) / seconds / slots,
        "perf/effective_tokens_per_gpu_per_sec": sum(effective) / seconds / slots,
        "perf/longest_sample_tokens_per_sec": max(lengths) / seconds,
        "perf/longest_effective_sample_tokens_per_sec": max(effective) / seconds,
    }


def engine_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """The engines' own counters, where they count: prefix cache and speculative decoding."""
    metrics = {}
    prompt_tokens = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    if prompt_tokens:
        cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
        metrics["rollout/prefix_cache_hit_rate"] = cached / prompt_tokens
        metrics["rollout/avg_cached_tokens_per_sample"] = cached / len(samples)
    drafted = sum(s.spec_info.spec_draft_token_num for s in samples)
    verified = sum(s.spec_info.spec_verify_ct for s in samples)
    if drafted and verified:
        metrics["rollout/spec_accept_rate"] = sum(s.spec_info.spec_accept_token_num for s in samples) / drafted
        metrics["rollout/spec_accept_length"] = sum(s.spec_info.completion_token_num for s in samples) / verified
    return metrics
