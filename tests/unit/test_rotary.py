"""Rotary embedding of packed sequences against Megatron's, on every context-parallel rank."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from slime.backends.megatron.layers.attention import AttentionPlan
from slime.backends.megatron.layers.rotary import Rotary, rotate
from slime.models import hf_config, shape_from_hf
from tests.unit.test_models import DEEPSEEK, KIMI, MOONLIGHT, written

NUM_GPUS = 0
CHANNELS = 24
SCALED = {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "rotary_base": 500000}

INTERLEAVED = {"rotary_interleaved": True, "rotary_percent": 0.5}


class Group:
    """One context-parallel rank, as far as Megatron asks."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def options(**changes: Any) -> Namespace:
    values = {"kv_channels": CHANNELS, "rotary_percent": 1.0, "rotary_base": 10000, "use_rope_scaling": False}
    values |= {"rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": None, "rotary_interleaved": False}
    values |= {"multi_latent_attention": False}
    return Namespace(**values | changes)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [{}, {"rotary_percent": 0.5}, SCALED, {"rotary_seq_len_interpolation_factor": 4.0}, INTERLEAVED],
    ids=["plain", "half of the channels", "llama 3", "linear scaling", "interleaved half"],
)
def test_same_as_megatron(changes: dict[str, Any], cp_size: int) -> None:
    args = options(**changes)
    lengths = [2 * cp_size * n for n in (3, 1, 40, 2)]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    names = ("rotary_base", "rope_scaling_factor")
    embedding = RotaryEmbedding(
        CHANNELS,
        args.rotary_percent,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        use_cpu_initialization=True,
        **{name: getattr(args, name) for name in names},
    )
    half, interleaved = embedding.get_freqs_non_repeated(max(lengths)), args.rotary_interleaved
    frequencies = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat([half, half], dim=-1)
    frequencies = frequencies[:, None, None]
    rotary = Rotary(args)
    for rank in range(cp_size):
        plan = AttentionPlan(lengths, cp_size, rank, torch.device("cpu"))
        x = torch.randn(sum(lengths) // cp_size, 3, CHANNELS, requires_grad=True)
        upstream = torch.randn_like(x)
        out = rotate(x, *rotary.angles(plan), rotary.interleaved)
        got = [out, *torch.autograd.grad(out, x, upstream)]
        out = _apply_rotary_pos_emb_thd(x, offsets, frequencies, interleaved, cp_group=Group(cp_size, rank))
        want = [out, *torch.autograd.grad(out, x, upstream)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_yarn_of_latent_attention(cp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron puts the members of a pair into either half and leaves them there, for queries and keys alike."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where Megatron puts angles
    yarn = {"original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0, "mscale": 0.7}
    yarn |= {"mscale_all_dim": 1.3}
    args = options(
        multi_latent_attention=True, rope_type="yarn", qk_pos_emb_head_dim=CHANNELS, rotary_scaling_factor=40.0, **yarn
    )
    embedding = YarnRotaryEmbedding(CHANNELS, scaling_factor=40.0, use_cpu_initialization=True, **yarn)
    lengths = [2 * cp_size * n for n in (3, 1, 40, 2)]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    angles, scale = embedding.get_emb(max(lengths))
    assert scale != 1.0
    rotary = Rotary(args)
    for rank in range(cp_size):
        plan = AttentionPlan(lengths, cp_size, rank, torch.device("cpu"))
        x = torch.randn(sum(lengths) // cp_size, 3, CHANNELS, requires_grad=True)
        out = rotate(x, *rotary.angles(plan), rotary.interleaved)
        group = Group(cp_size, rank)
        want = _apply_rotary_pos_emb_thd(x, offsets, angles, multi_latent_attention=True, mscale=scale, cp_group=group)
        got = out.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
        upstream = torch.randn_like(x)
        pair = [torch.autograd.grad(y, x, upstream)[0] for y in (got, want)]
        torch.testing.assert_close(*pair, rtol=0, atol=2e-5)


@pytest.mark.parametrize("published", [DEEPSEEK, KIMI, MOONLIGHT], ids=["deepseek", "kimi", "moonlight"])
def test_published_models_have_the_angles_of_transformers(
    published: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    config = hf_config(written(published, tmp_path))
    rotary = Rotary(options(**shape_from_hf(config)))
    reference = DeepseekV3RotaryEmbedding(config)
    assert torch.equal(rotary.frequencies, reference.inv_freq)
    assert rotary.scale == reference.attention_scaling


def test_bfloat16_is_rounded_once() -> None:
    plan = AttentionPlan([300, 50], 1, 0, torch.device("cpu"))
    angles = Rotary(options()).angles(plan)
    x = torch.randn(350, 2, CHANNELS, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, *angles), rotate(x.float(), *angles).bfloat16())


def test_angles_are_those_of_the_plan_at_hand() -> None:
    """Pipelines go to and fro between micro-batches."""
    rotary = Rotary(options())
    plans = [AttentionPlan(lengths, 1, 0, torch.device("cpu")) for lengths in ([4, 5], [5, 4])]
    first, second, again = (rotary.angles(plan) for plan in (plans[0], plans[1], plans[0]))
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[1], again[1])
    assert rotary.angles(plans[0]) is again
