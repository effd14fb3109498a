"""Which options of an algorithm go together."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import fields

from slime.options.algorithm import AlgorithmOptions, CorrectionOptions
from slime.options.checkpoint import same_place
from slime.options.errors import OptionError
from slime.options.rollout import DEFAULT_ROLLOUT, SFT_ROLLOUT
from slime.options.schema import flag_named

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


def derive_algorithm(args: Namespace) -> None:
    """Fill in what an algorithm implies and refuse what does not go together.

    Raises:
        OptionError: naming the flags.
    """
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    args.use_critic = args.loss_type == "policy_loss" and args.advantage_estimator == "ppo"
    args.reward_baseline = None if args.disable_rewards_normalization else BASELINES.get(args.advantage_estimator)
    args.reward_std = args.advantage_estimator in DIVIDED_BY_STD and not args.disable_grpo_std_normalization
    args.needs_reference = args.loss_type != "sft_loss" and (args.use_kl_loss or args.kl_coef > 0)
    _check_loss(args)
    _check_overlong(args)
    _check_correction(args)
    _derive_critic(args)
    if args.loss_type == "sft_loss":
        args.disable_compute_advantages_and_returns = True
        if args.rollout_function_path == DEFAULT_ROLLOUT:
            args.rollout_function_path = SFT_ROLLOUT
        return
    _check_estimator(args)


def _check_loss(args: Namespace) -> None:
    if args.kl_loss_coef and not args.use_kl_loss:
        raise OptionError(f"--kl-loss-coef {args.kl_loss_coef} has no effect without --use-kl-loss")
    if args.loss_type == "sft_loss":
        for name in ("kl_loss_coef", "kl_coef", "entropy_coef"):
            if value := getattr(args, name):
                raise OptionError(f"{flag_named(name)} {value} has no effect with --loss-type sft_loss: drop it")
    if args.use_unbiased_kl and not args.use_kl_loss:
        raise OptionError("--use-unbiased-kl has no effect without --use-kl-loss")
    if args.loss_constant_length is not None and args.calculate_per_token_loss:
        raise OptionError("--loss-constant-length and --calculate-per-token-loss exclude each other")
    if (args.loss_type == "custom_loss") != (args.custom_loss_function_path is not None):
        raise OptionError("--loss-type custom_loss and --custom-loss-function-path belong together")
    if args.disable_compute_advantages_and_returns and args.loss_type == "policy_loss":
        raise OptionError("--disable-compute-advantages-and-returns leaves --loss-type policy_loss nothing to train")
    computes = args.custom_advantage_function_path is None and not args.disable_compute_advantages_and_returns
    if args.loss_type == "custom_loss" and args.advantage_estimator == "ppo" and computes:
        raise OptionError(
            "--loss-type custom_loss trains no critic, whose values --advantage-estimator ppo needs: take another "
            "estimator, --custom-advantage-function-path, or --disable-compute-advantages-and-returns"
        )
    if args.eps_clip_c is not None and args.advantage_estimator == "cispo":
        raise OptionError("--eps-clip-c has no effect with --advantage-estimator cispo, which has no dual clip")
    if args.custom_pg_loss_reducer_function_path is not None and args.loss_type != "policy_loss":
        raise OptionError("--custom-pg-loss-reducer-function-path has no effect without --loss-type policy_loss")
    if args.custom_pg_loss_reducer_function_path is not None and args.loss_constant_length is not None:
        raise OptionError(
            "--loss-constant-length would divide KL and entropy, and not what --custom-pg-loss-reducer-function-path "
            "makes of the policy loss: let the function divide, and drop the flag"
        )


def _check_overlong(args: Namespace) -> None:
    buffer, factor = args.overlong_buffer_len, args.overlong_penalty_factor
    if buffer is None:
        if factor != AlgorithmOptions.overlong_penalty_factor:
            raise OptionError(f"--overlong-penalty-factor {factor:g} has no effect without --overlong-buffer-len")
        return
    flag = f"--overlong-buffer-len {buffer}"
    if args.rollout_max_response_len is None:
        raise OptionError(f"{flag} ends at --rollout-max-response-len, which is missing")
    if buffer > args.rollout_max_response_len:
        raise OptionError(f"{flag} is more than --rollout-max-response-len {args.rollout_max_response_len}")
    if args.loss_type == "sft_loss":
        raise OptionError(f"{flag} has no effect with --loss-type sft_loss, which has no rewards: drop it")
    for name in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        if getattr(args, name) is not None:
            raise OptionError(
                f"{flag} has no effect with {flag_named(name)}, which makes the rewards: drop one of them"
            )


def _check_estimator(args: Namespace) -> None:
    estimator = args.advantage_estimator
    replaced = args.custom_advantage_function_path or args.custom_reward_post_process_path
    if args.n_samples_per_prompt == 1 and args.reward_baseline and not args.debug_rollout_only and not replaced:
        raise OptionError(
            f"--n-samples-per-prompt 1 leaves --advantage-estimator {estimator} nothing to compare a response with: "
            "use 2 or more, or --disable-rewards-normalization for rewards as they are"
        )
    if estimator in WHITENED and not args.normalize_advantages and args.custom_advantage_function_path is None:
        raise OptionError(
            f"--advantage-estimator {estimator} is defined with whitened advantages: add --normalize-advantages"
        )


def _check_correction(args: Namespace) -> None:
    for name in ("use_rollout_logprobs", "use_tis", "use_rs", "use_opsm"):
        if getattr(args, name) and args.loss_type != "policy_loss":
            flag = flag_named(name)
            raise OptionError(f"{flag} has no effect without --loss-type policy_loss")
    if args.use_rollout_logprobs:
        for name in ("use_tis", "use_rs"):
            if getattr(args, name):
                flag = flag_named(name)
                raise OptionError(
                    f"--use-rollout-logprobs makes the engine's log-probs the behaviour policy's, which leaves {flag} "
                    "nothing to do: drop one of them"
                )
    _check_settings(args)
    if args.tis_mode == "truncate" and args.tis_clip_low > 0 and args.custom_tis_function_path is None:
        raise OptionError(
            f"--tis-clip-low {args.tis_clip_low} has no effect with --tis-mode truncate, which has an upper "
            "bound alone: use --tis-mode clip for both"
        )
    for low, high in (("tis_clip_low", "tis_clip"), ("rs_lower_bound", "rs_upper_bound")):
        if getattr(args, low) > getattr(args, high):
            flags = [f"{flag_named(name)} {getattr(args, name)}" for name in (low, high)]
            raise OptionError(f"{flags[0]} is above {flags[1]}")


def _check_settings(args: Namespace) -> None:
    """Refuse settings of a correction that is not made, or that a user's function makes."""
    defaults = {field.name: field.default for field in fields(CorrectionOptions)}
    for name, default in defaults.items():
        prefix = name.split("_")[0]
        switch = "use_tis" if name == "custom_tis_function_path" else f"use_{prefix}"
        if switch not in defaults or getattr(args, name) == default:
            continue
        flag = flag_named(name)
        if not getattr(args, switch):
            raise OptionError(f"{flag} has no effect without {flag_named(switch)}")


