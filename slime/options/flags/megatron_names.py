"""Megatron-LM's flags that no dataclass of megatron-core declares, or that rename, invert or extend a field.

This is the one such table; every other Megatron flag is made from a dataclass field by `slime.options.flags.megatron`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.options.flags.patterns import layer_pattern
from slime.options.flags.schema import flag_named


@dataclass(frozen=True)
class Flag:
    """One flag: the attribute that it sets, and how.

    ``const`` makes it a switch that sets this value.
    """

    name: str
    dest: str
    help: str
    convert: Callable[[str], Any] = str
    const: Any = None
    default: Any = None
    choices: tuple[Any, ...] | None = None


def _flag(name: str, help: str, convert: Callable[[str], Any] = str, dest: str = "", **kwargs: Any) -> Flag:
    return Flag(name, dest or name[2:].replace("-", "_"), help, convert, **kwargs)


def _choice(name: str, help: str, choices: str, default: str | None = None, dest: str = "") -> Flag:
    return _flag(name, help, dest=dest, choices=tuple(choices.split()), default=default)


def _switch(name: str, help: str, dest: str = "", const: Any = True, default: Any = False, **kwargs: Any) -> Flag:
    return _flag(name, help, dest=dest, const=const, default=default, **kwargs)


FLAGS: tuple[Flag, ...] = (
    # Shape. What is not given comes from config.json; what is given must agree with it.
    _flag("--num-experts", "Experts of a mixture-of-experts layer.", int),
    _flag("--norm-epsilon", "Epsilon of the norms.", float, default=1e-5),
    _flag("--max-position-embeddings", "Longest sequence of the model.", int),
    _flag("--vocab-size", "Vocabulary size before padding.", int),
    _flag("--padded-vocab-size", "Vocabulary size of the trained model.", int),
    _flag(
        "--make-vocab-size-divisible-by",
        "The vocabulary is padded to a multiple of this times the tensor-parallel size.",
        int,
        default=128,
    ),
    _choice("--position-embedding-type", "Kind of position embedding.", "rope yarn none", "rope"),
    _switch(
        "--use-rotary-position-embeddings",
        "The same as --position-embedding-type rope.",
        "position_embedding_type",
        const="rope",
        default="rope",
    ),
    _flag("--rotary-seq-len-interpolation-factor", "Linear scaling of rotary positions.", float),
    _switch("--use-rope-scaling", "Llama 3.1's scaling of rotary frequencies."),
    _flag("--rope-scaling-factor", "Its factor.", float, default=8.0),
    _switch("--swiglu", "Gated MLP with SiLU."),
    _switch("--disable-bias-linear", "No biases in linear layers.", "add_bias_linear", const=False, default=True),
    _switch("--untie-embeddings-and-output-weights", "The output layer has weights of its own."),
    _switch("--group-query-attention", "Fewer key/value heads than query heads."),
    _switch("--apply-layernorm-1p", "Norm weights are stored minus one."),
    _switch("--use-gated-attention", "The same as --attention-output-gate.", "attention_output_gate"),
    _switch("--post-self-attn-layernorm", "A norm after attention (GLM-4)."),
    _switch("--post-mlp-layernorm", "A norm after the MLP (GLM-4)."),
    *(
        _flag(flag_named(name), f"{help}: N, or a list such as [0]*3+[1]*89.", layer_pattern)
        for name, help in (
            ("moe_layer_freq", "Which layers have experts"),
            ("linear_attention_freq", "Which layers have linear attention"),
            ("no_rope_freq", "Which layers have no rotary embedding"),
        )
    ),
    # Names of layouts and switches that a field has under another name or the other way round.
    _flag("--num-layers-per-virtual-pipeline-stage", "Layers of one chunk of the interleaved pipeline.", int),
    _flag(
        "--num-virtual-stages-per-pipeline-rank",
        "Chunks of the interleaved pipeline per rank.",
        int,
        dest="virtual_pipeline_model_parallel_size",
    ),
    _flag("--decoder-first-pipeline-num-layers", "Layers of the first pipeline stage.", int),
    _flag("--decoder-last-pipeline-num-layers", "Layers of the last pipeline stage.", int),
    _flag("--microbatch-group-size-per-virtual-pipeline-stage", "Micro-batches of one chunk before the next.", int),
    _flag("--pipeline-model-parallel-layout", "Layers of every pipeline stage, as in E|t*3|t*4|tL."),
    _switch("--no-overlap-p2p-communication", "Do not overlap pipeline sends.", "overlap_p2p_comm", const=False),
    _switch("--no-rope-fusion", "No fused rotary kernel.", "apply_rope_fusion", const=False),
    _switch("--no-bias-swiglu-fusion", "No fused activation.", "bias_activation_fusion", const=False, default=True),
    _switch("--no-bias-gelu-fusion", "No fused activation.", "bias_activation_fusion", const=False, default=True),
    _switch("--no-initialization", "Leave weights uninitialised.", "perform_initialization", const=False, default=True),
    _switch(
        "--recompute-activations", "Recompute selectively.", "recompute_granularity", const="selective", default=None
    ),
    _choice("--fp8-format", "FP8 format.", "e4m3 hybrid", dest="fp8"),
    _choice("--fp4-format", "FP4 format.", "e2m1", dest="fp4"),
    _switch("--enable-experimental", "Allow megatron-core's experimental features."),
    _switch("--allgather-cp", "Context parallelism by gathering keys and values (DSA models only)."),
    _choice(
        "--attention-backend",
        "What computes attention: fa4, FlashAttention 4 of the package flash-attn-4 (Hopper and newer); flash, torch's "
        "FlashAttention 2; unfused, torch's SDPA; auto, fa4 where it was measured to be faster, else the first of the "
        "others that can. With --transformer-impl transformer_engine all but fa4 are that package's, and fused, "
        "cuDNN's, is the default.",
        "auto fa4 flash unfused fused local",
        "auto",
    ),
    # Precision.
    *(
        _switch(name, f"Train in {help}.", "precision", const=const, default="bfloat16")
        for name, const, help in (
            ("--bf16", "bfloat16", "bfloat16 with float32 main weights (default)"),
            ("--fp16", "float16", "float16"),
            ("--fp32", "float32", "float32"),
        )
    ),
    _switch("--accumulate-allreduce-grads-in-fp32", "Accumulate and reduce gradients in float32."),
    # Data parallelism.
    _switch(
        "--no-check-for-nan-in-loss-and-grad",
        "Do not stop at NaN or infinite gradients.",
        "check_for_nan_in_loss_and_grad",
        const=False,
        default=True,
    ),
    _flag("--ddp-bucket-size", "Parameters of one gradient bucket.", int),
    # Learning-rate and weight-decay schedule; steps are optimizer steps.
    _choice("--lr-decay-style", "Shape of the decay.", "constant linear cosine inverse-square-root WSD", "linear"),
    _flag("--lr-decay-iters", "Steps of the decay; default all steps of the run.", int),
    _flag("--lr-warmup-iters", "Steps of linear warm-up.", int, default=0),
    _flag("--lr-warmup-fraction", "Warm-up as a part of the decay steps.", float),
    _flag("--lr-warmup-init", "Learning rate at which the warm-up begins.", float, default=0.0),
    _choice(
        "--lr-wsd-decay-style",
        "Shape of the last part of a WSD schedule.",
        "exponential linear cosine minus_sqrt",
        "exponential",
    ),
    _flag("--lr-wsd-decay-iters", "Steps of the last part of a WSD schedule.", int),
    _flag("--start-weight-decay", "Weight decay of the first step.", float),
    _flag("--end-weight-decay", "Weight decay of the last step.", float),
    _choice(
        "--weight-decay-incr-style", "How weight decay goes from start to end.", "constant linear cosine", "constant"
    ),
    _switch(
        "--use-checkpoint-opt_param-scheduler",
        "On resume take the schedule from the checkpoint; default from the flags.",
    ),
    # Accepted, with the one value that has a meaning here.
    _switch("--no-position-embedding", "No learned position embedding.", "add_position_embedding", const=False),
    _choice("--tokenizer-type", "That of --hf-checkpoint.", "HuggingFaceTokenizer", "HuggingFaceTokenizer"),
    _flag("--seq-length", "Sequences have their own lengths; accepted for model scripts.", int),
    _choice("--ckpt-format", "Format of checkpoints.", "torch_dist", "torch_dist"),
)


def flag_saying(name: str, value: Any) -> str:
    """The flag by which an attribute gets a value: of False, the switch that says so."""
    const = False if value is False else None
    named = (flag.name for flag in FLAGS if flag.dest == name and flag.const is const)
    return next(named, flag_named(f"no_{name}" if value is False else name))


def shown_setting(name: str, value: Any) -> str:
    """An attribute's value as words of a command line."""
    words = [] if isinstance(value, bool) else value if isinstance(value, list) else [value]
    return " ".join(map(str, (flag_saying(name, value), *words)))


