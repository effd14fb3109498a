"""What a rollout's samples say: where prompts are, speed, lengths, pass@k, and more by flags of tracking."""

from __future__ import annotations

import logging
import math
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from slime.algorithms.rewards import rollout_rewards
from slime.data import Sample, TrainBatch
from slime.options.serving.sglang_config import generating
from slime.rollout.engine.state import REPLY_TIMES

if TYPE_CHECKING:
    from slime.data.source.data_source import RolloutDataSource

logger = logging.getLogger(__name__)

PREFIX_HITS = "rollout/prefix_cache_hit_rate"
ZERO_STD = "rollout/zero_std"
"""What the metrics of groups of equal rewards begin with."""
_PASSED = 1
_REPEATS, _SHRINKS = 10_000, 10


def accounting(args: Namespace, source: RolloutDataSource, in_flight: int = 0) -> dict[str, float]:
    """Where every prompt that was ever read is: trained, dropped (``rollout/prompts_dropped/<reason>`` tells why), in
    the buffer, or in flight: ``in_flight`` ones the rollout function still holds, a synchronous one none between two
    rollouts. RuntimeError where prompts were lost, or trained twice; of a user's own rollout function or data source,
    which may do as it likes, a warning."""
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


def rollout_metrics(samples: list[Sample], columns: TrainBatch) -> dict[str, float]:
    """Counts, and how long and how often truncated the samples are."""
    return length_stats(samples, "rollout/response_len", effective=True) | {
        "rollout/total_lengths": float(columns.lengths.mean()),
        "rollout/truncated_ratio": float(columns.truncated.mean()),
        "rollout/repetition_frac": repetition(samples),
        "rollout/num_samples": float(len(samples)),
        "rollout/num_rollouts": float(len(np.unique(columns.rollout_ids))),
    }


def reward_metrics(columns: TrainBatch) -> dict[str, float]:
    """Means over rollouts of rewards; groups of equal rewards, counted by that reward.

    The raw reward of a rollout is that of `rollout_rewards`, its normalised one the mean of its rows, as in the loss.
    """
    rollouts, first_row, rollout_of_row = np.unique(columns.rollout_ids, return_index=True, return_inverse=True)
    rows_of_rollout = np.bincount(rollout_of_row)
    by_rollout = rollout_rewards(columns.rollout_ids.tolist(), columns.raw_rewards.tolist())
    raw = np.array([by_rollout[rollout] for rollout in rollouts.tolist()])
    groups = columns.group_indices[first_row]
    metrics = {
        "rollout/raw_reward": float(raw.mean()),
        "rollout/rewards": float((np.bincount(rollout_of_row, columns.rewards) / rows_of_rollout).mean()),
    }
    equal, compared = _zero_std_groups(raw, groups)
    metrics |= counted_by_reward(ZERO_STD, equal)
    if compared:
        metrics["rollout/varied_groups_ratio"] = 1 - len(equal) / compared
    return metrics


def counted_by_reward(prefix: str, rewards: Iterable[float]) -> dict[str, float]:
    """How many of the rewards there are of each; those that are the same in four places, or six digits, are one."""
    counts = Counter(f"{prefix}/count_{round(reward, 4) + 0.0:g}" for reward in rewards)  # of -0.0 makes 0.0
    return {name: float(count) for name, count in counts.items()}


