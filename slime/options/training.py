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
    *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "fine_grained_activation_offloading"),
    *("batch_invariant_mode", "qk_clip", "log_max_attention_logit", "symmetric_ar_type"),
    *("moe_enable_routing_replay", "log_num_zeros_in_grad", "fp32_residual_connection"),
    *(
        "overlap_param_gather_with_optimizer_step",
        "enable_cuda_graph",
        "cuda_graph_impl",
        "use_kitchen",
        "test_mode",
        "num_distributed_optimizer_instances",
    ),
)
"""Settings that scripts may name, and that must stay off or 0: the model here goes without them, or, as with auxiliary
losses, Megatron scales them by token counts by which gradients are not divided here."""
_OFF = {"cuda_graph_impl": "none", "num_distributed_optimizer_instances": 1}
"""Which value of a setting is none, where it is another one."""
_NOT_WITH_TRANSFORMER_ENGINE = ("lora_rank", "tp_comm_overlap", "init_model_with_meta_device")
"""Without it the last two do nothing; its layers would obey them, and lack what they need for it."""
_IN_FLOAT32 = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""What only Transformer Engine's optimizer has in other types."""
_OF_OFFLOAD = {
    "overlap_cpu_optimizer_d2h_h2d": "--overlap-cpu-optimizer-d2h-h2d",
    "optimizer_offload_fraction": "--optimizer-offload-fraction",
    "pin_cpu_params": "--no-pin-cpu-params",
    "pin_cpu_grads": "--no-pin-cpu-grads",
}
"""Settings of the optimizer in host memory. Gradients need none there: they stay in the device's buffers."""


def check_training(args: Namespace, given: set[str]) -> None:
    """Choose the distributed optimizer where the user did not, and refuse what cannot be trained with.

    Raises:
        OptionError: an optimizer or a schedule that cannot be, or a feature that the trainer does not have.
    """
    for name in _NOT_COMPUTED:
        value = getattr(args, name)
        is_on = any(value) if isinstance(value, list) else value
        if is_on and value != _OFF.get(name):
            flag = flag_named(name)
            values = value if isinstance(value, list) else [value]
            shown = flag if value is True else " ".join(map(str, (flag, *values)))
            raise OptionError(f"{shown} is not available yet in this version")
    if args.transformer_impl == "transformer_engine" and args.placement != "rollout_only":
        _check_transformer_engine(args)
        if "attention_backend" not in given:
            args.attention_backend = "fused"  # by "auto" it may quietly compute whole matrices of scores
    elif args.cpu_offloading:
        raise OptionError("--cpu-offloading needs --transformer-impl transformer_engine")
    _check_optimizer(args, given)
    _check_weight_decay(args)
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
        import_transformer_engine()
    except ImportError as error:
        raise OptionError(f"{flag}: it cannot be imported ({error}): install it as docs/install.md says") from error


def import_transformer_engine() -> None:
    """Import what Transformer Engine has for torch.

    Raises:
        ImportError: whatever came of it, in one line: packages that are missing, or do not fit together, end in many
            ways.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ImportError(f"{type(error).__name__}: {lines[0]}" if lines else repr(error)) from error


def _check_optimizer(args: Namespace, given: set[str]) -> None:
    if asked := [f"{flag_named(name)} {value}" for name in _IN_FLOAT32 if (value := getattr(args, name)) != "fp32"]:
        raise OptionError(
            f"{', '.join(asked)}: the optimizer is torch's and keeps all in float32 (fp32), with "
            "--use-precision-aware-optimizer too; --optimizer-cpu-offload is what saves device memory"
        )
    if not args.optimizer_cpu_offload and (unused := [flag for name, flag in _OF_OFFLOAD.items() if name in given]):
        raise OptionError(f"{', '.join(unused)} has no effect without --optimizer-cpu-offload")
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


def weight_decays(args: Namespace) -> tuple[float, float]:
    """Weight decay of the first and of the last step."""
    given = (args.start_weight_decay, args.end_weight_decay)
    start, end = (args.weight_decay if value is None else value for value in given)
    return start, end


def _check_weight_decay(args: Namespace) -> None:
    start, end = weight_decays(args)
    style = f"--weight-decay-incr-style {args.weight_decay_incr_style}"
    shown = f"--start-weight-decay {start} and --end-weight-decay {end} (--weight-decay where not given)"
    if not 0 <= start <= end:
        raise OptionError(f"{shown}: weight decay is at least 0 and does not fall")
    if args.weight_decay_incr_style == "constant" and start != end:
        raise OptionError(f"{shown} differ, which {style} (default) does not allow: use linear or cosine")
    if args.weight_decay_incr_style != "constant" and start == end:
        raise OptionError(f"{style}: {shown} are the same; set them, or drop it")


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
        OptionError: a warm-up that is not shorter than the decay, or a last part of WSD that begins within it.
    """
    if args.num_rollout == 0:
        return 0, 1
    decay = args.lr_decay_iters or (args.num_rollout - args.num_critic_only_steps) * args.num_steps_per_rollout
    warmup = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * decay)
    steps = f"{decay} (--lr-decay-iters, else --num-rollout, less --num-critic-only-steps, x --num-steps-per-rollout)"
    if not 0 <= warmup < decay:
        flag = "--lr-warmup-iters" if args.lr_warmup_fraction is None else "--lr-warmup-fraction"
        raise OptionError(
            f"{flag} {warmup if args.lr_warmup_fraction is None else args.lr_warmup_fraction}: the learning rate would "
            f"warm up for {warmup} optimizer steps of {steps}"
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters > decay - warmup:
        raise OptionError(
            f"--lr-wsd-decay-iters {args.lr_wsd_decay_iters}: there are {decay - warmup} optimizer steps after the "
            f"warm-up, of {steps}"
        )
    return warmup, decay
