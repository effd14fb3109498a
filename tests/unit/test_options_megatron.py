"""Megatron's flags mean what Megatron-LM means by them: all model scripts, through to megatron-core's dataclasses."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.entry.arguments import assemble
from slime.options.checks.layout import check_layout
from slime.options.flags.megatron import config_kwargs
from slime.options.flags.parser import StrictParser

NUM_GPUS = 0
SHAPES: dict[str, str] = json.loads(Path(__file__).with_name("test_options_shapes.json").read_text())

ATTRIBUTES = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-rope-fusion": "apply_rope_fusion",
    "--no-masked-softmax-fusion": "masked_softmax_fusion",
    "--use-rotary-position-embeddings": "position_embedding_type",
    "--use-gated-attention": "attention_output_gate",
}
"""What a flag sets, where that is not its own name."""
VALUES = {
    "--disable-bias-linear": False,
    "--no-rope-fusion": False,
    "--no-masked-softmax-fusion": False,
    "--use-rotary-position-embeddings": "rope",
}
"""What a switch sets, where that is not True."""
FIELDS = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
"""megatron-core's name of an attribute, where it is another one."""
NO_FIELD = {
    *("vocab_size", "max_position_embeddings", "make_vocab_size_divisible_by", "position_embedding_type", "seq_length"),
    *("group_query_attention", "untie_embeddings_and_output_weights", "use_rope_scaling", "allgather_cp"),
    *("post_mlp_layernorm", "post_self_attn_layernorm", "enable_experimental", "rotary_base", "rotary_percent"),
    "rotary_scaling_factor",
}
"""Attributes for which a config may have no field: MLA's has some of them."""
WITHOUT_MEANING = "--no-position-embedding"
NEEDS_TRANSFORMER_ENGINE = {"moe_permute_fusion": False, "moe_grouped_gemm": False}


@pytest.fixture(scope="module")
def parser_and_defaults() -> tuple[StrictParser, dict[str, Any]]:
    parser = StrictParser(prog="train.py")
    return parser, assemble(parser, [], {})


@pytest.fixture(scope="module")
def given(parser_and_defaults: Any) -> Callable[[str], dict[str, Any]]:
    """Words -> the attributes that they set, and no others."""
    parser, _ = parser_and_defaults
    return lambda words: parser.parse_set(words.split())


@pytest.fixture(scope="module")
def parse(parser_and_defaults: Any, given: Any) -> Callable[[str], Namespace]:
    """Words -> every attribute."""
    _, defaults = parser_and_defaults

    def parse(words: str) -> Namespace:
        args = Namespace(**defaults | given(words))
        args.params_dtype = args.precision
        return args

    return parse


def pairs(words: str) -> list[tuple[str, str | None]]:
    """Flags with their value, or None for a switch."""
    split = words.split()
    follow = [*split[1:], "--"]
    return [(w, None if n.startswith("--") else n) for w, n in zip(split, follow, strict=False) if w.startswith("--")]


def agrees(actual: Any, said: Any) -> bool:
    """Whether a value is what the command line said: text, or the constant of a switch."""
    if not isinstance(said, str):
        return actual is said
    if isinstance(actual, list):
        return agrees(actual[0], said) if len(actual) == 1 else actual == eval(said)
    return str(actual) == said or float(actual) == float(said)


@pytest.mark.parametrize("name", SHAPES)
def test_model_scripts_give_the_config_that_they_mean(name: str, parse: Any, given: Any) -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    words = SHAPES[name]
    args, attributes = parse(words), given(words)
    cls = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    fields = {field.name for field in dataclasses.fields(cls)}
    kwargs = config_kwargs(args, cls)
    small = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4} if not words else {}
    config = cls(**kwargs | NEEDS_TRANSFORMER_ENGINE | small)
    named = set(given(WITHOUT_MEANING))
    for flag, text in pairs(words):
        if flag == WITHOUT_MEANING:
            continue
        attribute = ATTRIBUTES.get(flag, flag[2:].replace("-", "_"))
        said = VALUES.get(flag, True) if text is None else text
        assert agrees(attributes[attribute], said), flag
        named.add(attribute)
        field = FIELDS.get(attribute, attribute)
        if flag == "--swiglu":
            assert config.gated_linear_unit
            assert config.activation_func.__name__ == "silu"
        elif field in NEEDS_TRANSFORMER_ENGINE:
            assert kwargs[field] is True
        elif field in fields:
            assert agrees(getattr(config, field), said), flag
        else:
            assert attribute in NO_FIELD
    assert attributes.keys() <= named, "a flag has set more than its own attribute"
    if WITHOUT_MEANING in words:
        assert config_kwargs(parse(words.replace(WITHOUT_MEANING, "")), cls) == kwargs


