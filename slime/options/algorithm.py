"""What is optimised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.options.schema import option


@dataclass
class AlgorithmOptions:
    """Algorithm: advantages, loss and its terms."""

    loss_type: Literal["policy_loss", "sft_loss"] = option("policy_loss", "Policy gradient or supervised loss.")
    advantage_estimator: Literal["grpo"] = option("grpo", "How rewards become advantages.")
    disable_compute_advantages_and_returns: bool = option(False, "No advantages; what --loss-type sft_loss implies.")
    eps_clip: float = option(0.2, "The probability ratio is clipped below at 1 minus this.", at_least=0)
    eps_clip_high: float | None = option(None, "... and above at 1 plus this; default --eps-clip.", at_least=0)
    eps_clip_c: float | None = option(None, "Dual clip: bound of the loss of negative advantages.", above=1)
    use_kl_loss: bool = option(False, "Measure the KL divergence to the reference model, and add it to the loss.")
    kl_loss_coef: float = option(0.0, "Weight of the KL divergence in the loss; 0 only measures it.", at_least=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option("k1", "Estimator of the KL divergence.")
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")
    disable_grpo_std_normalization: bool = option(False, "Do not divide by the group's standard deviation.")
    disable_rewards_normalization: bool = option(False, "Do not subtract the group's mean.")
    custom_reward_post_process_path: str | None = option(
        None,
        "Function (args, samples) -> (raw rewards, rewards) instead of normalisation within groups.",
        hook=("post_process_rewards", "reward_post_process"),
    )
    calculate_per_token_loss: bool = option(
        False, "Average over all tokens of a step, instead of over each response and then over responses."
    )
    seed: int = option(1234, "Seed of model initialisation and of the training workers.")