def _zero_std_groups(raw: np.ndarray, groups: np.ndarray) -> tuple[list[float], int]:
    """Of each group of at least two rollouts that has one and the same reward throughout, this reward; and how many
    groups of two or more there are."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order][0] - 1))
    low, high = np.minimum.reduceat(raw[order], starts), np.maximum.reduceat(raw[order], starts)
    sizes = np.diff(np.append(starts, len(order)))
    return low[(low == high) & (sizes > 1)].tolist(), int((sizes > 1).sum())


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
    """Response tokens a second of wall time and slot, and of the longest sample; *effective* ones count in the loss."""
    models = getattr(args, "sglang_models", [])
    slots = max(1, generating(models).num_slots if models else args.rollout_num_gpus or 1)
    lengths = [sample.response_length for sample in samples]
    effective = [sample.effective_response_length for sample in samples]
    metrics = {
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(lengths) / seconds / slots,
        "perf/effective_tokens_per_gpu_per_sec": sum(effective) / seconds / slots,
        "perf/longest_sample_tokens_per_sec": max(lengths) / seconds,
        "perf/longest_effective_sample_tokens_per_sec": max(effective) / seconds,
    }
    apart = np.array([sample.non_generation_time for sample in samples])
    if apart.any():
        longest = float(apart[np.array(lengths) == max(lengths)].mean())
        metrics |= summary(apart, "perf/non_generation_time")
        metrics["perf/longest_sample_non_generation_time"] = longest
        if longest < seconds:
            rate = max(lengths) / (seconds - longest)
            metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] = rate
    return metrics


def request_metrics(replies: list[dict[str, float]]) -> dict[str, float]:
    """Of ``replies``, which are taken out, what their engines told of time (`REPLY_TIMES`); ``profiled_count`` are
    those of engines with ``--sglang-enable-metrics``, which tell more than the seconds in all."""
    taken = replies[:]
    del replies[: len(taken)]
    if not taken:
        return {}
    columns = {name: np.array([reply[name] for reply in taken if name in reply]) for name in REPLY_TIMES}
    profiled = float(len(columns["queue_time"]))
    metrics = {"perf/request/count": float(len(taken)), "perf/request/profiled_count": profiled}
    for name in ("e2e_latency", "queue_time"):
        if len(columns[name]):
            figures = summary(columns[name], f"perf/request/{name}")
            metrics |= {key: value for key, value in figures.items() if not key.endswith("/min")}
    if len(columns["decode_throughput"]):
        metrics["perf/decode/throughput/mean"] = float(columns["decode_throughput"].mean())
    return metrics


def repetition(samples: Sequence[Sample]) -> float:
    """Share of responses of more than 10,000 letters whose end of that length shrinks to less than a tenth: what zlib
    does to text that goes round in circles."""
    ends = [sample.response[-_REPEATS:].encode() for sample in samples if len(sample.response) > _REPEATS]
    return sum(len(end) > _SHRINKS * len(zlib.compress(end)) for end in ends) / max(1, len(samples))


def engine_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """The engines' own counters, where they count: prefix cache and speculative decoding."""
    metrics = {}
    prompt_tokens = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    if prompt_tokens:
        cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
        metrics[PREFIX_HITS] = cached / prompt_tokens
        metrics["rollout/avg_cached_tokens_per_sample"] = cached / len(samples)
    drafted = sum(s.spec_info.spec_draft_token_num for s in samples)
    verified = sum(s.spec_info.spec_verify_ct for s in samples)
    if drafted and verified:
        metrics["rollout/spec_accept_rate"] = sum(s.spec_info.spec_accept_token_num for s in samples) / drafted
        metrics["rollout/spec_accept_length"] = sum(s.spec_info.completion_token_num for s in samples) / verified
    return metrics


def agent_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What became of agents' sessions, which `slime.agent` notes with the first sample of each; nothing without any."""
    figures = [sample.metadata["agent"] for sample in samples if isinstance(sample.metadata.get("agent"), dict)]
    if not figures:
        return {}
    total = {name: sum(each[name] for each in figures) for name in figures[0]}
    said = sum(sample.response_length for sample in samples)
    return {
        "agent/turns": total["turns"] / len(figures),
        "agent/forks": total["forks"] / len(figures),
        "agent/tito_mismatch_rate": sum(each["forks"] > 0 for each in figures) / len(figures),
        "agent/realigned_tokens": total["rendered_again"] / len(figures),
        "agent/trained_ratio": sum(sample.effective_response_length for sample in samples) / said if said else 0.0,
        "agent/samples": len(samples) / len(figures),
        "agent/tokenization_ms": 1000 * total["render_seconds"] / total["turns"] if total["turns"] else 0.0,
        "agent/prefix_cache_hit_rate": total["cached_tokens"] / max(1.0, total["prompt_tokens"]),
    }


def sample_metrics(args: Namespace, samples: list[Sample]) -> dict[str, float]:
    """What --log-passrate, --log-multi-turn, --log-reward-category and --log-correct-samples ask for, and agents'."""
    metrics: dict[str, float] = {}
    if not samples:
        return metrics
    metrics |= agent_metrics(samples)
    if args.log_passrate:
        rates = pass_rates(by_response(samples, [reward_or_none(args, sample) for sample in samples]))
        metrics |= {f"passrate/pass@{k}": rate for k, rate in rates.items()}
    if args.log_multi_turn:
        metrics |= _turn_stats(samples)
    if args.log_reward_category:
        metrics |= _category_shares(samples, args.log_reward_category)
    if args.log_correct_samples:
        metrics |= _correct_stats(
            [sample for sample in samples if reward_or_none(args, sample) == _PASSED], len(samples)
        )
    return metrics


