"""A right function of each kind that slime has none of its own of, to begin from and to check the contracts by."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import aiohttp

from slime.data import Sample


def remove_truncated(args: Namespace, groups: list[list[Sample]]) -> None:
    """--rollout-sample-filter-path: do not learn from responses that were cut off."""
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.status is Sample.Status.TRUNCATED


def count_all(args: Namespace, all_groups: list[list[Sample]], data_source: Any) -> None:
    """--rollout-all-samples-process-path: how many samples each rollout took."""
    counts = vars(args).setdefault("samples_made", [])
    counts.append(sum(len(group) for group in all_groups))


def note_length(args: Namespace, sample: Sample, *, evaluation: bool = False) -> None:
    """--rollout-sample-hook-path: what the reward function may want to know."""
    sample.metadata["num_words"] = len(sample.response.split())


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """--custom-rm-path: the label in a box."""
    return float(f"\\boxed{{{sample.label}}}" in sample.response)


async def batched_custom_rm(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    """--custom-rm-path with --group-rm: the shortest response of a group is the best."""
    shortest = min(sample.response_length for sample in samples)
    return [float(sample.response_length == shortest) for sample in samples]


def log_rollout_data(
    rollout_id: int, args: Namespace, samples: list[Sample], rollout_extra_metrics: dict[str, Any], rollout_time: float
) -> bool:
    """--custom-rollout-log-function-path: the best response of each rollout, besides what slime logs."""
    best = max(samples, key=lambda sample: sample.get_reward_value(args))
    print(f"rollout {rollout_id}, {rollout_time:.1f} s: {best.response}")
    return False


def log_eval_rollout_data(
    rollout_id: int, args: Namespace, data: dict[str, Any], extra_metrics: dict[str, Any] | None
) -> bool:
    """--custom-eval-rollout-log-function-path: how many responses had no reward."""
    for name, result in data.items():
        print(f"evaluation {rollout_id}: {name} has {result['rewards'].count(None)} samples without a reward")
    return False


def post_process_rewards(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """--custom-reward-post-process-path: less the mean of the group."""
    raw = [sample.get_reward_value(args) for sample in samples]
    groups: dict[int | None, list[float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        groups.setdefault(sample.group_index, []).append(reward)
    means = {index: sum(rewards) / len(rewards) for index, rewards in groups.items()}
    return raw, [reward - means[sample.group_index] for sample, reward in zip(samples, raw, strict=True)]


def convert_samples_to_train_data(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """--custom-convert-samples-to-train-data-path: as slime does, with the rewards as they are."""
    raw = [sample.get_reward_value(args) for sample in samples]
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": raw,
        "raw_reward": raw,
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [
            [0] * sample.response_length if sample.remove_sample else sample.loss_mask or [1] * sample.response_length
            for sample in samples
        ],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def rollout_data_postprocess(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """--rollout-data-postprocess-path: limit advantages."""
    rollout_data["advantages"] = [row.clamp(-1, 1) for row in rollout_data["advantages"]]


def compute_advantages(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """--custom-advantage-function-path: the reward, at every token."""
    pairs = list(zip(rollout_data["rewards"], rollout_data["loss_masks"], strict=True))
    rollout_data["advantages"] = [reward * mask for reward, mask in pairs]
    rollout_data["returns"] = [reward * mask for reward, mask in pairs]


def megatron_init(args: Namespace) -> None:
    """--custom-megatron-init-path."""


def model_provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    """--custom-model-provider-path: only called where Megatron has been set up."""
    raise NotImplementedError(f"a stage with {pre_process=}, {post_process=}, {vp_stage=}")


def before_log_prob(args: Namespace, model: list[Any], store_prefix: str) -> None:
    """--custom-megatron-before-log-prob-hook-path."""


def before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """--custom-megatron-before-train-step-hook-path."""


def post_write(args: Namespace, version_dir: str, rollout_engines: list[Any]) -> None:
    """--custom-update-weight-post-write-path."""


async def run_agent(
    base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """--custom-agent-function-path: two turns, and whether the second one has the answer."""
    messages = [{"role": "user", "content": prompt}]
    async with aiohttp.ClientSession() as client:
        for _ in range(2):
            body = {"messages": messages, **request_kwargs}
            async with client.post(f"{base_url}/chat/completions", json=body, raise_for_status=True) as reply:
                said = (await reply.json())["choices"][0]["message"]
            messages += [said, {"role": "user", "content": "Are you sure?"}]
    return {"reward": float(str(metadata["label"]) in said["content"]), "metadata": {"turns": 2}}
