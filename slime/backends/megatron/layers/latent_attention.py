"""Multi-latent attention of DeepSeek V3 over packed sequences, from megatron-core's class without Transformer Engine.

What is replaced is the way from hidden states to queries, keys and values. In megatron-core 0.16.1 without Transformer
Engine it is wrong under tensor parallelism: the down projections are cut over the ranks, and the gradient of the key's
rotated part, which all heads share, is not summed over the ranks, which have some heads each. Here every rank has the
whole down projections, which are small, as with Transformer Engine; and rotation is that of the other families.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules, MultiLatentAttention
from torch import Tensor

from slime.backends.megatron.layers.attention import plan_of
from slime.backends.megatron.layers.head import to_every_rank
from slime.backends.megatron.layers.norm import RMSNorm
from slime.backends.megatron.layers.rotary import Rotary, rotate
from slime.utils import device

_LATENT_NORM_EPSILON = 1e-6
"""DeepSeek's code gives these two norms no epsilon, so that theirs is the norm's default and not ``rms_norm_eps``."""


class LatentAttention(MultiLatentAttention):
    """Queries, keys and values by way of small latent vectors, for Megatron's attention module; ``rotary`` has the
    angles of the part of queries and keys that holds the position."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        rotary: Rotary,
        **later: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, groups, **later)
        del self.rotary_pos_emb  # Megatron's, one a layer
        self.rotary = rotary
        heads, hidden = config.num_attention_heads, config.hidden_size
        if config.q_lora_rank is None:
            self.linear_q_proj = self._cut(hidden, heads * self.q_head_dim)
        else:
            self.linear_q_down_proj = ReplicatedLinear(hidden, config.q_lora_rank, config)
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, _LATENT_NORM_EPSILON)
            self.linear_q_up_proj = self._cut(config.q_lora_rank, heads * self.q_head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, _LATENT_NORM_EPSILON)
        self.linear_kv_up_proj = self._cut(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))

    def _cut(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            tp_group=self.pg_collection.tp,
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Query, key and value [tokens, heads, channels], and the normed latents of query and of key and value, of
        [tokens, 1, h], under sequence parallelism this rank's part of the tokens."""
        config, cp = self.config, self.pg_collection.cp
        hidden = hidden_states.squeeze(1)
        cos, sin = self.rotary.angles(plan_of(packed_seq_params, cp.size(), cp.rank(), hidden.device))

        query_latent = None
        if config.q_lora_rank is None:
            query = self.linear_q_proj(hidden)[0]
        else:
            query_latent = self.q_layernorm(self.linear_q_down_proj(hidden))
            query = self.linear_q_up_proj(query_latent)[0]
        plain, positional = self._by_head(query).split((config.qk_head_dim, config.qk_pos_emb_head_dim), dim=-1)
        query = torch.cat((plain, rotate(positional, cos, sin, self.rotary.interleaved)), dim=-1)

        latent, positional = self.linear_kv_down_proj(hidden).split(
            (config.kv_lora_rank, config.qk_pos_emb_head_dim), dim=-1
        )
        latent = self.kv_layernorm(latent)
        key_value = self._by_head(self.linear_kv_up_proj(latent)[0])
        plain, value = key_value.split((config.qk_head_dim, config.v_head_dim), dim=-1)
        positional = to_every_rank(positional, self.pg_collection.tp, config.sequence_parallel)  # all heads share it
        shared = rotate(positional[:, None], cos, sin, self.rotary.interleaved)
        key = torch.cat((plain, shared.expand(-1, plain.size(1), -1)), dim=-1)
        return query, key, value, query_latent, latent

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads_per_partition, -1))


class ReplicatedLinear(torch.nn.Module):
    """A projection that every tensor-parallel rank has whole, without bias.

    Under sequence parallelism Megatron adds up its gradient over those ranks, as it does for marked norms.
    """

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        where = device.current_device()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=where))
        self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            config.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