def test_optimizer_and_ddp_flags(parse: Any) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    args = parse(
        "--optimizer adam --lr 3e-4 --min-lr 1e-5 --weight-decay 0.1 --adam-beta1 0.8 --adam-beta2 0.98 "
        "--adam-eps 1e-6 --clip-grad 0.5 --fp16 --accumulate-allreduce-grads-in-fp32 --overlap-grad-reduce "
        "--overlap-param-gather --ddp-bucket-size 4000000 --no-check-for-nan-in-loss-and-grad "
        "--use-precision-aware-optimizer"
    )
    assert str(config_kwargs(parse("--exp-avg-dtype bf16"), OptimizerConfig)["exp_avg_dtype"]) == "torch.bfloat16"
    optimizer = OptimizerConfig(**config_kwargs(args, OptimizerConfig) | {"use_precision_aware_optimizer": False})
    assert (optimizer.lr, optimizer.min_lr, optimizer.weight_decay) == (3e-4, 1e-5, 0.1)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.8, 0.98, 1e-6)
    assert (optimizer.clip_grad, optimizer.fp16, optimizer.bf16) == (0.5, True, False)
    assert optimizer.use_distributed_optimizer
    ddp = DistributedDataParallelConfig(**config_kwargs(args, DistributedDataParallelConfig))
    assert ddp.grad_reduce_in_fp32
    assert ddp.overlap_grad_reduce
    assert ddp.overlap_param_gather
    assert ddp.use_distributed_optimizer
    assert (ddp.bucket_size, ddp.check_for_nan_in_grad) == (4000000, False)
    plain = config_kwargs(parse("--no-use-distributed-optimizer"), DistributedDataParallelConfig)
    assert "use_distributed_optimizer" not in plain


def test_enum_list_and_precision_fields(parse: Any) -> None:
    import torch
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = parse(
        "--attention-backend flash --cp-comm-type p2p --moe-aux-loss-coeff 0.1 --fp8-format hybrid --bf16 "
        "--recompute-modules core_attn moe_act --microbatch-group-size-per-virtual-pipeline-stage 4"
    )
    kwargs = config_kwargs(args, TransformerConfig)
    assert kwargs["attention_backend"] is AttnBackend.flash
    assert kwargs["cp_comm_type"] == "p2p"
    assert kwargs["moe_aux_loss_coeff"] == 0.1
    assert kwargs["recompute_modules"] == ["core_attn", "moe_act"]
    assert kwargs["microbatch_group_size_per_vp_stage"] == 4
    assert kwargs["fp8"] == "hybrid"
    assert kwargs["params_dtype"] is kwargs["pipeline_dtype"] is torch.bfloat16
    assert kwargs["bf16"] is True
    assert kwargs["fp16"] is False
    assert "calculate_per_token_loss" not in config_kwargs(parse("--calculate-per-token-loss"), TransformerConfig)


DENSE = {"num_layers": 8, "num_attention_heads": 8, "num_query_groups": 4, "group_query_attention": True}
MOE = DENSE | {"num_experts": 8, "moe_ffn_hidden_size": 6}


def layout(parse: Any, words: str, world: int, shape: dict[str, Any], batch: int = 64) -> Namespace:
    args = parse(words)
    vars(args).update(shape | {"world_size": world, "global_batch_size": batch})
    check_layout(args)
    return args


