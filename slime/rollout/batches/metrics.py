"""What a rollout says about its speed, and lengths that training and evaluation report alike."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slime.data import Sample

if TYPE_CHECKING:
    from slime.data.source.data_source import RolloutDataSource

logger = logging.getLogger(__name__)


def accounting(args: Namespace, source: RolloutDataSource, in_flight: int = 0) -> dict[str, float]:
    """Where every prompt that was ever read is: trained, dropped (``rollout/prompts_dropped/<reason>`` tells why), in
    the buffer, or in flight: ``in_flight`` ones the rollout function still holds; a synchronous one holds none between
    two rollouts.

    RuntimeError where the sum is not what was read: prompts were lost, or trained twice. Of a user's own rollout
    function or data source, which may do as it likes, it is a warning.
    """
    dropped = source.num_dropped
    parts = {
        "trained": source.num_trained,
        "dropped": dropped.total(),
        "buffered": source.get_buffer_length(),
        "in_flight": in_flight,
    }
    added = source.num_added
    paths = (args.rollout_function_path, args.data_source_path)
    is_ours = all(path.startswith("slime.") for path in paths) and args.rollout_all_samples_process_path is None
    if sum(parts.values()) != source.num_read + added or (added and is_ours):
        message = (
            f"{source.num_read} prompts were read and {added} added, but "
            f"{' + '.join(f'{n} {what}' for what, n in parts.items())}"
        )
        if is_ours:
            raise RuntimeError(message)
        logger.warning("%s: a rollout function reports what it drops by data_source.count_dropped", message)
    parts = {"read": source.num_read, **parts} | {f"dropped/{reason}": n for reason, n in sorted(dropped.items())}
    parts |= {"added": added} if added else {}
    return {f"rollout/prompts_{name}": float(n) for name, n in parts.items()}


def length_stats(samples: Sequence[Sample], prefix: str, *, effective: bool = False) -> dict[str, float]:
    """Mean, median, maximum and minimum of response lengths, in tokens; nothing where there are no samples. *Effective*
    tokens count in the loss, and samples without any of them are left out."""
    lengths = np.array([s.effective_response_length if effective else s.response_length for s in samples])
    if effective:
        lengths = lengths[lengths > 0]
    return summary(lengths, prefix) if len(lengths) else {}


def summary(values: np.ndarray, prefix: str) -> dict[str, float]:
    """Mean, median, maximum and minimum of values, of which there are some."""
    figures = {"mean": values.mean(), "median": np.median(values), "max": values.max(), "min": values.min()}
    return {f"{prefix}/{name}": float(value) for name, value in figures.items()}


def speed_metrics(args: Namespace, samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Response tokens a second of wall time and slot, and of the longest sample; *effective* tokens count in the
    loss."""
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
