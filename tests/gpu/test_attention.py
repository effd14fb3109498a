"""Each attention kernel against float64 written out, on fresh inputs, and against itself, bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime.backends.megatron.layers import kernels
from slime.backends.megatron.layers.attention import AttentionPlan
from slime.options.checks import attention as table
from slime.utils import device
from tests.gpu.test_loop import Record, check, run
from tests.gpu.test_passes import check_same_bits, trained_model
from tests.integration.harness import ROOT
from tests.integration.tiny_run import Value
from tests.parallel import tiny

NUM_GPUS = 1
KERNELS = ("fa4", "flash", "unfused")
# (heads, groups, channels, value channels): 1.7B, 4B and 8B, small models, DeepSeek V3, wide heads, one group a rank,
# tiny models.
SHAPES = (
    *((16, 8, 128, 128), (32, 8, 128, 128), (16, 8, 64, 64), (8, 8, 192, 128), (8, 4, 256, 256), (4, 1, 128, 128)),
    (4, 2, 32, 32),
)
_WIDTHS = {
    "qwen3": {"head_dim": 128},
    "deepseek_v3": {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
"""That every kernel has, of tiny models."""
_ROWS_AT_ONCE = 2**26
"""Scores of the reference in one piece: half a GiB."""


@dataclass(frozen=True)
class _Lengths:
    name: str
    cp_size: int = 1

    def draw(self, rng: random.Random) -> list[int]:
        """Multiples of 2 * cp_size under context parallelism."""
        ones = [1] * 40 + [rng.randint(2, 700), 1, 129, 128, 127]
        several = [min(4096, round(rng.lognormvariate(5, 1.2)) + 1) for _ in range(24)] + [4096]
        many = [rng.randint(1, 60) for _ in range(300)]
        drawn = {"ones": ones, "one token": [1], "long tail": several, "16k": [16384], "many": many}[self.name]
        return drawn if self.cp_size == 1 else [-(-n // (2 * self.cp_size)) * 2 * self.cp_size for n in drawn]


LENGTHS = (
    *(_Lengths(name) for name in ("ones", "one token", "long tail", "16k", "many")),
    *(_Lengths(name, 2) for name in ("ones", "long tail")),
    _Lengths("long tail", 4),
)


def able(kernel: str, dtype: str = "bfloat16", widths: tuple[int, int] = (128, 128)) -> None:
    """Skip a case that the table says this kernel cannot do here, or whose package is not there."""
    try:
        kernels.choose(kernel, table.Needs(dtype, *widths, "cuda", device.capability()))
    except table.OptionError as error:
        pytest.skip(str(error))


def reference(inputs: list[Tensor], upstream: Tensor, plan: AttentionPlan, scale: float) -> list[list[Tensor]]:
    """Output and gradients of query, key and value of every sequence, in float64, a few rows at a time."""
    found = []
    query_start = key_start = 0
    for queries, keys in zip(plan.queries, plan.keys, strict=True):
        of_queries, of_keys = slice(query_start, query_start + queries), slice(key_start, key_start + keys)
        q, up = (x[of_queries].double().transpose(0, 1) for x in (inputs[0], upstream))
        k, v = (x[of_keys].double().transpose(0, 1) for x in inputs[1:])
        found.append(_of_sequence(q, k, v, up, scale))
        query_start, key_start = query_start + queries, key_start + keys
    return [list(tensors) for tensors in zip(*found, strict=True)]


def _of_sequence(q: Tensor, k: Tensor, v: Tensor, up: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Of [heads, tokens, channels], as [tokens, heads, channels]."""
    (heads, queries, _), (groups, keys, _) = q.shape, k.shape
    out, dq = up.new_empty(up.shape), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    rows = max(1, _ROWS_AT_ONCE // (keys * heads // groups))
    for group in range(groups):
        own = slice(group * heads // groups, (group + 1) * heads // groups)
        for start in range(0, queries, rows):
            part = (own, slice(start, start + rows))
            scores = q[part] @ k[group].T * scale
            last = torch.arange(queries, device=q.device)[part[1]] + keys - queries
            later = torch.arange(keys, device=q.device) > last[:, None]
            probabilities = scores.masked_fill_(later, -torch.inf).softmax(-1)
            out[part] = probabilities @ v[group]
            dv[group] += (probabilities.transpose(1, 2) @ up[part]).sum(0)
            of_scores = up[part] @ v[group].T
            of_scores = probabilities * (of_scores - (of_scores * probabilities).sum(-1, keepdim=True)) * scale
            dq[part] = of_scores @ k[group]
            dk[group] += (of_scores.transpose(1, 2) @ q[part]).sum(0)
    return tuple(x.transpose(0, 1) for x in (out, dq, dk, dv))


def make_inputs(shape: tuple[int, int, int, int], plan: AttentionPlan) -> tuple[list[Tensor], Tensor]:
    """Query, key and value as a projection has them, slices of one tensor where they have one width, and the output's
    gradient; in bfloat16."""
    heads, groups, channels, value_channels = shape
    where, queries, keys = plan.device, sum(plan.queries), sum(plan.keys)
    widths = (channels, channels, value_channels)
    if len(set(widths)) == 1 and queries == keys:
        together = torch.randn(queries, heads + 2 * groups, channels, device=where, dtype=torch.bfloat16)
        inputs = list(together.split((heads, groups, groups), dim=1))
    else:  # as context parallelism gathers them
        inputs = [torch.randn(queries, heads, channels, device=where, dtype=torch.bfloat16)]
        gathered = torch.randn(keys, groups, channels + value_channels, device=where, dtype=torch.bfloat16)
        inputs += gathered.split(widths[1:], dim=-1)
    return inputs, torch.randn(queries, heads, value_channels, device=where, dtype=torch.bfloat16)


def computed(kernel: str, inputs: list[Tensor], upstream: Tensor, plan: AttentionPlan, scale: float) -> list[Tensor]:
    """Output and gradients."""
    own = [x.detach().requires_grad_() for x in inputs]
    out = kernels.packed_attention(*own, plan, scale, backend=kernel)
    return [out.detach(), *torch.autograd.grad(out, own, upstream)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{x.name} cp{x.cp_size}".replace(" ", "_"))
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_as_near_to_float64_as_its_type_allows(
    shape: tuple[int, int, int, int], kernel: str, lengths: _Lengths, record_property: Record
) -> None:
    """Every sequence by itself, so that none hides a wrong one beside it; the seed is in the message."""
    able(kernel, widths=shape[2:])
    rng = random.Random(seed := torch.seed())
    rank, scale = rng.randrange(lengths.cp_size), rng.uniform(0.5, 1.5) * shape[2] ** -0.5
    plan = AttentionPlan(lengths.draw(rng), lengths.cp_size, rank, device.current_device())
    inputs, upstream = make_inputs(shape, plan)
    found, worst = computed(kernel, inputs, upstream, plan, scale), 0.0
    for name, got, want in zip(("out", "dq", "dk", "dv"), found, reference(inputs, upstream, plan, scale), strict=True):
        sizes = plan.keys if name in ("dk", "dv") else plan.queries
        for number, (mine, exact) in enumerate(zip(got.split(sizes), want, strict=True)):
            error, size = (float(x.pow(2).mean().sqrt()) for x in (mine.double() - exact, exact))
            where = f"seed {seed}, {name} of sequence {number}: {plan.queries[number]} after {plan.keys[number]}"
            # Where one key has all of the probability, as that of a first token, queries and keys have no gradient but
            # for roundings, which are as large as a key's share.
            allowed = 1.5e-2 * size + 2e-2 / plan.keys[number]
            assert error < allowed, f"{where}: {error:.1e}, {size:.1e}"
        exact = torch.cat(want)
        if len(exact) > 1:
            worst = max(worst, float((got.double() - exact).norm() / exact.norm()))
    assert worst < 8e-3, f"seed {seed}"
    record_property("error", f"{worst:.1e}")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """What ``--deterministic-mode`` has of torch."""
    device.compute_deterministically()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_the_same_bits_again(shape: tuple[int, int, int, int], kernel: str, deterministic: None) -> None:
    """Outputs with and without gradients; and of a deterministic run gradients too, beside other work."""
    able(kernel, widths=shape[2:])
    lengths = [2048, 1, 700, *(random.Random(torch.seed()).randint(1, 400) for _ in range(20))]
    plan = AttentionPlan(lengths, 1, 0, device.current_device())
    inputs, upstream = make_inputs(shape, plan)
    first = computed(kernel, inputs, upstream, plan, 0.1)
    for _ in range(5):
        with torch.no_grad():
            assert torch.equal(kernels.packed_attention(*inputs, plan, 0.1, backend=kernel), first[0])
        again = computed(kernel, inputs, upstream, plan, 0.1)
        assert [torch.equal(a, b) for a, b in zip(again, first, strict=True)] == [True] * 4


@pytest.mark.parametrize("kernel", ["fa4", "flash"])
def test_nothing_waits_for_the_device(kernel: str) -> None:
    able(kernel)
    plan = AttentionPlan([300, 1, 40], 1, 0, device.current_device())
    inputs, upstream = make_inputs(SHAPES[0], plan)
    computed(kernel, inputs, upstream, plan, 0.1)  # compiles, and copies the plan
    accelerator = torch.get_device_module(plan.device)
    device.synchronize()
    accelerator.set_sync_debug_mode("error")
    try:
        computed(kernel, inputs, upstream, plan, 0.1)
    finally:
        accelerator.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", list(_WIDTHS))
def test_passes_with_and_without_gradients_have_the_same_bits(
    kind: str, kernel: str, megatron: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole model."""
    able(kernel, widths=(128, 128) if kind == "qwen3" else (192, 128))
    monkeypatch.setitem(tiny.KINDS, kind, tiny.KINDS[kind] | _WIDTHS[kind])
    tiny.save(kind, tmp_path / "model")
    check_same_bits(trained_model(tmp_path / "model", attention_backend=kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_loop(kernel: str, workspace: Path, record_property: Record) -> None:
    """Of two rollouts, the first step of each on policy (``--ci-test``)."""
    able(kernel)
    make = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), str(workspace / f"model_{kernel}")]
    make += ["--hidden-size", "512", "--num-heads", "4", "--num-kv-heads", "2"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=120)
    model: dict[str, Value] = dict.fromkeys(("hf_checkpoint", "ref_load"), make[2])
    run_dir = run(workspace, f"attention_{kernel}", num_rollout=2, attention_backend=kernel, ci_test=True, **model)
    check(run_dir, 2, record_property)