def test_layout_derivations(parse: Any) -> None:
    args = layout(parse, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2", 8, DENSE)
    assert args.data_parallel_size == 2
    assert args.sequence_parallel
    assert args.expert_tensor_parallel_size == 2
    assert not layout(parse, "--sequence-parallel", 2, DENSE).sequence_parallel
    words = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
    assert layout(parse, words, 2, DENSE).virtual_pipeline_model_parallel_size == 2
    words = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4"
    assert layout(parse, words, 2, DENSE).virtual_pipeline_model_parallel_size == 4
    args = layout(parse, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2", 4, MOE)
    assert args.expert_tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("words", "chunks"),
    [
        ("--pipeline-model-parallel-layout Ettt|t*5L", None),
        ("--pipeline-model-parallel-layout E|(tt|)*2,t*4L", 2),
        ("--pipeline-model-parallel-layout E|tt|t|t*5L --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--decoder-first-pipeline-num-layers 3", None),
        ("--decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 1", None),
    ],
)
def test_chunks_of_uneven_pipelines(parse: Any, words: str, chunks: int | None) -> None:
    args = layout(parse, f"--pipeline-model-parallel-size 2 {words}", 2, DENSE)
    assert args.virtual_pipeline_model_parallel_size == chunks


@pytest.mark.parametrize(
    ("words", "world", "shape", "expected"),
    [
        ("--tensor-model-parallel-size 2", 3, DENSE, "3 training slots .* are not a multiple of .*-size 2"),
        ("--tensor-model-parallel-size 8", 8, DENSE, "--num-query-groups 4 is not a multiple of"),
        ("--pipeline-model-parallel-size 3", 3, DENSE, "--num-layers 8 is not a multiple of --pipeline"),
        ("--num-layers-per-virtual-pipeline-stage 2", 1, DENSE, "needs --pipeline-model-parallel-size above 1"),
        ("--expert-model-parallel-size 2", 2, DENSE, "the model has no experts"),
        (
            "--expert-model-parallel-size 3",
            3,
            MOE,
            "8 is not a multiple of --expert-model-parallel-size 3",
        ),
        ("--tensor-model-parallel-size 2", 2, MOE, "needs --sequence-parallel"),
        (
            "--expert-tensor-parallel-size 3",
            4,
            MOE,
            "4 training slots .* are not a multiple of --expert-tensor-parallel-size 3",
        ),
        ("--recompute-granularity full", 1, DENSE, "needs --recompute-method; .* needs --recompute-num-layers"),
        (
            "--recompute-activations --recompute-modules mlp layernorm moe_act mla_up_proj",
            1,
            DENSE,
            "--recompute-modules layernorm mla_up_proj: megatron-core needs Transformer Engine",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t*6L",
            2,
            DENSE,
            "has 3 stages, which does not fit --pipeline-model-parallel-size 2",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t*7L "
            "--num-virtual-stages-per-pipeline-rank 2",
            2,
            DENSE,
            "has 2 stages, .* --num-virtual-stages-per-pipeline-rank 2",
        ),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 "
            "--num-layers-per-virtual-pipeline-stage 1",
            2,
            DENSE,
            "use --num-virtual-stages-per-pipeline-rank",
        ),
        ("--expert-tensor-parallel-size 4", 4, MOE, "--moe-ffn-hidden-size 6 is not a multiple of --expert-tensor"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel",
            2,
            MOE | {"moe_shared_expert_intermediate_size": 5},
            "--moe-shared-expert-intermediate-size 5 is not a multiple of --tensor-model-parallel-size 2",
        ),
        ("--allgather-cp --context-parallel-size 2", 2, DENSE, "--allgather-cp is not available yet"),
    ],
)
def test_layouts_that_are_refused(parse: Any, words: str, world: int, shape: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        layout(parse, words, world, shape)


def test_a_batch_smaller_than_the_ranks_is_refused(parse: Any) -> None:
    with pytest.raises(ValueError, match="--global-batch-size 2 is less than 4 data-parallel ranks"):
        layout(parse, "", 4, DENSE, batch=2)