def _derive_critic(args: Namespace) -> None:
    """Where the critic's checkpoints are: beside the actor's, never among them."""
    for name in ("critic_lr", "critic_lr_warmup_iters", "critic_load", "critic_save", "num_critic_only_steps"):
        if getattr(args, name) and not args.use_critic:
            flag = flag_named(name)
            raise OptionError(f"{flag} has no effect: only --advantage-estimator ppo has a critic")
    args.critic_source = None
    if not args.use_critic:
        return
    if args.num_rollout and args.num_critic_only_steps >= args.num_rollout:
        raise OptionError(
            f"--num-critic-only-steps {args.num_critic_only_steps} leaves none of --num-rollout {args.num_rollout} "
            "to the actor"
        )
    given = args.critic_load
    for name, base in (("critic_load", args.load), ("critic_save", args.save)):
        path = getattr(args, name) or (base and os.path.join(base, "critic"))
        setattr(args, name, path and os.path.abspath(os.path.expanduser(path)))
    if same_place(args.critic_save, args.save):
        raise OptionError(f"--critic-save {args.critic_save} is --save: actor and critic would overwrite each other")
    args.critic_source = _critic_source(args) if given else None


def _critic_source(args: Namespace) -> str | None:
    """The critic that a run starts from which does not resume: that of a given ``--critic-load``.

    None where this run saves its own, to resume from: what is there without a checkpoint of the actor was left by a run
    that ended between its first checkpoint's two parts.
    """
    load, save = args.critic_load, args.critic_save
    if args.load is not None and same_place(load, save):
        return None
    if not os.path.isdir(load):
        raise OptionError(f"--critic-load {load}: there is no such directory")
    return str(load)
