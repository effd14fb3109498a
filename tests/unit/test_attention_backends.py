"""Which kernel computes attention: the table, what options refuse, and what FlashAttention 4 is called with."""

from __future__ import annotations

import functools
import logging
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron import patches
from slime.convert.arguments import parse_model_args
from slime.fleet.placement import _what_trainers_lack, describe_placement
from slime.options import training
from slime.options.checks import attention as table
from slime.options.checks.attention import KERNELS, Needs, choose
from slime.options.errors import OptionError
from slime.utils import device
from tests.command_line import LATENT, Fails, Flags, Parse, refused, write_model
from tests.parallel import tiny
from tests.shipped import CONFIGS
from tests.unit.test_attention import CHANNELS, HEADS, dense, inputs, with_gradients

patches.install()

from slime.backends.megatron.layers import kernels  # noqa: E402
from slime.backends.megatron.layers.attention import AttentionPlan  # noqa: E402
from slime.backends.megatron.model import transformer_config  # noqa: E402

NUM_GPUS = 0
pytestmark = pytest.mark.usefixtures("launch_directory")

A100, H100, B200, RTX5090 = (8, 0), (9, 0), (10, 0), (12, 0)
ON_H100 = Needs("bfloat16", 128, 128, "cuda", H100)
ON_CPU = replace(ON_H100, device="cpu", capability=None)
UNKNOWN = replace(ON_H100, device=None, capability=None)
"""As options know it."""
LONG = replace(ON_H100, micro_batch=16384)
ABSENT = {"fa4": "the package flash-attn-4 is not installed"}


def widths(key: int, value: int, needs: Needs = ON_H100) -> Needs:
    return replace(needs, key_width=key, value_width=value)


@pytest.mark.parametrize(
    ("needs", "able", "first"),
    [
        (LONG, "fa4 flash unfused", "fa4"),
        (replace(LONG, deterministic=True), "fa4 flash unfused", "fa4"),
        (replace(LONG, dtype="float16"), "fa4 flash unfused", "fa4"),
        (replace(LONG, dtype="float32"), "unfused", "unfused"),
        (replace(LONG, capability=A100), "flash unfused", "flash"),
        (replace(LONG, capability=(7, 5)), "unfused", "unfused"),
        (replace(LONG, capability=B200), "fa4 flash unfused", "flash"),
        (replace(LONG, capability=RTX5090), "flash unfused", "flash"),
        (replace(LONG, device="cpu", capability=None), "unfused", "unfused"),
        (ON_H100, "fa4 flash unfused", "flash"),
        (UNKNOWN, "fa4 flash unfused", "flash"),
        (ON_CPU, "unfused", "unfused"),
        (replace(ON_CPU, dtype="float64"), "unfused", "unfused"),
        (widths(192, 128, LONG), "fa4 flash unfused", "flash"),
        (widths(192, 128, replace(LONG, capability=B200)), "fa4 flash unfused", "flash"),
        (widths(192, 192, LONG), "flash unfused", "flash"),
        (widths(160, 160, LONG), "flash unfused", "flash"),
        (widths(256, 256, LONG), "fa4 flash unfused", "flash"),
        (widths(256, 256, replace(LONG, capability=B200)), "fa4 flash unfused", "flash"),
        (widths(32, 32, LONG), "fa4 flash unfused", "flash"),
        (widths(64, 64, LONG), "fa4 flash unfused", "flash"),
        (widths(80, 80, LONG), "flash unfused", "flash"),
        (widths(24, 24, LONG), "flash unfused", "flash"),
        (widths(24, 12, LONG), "flash unfused", "flash"),
        (widths(128, 64, LONG), "flash unfused", "flash"),
        (widths(64, 128, LONG), "unfused", "unfused"),
        (widths(288, 288, LONG), "unfused", "unfused"),
        (widths(576, 512, LONG), "unfused", "unfused"),
        (widths(20, 20, LONG), "unfused", "unfused"),
    ],
)
def test_what_each_can_do_and_what_auto_takes(needs: Needs, able: str, first: str) -> None:
    assert choose("auto", needs) == first
    for kernel in KERNELS:
        if kernel.name in able.split():
            assert choose(kernel.name, needs) == kernel.name
        else:
            with pytest.raises(OptionError):
                choose(kernel.name, needs)


