"""Megatron-LM's flags that no dataclass of megatron-core declares, or that rename, invert or extend a field.

This is the one such table; every other Megatron flag is made from a dataclass field by `slime.options.megatron`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.options.patterns import layer_pattern
from slime.options.schema import flag_named


@dataclass(frozen=True)
class Flag:
    """One flag: the attribute that it sets, and how.

    ``const`` makes it a switch that sets this value. ``field`` is the dataclass field that the attribute stands for,
    where the two names differ.
    """

    name: str
    dest: str
    help: str
    convert: Callable[[str], Any] = str
    const: Any = None
    default: Any = None
    field: str | None = None
    choices: tuple[Any, ...] | None = None


def _switch(name: str, dest: str, help: str, const: Any = True, default: Any = False, field: str | None = None) -> Flag:
    return Flag(name, dest, help, const=const, default=default, field=field)


FLAGS: tuple[Flag, ...] = (
    # Shape. What is not given comes from config.json; what is given must agree with it.
    Flag("--num-experts", "num_experts", "Experts of a mixture-of-experts layer.", int, field="num_moe_experts"),
    Flag("--norm-epsilon", "norm_epsilon", "Epsilon of the norms.", float, default=1e-5, field="layernorm_epsilon"),
    Flag("--max-position-embeddings", "max_position_embeddings", "Longest sequence of the model.", int),
    Flag("--vocab-size", "vocab_size", "Vocabulary size before padding.", int),
    Flag("--padded-vocab-size", "padded_vocab_size", "Vocabulary size of the trained model.", int),
    Flag(
        "--make-vocab-size-divisible-by",
        "make_vocab_size_divisible_by",
        "The vocabulary is padded to a multiple of this times the tensor-parallel size.",
        int,
        default=128,
    ),
    Flag(
        "--position-embedding-type",
        "position_embedding_type",
        "Kind of position embedding.",
        str,
        default="rope",
        choices=("rope", "yarn", "none"),
    ),
    _switch(
        "--use-rotary-position-embeddings",
        "position_embedding_type",
        "The same as --position-embedding-type rope.",
        "rope",
        "rope",
    ),
    Flag(
        "--rotary-seq-len-interpolation-factor",
        "rotary_seq_len_interpolation_factor",
        "Linear scaling of rotary positions.",
        float,
    ),
    _switch("--use-rope-scaling", "use_rope_scaling", "Llama 3.1's scaling of rotary frequencies."),
    Flag("--rope-scaling-factor", "rope_scaling_factor", "Its factor.", float, default=8.0),
    _switch("--swiglu", "swiglu", "Gated MLP with SiLU."),
    _switch("--disable-bias-linear", "add_bias_linear", "No biases in linear layers.", False, True),
    _switch(
        "--untie-embeddings-and-output-weights",
        "untie_embeddings_and_output_weights",
        "The output layer has weights of its own.",
    ),
    _switch("--group-query-attention", "group_query_attention", "Fewer key/value heads than query heads."),
    _switch(
        "--apply-layernorm-1p",
        "apply_layernorm_1p",
        "Norm weights are stored minus one.",
        field="layernorm_zero_centered_gamma",
    ),
    _switch("--use-gated-attention", "attention_output_gate", "The same as --attention-output-gate."),
    _switch("--post-self-attn-layernorm", "post_self_attn_layernorm", "A norm after attention (GLM-4)."),
    _switch("--post-mlp-layernorm", "post_mlp_layernorm", "A norm after the MLP (GLM-4)."),
    *(
        Flag(flag_named(name), name, f"{help}: N, or a list such as [0]*3+[1]*89.", layer_pattern)
        for name, help in (
            ("moe_layer_freq", "Which layers have experts"),
            ("linear_attention_freq", "Which layers have linear attention"),
            ("no_rope_freq", "Which layers have no rotary embedding"),
        )
    ),
    # Names of layouts and switches that a field has under another name or the other way round.
    Flag(
        "--num-layers-per-virtual-pipeline-stage",
        "num_layers_per_virtual_pipeline_stage",
        "Layers of one chunk of the interleaved pipeline.",
        int,
    ),
    Flag(
        "--num-virtual-stages-per-pipeline-rank",
        "virtual_pipeline_model_parallel_size",
        "Chunks of the interleaved pipeline per rank.",
        int,
    ),
    Flag(
        "--decoder-first-pipeline-num-layers",
        "decoder_first_pipeline_num_layers",
        "Layers of the first pipeline stage.",
        int,
        field="num_layers_in_first_pipeline_stage",
    ),
    Flag(
        "--decoder-last-pipeline-num-layers",
        "decoder_last_pipeline_num_layers",
        "Layers of the last pipeline stage.",
        int,
        field="num_layers_in_last_pipeline_stage",
    ),
    Flag(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "microbatch_group_size_per_virtual_pipeline_stage",
        "Micro-batches of one chunk before the next chunk.",
        int,
        field="microbatch_group_size_per_vp_stage",
    ),
    Flag(
        "--pipeline-model-parallel-layout",
        "pipeline_model_parallel_layout",
        "Layers of every pipeline stage, as in E|t*3|t*4|tL.",
        str,
    ),
    _switch("--no-overlap-p2p-communication", "overlap_p2p_comm", "Do not overlap pipeline sends.", False, False),
    _switch("--no-rope-fusion", "apply_rope_fusion", "No fused rotary kernel.", False),
    _switch("--no-bias-swiglu-fusion", "bias_activation_fusion", "No fused activation.", False, True),
    _switch("--no-bias-gelu-fusion", "bias_activation_fusion", "No fused activation.", False, True),
    _switch("--no-initialization", "perform_initialization", "Leave weights uninitialised.", False, True),
    _switch("--recompute-activations", "recompute_granularity", "Recompute selectively.", "selective", None),
    Flag("--fp8-format", "fp8", "FP8 format.", str, choices=("e4m3", "hybrid")),
    Flag("--fp4-format", "fp4", "FP4 format.", str, choices=("e2m1",)),
    _switch("--enable-experimental", "enable_experimental", "Allow megatron-core's experimental features."),
    _switch("--allgather-cp", "allgather_cp", "Context parallelism by gathering keys and values (DSA models only)."),
    # Precision.
    _switch("--bf16", "precision", "Train in bfloat16 with float32 main weights (default).", "bfloat16", "bfloat16"),
    _switch("--fp16", "precision", "Train in float16.", "float16", "bfloat16"),
    _switch("--fp32", "precision", "Train in float32.", "float32", "bfloat16"),
    _switch(
        "--accumulate-allreduce-grads-in-fp32",
        "accumulate_allreduce_grads_in_fp32",
        "Accumulate and reduce gradients in float32.",
        field="grad_reduce_in_fp32",
    ),
    # Data parallelism.
    _switch(
        "--no-check-for-nan-in-loss-and-grad",
        "check_for_nan_in_loss_and_grad",
        "Do not stop at NaN or infinite gradients.",
        False,
        True,
        field="check_for_nan_in_grad",
    ),
    Flag("--ddp-bucket-size", "ddp_bucket_size", "Parameters of one gradient bucket.", int, field="bucket_size"),
    # Learning-rate and weight-decay schedule; steps are optimizer steps.
    Flag(
        "--lr-decay-style",
        "lr_decay_style",
        "Shape of the decay.",
        str,
        default="linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    ),
    Flag("--lr-decay-iters", "lr_decay_iters", "Steps of the decay; default all steps of the run.", int),
    Flag("--lr-warmup-iters", "lr_warmup_iters", "Steps of linear warm-up.", int, default=0),
    Flag("--lr-warmup-fraction", "lr_warmup_fraction", "Warm-up as a part of the decay steps.", float),
    Flag("--lr-warmup-init", "lr_warmup_init", "Learning rate at which the warm-up begins.", float, default=0.0),
    Flag(
        "--lr-wsd-decay-style",
        "lr_wsd_decay_style",
        "Shape of the last part of a WSD schedule.",
        str,
        default="exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    ),
    Flag("--lr-wsd-decay-iters", "lr_wsd_decay_iters", "Steps of the last part of a WSD schedule.", int),
    Flag("--start-weight-decay", "start_weight_decay", "Weight decay of the first step.", float),
    Flag("--end-weight-decay", "end_weight_decay", "Weight decay of the last step.", float),
    Flag(
        "--weight-decay-incr-style",
        "weight_decay_incr_style",
        "How weight decay goes from start to end.",
        str,
        default="constant",
        choices=("constant", "linear", "cosine"),
    ),
    _switch(
        "--use-checkpoint-opt_param-scheduler",
        "use_checkpoint_opt_param_scheduler",
        "On resume take the schedule from the checkpoint; default from the flags.",
    ),
    # Accepted, with the one value that has a meaning here.
    _switch("--no-position-embedding", "add_position_embedding", "No learned position embedding.", False, False),
    Flag(
        "--tokenizer-type",
        "tokenizer_type",
        "The tokenizer is that of --hf-checkpoint.",
        str,
        default="HuggingFaceTokenizer",
        choices=("HuggingFaceTokenizer",),
    ),
    Flag("--seq-length", "seq_length", "Sequences have their own lengths; accepted for model scripts.", int),
    Flag(
        "--ckpt-format", "ckpt_format", "Format of checkpoints.", str, default="torch_dist", choices=("torch_dist",)
    ),
)  # fmt: skip


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

FIELD_OF: dict[str, str] = {flag.dest: flag.field for flag in FLAGS if flag.field and flag.field != flag.dest}
"""Attribute -> field, where the names differ."""

DEST_OF: dict[str, str] = {field: dest for dest, field in FIELD_OF.items()}
"""Field -> attribute, where the names differ."""
