"""Megatron's settings that a run overwrites or has no use for: one table, so that a user is told when flags are read.

Left out are those of a feature that is off, such as ``--fp8-recipe`` without ``--fp8-format``, and those that are
refused. What changes the model is compared with config.json (`slime.options.checks.model_shape`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.options.flags.megatron_names import shown_setting
from slime.options.rules import hold

_OWN = "!custom_model_provider_path"
_OWN_ALONE = f"{_OWN} transformer_impl!=transformer_engine"
"""slime's own layers, and those that are not Transformer Engine's."""


@dataclass(frozen=True)
class Unheeded:
    """Attributes of one reason."""

    names: str
    why: str
    does: Any = None
    """What the run does whatever is set, or a function of the options that tells: who sets that much is told nothing.
    None: nothing that such a setting could mean."""
    when: str = ""
    """Terms of `slime.options.rules`."""


UNHEEDED = (
    # Overwritten in the model's configuration.
    Unheeded("persist_layer_norm", "norms are torch's", False),
    Unheeded(
        "gradient_accumulation_fusion",
        "products that make gradients of slime's own linear layers add them in float32, and no others",
        lambda args: not args.custom_model_provider_path,
    ),
    Unheeded("masked_softmax_fusion", "attention is one kernel, its softmax a part of it", False),
    Unheeded("apply_rope_fusion", "a kernel of slime's own rotates queries and keys", False),
    Unheeded("moe_permute_fusion", "tokens are permuted by slime's own functions, in one order each time", False),
    Unheeded("use_cpu_initialization", "weights are made or loaded on the rank's own device", False),
    Unheeded(
        "perform_initialization",
        "weights are loaded, but for those of --random-weights, which are made",
        lambda args: args.random_weights,
    ),
    Unheeded("variable_seq_lengths", "sequences are packed as long as they are", True),
    Unheeded("moe_grouped_gemm", "all experts of a rank are multiplied by one grouped product", True),
    Unheeded("moe_token_dispatcher_type", "experts get their tokens by alltoall, with the same results", "alltoall"),
    Unheeded("moe_enable_deepep", "experts get their tokens by alltoall, with the same results", False),
    Unheeded(
        "moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms",
        "it is of the dispatcher flex, and experts get their tokens by alltoall",
    ),
    Unheeded(
        "overlap_p2p_comm",
        "stages overlap what they send if they are interleaved, and only then",
        lambda args: args.virtual_pipeline_model_parallel_size is not None,
    ),
    Unheeded(
        "batch_p2p_comm",
        "stages batch what they send unless they are interleaved",
        lambda args: args.virtual_pipeline_model_parallel_size is None,
    ),
    Unheeded(
        "sequence_parallel",
        "with --tensor-model-parallel-size 1 there is nothing to divide",
        False,
        "tensor_model_parallel_size=1",
    ),
    Unheeded(
        "accumulate_allreduce_grads_in_fp32",
        "gradients of bfloat16 are always summed in float32",
        True,
        "params_dtype=bfloat16",
    ),
    # Read by parts of Megatron in whose place slime has its own.
    Unheeded("memory_efficient_layer_norm", "norms are torch's", False, _OWN),
    Unheeded(
        "attention_backend",
        "true on-policy mode has the engine's",
        "auto",
        "true_on_policy_mode",
    ),
    Unheeded("attention_softmax_in_fp32", "attention computes its softmax in float32", True, _OWN),
    Unheeded("cp_comm_type", "context-parallel ranks gather keys and values", ["all_gather"], _OWN),
    Unheeded("kv_channels", "multi-latent attention has widths of its own", None, "multi_latent_attention"),
    Unheeded("add_qkv_bias", "multi-latent attention has no bias", False, "multi_latent_attention"),
    Unheeded(
        "moe_use_legacy_grouped_gemm use_te_activation_func use_fused_weighted_squared_relu",
        "experts and their activation are slime's own",
        False,
        _OWN,
    ),
    Unheeded("cross_entropy_loss_fusion", "losses are made of slime's own log-probs", False),
    Unheeded("cross_entropy_fusion_impl", "losses are made of slime's own log-probs"),
    Unheeded(
        "tp_comm_overlap init_model_with_meta_device",
        "layers of Transformer Engine do it, and no others",
        False,
        _OWN_ALONE,
    ),
    # Of process groups, which slime makes.
    Unheeded("hierarchical_context_parallel_sizes", "context parallelism has one level"),
    Unheeded("max_seqlen_per_dp_cp_rank", "--max-tokens-per-gpu says how much is computed at a time"),
    Unheeded("pipeline_model_parallel_comm_backend", "stages talk by the backend of all groups: nccl, gloo on a CPU"),
    # Of the optimizer, which is torch's.
    Unheeded("use_torch_optimizer_for_cpu_offload", "the optimizer is torch's", True),
    Unheeded(
        "use_precision_aware_optimizer", "the optimizer keeps all in float32, in which its steps are the same", False
    ),
    Unheeded("store_param_remainders", "the optimizer keeps float32 weights as they are"),
    Unheeded(
        "pin_cpu_grads",
        "gradients stay in the device's buffers; --no-pin-cpu-params is for what --optimizer-cpu-offload keeps in host "
        "memory",
        True,
    ),
    # Of features that there are not.
    Unheeded(
        """
        data_parallel_sharding_strategy outer_dp_sharding_strategy suggested_communication_unit_size
        gradient_reduce_div_fusion preserve_fp32_weights keep_fp8_transpose_cache fsdp_double_buffer
        fsdp_manual_registration
        """,
        "the distributed optimizer shards optimizer state; there is no FSDP backend",
    ),
    Unheeded(
        "moe_extended_tp async_tensor_model_parallel_allreduce moe_token_dropping tp_comm_bootstrap_backend",
        "megatron-core does not read it",
    ),
    Unheeded("moe_per_layer_logging", "auxiliary losses, which it is about, are not computed"),
    Unheeded("seq_length", "sequences have lengths of their own; --rollout-max-context-len limits them"),
)


def unheeded(args: Namespace, given: Mapping[str, Any]) -> list[str]:
    """A line for each setting that the user gave and the run does not heed.

    Args:
        args: the run's options, with its layout.
        given: what flags or YAML set, by attribute.
    """
    lines = []
    for row in UNHEEDED:
        names = [name for name in row.names.split() if name in given]
        if names and hold(args, row.when):
            does = row.does(args) if callable(row.does) else row.does
            ignored = [shown_setting(name, given[name]) for name in names if given[name] != does]
            lines += [f"{setting} is ignored: {row.why}" for setting in ignored]
    return lines