@pytest.mark.parametrize(
    ("micro_batch", "response", "sequence", "first"),
    [
        (None, None, None, "flash"),
        (16383, 2047, None, "flash"),
        (8192, 512, 40960, "flash"),
        (16384, None, None, "fa4"),
        (16384, 512, 40960, "fa4"),
        (4096, 2048, 40960, "fa4"),
        (None, 2048, 4096, "fa4"),
        (16384, 100, 129, "fa4"),
        (16384, 100, 128, "flash"),
    ],
)
def test_auto_takes_fa4_where_it_is_faster(
    micro_batch: int | None, response: int | None, sequence: int | None, first: str
) -> None:
    assert choose("auto", replace(ON_H100, micro_batch=micro_batch, response=response, sequence=sequence)) == first


@pytest.mark.parametrize(
    ("needs", "second"), [(LONG, "flash"), (widths(64, 128, LONG), "unfused"), (ON_CPU, "unfused")]
)
def test_auto_goes_without_a_package(needs: Needs, second: str) -> None:
    assert choose("auto", needs, ABSENT) == second


@pytest.mark.parametrize(
    ("backend", "needs", "line"),
    [
        ("fa4", ON_CPU, "FlashAttention 4 is for GPUs, and this host has none: take unfused"),
        ("flash", ON_CPU, "torch's FlashAttention 2 is for GPUs, and this host has none: take unfused"),
        (
            "fa4",
            replace(ON_H100, capability=A100),
            "FlashAttention 4 is for GPUs of compute capability 9 to 11, and this one has 8.0: take flash or unfused",
        ),
        (
            "fa4",
            replace(UNKNOWN, dtype="float32"),
            "FlashAttention 4 computes in bfloat16 or float16, and the model is float32: take unfused",
        ),
        (
            "fa4",
            widths(256, 128, replace(ON_H100, capability=B200)),
            "FlashAttention 4 has no heads of 256 channels and values of 128 (32, 64, 96, 128 or 256, with values as "
            "wide, or 192 with values of 128): take flash or unfused",
        ),
        (
            "flash",
            widths(64, 128),
            "torch's FlashAttention 2 has no heads of 64 channels and values of 128 (multiples of 8 to 256, with "
            "values no wider): take unfused",
        ),
        (
            "flash",
            replace(ON_H100, variants=("sinks", "sliding windows")),
            "torch's FlashAttention 2 has no sinks and no sliding windows here: there is no kernel that does",
        ),
        (
            "auto",
            replace(ON_H100, variants=("sinks",)),
            "torch's SDPA has no sinks here: there is no kernel that does",
        ),
    ],
)
def test_a_kernel_that_cannot_is_refused_in_one_line(backend: str, needs: Needs, line: str) -> None:
    with pytest.raises(OptionError) as error:
        choose(backend, needs)
    assert str(error.value) == f"--attention-backend {backend}: {line}"


def test_a_package_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"fa4: the package flash-attn-4 is not installed: take flash or unfused$"):
        choose("fa4", ON_H100, ABSENT)


def test_a_gradient_in_no_order_is_no_deterministic_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loose = replace(KERNELS[0], deterministic=False)
    monkeypatch.setattr(table, "KERNELS", (loose, *KERNELS[1:]))
    needs = replace(LONG, deterministic=True)
    assert (choose("auto", LONG), choose("auto", needs)) == ("fa4", "flash")
    with pytest.raises(OptionError, match="FlashAttention 4 has no deterministic gradient"):
        choose("fa4", needs)


TE = "--transformer-impl transformer_engine --bf16 --attention-backend"


@refused(
    f"""
--attention-backend flash -> flash: torch's FlashAttention 2 computes in bfloat16 or float16, and the model is float32
--attention-backend fa4 -> fa4: FlashAttention 4 computes in bfloat16 or float16, and the model is float32: take unfused
--attention-backend fa4 --bf16 less --fp32 -> fa4: the package flash-attn-4 is not installed: take flash or unfused
--attention-backend fused -> fused needs --transformer-impl transformer_engine, whose attention by cuDNN it is: take
    auto, fa4, flash or unfused
--attention-backend local -> local: Megatron's own attention is not for packed sequences: take unfused
--attention-backend fa3 -> invalid choice: 'fa3' (choose from 'auto', 'fa4', 'flash', 'unfused', 'fused', 'local')
{TE} local less --fp32 -> local: Megatron's own attention is not for packed sequences: take unfused
{TE} fa4 less --fp32 -> fa4: the package flash-attn-4 is not installed: take flash or unfused
"""
)
def test_options_refuse(flags: Flags, message: str, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "import_transformer_engine", lambda: None)
    assert message in fails(*flags)


@pytest.mark.parametrize(
    "words",
    [
        "--attention-backend auto",
        "--attention-backend unfused",
        "--bf16 --attention-backend flash",
        "--bf16 --attention-backend unfused --deterministic-mode",
        "--debug-rollout-only --attention-backend flash",
        f"{TE} fused",
        f"{TE} flash",
    ],
)
def test_options_take(words: str, parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "import_transformer_engine", lambda: None)
    assert parse(words, without="--fp32" if "--bf16" in words else "").option_warnings == []