def by_response(samples: Sequence[Sample], rewards: Sequence[float | None]) -> list[list[float | None]]:
    """Rewards of each prompt's responses. A response that was cut into several samples counts once, by
    `rollout_rewards`: None where no sample of it has a reward. Without samples every reward is a prompt of its own."""
    if not samples:
        return [[reward] for reward in rewards]
    prompts: dict[object, list[tuple[int | None, float | None]]] = {}
    for position, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        # What has no number is alone: a user's function may leave it out.
        prompt = ("alone", position) if sample.group_index is None else sample.group_index
        prompts.setdefault(prompt, []).append((sample.rollout_id, reward))
    return [list(rollout_rewards(*zip(*parts, strict=True)).values()) for parts in prompts.values()]


def pass_rates(prompts: Iterable[Sequence[float | None]]) -> dict[int, float]:
    """pass@k for the powers of two up to n, and n, the most responses that a prompt has; a reward of 1 is a pass. Each
    prompt counts with the rewards that it has, and for no k above their number."""
    prompts = list(prompts)
    n = max((len(rewards) for rewards in prompts), default=0)
    known = [[reward for reward in rewards if reward is not None] for rewards in prompts]
    counts = [(len(rewards), sum(reward == _PASSED for reward in rewards)) for rewards in known]
    chances = {
        k: [pass_at_k(size, correct, k) for size, correct in counts if size >= k]
        for k in sorted({2**i for i in range(n.bit_length())} | {n})
        if 1 <= k <= n
    }
    return {k: float(np.mean(of_prompts)) for k, of_prompts in chances.items() if of_prompts}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of ``k`` responses is right, from ``n`` of which ``correct`` are.

    ``1 - C(n - correct, k) / C(n, k)``: Chen et al. 2021, arXiv:2107.03374, section 2.1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def num_turns(sample: Sample) -> int:
    """How often the model spoke: the spans of the response that are trained on, with a tool's words between them."""
    if sample.loss_mask is None:
        return int(sample.response_length > 0)
    return int(np.count_nonzero(np.diff(np.asarray(sample.loss_mask, dtype=np.int8), prepend=np.int8(0)) == 1))


def reward_or_none(args: Namespace, sample: Sample) -> float | None:
    """`Sample.get_reward_value`; None without a reward."""
    return None if sample.reward is None else sample.get_reward_value(args)


def _turn_stats(samples: list[Sample]) -> dict[str, float]:
    return (
        summary(np.array([num_turns(sample) for sample in samples]), "multi_turn/turns")
        | length_stats(samples, "multi_turn/response_len")
        | length_stats(samples, "multi_turn/response_len_without_tools", effective=True)
    )


def _category_shares(samples: list[Sample], key: str) -> dict[str, float]:
    """Shares of the values of ``key``; "missing" where the reward is not a dict or has no such entry."""
    rewards = [sample.reward if isinstance(sample.reward, dict) else {} for sample in samples]
    counts = Counter(str(reward.get(key, "missing")) for reward in rewards)
    return {f"rollout/error_cat/{category}": count / len(samples) for category, count in counts.items()}


def _correct_stats(correct: list[Sample], num_samples: int) -> dict[str, float]:
    """Lengths, and the mean of the engine's log-probs over the tokens that are trained on."""
    prefix = "rollout/correct_samples"
    metrics = {f"{prefix}/ratio": len(correct) / num_samples} | length_stats(correct, f"{prefix}/response_len")
    log_probs = [_trained_log_probs(sample) for sample in correct if sample.rollout_log_probs is not None]
    tokens = np.concatenate(log_probs) if log_probs else np.empty(0)
    if tokens.size:
        metrics[f"{prefix}/log_probs"] = float(tokens.mean())
    return metrics


def _trained_log_probs(sample: Sample) -> np.ndarray:
    if sample.remove_sample:
        return np.empty(0)
    log_probs = np.asarray(sample.rollout_log_probs, dtype=np.float64)
    return log_probs if sample.loss_mask is None else log_probs[np.asarray(sample.loss_mask, dtype=bool)]
