"""The Megatron model of one training rank: configuration, layer specification, pipeline chunks, names of weights."""

from __future__ import annotations

import functools
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slime.backends.megatron import releases
from slime.backends.megatron.layers import dispatch, mtp, same_kernels
from slime.backends.megatron.layers.attention import Kernel, PackedAttention
from slime.backends.megatron.layers.experts import Experts
from slime.backends.megatron.layers.head import LanguageHead, ValueHead
from slime.backends.megatron.layers.kernels import kernel_of
from slime.backends.megatron.layers.latent_attention import LatentAttention
from slime.backends.megatron.layers.norm import RMSNorm, SandwichLayer
from slime.backends.megatron.layers.rotary import Rotary
from slime.backends.megatron.model_hooks import provided_stage
from slime.options.checks.attention import AUTO, by_transformer_engine
from slime.options.flags.megatron import config_kwargs
from slime.utils import device

_WITHOUT_TRANSFORMER_ENGINE: dict[str, Any] = {
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "use_cpu_initialization": False,
}
"""Settings that need kernels of Transformer Engine or Apex, at the value that does not (`checks.unheeded`). Gradients
are added within products all the same, by torch's (`optimizer.add_gradients_in_products`)."""
EXPERTS = ".mlp.experts."
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


def transformer_config(args: Namespace) -> TransformerConfig:
    """The model's configuration from the options.

    Sequences are packed and vary in length, and the loss is a sum over tokens that its caller has already normalised:
    these are not options. Weights come from a checkpoint, unless they are to be random. What is overwritten here,
    `slime.options.checks.unheeded` says when flags are read.
    """
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    # Megatron notes a choice in the environment, and then refuses others: it hears of those only that are its own.
    is_megatrons = args.custom_model_provider_path and args.attention_backend != "fa4"
    attention = args.attention_backend if is_megatrons or by_transformer_engine(args) else AUTO
    values = config_kwargs(Namespace(**vars(args) | {"attention_backend": attention}), kind)
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    values.update(
        _WITHOUT_TRANSFORMER_ENGINE,
        perform_initialization=args.random_weights,
        variable_seq_lengths=True,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        moe_enable_deepep=False,
        mtp_num_layers=None,  # the heads are slime's own: see layers.mtp
        calculate_per_token_loss=True,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )
    if args.true_on_policy_mode:
        values["bias_activation_fusion"] = False  # a compiled kernel does not round between SiLU and its product
    if args.multi_latent_attention:
        # None is a value of the first. With the second on, Megatron would sum gradients of what is called q_layernorm
        # over the tensor-parallel ranks: right for norms of heads, but latents every rank has whole. The third is of
        # Megatron's own rotary embedding, which is not used: that for YaRN cannot be built without CUDA.
        values.update(q_lora_rank=args.q_lora_rank, qk_layernorm=False, rope_type="rope")
    return kind(**values)


def padded_vocab_size(args: Namespace) -> int:
    """The vocabulary rounded up so that every tensor-parallel rank holds the same number of rows."""
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-args.vocab_size // multiple) * multiple)


def build_model(args: Namespace, role: Literal["actor", "critic"] = "actor") -> list[GPTModel]:
    """This rank's pipeline stages (one, or one per virtual stage), on its device, with weights yet to be loaded.

    `parallel.initialize_distributed` must have been called. Stages return hidden states: the last one the final ones of
    all tokens, [1, tokens, h], for `log_probs.token_terms` with `head_weight`; a critic's last one values,
    [1, tokens, 1]. The weight of its value head is random, from ``--seed``, and the same on every rank.
    """
    if args.true_on_policy_mode:
        same_kernels.multiply_batch_invariantly()
    config = transformer_config(args)
    stages = args.virtual_pipeline_model_parallel_size
    return [_build_stage(args, role, config, i if stages else None) for i in range(stages or 1)]


def wrap(chunks: list[GPTModel]) -> list[torch.nn.Module]:
    """The chunks as the training loop calls them: with inputs and outputs cast where the parameters are 16 bit wide."""
    return [_cast(c) if c.config.bf16 or c.config.fp16 else c for c in chunks]


def _cast(model: GPTModel) -> Float16Module:
    """Parameters in 16 bits and buffers as they were made: routers choose experts by small differences of biases."""
    buffers = [(module, *own) for module in model.modules() for own in module.named_buffers(recurse=False)]
    wrapped = Float16Module(model.config, model)
    for module, name, buffer in buffers:
        setattr(module, name, buffer)
    return wrapped


def unwrap(module: torch.nn.Module) -> GPTModel:
    """The model within DistributedDataParallel and Float16Module."""
    inner: Any = module
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def global_namer(chunk: torch.nn.Module) -> Callable[[str], str]:
    """What turns a name within a chunk into one whose layer number counts over all pipeline stages."""
    layers = {name: module.layer_number - 1 for name, module in unwrap(chunk).decoder.layers.named_children()}
    return lambda name: _LAYER.sub(lambda match: str(layers[match[0]]), name)