def test_a_package_is_looked_for_and_not_imported(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: object() if name == "flash_attn.cute" else None)
    args = parse("--bf16 --attention-backend fa4", without="--fp32")
    assert args.attention_backend == "fa4"
    assert transformer_config(tiny.arguments(CONFIGS / "qwen3-30B-A3B", attention_backend="fa4"))


def test_latent_attentions_widths(launch_directory: Any, parse: Parse) -> None:
    write_model(launch_directory / "model", {**LATENT, "v_head_dim": 24})
    needs = table.needs_of(parse())
    assert (needs.key_width, needs.value_width) == (32, 24)


@pytest.mark.parametrize(
    ("words", "micro_batch", "response", "sequence"),
    [
        ("--rollout-max-prompt-len 24 --rollout-max-response-len 16", None, 16, 40),
        ("--rollout-max-response-len 16 --rollout-max-context-len 30", None, 16, 30),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 16384 --rollout-max-response-len 16", 16384, 16, None),
    ],
)
def test_bounds_of_lengths(
    words: str, micro_batch: int | None, response: int, sequence: int | None, parse: Parse
) -> None:
    args = parse(words)
    needs = table.with_lengths(table.needs_of(args), args)
    room = args.rollout_max_context_len  # of the model, where no flag says less
    assert (needs.micro_batch, needs.response, needs.sequence) == (micro_batch, response, sequence or room)


def test_placement_knows_the_device(parse: Parse) -> None:
    args = parse("--bf16 --attention-backend flash", without="--fp32")
    fleet: Any = Namespace(trainers=1, engines=[])
    assert not list(_what_trainers_lack(args, fleet, gpus=True))
    refusal = "--attention-backend flash: torch's FlashAttention 2 is for GPUs, and this host has none: take unfused"
    assert list(_what_trainers_lack(args, fleet, gpus=False)) == [refusal]
    assert describe_placement(args).splitlines()[-1] == f"warning: {refusal}"
    fleet.trainers = 0
    assert not list(_what_trainers_lack(args, fleet, gpus=False))


