"""A decoder layer with norms where megatron-core's has none."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from slime.backends.megatron.norm import RMSNorm


class SandwichLayer(TransformerLayer):
    """A layer that normalises what attention and MLP add to its input, too, as GLM-4's does.

    The norms follow the two modules as hooks: within what selective recomputation of the MLP repeats, and after the sum
    over tensor-parallel ranks, of which each then has all tokens, or with sequence parallelism its own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        post_self_attn_layernorm: bool,
        post_mlp_layernorm: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        if post_self_attn_layernorm:
            self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.self_attention.register_forward_hook(partial(_normalized, self.post_self_attn_layernorm))
        if post_mlp_layernorm:
            self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.mlp.register_forward_hook(partial(_normalized, self.post_mlp_layernorm))


def _normalized(norm: nn.Module, module: nn.Module, args: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    """For the output of attention or MLP and its bias, which these models do not have."""
    hidden, bias = output
    return norm(hidden), bias
