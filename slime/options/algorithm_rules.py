"""Which options of an algorithm go together."""

from __future__ import annotations

import os
from argparse import Namespace

from slime.options.errors import OptionError
from slime.options.rollout import DEFAULT_ROLLOUT, SFT_ROLLOUT

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
    if args.use_unbiased_kl and not args.use_kl_loss:
        raise OptionError("--use-unbiased-kl has no effect without --use-kl-loss")
    if args.loss_constant_length is not None and args.calculate_per_token_loss:
        raise OptionError("--loss-constant-length and --calculate-per-token-loss exclude each other")
    if (args.loss_type == "custom_loss") != (args.custom_loss_function_path is not None):
        raise OptionError("--loss-type custom_loss and --custom-loss-function-path belong together")
    if args.disable_compute_advantages_and_returns and args.loss_type == "policy_loss":
        raise OptionError("--disable-compute-advantages-and-returns leaves --loss-type policy_loss nothing to train")
    if args.eps_clip_c is not None and args.advantage_estimator == "cispo":
        raise OptionError("--eps-clip-c has no effect with --advantage-estimator cispo, which has no dual clip")
    if args.custom_pg_loss_reducer_function_path is not None and args.loss_type != "policy_loss":
        raise OptionError("--custom-pg-loss-reducer-function-path has no effect without --loss-type policy_loss")


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
            flag = "--" + name.replace("_", "-")
            raise OptionError(f"{flag} has no effect without --loss-type policy_loss")
    if args.keep_old_actor and args.loss_type == "sft_loss":
        raise OptionError("--keep-old-actor has no effect with --loss-type sft_loss")
    if args.use_rollout_logprobs:
        for name in ("use_tis", "use_rs", "keep_old_actor"):
            if getattr(args, name):
                flag = "--" + name.replace("_", "-")
                raise OptionError(
                    f"--use-rollout-logprobs makes the engine's log-probs the behaviour policy's, which leaves {flag} "
                    "nothing to do: drop one of them"
                )
    if args.custom_tis_function_path is not None and not args.use_tis:
        raise OptionError("--custom-tis-function-path has no effect without --use-tis")
    for low, high in (("tis_clip_low", "tis_clip"), ("rs_lower_bound", "rs_upper_bound")):
        if getattr(args, low) > getattr(args, high):
            flags = [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in (low, high)]
            raise OptionError(f"{flags[0]} is above {flags[1]}")


def _derive_critic(args: Namespace) -> None:
    """Where the critic's checkpoints are: beside the actor's, never among them."""
    for name in ("critic_lr", "critic_lr_warmup_iters", "critic_load", "critic_save", "num_critic_only_steps"):
        if getattr(args, name) and not args.use_critic:
            flag = "--" + name.replace("_", "-")
            raise OptionError(f"{flag} has no effect: only --advantage-estimator ppo has a critic")
    if not args.use_critic:
        return
    if args.num_rollout and args.num_critic_only_steps >= args.num_rollout:
        raise OptionError(
            f"--num-critic-only-steps {args.num_critic_only_steps} leaves none of --num-rollout {args.num_rollout} "
            "to the actor"
        )
    for name, base in (("critic_load", args.load), ("critic_save", args.save)):
        path = getattr(args, name) or (base and os.path.join(base, "critic"))
        setattr(args, name, path and os.path.abspath(os.path.expanduser(path)))
    if args.critic_save and args.save and os.path.realpath(args.critic_save) == os.path.realpath(args.save):
        raise OptionError(f"--critic-save {args.critic_save} is --save: actor and critic would overwrite each other")
