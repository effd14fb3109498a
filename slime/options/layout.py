"""Parallel layouts: which fit the model and the slots."""

from __future__ import annotations

import re
from argparse import Namespace

from slime.options.errors import OptionError
from slime.options.schema import flag_named

_RECOMPUTED_BY_TRANSFORMER_ENGINE = {"layernorm", "mla_up_proj"}
"""Of ``--recompute-modules``: megatron-core 0.16.1 drops their outputs with names that it imports from there."""


def check_layout(args: Namespace) -> None:
    """Fill in what the layout implies and refuse what cannot work; needs the model's shape.

    Raises:
        OptionError: sizes that do not divide, or flags that need others.
    """
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    model_slots = tp * pp * cp
    if args.world_size % model_slots:
        raise OptionError(
            f"{args.world_size} training slots (--actor-num-nodes x --actor-num-gpus-per-node) are no multiple of "
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = "
            f"{model_slots}"
        )
    args.data_parallel_size = args.world_size // model_slots
    if args.global_batch_size < args.data_parallel_size:
        raise OptionError(
            f"--global-batch-size {args.global_batch_size} is less than {args.data_parallel_size} data-parallel ranks"
        )
    if tp == 1:
        args.sequence_parallel = False
    if args.allgather_cp and cp > 1:
        raise OptionError("--allgather-cp is not available yet in this version with --context-parallel-size above 1")
    _divides("num_attention_heads", args.num_attention_heads, "tensor_model_parallel_size", tp)
    if args.group_query_attention and args.num_query_groups:
        _divides("num_query_groups", args.num_query_groups, "tensor_model_parallel_size", tp)
    padded = args.padded_vocab_size
    if padded is not None and (padded < args.vocab_size or padded % tp):
        raise OptionError(
            f"--padded-vocab-size {padded} must be at least the vocabulary's {args.vocab_size} and a multiple of "
            f"--tensor-model-parallel-size {tp}"
        )
    _check_experts(args)
    _check_pipeline(args)
    _check_recompute(args)


def _divides(what: str, amount: int, by: str, size: int) -> None:
    if amount % size:
        flags = f"{flag_named(what)} {amount} is no multiple of {flag_named(by)} {size}"
        raise OptionError(flags)


def _check_experts(args: Namespace) -> None:
    tp, ep = args.tensor_model_parallel_size, args.expert_model_parallel_size
    if not args.num_experts:
        if ep > 1:
            raise OptionError(f"--expert-model-parallel-size {ep}: the model has no experts")
        args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or tp
        return
    _divides("num_experts", args.num_experts, "expert_model_parallel_size", ep)
    etp = args.expert_tensor_parallel_size or tp
    args.expert_tensor_parallel_size = etp
    if tp > 1 and not args.sequence_parallel:
        raise OptionError("experts with --tensor-model-parallel-size above 1 need --sequence-parallel")
    expert_slots = etp * ep * args.pipeline_model_parallel_size
    if args.world_size % expert_slots:
        raise OptionError(
            f"{args.world_size} training slots are no multiple of --expert-tensor-parallel-size {etp} x "
            f"--expert-model-parallel-size {ep} x --pipeline-model-parallel-size {args.pipeline_model_parallel_size} = "
            f"{expert_slots}"
        )
    _divides("moe_ffn_hidden_size", args.moe_ffn_hidden_size, "expert_tensor_parallel_size", etp)
    shared = args.moe_shared_expert_intermediate_size or 0
    _divides("moe_shared_expert_intermediate_size", shared, "tensor_model_parallel_size", tp)


def _check_pipeline(args: Namespace) -> None:
    """Even stages, and chunks of the interleaved pipeline."""
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if args.pipeline_model_parallel_layout or uneven:
        _check_uneven_pipeline(args)
        return
    extra = int(args.account_for_embedding_in_pipeline_split) + int(args.account_for_loss_in_pipeline_split)
    if (layers + extra) % pp:
        raise OptionError(
            f"--num-layers {layers} is no multiple of --pipeline-model-parallel-size {pp}; see "
            "--decoder-first-pipeline-num-layers and --pipeline-model-parallel-layout"
        )
    per_chunk, chunks = args.num_layers_per_virtual_pipeline_stage, args.virtual_pipeline_model_parallel_size
    if per_chunk is not None and chunks is not None:
        raise OptionError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other"
        )
    if per_chunk is not None:
        if (layers // pp) % per_chunk:
            raise OptionError(
                f"{layers // pp} layers of a pipeline stage are no multiple of "
                f"--num-layers-per-virtual-pipeline-stage {per_chunk}"
            )
        chunks = layers // pp // per_chunk
    if chunks is not None and (pp == 1 or (layers // pp) % chunks):
        raise OptionError(
            f"an interleaved pipeline of {chunks} chunks a rank needs --pipeline-model-parallel-size above 1 and "
            f"{layers // pp} layers a rank that {chunks} divides"
        )
    args.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks


def _check_uneven_pipeline(args: Namespace) -> None:
    """Chunks that a written layout implies: with fewer, the trainer's model would silently lack the others' layers."""
    pp, layout = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout
    given = args.virtual_pipeline_model_parallel_size
    if args.num_layers_per_virtual_pipeline_stage is not None:
        raise OptionError(
            "--num-layers-per-virtual-pipeline-stage does not go with stages of different size: "
            "use --num-virtual-stages-per-pipeline-rank"
        )
    chunks = 1 if given is None else given
    if layout:
        stages = _written_out(layout).count("|") + 1
        chunks = stages // pp
        if stages % pp or given not in (None, chunks):
            virtual = "" if given is None else f" x --num-virtual-stages-per-pipeline-rank {given}"
            raise OptionError(
                f"--pipeline-model-parallel-layout {layout} has {stages} stages, "
                f"which does not fit --pipeline-model-parallel-size {pp}{virtual}"
            )
    args.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks


def _written_out(layout: str) -> str:
    """Without repetitions, as megatron-core reads them: E|(t|)*2t*3L is E|t|t|tttL."""
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda found: found[1] * int(found[2]), layout)
    return layout


def _check_recompute(args: Namespace) -> None:
    refused = _RECOMPUTED_BY_TRANSFORMER_ENGINE & set(args.recompute_modules or ())
    if refused and args.recompute_granularity == "selective":
        raise OptionError(
            f"--recompute-modules {' '.join(sorted(refused))}: megatron-core needs Transformer Engine for it, which is "
            "not used for that; core_attn, mlp, moe and shared_experts do without, as does --recompute-granularity full"
        )
    if args.recompute_granularity != "full":
        return
    missing = [f for f in ("recompute_method", "recompute_num_layers") if getattr(args, f) is None]
    if missing:
        names = " and ".join(flag_named(name) for name in missing)
        raise OptionError(f"--recompute-granularity full needs {names}")
