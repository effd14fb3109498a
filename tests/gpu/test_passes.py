"""Passes without gradients and training passes give the same bits: an on-policy step's ratio is then exactly 1."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, _dynamo

from slime.utils import device
from tests.parallel import tiny

NUM_GPUS = 1
_PASSES = 60
_KINDS = ("qwen3", "glm4", "qwen3_moe", "deepseek_v3")
_LONGEST = 60
_MANY = 300


def micro_batch(rng: random.Random, sequences: int) -> tuple[list[int], Tensor]:
    """Lengths of packed sequences, and tokens [1, sum of lengths]."""
    lengths = [rng.randint(2, _LONGEST) for _ in range(sequences)]
    return lengths, torch.randint(0, tiny.VOCAB, (1, sum(lengths)), device=device.current_device())


def outputs(module: torch.nn.Module, lengths: list[int], tokens: Tensor) -> dict[str, Tensor]:
    """What each part of the model, and its head, made of a micro-batch, in the order of computing; followed by a
    backward pass where gradients are enabled."""
    from slime.backends.megatron import model
    from slime.backends.megatron.layers import attention
    from slime.training.loss import log_probs

    found: dict[str, Tensor] = {}

    def note(name: str, part: torch.nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            found[name] = first.detach().clone()

    hooks = [part.register_forward_hook(partial(note, name)) for name, part in module.named_modules()]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(tokens.device)
    hidden = module(tokens, positions, None, packed_seq_params=attention.packed_params(lengths))
    for hook in hooks:
        hook.remove()
    weight = model.head_weight(module)
    settings = {"vocab_size": tiny.VOCAB, "temperature": 1.0, "group": None, "chunk_size": 64}
    terms = log_probs.token_terms(hidden[0], weight, tokens[0], **settings, wants_entropy_gradient=False)
    if torch.is_grad_enabled():
        terms[0].sum().backward()
    return found | {"log-probs": terms[0].detach(), "entropy": terms[1].detach()}


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "bfloat16") for kind in _KINDS), ("qwen3", "float32")])
def test_passes_with_and_without_gradients_have_the_same_bits(
    kind: str, dtype: str, megatron: None, tmp_path: Path
) -> None:
    tiny.save(kind, tmp_path / "model")
    check_same_bits(trained_model(tmp_path / "model", dtype))


def test_no_kernel_is_chosen_twice(megatron: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch compiles in this process, as until its workers are there, one that is compiled twice is timed twice,
    and beside other work another variant may then win, which adds up in another order.

    From torch 2.13 on the setting does not reach the thread of backward passes: only forward kernels are seen."""
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.utils import fresh_cache

    choose = CachingAutotuner.autotune_to_one_config
    chosen: list[CachingAutotuner] = []

    def noted(kernel: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        chosen.append(kernel)
        choose(kernel, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", noted)
    tiny.save("qwen3", tmp_path / "model")
    with fresh_cache(), config.patch(compile_threads=1):
        check_same_bits(trained_model(tmp_path / "model", "float32"))
    assert chosen
    assert [kernel.fn.__name__ for kernel in chosen if chosen.count(kernel) > 1] == []


def trained_model(directory: Path, dtype: str = "bfloat16", **options: Any) -> torch.nn.Module:
    """The model of ``directory`` as it is trained, but for where gradients are collected."""
    from slime.backends.megatron import model
    from slime.backends.megatron.weights import weights_io

    chunks = model.build_model(tiny.arguments(directory, params_dtype=dtype, bf16=dtype == "bfloat16", **options))
    weights_io.load_hf(chunks, directory)
    (module,) = model.wrap(chunks)
    return module


def check_same_bits(module: torch.nn.Module) -> None:
    """In the order of a trainer's first step, whose kernels are not compiled yet: all micro-batches without gradients,
    then all with. The first part of the model that differs is named."""
    rng = random.Random(seed := torch.seed())
    # The first is large: some of its kernels are compiled for its extents, and in the second pass are others.
    batches = [micro_batch(rng, _MANY if number == 0 else rng.randint(1, 12)) for number in range(_PASSES)]
    _dynamo.reset()
    with torch.no_grad():
        plain = [outputs(module, *batch) for batch in batches]
    for number, (batch, expected) in enumerate(zip(batches, plain, strict=True)):
        trained = outputs(module, *batch)
        differing = [name for name, tensor in expected.items() if not torch.equal(tensor, trained[name])]
        where = f"seed {seed}, micro-batch {number}, lengths {batch[0]}"
        assert not differing, f"{where}: first {differing[0]}, {len(differing)} in all"
