"""What is optimised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.options.calls import Call
from slime.options.schema import LARGEST_SEED, option

Level = Literal["token", "sequence", "geometric"]


@dataclass
class AlgorithmOptions:
    """Algorithm: advantages, loss and its terms."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = option(
        "policy_loss", "Policy gradient, supervised loss, or --custom-loss-function-path."
    )
    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = option("grpo", "How rewards become advantages, and which ratio and clipping the policy loss has.")
    disable_compute_advantages_and_returns: bool = option(False, "No advantages; what --loss-type sft_loss implies.")
    eps_clip: float = option(0.2, "The probability ratio is clipped below at 1 minus this.", at_least=0, at_most=1)
    eps_clip_high: float | None = option(
        None, "The probability ratio is clipped above at 1 plus this; default --eps-clip.", at_least=0
    )
    eps_clip_c: float | None = option(None, "Dual clip: bound of the loss of negative advantages.", above=1)
    use_kl_loss: bool = option(False, "Measure the KL divergence to the reference model, and add it to the loss.")
    kl_loss_coef: float = option(0.0, "Weight of the KL divergence in the loss; 0 only measures it.", at_least=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option(
        "k1",
        "Estimator of the KL divergence; as a loss, k1 has no gradient in the mean on policy: with --kl-loss-coef take "
        "k2, or low_var_kl.",
    )
    use_unbiased_kl: bool = option(False, "Weigh the KL loss by the probability ratio to the behaviour policy.")
    kl_coef: float = option(
        0.0,
        "Weight of a KL penalty in the token rewards, of actor and critic alike; by the estimator --kl-loss-type.",
        at_least=0,
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")
    gamma: float = option(1.0, "Discount per token, of reinforce_plus_plus and ppo.", at_least=0, at_most=1)
    lambd: float = option(1.0, "Decay of generalised advantage estimation, of ppo.", at_least=0, at_most=1)
    normalize_advantages: bool = option(False, "Whiten advantages over all tokens of a rollout.")
    disable_grpo_std_normalization: bool = option(False, "Do not divide by the group's standard deviation.")
    disable_rewards_normalization: bool = option(False, "Do not subtract the group's mean.")
    overlong_buffer_len: int | None = option(
        None,
        "Tokens before --rollout-max-response-len in which a response's reward falls, by --overlong-penalty-factor at "
        "the end (soft overlong punishment of DAPO).",
        at_least=1,
    )
    overlong_penalty_factor: float = option(1.0, "Penalty on the reward of a response of the maximum length.", above=0)
    calculate_per_token_loss: bool = option(
        False, "Average over all tokens of a step, instead of over each response and then over responses."
    )
    loss_constant_length: int | None = option(
        None, "Divide the token sum of each response by this, not by its own length (Dr. GRPO).", at_least=1
    )
    log_probs_chunk_size: int = option(
        1024, "Tokens whose logits exist at a time; smaller takes less memory.", at_least=1
    )
    custom_reward_post_process_path: str | None = option(
        None,
        "Function (args, samples) -> (raw rewards, rewards) instead of normalisation within groups.",
        hook=("post_process_rewards", "reward_post_process"),
        call=(Call("args, samples", "tuple[list[float], list[float]]"),),
    )
    custom_advantage_function_path: str | None = option(
        None,
        "Function (args, rollout_data) that sets its lists advantages and returns, instead of the estimator; it sees "
        "one data-parallel rank's samples, so statistics over groups belong into --custom-reward-post-process-path.",
        hook=("compute_advantages", "advantage_function"),
        call=(Call("args, rollout_data", "None"),),
    )
    custom_loss_function_path: str | None = option(
        None,
        "Function (args, batch, logits, sum_of_sample_mean) -> (loss, metrics), of --loss-type custom_loss; logits are "
        "None where its attribute needs_logits is False.",
        hook=("loss_function", "custom_loss"),
        call=(Call("args, batch, logits, sum_of_sample_mean", "tuple[Tensor, dict[str, Tensor]]"),),
    )
    custom_pg_loss_reducer_function_path: str | None = option(
        None,
        "Function (total_lengths, response_lengths, loss_masks, calculate_per_token_loss) that returns the reduction "
        "of the policy loss's tokens.",
        hook=("get_pg_loss_reducer", "pg_loss_reducer"),
        call=(
            Call("total_lengths, response_lengths, loss_masks, calculate_per_token_loss", "Callable[[Tensor], Tensor]"),
        ),
    )
    enable_mtp_training: bool = option(
        False,
        "Train the heads that predict further tokens (MTP) too, --mtp-num-layers of them (default: what config.json "
        "says), with weight --mtp-loss-scaling-factor; their loss changes nothing else.",
    )
    seed: int = option(
        1234, "Seed of model initialisation and of the training workers.", at_least=0, at_most=LARGEST_SEED
    )


@dataclass
class CorrectionOptions:
    """Off-policy correction: where the engine's probabilities, or older weights, differ from the trainer's."""

    use_rollout_logprobs: bool = option(False, "The behaviour policy's log-probs are the engine's.")
    use_tis: bool = option(False, "Weigh the policy loss by the ratio of the trainer's and engine's probabilities.")
    tis_level: Level = option("token", "The ratio of each token, of its sequence, or its geometric mean over it.")
    tis_mode: Literal["truncate", "clip", "mask"] = option(
        "clip",
        "Ratios outside the bounds are limited above only (truncate), limited on both sides (clip), or set to "
        "0 (mask; with level token: IcePop).",
    )
    tis_clip: float = option(2.0, "Upper bound of the ratio.", above=0, aliases=("--tis-threshold",))
    tis_clip_low: float = option(0.0, "Lower bound of the ratio.", at_least=0)
    use_rs: bool = option(False, "Rejection sampling: leave out tokens or sequences whose ratio is out of bounds.")
    rs_level: Level = option(
        "geometric", "Judge each token by its own ratio, or a whole sequence by its ratio or by the geometric mean."
    )
    rs_upper_bound: float = option(2.0, "Largest ratio that is kept.", above=0)
    rs_lower_bound: float = option(0.5, "Smallest ratio that is kept.", at_least=0)
    rs_veto_threshold: float | None = option(
        None, "Leave out a sequence if any of its tokens has a smaller ratio.", above=0
    )
    custom_tis_function_path: str | None = option(
        None,
        "Function (args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths) "
        "-> (pg_loss, loss_masks, metrics) instead, with --use-tis.",
        hook=("tis_function", "custom_tis"),
        call=(
            Call(
                "args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths",
                "tuple[Tensor, list[Tensor], dict[str, Tensor]]",
            ),
        ),
    )
    use_opsm: bool = option(False, "Leave out sequences of negative advantage that have become unlikely.")
    opsm_delta: float = option(1e-4, "How much the mean log-prob may have fallen, for --use-opsm.")
    mismatch_threshold: float = option(
        0.1, "Warn when the trainer's and the engine's log-probs differ by more than this in the mean.", above=0
    )
    stop_on_mismatch: bool = option(False, "Stop the run instead of warning.")


@dataclass
class CriticOptions:
    """Critic: the value model of --advantage-estimator ppo, on the actor's slots and in its layout."""

    value_clip: float = option(0.2, "Clip a new value to within this distance of the old one.", at_least=0)
    num_critic_only_steps: int = option(0, "Rollouts at the start that train the critic only.", at_least=0)
    critic_lr: float | None = option(None, "Learning rate; default --lr.", above=0)
    critic_lr_warmup_iters: int | None = option(None, "Warm-up in optimizer steps; default as the actor's.", at_least=0)
    critic_load: str | None = option(
        None,
        "Checkpoints to resume from, default --load/critic; if given, a run that does not resume starts from the "
        "model or latest checkpoint in it.",
    )
    critic_save: str | None = option(None, "Directory for checkpoints; default --save/critic.")
