"""Optimizer and schedule of the trainer, and what Megatron's flags offer that it would not do."""

from __future__ import annotations

import importlib
from argparse import Namespace

from slime.options.errors import OptionError
from slime.options.schema import flag_named

OPTIMIZERS = ("adam", "sgd")

_NOT_COMPUTED = (
    *("apply_layernorm_1p", "enable_experimental"),
    *("attention_dropout", "hidden_dropout", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
)
"""Settings that model scripts may name, and that must stay off or 0: the model here goes without them, or, as with
auxiliary losses, Megatron scales them by token counts by which gradients are not divided here."""


_NOT_WITH_TRANSFORMER_ENGINE = ("lora_rank", "tp_comm_overlap", "symmetric_ar_type", "init_model_with_meta_device")
"""Without it the last three do nothing; its layers would obey them, and lack what they need for it."""


def check_training(args: Namespace, given: set[str]) -> None:
    """Choose the distributed optimizer where the user did not, and refuse what cannot be trained with.

    Raises:
        OptionError: an optimizer or a schedule that cannot be, or a feature that the trainer does not have.
    """
    for name in _NOT_COMPUTED:
        value = getattr(args, name)
        if any(value) if isinstance(value, list) else value:
            flag = flag_named(name)
            shown = flag if value is True else f"{flag} {value}"
            raise OptionError(f"{shown} is not available yet in this version")
    if args.transformer_impl == "transformer_engine" and args.placement != "rollout_only":
        _check_transformer_engine(args)
        if "attention_backend" not in given:
            args.attention_backend = "fused"  # by "auto" it may quietly compute whole matrices of scores
    _check_optimizer(args, given)
    _check_learning_rate(args)
    if args.use_critic:
        _check_learning_rate(critic_options(args), "critic-")


def _check_transformer_engine(args: Namespace) -> None:
    flag = "--transformer-impl transformer_engine"
    refused = {
        "float32, in which its attention does not compute": args.params_dtype == "float32",
        "multi-latent attention": args.multi_latent_attention,
        **{flag_named(name): getattr(args, name) for name in _NOT_WITH_TRANSFORMER_ENGINE},
    }
    if asked := [what for what, is_asked in refused.items() if is_asked]:
        raise OptionError(f"{flag} does not go with {asked[0]}: drop one")
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # packages of it that are missing, or do not fit together, end in many ways
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error) else repr(error)
        raise OptionError(f"{flag}: it cannot be imported ({reason}): install it as docs/install.md says") from error


def _check_optimizer(args: Namespace, given: set[str]) -> None:
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if getattr(args, name):
            raise OptionError(
                f"{flag_named(name)} is not available yet in this version: the optimizer is torch's, on the GPU and in "
                "float32; with --colocate its state is in host memory while engines generate"
            )
    if args.optimizer not in OPTIMIZERS:
        raise OptionError(f"--optimizer {args.optimizer}: there are {' and '.join(OPTIMIZERS)}")
    if args.optimizer != "adam":
        if args.use_distributed_optimizer and "use_distributed_optimizer" in given:
            raise OptionError(f"--optimizer {args.optimizer} cannot be distributed: drop --use-distributed-optimizer")
        args.use_distributed_optimizer = False


def critic_options(args: Namespace) -> Namespace:
    """``args`` as the critic reads them: with its own learning rate and warm-up, and trained by every rollout."""
    own = Namespace(**vars(args))
    own.num_critic_only_steps = 0
    own.lr = args.lr if args.critic_lr is None else args.critic_lr
    if args.critic_lr_warmup_iters is not None:
        own.lr_warmup_iters, own.lr_warmup_fraction = args.critic_lr_warmup_iters, None
    return own


def _check_learning_rate(args: Namespace, role: str = "") -> None:
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        raise OptionError("--lr-warmup-fraction and --lr-warmup-iters exclude each other")
    for flag, rate in (("--min-lr", args.min_lr), ("--lr-warmup-init", args.lr_warmup_init)):
        if rate > args.lr:
            raise OptionError(f"{flag} {rate} is above --{role}lr {args.lr}")
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise OptionError("--lr-decay-style WSD needs --lr-wsd-decay-iters")
    if args.num_rollout is not None or args.lr_decay_iters is not None:
        warmup_and_decay_steps(args)


def warmup_and_decay_steps(args: Namespace) -> tuple[int, int]:
    """Optimizer steps of the learning rate's warm-up, and those until its decay ends, warm-up included.

    With ``--num-epoch`` and no ``--lr-decay-iters`` they are known once the prompts are counted.

    Raises:
        OptionError: a warm-up that is not shorter than the decay.
    """
    if args.num_rollout == 0:
        return 0, 1
    decay = args.lr_decay_iters or (args.num_rollout - args.num_critic_only_steps) * args.num_steps_per_rollout
    warmup = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * decay)
    if warmup >= decay:
        flag = "--lr-warmup-iters" if args.lr_warmup_fraction is None else "--lr-warmup-fraction"
        raise OptionError(
            f"{flag} {warmup if args.lr_warmup_fraction is None else args.lr_warmup_fraction}: the learning rate would "
            f"warm up for {warmup} optimizer steps of {decay} (--lr-decay-iters, else --num-rollout, "
            "less --num-critic-only-steps, x --num-steps-per-rollout)"
        )
    return warmup, decay
