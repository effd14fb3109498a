"""The fused optimizer step against torch's loop over parameters, and through checkpoints of either."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron.optimizer import _fuse

SIZES = (1, 17, 4096)
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters() -> list[Tensor]:
    return [torch.nn.Parameter(torch.randn(size)) for size in SIZES]


def adam(like: list[Tensor], fused: bool) -> torch.optim.AdamW:
    copies = [torch.nn.Parameter(p.detach().clone()) for p in like]
    groups = [{"params": copies[:1], "weight_decay": 0.0}, {"params": copies[1:]}]
    optimizer = torch.optim.AdamW(groups, **OPTIONS, foreach=False)
    if fused:
        _fuse(optimizer)
    return optimizer


def all_of(optimizer: torch.optim.AdamW) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizers: list[torch.optim.AdamW], gradients: list[Tensor]) -> None:
    for optimizer in optimizers:
        for parameter, gradient in zip(all_of(optimizer), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def check_equal(fused: torch.optim.AdamW, loop: torch.optim.AdamW) -> None:
    for a, b in zip(all_of(fused), all_of(loop), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * OPTIONS["lr"])
        assert fused.state[a]["step"] == loop.state[b]["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(fused.state[a][name], loop.state[b][name], rtol=1e-5, atol=1e-7)


def test_fused_steps_are_those_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    start = parameters()
    fused, loop = adam(start, True), adam(start, False)
    for _ in range(5):
        step([fused, loop], parameters())
    check_equal(fused, loop)
    assert len(calls) == 5 * len(fused.param_groups)


@pytest.mark.parametrize("saved_by_fused", [True, False])
def test_either_continues_from_the_other(saved_by_fused: bool) -> None:
    start = parameters()
    saved, other = adam(start, saved_by_fused), adam(start, False)
    for _ in range(3):
        step([saved, other], parameters())
    resumed = adam([p.detach() for p in all_of(saved)], True)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert [group["fused"] for group in resumed.param_groups] == [True, True]
    assert [group["weight_decay"] for group in resumed.param_groups] == [0.0, 0.1]
    step([resumed, other], parameters())
    check_equal(resumed, other)