DEFAULTS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bias_activation_fusion": True,
    "hidden_dropout": 0.0,
    "lr": 1e-6,
    "min_lr": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "mtp_loss_scaling_factor": 0.2,
    "optimizer_offload_fraction": 1.0,
    "transformer_impl": "local",
    "use_distributed_optimizer": True,
}
"""Defaults that differ from the dataclass field's."""

_ANY: Mapping[str, float] = {}
_POSITIVE, _COUNT, _SHARE = {"above": 0}, {"at_least": 1}, {"at_least": 0, "below": 1}
BOUNDS: dict[str, Mapping[str, float]] = {
    name: bounds
    for names, bounds in (
        ("glu_linear_offset", _ANY),
        (
            """
            tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
            expert_tensor_parallel_size hierarchical_context_parallel_sizes num_distributed_optimizer_instances
            num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size
            microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers
            decoder_last_pipeline_num_layers ddp_bucket_size lr_decay_iters lr_wsd_decay_iters
            num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels vocab_size
            padded_vocab_size make_vocab_size_divisible_by max_position_embeddings seq_length recompute_num_layers
            moe_router_topk moe_router_num_groups moe_router_group_topk moe_ffn_hidden_size moe_latent_size hysteresis
            """,
            _COUNT,
        ),
        (
            "adam_beta1 adam_beta2 sgd_momentum muon_momentum attention_dropout hidden_dropout lr_warmup_fraction",
            _SHARE,
        ),
        (
            """
            adam_eps rotary_base rope_scaling_factor rotary_scaling_factor loss_scale softmax_scale
            rotary_seq_len_interpolation_factor initial_loss_scale min_loss_scale loss_scale_window
            moe_expert_capacity_factor moe_router_topk_scaling_factor
            """,
            _POSITIVE,
        ),
        ("rotary_percent optimizer_offload_fraction", {"above": 0, "at_most": 1}),
    )
    for name in names.split()
}
"""Bounds of Megatron's numbers, by attribute: at least 0 where nothing is said."""

HIDDEN: frozenset[str] = frozenset(
    (
        *("activation_func", "autocast_dtype", "average_in_collective", "barrier_with_L1_time", "bf16"),
        *("calculate_per_token_loss", "config_logger_dir", "embedding_init_method", "finalize_model_grads_func"),
        *("fp16", "gated_linear_unit", "grad_scale_func", "grad_sync_func", "init_method", "no_sync_func"),
        "output_layer_init_method",
        *("param_sync_func", "params_dtype", "pipeline_dtype", "quant_recipe", "softmax_type", "timers"),
        *("use_custom_fsdp", "use_megatron_fsdp", "use_te_rng_tracker", "window_attn_skip_freq"),
    )
)
"""Fields that are no flag: callables, values that slime computes, and features that it does not run."""

DEST_OF: dict[str, str] = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "bucket_size": "ddp_bucket_size",
}
"""Field -> attribute, where the names differ."""
