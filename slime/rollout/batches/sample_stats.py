"""What a rollout's samples say besides rewards and lengths, by flags of tracking, and pass@k."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from slime.algorithms.rewards import rollout_rewards
from slime.data import Sample
from slime.rollout.batches.metrics import length_stats, summary

_PASSED = 1


def sample_metrics(args: Namespace, samples: list[Sample]) -> dict[str, float]:
    """What --log-passrate, --log-multi-turn, --log-reward-category and --log-correct-samples ask for."""
    metrics: dict[str, float] = {}
    if not samples:
        return metrics
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
    """Rewards of each prompt's responses.

    A response that was cut into several samples counts once, by `rollout_rewards`; it is None where no sample of it has
    a reward. Without samples every reward is a prompt of its own.
    """
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
    """Shares of the values of ``key``; "missing" where the reward is no dict or has no such entry."""
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
