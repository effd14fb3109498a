"""Optimizer and schedule of the trainer, and what Megatron's flags offer that it would not do."""

from __future__ import annotations

import importlib
from argparse import Namespace

from slime.options.errors import OptionError
from slime.options.learning.algorithm import CRITIC_ONLY
from slime.options.rules import Rule, check

RULES = (
    # The model here goes without them, or, as with auxiliary losses, Megatron scales them by token counts by which
    # gradients are not divided here.
    Rule(
        """
        apply_layernorm_1p enable_experimental attention_dropout hidden_dropout moe_aux_loss_coeff moe_z_loss_coeff
        overlap_moe_expert_parallel_comm delay_wgrad_compute fine_grained_activation_offloading batch_invariant_mode
        qk_clip log_max_attention_logit symmetric_ar_type moe_enable_routing_replay log_num_zeros_in_grad
        fp32_residual_connection overlap_param_gather_with_optimizer_step enable_cuda_graph cuda_graph_impl!=none|None
        use_kitchen test_mode num_distributed_optimizer_instances>1
        """,
        "is not available yet in this version",
    ),
    Rule("cpu_offloading", "needs", "transformer_impl=transformer_engine"),
    Rule(
        "transformer_impl=transformer_engine",
        "does not go with",
        "precision=float32",
        ", in which its attention does not compute: drop one",
    ),
    # Without it the last two do nothing; its layers would obey them, and lack what they need for it.
    Rule(
        "transformer_impl=transformer_engine",
        "does not go with",
        "multi_latent_attention lora_rank tp_comm_overlap init_model_with_meta_device",
        ": drop one",
    ),
    # Only Transformer Engine's optimizer has these in other types.
    Rule(
        "main_grads_dtype!=fp32 main_params_dtype!=fp32 exp_avg_dtype!=fp32 exp_avg_sq_dtype!=fp32",
        ": the optimizer is torch's and keeps all in float32 (fp32), with --use-precision-aware-optimizer too; "
        "--optimizer-cpu-offload is what saves device memory",
    ),
    # Gradients need no settings in host memory: they stay in the device's buffers.
    Rule(
        "@overlap_cpu_optimizer_d2h_h2d @optimizer_offload_fraction @pin_cpu_params @pin_cpu_grads",
        "has no effect without",
        "optimizer_cpu_offload",
    ),
    Rule("optimizer!=adam|sgd", ": there are adam and sgd"),
    Rule(
        "optimizer!=adam", "cannot be distributed: drop", "use_distributed_optimizer", when="@use_distributed_optimizer"
    ),
    Rule("lr_warmup_fraction!=None", "and", "lr_warmup_iters", " exclude each other"),
    Rule("min_lr lr_warmup_init", "is above", "lr"),
    Rule("min_lr lr_warmup_init", "is above", "critic_lr", when="use_critic"),
    Rule("lr_decay_style=WSD", "needs", "lr_wsd_decay_iters"),
)


def check_training(args: Namespace) -> None:
    """Choose the distributed optimizer where the user did not; OptionError for what cannot be trained with."""
    check(args, RULES)
    if args.transformer_impl == "transformer_engine":
        try:
            import_transformer_engine()
        except ImportError as error:
            raise OptionError(
                f"--transformer-impl transformer_engine: it cannot be imported ({error}): install it as "
                "docs/install.md says"
            ) from error
        if "attention_backend" not in args.given_options:
            args.attention_backend = "fused"  # by "auto" it may quietly compute whole matrices of scores
    args.use_distributed_optimizer &= args.optimizer == "adam"
    _check_weight_decay(args)
    if args.num_rollout is not None or args.lr_decay_iters is not None:
        check_schedule(args)


def import_transformer_engine() -> None:
    """Import what Transformer Engine has for torch; ImportError, in one line, for the many ways in which that fails."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ImportError(f"{type(error).__name__}: {lines[0]}" if lines else repr(error)) from error


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


def check_schedule(args: Namespace) -> None:
    """What ``--num-epoch`` leaves open until the prompts are counted and ``num_rollout`` is set; or OptionError."""
    if args.placement == "rollout_only":
        return
    check(args, CRITIC_ONLY)
    for trained in (args, critic_options(args)) if args.use_critic else (args,):
        warmup_and_decay_steps(trained)


def warmup_and_decay_steps(args: Namespace) -> tuple[int, int]:
    """Optimizer steps of the learning rate's warm-up, and those until its decay ends, warm-up included; or OptionError.

    With ``--num-epoch`` and no ``--lr-decay-iters`` they are known once the prompts are counted.
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


def micro_batch_multiple(args: Namespace) -> int:
    """Megatron's interleaved schedule takes micro-batches in groups of this many."""
    if args.virtual_pipeline_model_parallel_size is None:
        return 1
    return int(args.microbatch_group_size_per_virtual_pipeline_stage or args.pipeline_model_parallel_size)