class _Fa4(ModuleType):
    """What flash-attn-4 has under this name, of which it is told how it was called; it computes with dense matrices."""

    def __init__(self) -> None:
        super().__init__("flash_attn.cute")
        self.calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert causal
        assert return_lse
        assert softmax_scale is not None
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        self.calls.append(
            {
                "queries": cu_seqlens_q.diff().tolist(),
                "keys": cu_seqlens_k.diff().tolist(),
                "longest": (max_seqlen_q, max_seqlen_k),
                "deterministic": deterministic,
            }
        )
        out = torch.cat([self._one(*each, softmax_scale) for each in self._each(q, k, v)])
        return out, out.new_zeros(q.size(1), q.size(0))

    def _each(self, q: Tensor, k: Tensor, v: Tensor) -> zip[tuple[Tensor, Tensor, Tensor]]:
        call = self.calls[-1]
        return zip(*(x.split(call[n]) for x, n in ((q, "queries"), (k, "keys"), (v, "keys"))), strict=True)

    def _one(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The last queries of a sequence."""
        missing = q.new_zeros(k.size(0) - q.size(0), *q.shape[1:])
        return dense(torch.cat((missing, q)), k, v, [k.size(0)], scale)[len(missing) :]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> _Fa4:
    module = _Fa4()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    for name in ("_fa4_function", "why_absent", "_tell"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name).__wrapped__)  # nothing is cached
    return module


@pytest.mark.parametrize("value_channels", [10, CHANNELS, 24])
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_fa4_is_called_as_it_is_declared(package: _Fa4, value_channels: int, cp_size: int, cp_rank: int) -> None:
    """Offsets of queries and of keys, values of their own width, and lengths that no further kernel is compiled for."""
    lengths = [4, 40, 300, 8] if cp_size > 1 else [5, 40, 1, 300]
    plan = AttentionPlan(lengths, cp_size, cp_rank, torch.device("cpu"))
    query = inputs(sum(plan.queries))[0]
    key, value = inputs(sum(plan.keys), value_channels)[1:]
    qkv, upstream = [query, key, value], torch.randn(len(query), HEADS, value_channels, dtype=torch.float64)
    got = with_gradients(kernels.fa4(*qkv, plan, 0.3), qkv, upstream)
    want = with_gradients(kernels.unfused(*qkv, plan, 0.3), qkv, upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    (call,) = package.calls
    assert (call["queries"], call["keys"]) == (plan.queries, plan.keys)
    assert call["longest"] == (max(256, *plan.queries), max(256, *plan.keys))
    assert not call["deterministic"]


def test_fa4_is_deterministic_where_torch_is(package: _Fa4) -> None:
    device.compute_deterministically()
    try:
        kernels.fa4(*inputs(3), AttentionPlan([3], 1, 0, torch.device("cpu")), 1.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert package.calls[-1]["deterministic"]


@pytest.mark.parametrize(
    ("capability", "backend", "tokens", "told"),
    [
        (H100, "auto", 16384, "attention: FlashAttention 4 (--attention-backend auto)"),
        (H100, "auto", 8192, "attention: torch's FlashAttention 2 (--attention-backend auto)"),
        (H100, "fa4", 8192, ""),
        (H100, "flash", 16384, ""),
        (A100, "auto", 16384, "attention: torch's FlashAttention 2 (--attention-backend auto)"),
        (None, "auto", 16384, "attention: torch's SDPA (--attention-backend auto)"),
    ],
)
def test_a_model_takes_what_the_gpu_has(
    capability: tuple[int, int] | None,
    backend: str,
    tokens: int,
    told: str,
    package: _Fa4,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is asked for by its name needs no telling."""
    assert logs(capability, backend, monkeypatch, caplog, tokens) == ([told] if told else [])


def test_what_is_not_there_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for cached in (kernels.why_absent, kernels._tell):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    (line,) = logs(H100, "auto", monkeypatch, caplog, times=2)
    assert line.startswith(
        "attention: torch's FlashAttention 2 (--attention-backend auto); the package flash-attn-4 is not"
    )
    with pytest.raises(OptionError, match=r"fa4: the package flash-attn-4 is not installed .*: take flash or unfused"):
        logs(H100, "fa4", monkeypatch, caplog)
    for cached in (kernels.why_absent, kernels._tell):
        cached.cache_clear()


def test_nothing_is_imported_that_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for cached in (kernels.why_absent, kernels._tell):
        cached.cache_clear()
    imported: list[str] = []
    monkeypatch.setattr(kernels.importlib, "import_module", imported.append)
    logs(H100, "auto", monkeypatch, caplog, tokens=8192)
    assert imported == []
    logs(H100, "auto", monkeypatch, caplog)
    assert imported == ["flash_attn.cute"]
    for cached in (kernels.why_absent, kernels._tell):
        cached.cache_clear()


def logs(
    capability: tuple[int, int] | None,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tokens: int = 16384,
    times: int = 1,
) -> list[str]:
    """Of a model that is built on such a GPU, for micro-batches of so many tokens."""
    monkeypatch.setattr(device, "is_cuda", lambda: capability is not None)
    monkeypatch.setattr(device, "capability", lambda: capability)
    options = {"params_dtype": "bfloat16", "use_dynamic_batch_size": True, "max_tokens_per_gpu": tokens}
    args = tiny.arguments(CONFIGS / "qwen3-30B-A3B", attention_backend=backend, **options)
    config = transformer_config(args)
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        for _ in range(times):
            kernels.kernel_of(args, config)
    return [record.getMessage() for record in caplog.records if record.name == kernels.__name__]


def test_a_run_has_one_kernel(package: _Fa4, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options' lengths decide, not a micro-batch's."""
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    monkeypatch.setattr(device, "capability", lambda: H100)
    args = tiny.arguments(CONFIGS / "qwen3-30B-A3B", params_dtype="bfloat16", rollout_max_response_len=4096)
    kernel = kernels.kernel_of(args, transformer_config(args))
    assert isinstance(kernel, functools.partial)
    assert kernel.keywords == {"backend": "fa4"}


@pytest.mark.parametrize("words", ["--attention-backend fa4", "--attention-backend fused", ""])
def test_a_conversion_computes_no_attention(words: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    directories = ["--hf-checkpoint", str(models("qwen3")), "--save", str(tmp_path / "out")]
    args = parse_model_args("", [*directories, *words.split()])
    kernel = kernels.kernel_of(args, transformer_config(args))
    assert isinstance(kernel, functools.partial)
    assert kernel.keywords == {"backend": "unfused"}


def test_a_models_own_softmax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = tiny.arguments(CONFIGS / "qwen3-30B-A3B")
    config = transformer_config(args)
    config.softmax_type, config.window_size = "learnable", (128, 0)
    with pytest.raises(OptionError, match="torch's SDPA has no sinks and no sliding windows here"):
        kernels.kernel_of(args, config)
