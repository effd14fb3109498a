"""What is optimised."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Literal

from slime.files.checkpoints import same_place
from slime.options.errors import OptionError
from slime.options.flags.schema import LARGEST_SEED, function_path, option
from slime.options.rollout import DEFAULT_ROLLOUT, SFT_ROLLOUT
from slime.options.rules import Rule, check

Level = Literal["token", "sequence", "geometric"]

BASELINES = {
    "grpo": "mean",
    "gspo": "mean",
    "cispo": "mean",
    "rloo": "leave_one_out",
    "reinforce_plus_plus_baseline": "mean",
}
"""Estimators that compare a response with the others to its prompt, and with what of them."""
DIVIDED_BY_STD = ("grpo", "gspo", "cispo")
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose definition has the advantages whitened."""
PARAMETER_LISTS = {
    "only_train_params_name_list": "--only-train-params-name-list",
    "freeze_params_name_list": "--freeze-params-name-list",
}
"""Options that say by names which parameters are trained."""


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
    custom_reward_post_process_path: str | None = function_path(
        "(args, samples) -> tuple[list[float], list[float]]",
        ": raw rewards, and rewards, instead of normalisation within groups.",
        ("post_process_rewards", "reward_post_process"),
    )
    custom_advantage_function_path: str | None = function_path(
        "(args, rollout_data) -> None",
        " that sets its lists advantages and returns, instead of the estimator; it sees one data-parallel rank's "
        "samples, so statistics over groups belong into --custom-reward-post-process-path.",
        ("compute_advantages", "advantage_function"),
    )
    custom_loss_function_path: str | None = function_path(
        "(args, batch, logits, sum_of_sample_mean) -> tuple[Tensor, dict[str, Tensor]]",
        ": loss and metrics, of --loss-type custom_loss; logits are None where its attribute needs_logits is False.",
        ("loss_function", "custom_loss"),
    )
    custom_pg_loss_reducer_function_path: str | None = function_path(
        "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> Callable[[Tensor], Tensor]",
        ": the reduction of the policy loss's tokens.",
        ("get_pg_loss_reducer", "pg_loss_reducer"),
    )
    ref_update_interval: int | None = option(
        None, "After every so many rollouts, the reference model becomes the actor as it is then.", at_least=1
    )
    only_train_params_name_list: list[str] | None = option(
        None, "Regular expressions: parameters with one of them in their Megatron name are trained, and no others."
    )
    freeze_params_name_list: list[str] | None = option(
        None, "Regular expressions: parameters with one of them in their Megatron name are not trained."
    )
    enable_mtp_training: bool = option(
        False,
        "Train the multi-token prediction (MTP) heads too, --mtp-num-layers of them (default: what config.json "
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
    custom_tis_function_path: str | None = function_path(
        "(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths) -> "
        "tuple[Tensor, list[Tensor], dict[str, Tensor]]",
        ": pg_loss, loss_masks and metrics instead, with --use-tis.",
        ("tis_function", "custom_tis"),
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


RULES = (
    Rule("kl_loss_coef use_unbiased_kl", "has no effect without", "use_kl_loss"),
    Rule("kl_loss_coef kl_coef entropy_coef", "has no effect with", "loss_type=sft_loss", ": drop it"),
    Rule("ref_update_interval", "needs", "use_kl_loss kl_coef", ", which have a reference"),
    Rule("only_train_params_name_list", "and", "freeze_params_name_list", " exclude each other"),
    Rule(" ".join(PARAMETER_LISTS), "and", "lora_rank", " do not go together: beside adapters, nothing is trained"),
    Rule("loss_constant_length", "and", "calculate_per_token_loss", " exclude each other"),
    Rule("loss_type=custom_loss", "needs", "custom_loss_function_path"),
    Rule("custom_loss_function_path", "has no effect without", "loss_type=custom_loss"),
    Rule("disable_compute_advantages_and_returns", "leaves", "loss_type=policy_loss", " nothing to train"),
    Rule(
        "loss_type=custom_loss",
        "trains no critic, whose values",
        "advantage_estimator=ppo",
        " needs: take another estimator, --custom-advantage-function-path, or --disable-compute-advantages-and-returns",
        when="!custom_advantage_function_path !disable_compute_advantages_and_returns",
    ),
    Rule("eps_clip_c", "has no effect with", "advantage_estimator=cispo", ", which has no dual clip"),
    Rule(
        "custom_pg_loss_reducer_function_path use_rollout_logprobs use_tis use_rs use_opsm",
        "has no effect without",
        "loss_type=policy_loss",
    ),
    Rule(
        "loss_constant_length",
        "would divide KL and entropy, and not what",
        "custom_pg_loss_reducer_function_path",
        " makes of the policy loss: let the function divide, and drop the flag",
    ),
    Rule(
        f"overlong_penalty_factor!={AlgorithmOptions.overlong_penalty_factor}",
        "has no effect without",
        "overlong_buffer_len",
    ),
    Rule("overlong_buffer_len", "needs", "rollout_max_response_len", ", at which it ends"),
    Rule("overlong_buffer_len", "is more than", "rollout_max_response_len"),
    Rule("overlong_buffer_len", "has no effect with", "loss_type=sft_loss", ", which has no rewards: drop it"),
    Rule(
        "overlong_buffer_len",
        "has no effect with",
        "custom_reward_post_process_path custom_convert_samples_to_train_data_path",
        ", which makes the rewards: drop one of them",
    ),
    Rule(
        "n_samples_per_prompt=1",
        "leaves",
        f"advantage_estimator={'|'.join(BASELINES)}",
        " nothing to compare a response with: use 2 or more, or --disable-rewards-normalization for "
        "rewards as they are",
        when="loss_type!=sft_loss reward_baseline !debug_rollout_only "
        "!custom_advantage_function_path !custom_reward_post_process_path",
    ),
    Rule(
        f"advantage_estimator={'|'.join(WHITENED)}",
        "is defined with whitened advantages: add",
        "!normalize_advantages",
        when="loss_type!=sft_loss !custom_advantage_function_path",
    ),
    Rule(
        "use_rollout_logprobs",
        "makes the engine's log-probs the behaviour policy's, which leaves",
        "use_tis use_rs",
        " nothing to do: drop one of them",
    ),
    *(
        Rule(f"{field.name}!={field.default}", "has no effect without", f"use_{prefix}")
        for field in fields(CorrectionOptions)
        if (prefix := field.name.removeprefix("custom_").split("_")[0]) in ("tis", "rs", "opsm")
    ),
    Rule(
        "tis_clip_low",
        "has no effect with",
        "tis_mode=truncate",
        ", which has an upper bound alone: use --tis-mode clip for both",
        when="!custom_tis_function_path",
    ),
    Rule("tis_clip_low", "is above", "tis_clip"),
    Rule("rs_lower_bound", "is above", "rs_upper_bound"),
    Rule(
        "critic_lr critic_lr_warmup_iters critic_load critic_save num_critic_only_steps",
        "has no effect: only --advantage-estimator ppo has a critic",
        when="!use_critic",
    ),
)

CRITIC_ONLY = (
    Rule("num_critic_only_steps", "leaves none of", "num_rollout", " to the actor", when="use_critic num_rollout"),
)
"""Checked once more when the prompts of ``--num-epoch`` are counted."""


def derive_algorithm(args: Namespace) -> None:
    """Fill in what an algorithm implies; OptionError, naming the flags, for what does not go together."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    args.use_critic = args.loss_type == "policy_loss" and args.advantage_estimator == "ppo"
    args.reward_baseline = None if args.disable_rewards_normalization else BASELINES.get(args.advantage_estimator)
    args.reward_std = args.advantage_estimator in DIVIDED_BY_STD and not args.disable_grpo_std_normalization
    args.needs_reference = args.loss_type != "sft_loss" and (args.use_kl_loss or args.kl_coef > 0)
    args.critic_source = None
    _check_patterns(args)
    check(args, RULES)
    if args.use_critic:
        _derive_critic(args)
    if args.loss_type == "sft_loss":
        args.disable_compute_advantages_and_returns = True
        if args.rollout_function_path == DEFAULT_ROLLOUT:
            args.rollout_function_path = SFT_ROLLOUT


def _check_patterns(args: Namespace) -> None:
    for name, flag in PARAMETER_LISTS.items():
        for pattern in getattr(args, name) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise OptionError(f"{flag} {pattern}: it is no regular expression: {error}") from error


def trained_names(args: Namespace) -> dict[str, list[str]]:
    """What a checkpoint says of the parameters that its run trained: the options that were given; {} is all."""
    return {name: sorted(patterns) for name in PARAMETER_LISTS if (patterns := getattr(args, name))}


def _derive_critic(args: Namespace) -> None:
    """Where the critic's checkpoints are: beside the actor's, never among them.

    Sets ``critic_source``: the given ``--critic-load``, which a run starts from that does not resume. None where this
    run saves its own there, to resume from: what is there without a checkpoint of the actor was left by a run that
    ended between its first checkpoint's two parts.
    """
    check(args, CRITIC_ONLY)
    given = args.critic_load
    for name, base in (("critic_load", args.load), ("critic_save", args.save)):
        path = getattr(args, name) or (base and os.path.join(base, "critic"))
        setattr(args, name, path and os.path.abspath(os.path.expanduser(path)))
    load, save = args.critic_load, args.critic_save
    if same_place(save, args.save):
        raise OptionError(f"--critic-save {save} is --save: actor and critic would overwrite each other")
    if not given or (args.load is not None and same_place(load, save)):
        return
    if not os.path.isdir(load):
        raise OptionError(f"--critic-load {load}: there is no such directory")
    args.critic_source = load
