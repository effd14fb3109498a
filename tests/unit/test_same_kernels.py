"""True on-policy mode: what trainers compute with, what engines are told, and what is refused."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron.layers.attention import AttentionPlan
from slime.backends.megatron.layers.kernels import packed_attention
from slime.backends.megatron.layers.same_kernels import attend
from slime.backends.sglang import same_kernels
from slime.backends.sglang.patches import EVERY_PROCESS, ServerFacts
from slime.fleet.placement import _check_precision
from slime.options.errors import OptionError
from slime.options.learning.same_kernels import check_same_kernels
from slime.processes.server_process import SAME_KERNELS_VARIABLE
from slime.ray.supervision import InputError
from slime.training.checks import TrainingError, check_step
from slime.training.loss.log_probs import token_terms
from slime.utils.environment import kernels_of_any_shape
from tests.algorithm_options import algorithm_options
from tests.unit.test_engine import make_engine

NUM_GPUS = 0
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def _with_gradients(kernel: Any, inputs: list[Tensor], plan: AttentionPlan, out: Tensor) -> list[Tensor]:
    own = [x.clone().requires_grad_() for x in inputs]
    result = kernel(*own, plan, 0.3)
    (result * out).sum().backward()
    return [result.detach(), *(x.grad for x in own if x.grad is not None)]


def test_one_query_at_a_time_is_attention() -> None:
    """Value and gradients are those of packed attention; a sequence's bits do not depend on what is beside it."""
    torch.manual_seed(torch.seed() % 2**32)
    lengths = [5, 1, 9]
    plan = AttentionPlan(lengths, 1, 0, torch.device("cpu"))
    inputs = [torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2)]
    out = torch.randn(sum(lengths), 4, 16)
    ours, packed = (_with_gradients(kernel, inputs, plan, out) for kernel in (attend, packed_attention))
    for mine, other in zip(ours, packed, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    alone = AttentionPlan([9], 1, 0, torch.device("cpu"))
    assert torch.equal(attend(*(x[6:] for x in inputs), alone, 0.3), ours[0][6:])


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_log_probs_are_torchs_and_their_gradient_is_as_ever(chunk_size: int | None) -> None:
    torch.manual_seed(torch.seed() % 2**32)
    hidden, weight, labels = torch.randn(7, 8), torch.randn(12, 8), torch.randint(0, 11, (7,))
    results = []
    for as_engines in (True, False):
        own = [x.clone().requires_grad_() for x in (hidden, weight)]
        log_probs, entropy = token_terms(
            *own, labels, vocab_size=11, temperature=0.7, chunk_size=chunk_size, as_engines=as_engines
        )
        (log_probs * torch.arange(1.0, 8.0)).sum().backward()
        results.append((log_probs.detach(), entropy, *(x.grad for x in own)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    parts = [slice(0, 7)] if chunk_size is None else [slice(0, 3), slice(3, 6), slice(6, 7)]
    rows = torch.cat([torch.log_softmax(hidden[part] @ weight[:11].t() / 0.7, -1) for part in parts])
    assert torch.equal(results[0][0], rows.gather(1, labels[:, None])[:, 0])


def test_an_engine_is_told_by_its_command_and_environment(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    assert not ServerFacts.of_command(engine._command(1, 2), engine._environment()).same_kernels
    assert "--enable-deterministic-inference" not in engine._command(1, 2)
    assert not ServerFacts.of_command([], engine._environment()).equal_bits
    engine._args.deterministic_mode = True
    assert ServerFacts.of_command([], engine._environment()).equal_bits
    engine._args.deterministic_mode = False
    engine._args.true_on_policy_mode = True
    environment = engine._environment()
    assert ServerFacts.of_command([], environment).equal_bits
    assert ServerFacts.of_command(engine._command(1, 2), environment).same_kernels
    assert environment[SAME_KERNELS_VARIABLE] == "1"
    assert environment["MKL_CBWR"] == kernels_of_any_shape()["MKL_CBWR"]
    assert "--enable-deterministic-inference" in engine._command(1, 2)
    assert "fa3" not in engine._command(1, 2)
    engine._cuda_devices = [0]
    assert "fa3" in engine._command(1, 2)


@pytest.mark.parametrize(("cuda", "mode", "wanted"), [(True, True, True), (False, True, False), (True, False, False)])
def test_engines_on_gpus_round_as_trainers(cuda: bool, mode: bool, wanted: bool) -> None:
    server = ServerFacts(cuda=cuda, torchvision=False, same_kernels=mode)
    assert wanted == any(p.name == "roundings_of_trainers" and p.wanted(server) for p in EVERY_PROCESS)


ALLOWED: dict[str, Any] = {
    "true_on_policy_mode": True,
    "precision": "float32",
    **dict.fromkeys(("num_experts", "lora_rank", "custom_model_provider_path", "over_sampling_batch_size")),
    **dict.fromkeys(("multi_latent_attention", "enable_mtp_training", "asynchronous", "partial_rollout"), False),
    **dict.fromkeys(("tensor_model_parallel_size", "context_parallel_size", "rollout_num_gpus_per_engine"), 1),
    **{
        "transformer_impl": "local",
        "loss_type": "policy_loss",
        "keep_old_actor": False,
        "rollout_external_engine_addrs": None,
    },
}


@pytest.mark.parametrize(
    ("changes", "model_type", "why"),
    [
        ({}, "qwen3", None),
        ({}, "qwen2", None),
        ({"tensor_model_parallel_size": 2, "true_on_policy_mode": False}, "llama", None),
        ({}, "llama", "it is for qwen2 and qwen3, and .* is llama"),
        ({"precision": "float16"}, "qwen3", "--fp16"),
        ({"tensor_model_parallel_size": 2}, "qwen3", "--tensor-model-parallel-size"),
        ({"rollout_num_gpus_per_engine": 2}, "qwen3", "--rollout-num-gpus-per-engine"),
        ({"num_experts": 8}, "qwen3", "--num-experts"),
        ({"asynchronous": True}, "qwen3", "train_async.py"),
        ({"partial_rollout": True}, "qwen3", "--partial-rollout"),
        ({"loss_type": "sft_loss"}, "qwen3", "has no effect with --loss-type sft_loss"),
        ({"rollout_external_engine_addrs": ["a"]}, "qwen3", "--rollout-external-engine-addrs"),
    ],
)
def test_what_the_mode_is_not_for_is_refused(
    changes: dict[str, Any], model_type: str, why: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    args = Namespace(**ALLOWED | changes | {"hf_checkpoint": str(tmp_path)})
    if why is None:
        check_same_kernels(args)
        return
    with pytest.raises(OptionError, match=why):
        check_same_kernels(args)


@pytest.mark.parametrize(
    ("mean", "largest", "passes"), [(0, 0, True), (9e-7, 4e-6, True), (2e-6, 0, False), (0, 6e-6, False)]
)
def test_a_difference_ends_the_run(mean: float, largest: float, passes: bool) -> None:
    args = algorithm_options(true_on_policy_mode=True, ci_test=False)
    metrics = {DIFFERENCE: mean, f"{DIFFERENCE}_max": largest}
    if passes:
        check_step(args, "rollout 0", metrics, 1.0, is_first=False, on_policy=True)
        return
    with pytest.raises(TrainingError, match=r"rollout 0: --true-on-policy-mode: .* tools/compare_log_probs\.py"):
        check_step(args, "rollout 0", metrics, 1.0, is_first=False, on_policy=True)
    check_step(args, "rollout 0", metrics, 1.0, is_first=False, on_policy=False)


@pytest.mark.parametrize("missing", [DIFFERENCE, f"{DIFFERENCE}_max"])
def test_a_step_that_compared_nothing_ends_the_run(missing: str) -> None:
    args = algorithm_options(true_on_policy_mode=True, ci_test=False)
    metrics = {name: 0.0 for name in (DIFFERENCE, f"{DIFFERENCE}_max") if name != missing}
    with pytest.raises(TrainingError, match=f"rollout 0: --true-on-policy-mode: there is no {missing}: "):
        check_step(args, "rollout 0", metrics, 1.0, is_first=False, on_policy=True)
    check_step(args, "rollout 0, critic", {}, 1.0, is_first=False, on_policy=False)


def _of_16_bits(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_engines_normalise_the_rounded_sum() -> None:
    """A trainer adds in bfloat16, and its norm sees nothing else; an engine gives the sum on as the residual."""
    norm = same_kernels._adds_first(lambda self, x: x.float() * self)
    x, residual = _of_16_bits(4, 64), _of_16_bits(4, 64)
    total = (x.float() + residual.float()).to(torch.bfloat16)
    assert not torch.equal(total.float(), x.float() + residual.float())
    normalised, kept = norm(3.0, x, residual)
    assert torch.equal(kept, total)
    assert torch.equal(normalised, total.float() * 3.0)
    assert torch.equal(norm(3.0, x), x.float() * 3.0)


def test_engines_round_before_they_add_a_bias() -> None:
    apply = same_kernels._adds_bias_last(lambda self, layer, x, bias=None: x @ layer if bias is None else None)
    x, weight, bias = _of_16_bits(5, 32), _of_16_bits(32, 16), _of_16_bits(16)
    assert torch.equal(apply(None, weight, x), x @ weight)
    rounded = (x @ weight).float() + bias.float()
    assert torch.equal(apply(None, weight, x, bias), rounded.to(torch.bfloat16))


class _Native:
    """As SGLang's rotary embedding computes without kernels: in the type of what it is given."""

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor, offsets: Any) -> tuple[Tensor, Tensor]:
        assert offsets is None
        cos, sin = (function(positions.float()).to(query.dtype)[:, None] for function in (torch.cos, torch.sin))
        return query * cos + query.flip(-1) * sin, key * cos + key.flip(-1) * sin


def test_engines_rotate_in_float32() -> None:
    positions, query, key = torch.arange(6), _of_16_bits(6, 64), _of_16_bits(6, 32)
    rotated = same_kernels._rotate(_Native(), positions, query, key)
    for mine, x in zip(rotated, (query, key), strict=True):
        cos, sin = positions.float().cos()[:, None], positions.float().sin()[:, None]
        assert torch.equal(mine, (x.float() * cos + x.float().flip(-1) * sin).to(torch.bfloat16))
    assert not torch.equal(rotated[0], _Native().forward_native(positions, query, key, None)[0])


def test_frequencies_are_those_of_a_cpu() -> None:
    with torch.device("meta"):
        made = same_kernels._on_cpu(lambda self, base: base ** torch.arange(3.0))(None, 2.0)
        assert made.device.type == "meta"
    assert same_kernels._on_cpu(lambda self, base: base ** torch.arange(3.0))(None, 2.0).tolist() == [1, 2, 4]


@pytest.mark.parametrize(("gpus", "dtype", "given"), [(True, "float32", "--bf16"), (False, "bfloat16", "--fp32")])
def test_where_there_are_no_such_kernels_is_said(gpus: bool, dtype: str, given: str) -> None:
    args = Namespace(true_on_policy_mode=True, params_dtype=dtype, kv_channels=128, sglang_cli=[])
    with pytest.raises(InputError, match=f"--true-on-policy-mode .* is for {given}: give that"):
        _check_precision(args, Namespace(engines=[]), gpus)  # type: ignore[arg-type]
    args.params_dtype = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    _check_precision(args, Namespace(engines=[]), gpus)  # type: ignore[arg-type]
    if gpus:
        args.sglang_cli = ["--attention-backend", "triton"]
        with pytest.raises(InputError, match="--sglang-attention-backend is triton: drop it"):
            _check_precision(args, Namespace(engines=[]), gpus)  # type: ignore[arg-type]
        args.kv_channels = 64
        with pytest.raises(InputError, match="heads of 128 channels, and this model's have 64"):
            _check_precision(args, Namespace(engines=[]), gpus)  # type: ignore[arg-type]
