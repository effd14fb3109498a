"""Rotary position embedding of packed sequences, in the place of Megatron's.

Megatron puts together every layer's angles anew, sequence by sequence, and rotates in a dozen passes over queries and
keys. Here the angles of a micro-batch are worked out once, and on a GPU one kernel rotates, in float32.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from torch import Tensor

from slime.utils import device

if TYPE_CHECKING:
    from slime.backends.megatron.layers.attention import AttentionPlan


class Rotary:
    """The angles of a model, which its layers share."""

    def __init__(self, args: Namespace, fused: bool = True) -> None:
        yarn = args.multi_latent_attention and args.rope_type == "yarn"
        self.frequencies, self.scale = _yarn(args) if yarn else (_plain(args), 1.0)
        self.interleaved: bool = args.rotary_interleaved or args.multi_latent_attention
        self.fused = fused
        """Whether rotating is one kernel, which may round less often than torch does, where there is a GPU."""
        self._angles: weakref.WeakKeyDictionary[AttentionPlan, tuple[Tensor, Tensor]] = weakref.WeakKeyDictionary()

    def angles(self, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Cosine and sine of this rank's tokens, times YaRN's scale, float32 [tokens, 1, channels / 2].

        Only the last plan's are kept, since all micro-batches of a rollout live at once, and no longer than the plan: a
        tensor that stays keeps a whole segment of GPU memory from sleeping, gibibytes if it was cut from a large one.
        """
        if plan not in self._angles:
            frequencies = device.from_host(self.frequencies, plan.positions.device)
            angles = torch.outer(plan.positions.float(), frequencies)[:, None]
            cos, sin = angles.cos(), angles.sin()
            if self.scale != 1.0:
                cos, sin = cos * self.scale, sin * self.scale
            self._angles.clear()
            self._angles[plan] = cos, sin
        return self._angles[plan]


def _plain(args: Namespace) -> Tensor:
    """[channels / 2]"""
    megatron = RotaryEmbedding(
        args.qk_pos_emb_head_dim if args.multi_latent_attention else args.kv_channels,
        args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    return megatron.inv_freq / (args.rotary_seq_len_interpolation_factor or 1.0)


def _yarn(args: Namespace) -> tuple[Tensor, float]:
    """Frequencies [channels / 2], and what cosines and sines are multiplied by."""
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    megatron = YarnRotaryEmbedding(
        args.qk_pos_emb_head_dim,
        rotary_base=args.rotary_base,
        scaling_factor=args.rotary_scaling_factor,
        use_cpu_initialization=True,
        # Positions are cut over context-parallel ranks here; Megatron would cut them too, which needs pinned memory.
        cp_group=cast(Any, SimpleNamespace(size=lambda: 1)),
        **{name: getattr(args, name) for name in names},
    )
    # It gives angles only: those of position 1 are the frequencies, here twice.
    angles, scale = megatron.get_emb(2)
    return angles[1, 0, 0].chunk(2)[0].cpu(), scale


class _Rotate(torch.autograd.Function):
    """The gradient is rotated back; nothing but the angles is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, fused: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved) if fused else _rotated(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, ctx.interleaved, back=True), None, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, fused: bool = True) -> Tensor:
    """Rotate pairs of channels of [tokens, heads, channels]: number i of the first half with number i of the second,
    or, interleaved, number 2i with number 2i + 1.

    Channels beyond two for each angle stay as they are. ``fused``: by a kernel of its own, where there is a GPU.
    """
    return cast(Tensor, _Rotate.apply(x, cos, sin, interleaved, fused))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool = False) -> Tensor:
    if device.is_cuda():
        from slime.backends.megatron.layers import gpu_kernels

        return gpu_kernels.rotated(x, cos, sin, interleaved, back=back)
    return _rotated(x, cos, -sin if back else sin, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.size(-1)
    turned, rest = x.split((2 * pairs, x.size(-1) - 2 * pairs), dim=-1)
    shape, member = ((pairs, 2), -1) if interleaved else ((2, pairs), -2)
    members = turned.unflatten(-1, shape).to(cos.dtype)
    signs = torch.stack([-sin, sin], dim=member)
    rotated = (members * cos.unsqueeze(member) + members.flip(member) * signs).flatten(-2).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.size(-1) else rotated
