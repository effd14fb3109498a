"""Parallel layouts: which fit the model and the slots."""

from __future__ import annotations

import re
from argparse import Namespace
from math import prod

from slime.options.errors import OptionError
from slime.options.flags.schema import flag_named
from slime.options.rules import Rule, check

RULES = (
    Rule("allgather_cp", "is not available yet in this version with", "context_parallel_size>1"),
    Rule("num_attention_heads", "is not a multiple of", "tensor_model_parallel_size"),
    Rule("num_query_groups", "is not a multiple of", "tensor_model_parallel_size", when="group_query_attention"),
    Rule("padded_vocab_size", "is less than", "vocab_size"),
    Rule("opd_top_k", "is more than", "vocab_size"),
    Rule("padded_vocab_size", "is not a multiple of", "tensor_model_parallel_size"),
    Rule("expert_model_parallel_size>1", "has no effect: the model has no experts", when="!num_experts"),
    Rule("num_experts", "is not a multiple of", "expert_model_parallel_size"),
    Rule(
        "tensor_model_parallel_size>1", "needs", "sequence_parallel", ", as the model has experts", when="num_experts"
    ),
    Rule("moe_ffn_hidden_size", "is not a multiple of", "expert_tensor_parallel_size", when="num_experts"),
    Rule(
        "moe_shared_expert_intermediate_size", "is not a multiple of", "tensor_model_parallel_size", when="num_experts"
    ),
    Rule("recompute_granularity=full", "needs", "recompute_method"),
    Rule("recompute_granularity=full", "needs", "recompute_num_layers"),
    Rule("num_layers_per_virtual_pipeline_stage", "and", "virtual_pipeline_model_parallel_size", " exclude each other"),
    Rule(
        "num_layers_per_virtual_pipeline_stage",
        "cannot be used with",
        "pipeline_model_parallel_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
        ", by which stages differ in size: use --num-virtual-stages-per-pipeline-rank",
    ),
)

_RECOMPUTED_BY_TRANSFORMER_ENGINE = {"layernorm", "mla_up_proj"}
"""Of ``--recompute-modules``: megatron-core 0.16.1 drops their outputs with names that it imports from there."""


def check_layout(args: Namespace) -> None:
    """Fill in what the layout implies; OptionError for what cannot work. Needs the model's shape."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or tp
    if tp == 1:
        args.sequence_parallel = False
    model_slots = _slots(args, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    if args.num_experts:
        _slots(args, "expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
    args.data_parallel_size = args.world_size // model_slots
    if args.global_batch_size < args.data_parallel_size:
        raise OptionError(
            f"--global-batch-size {args.global_batch_size} is less than {args.data_parallel_size} data-parallel ranks"
        )
    check(args, RULES)
    refused = _RECOMPUTED_BY_TRANSFORMER_ENGINE & set(args.recompute_modules or ())
    if refused and args.recompute_granularity == "selective":
        raise OptionError(
            f"--recompute-modules {' '.join(sorted(refused))}: megatron-core needs Transformer Engine for it, which is "
            "not used for that; core_attn, mlp, moe and shared_experts do without, as does --recompute-granularity full"
        )
    chunks: int | None = args.virtual_pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout:
        chunks = _written_chunks(args.pipeline_model_parallel_layout, pp, chunks)
    elif not (args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers):
        chunks = _even_chunks(args, pp, chunks)
    args.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks


def _slots(args: Namespace, *sizes: str) -> int:
    product: int = prod(getattr(args, name) for name in sizes)
    if args.world_size % product:
        shown = " x ".join(f"{flag_named(name)} {getattr(args, name)}" for name in sizes)
        raise OptionError(
            f"{args.world_size} training slots (--actor-num-nodes x --actor-num-gpus-per-node) are not a multiple of "
            f"{shown} = {product}"
        )
    return product


def _even_chunks(args: Namespace, pp: int, chunks: int | None) -> int | None:
    layers = args.num_layers
    extra = int(args.account_for_embedding_in_pipeline_split) + int(args.account_for_loss_in_pipeline_split)
    if (layers + extra) % pp:
        raise OptionError(
            f"--num-layers {layers} is not a multiple of --pipeline-model-parallel-size {pp}; see "
            "--decoder-first-pipeline-num-layers and --pipeline-model-parallel-layout"
        )
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    if per_chunk is not None:
        if (layers // pp) % per_chunk:
            raise OptionError(
                f"{layers // pp} layers of a pipeline stage are not a multiple of "
                f"--num-layers-per-virtual-pipeline-stage {per_chunk}"
            )
        chunks = layers // pp // per_chunk
    if chunks is not None and (pp == 1 or (layers // pp) % chunks):
        raise OptionError(
            f"an interleaved pipeline of {chunks} chunks a rank needs --pipeline-model-parallel-size above 1 and "
            f"{layers // pp} layers a rank that {chunks} divides"
        )
    return chunks


def _written_chunks(layout: str, pp: int, given: int | None) -> int:
    """Chunks that a written layout implies: with fewer, the trainer's model would silently lack the others' layers.

    Repetitions are as megatron-core reads them: E|(t|)*2t*3L is E|t|t|tttL.
    """
    written = layout
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        written = re.sub(repeated, lambda found: found[1] * int(found[2]), written)
    stages = written.count("|") + 1
    if stages % pp or given not in (None, stages // pp):
        virtual = "" if given is None else f" x --num-virtual-stages-per-pipeline-rank {given}"
        raise OptionError(
            f"--pipeline-model-parallel-layout {layout} has {stages} stages, which does not fit "
            f"--pipeline-model-parallel-size {pp}{virtual}"
        )
    return stages // pp