def local_experts(chunk: torch.nn.Module) -> range:
    """The numbers of this rank's experts; empty without experts."""
    count = (unwrap(chunk).config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first = count * parallel_state.get_expert_model_parallel_rank()
    return range(first, first + count)


def expert_name(name: str, expert: int) -> str:
    """The name of one expert's part of what experts share; any other name as it is."""
    before, experts, after = name.partition(EXPERTS)
    return f"{before}{experts}{expert}.{after}" if experts else name


def has_heads(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the model trains MTP heads, on whichever pipeline stage."""
    return bool(unwrap(chunks[-1]).next_token_heads)


def head_weight(module: torch.nn.Module) -> torch.nn.Parameter:
    """The output layer's weight [vocabulary / TP, h] of an actor's last stage: its own or the embedding's, if tied."""
    model = unwrap(module)
    tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight


def default_stage(
    args: Namespace,
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    *,
    tied: bool | None = None,
) -> GPTModel:
    """The stage that is built without ``--custom-model-provider-path``, whose function may start from it; ``tied``:
    whether the output layer is the embedding, by default as the options say."""
    return GPTModel(
        config,
        _block_spec(args, config, vp_stage),
        vocab_size=padded_vocab_size(args),
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights if tied is None else tied,
        position_embedding_type="none",  # the attention of the layer specification has the rotary embedding
        vp_stage=vp_stage,
    )


def _build_stage(args: Namespace, role: str, config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    is_critic = role == "critic"
    if args.custom_model_provider_path is not None:
        model = provided_stage(args, config, pre_process, post_process, vp_stage)
        if is_critic:
            model.share_embeddings_and_output_weights = False
    else:
        tied = False if is_critic else None
        model = default_stage(args, config, pre_process, post_process, vp_stage, tied=tied)
    if model.post_process and is_critic:
        model.output_layer = ValueHead(config, model.pg_collection.tp, args.seed)
    elif model.post_process:
        model.output_layer = LanguageHead(model.output_layer)
    model.unpadded_vocab_size = args.vocab_size
    model.next_token_heads = args.mtp_num_layers if args.enable_mtp_training and not is_critic else 0
    if model.post_process and model.next_token_heads:
        mtp.attach(model, args)
    dispatch.attach(model)
    if not config.perform_initialization:
        _mark_cut_weights(model)
    return model.to(device.current_device())


def _mark_cut_weights(model: GPTModel) -> None:
    """Mark the weights that tensor parallelism cuts, so that the gradient norm sums over all their shards.

    megatron-core 0.16.1 does so only together with its random initialisation, which weights that are loaded do without;
    0.19.2 always.
    """
    for module in model.modules():
        if getattr(module, "weight", None) is None or hasattr(module.weight, "tensor_model_parallel"):
            continue
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
            set_tensor_model_parallel_attributes(module.weight, True, 0, 1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, True, 1, 1)


def _kernel(args: Namespace, config: TransformerConfig) -> Kernel:
    """What computes attention."""
    if args.true_on_policy_mode:
        return same_kernels.attend
    if by_transformer_engine(args):
        from slime.backends.megatron.layers import te  # the package need not be installed

        return te.packed_attention
    return kernel_of(args, config)


def _block_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's own layers, or Transformer Engine's, with torch's RMSNorm, packed attention and grouped experts."""
    rotary = Rotary(args, fused=not args.true_on_policy_mode)
    norm, kernel = same_kernels.RMSNorm if args.true_on_policy_mode else RMSNorm, _kernel(args, config)
    more_norms = {name: getattr(args, name) for name in ("post_self_attn_layernorm", "post_mlp_layernorm")}
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        if any(more_norms.values()):
            layer.module, layer.params = SandwichLayer, more_norms
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        attention = parts.self_attention.submodules
        if config.multi_latent_attention:
            attention.core_attention = ModuleSpec(PackedAttention, {"rotary": None, "kernel": kernel})
            parts.self_attention = ModuleSpec(LatentAttention, {"rotary": rotary}, attention)
        else:
            attention.core_attention = functools.partial(PackedAttention, rotary=rotary, kernel=kernel)
            attention.q_layernorm = attention.k_layernorm = norm if config.qk_layernorm else IdentityOp
        kind, mlp = releases.of_module(parts.mlp)
        if kind is MoELayer:
            mlp.experts = Experts
        if args.transformer_impl == "transformer_engine":
            from slime.backends.megatron.layers import te  # the package need not be installed

            te.use_linear_layers(parts)
    block.layer_norm = norm
    return block
