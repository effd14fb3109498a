"""The fused optimizer step against torch's loop over parameters, and through checkpoints of either."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron.optimizer import _allocate, _fuse, _keep_groups

NUM_GPUS = 0
SIZES = (1, 17, 4096)
RATE = 1e-2
_SHARED: dict[str, Any] = {"lr": RATE, "weight_decay": 0.1, "foreach": False}
KINDS: dict[str, Callable[..., Any]] = {
    "adam": functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-8, **_SHARED),
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9, **_SHARED),
}
KERNELS = {"adam": "_fused_adamw_", "sgd": "_fused_sgd_"}


def parameters() -> list[Tensor]:
    return [torch.nn.Parameter(torch.randn(size)) for size in SIZES]


def make(kind: str, like: list[Tensor], fused: bool) -> Any:
    copies = [torch.nn.Parameter(p.detach().clone()) for p in like]
    optimizer = KINDS[kind]([{"params": copies[:1], "weight_decay": 0.0}, {"params": copies[1:]}])
    if fused:
        _fuse(optimizer)
        _keep_groups(optimizer)
    return optimizer


def all_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizers: list[torch.optim.Optimizer], gradients: list[Tensor]) -> None:
    for optimizer in optimizers:
        for parameter, gradient in zip(all_of(optimizer), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def check_equal(fused: torch.optim.Optimizer, loop: torch.optim.Optimizer) -> None:
    for a, b in zip(all_of(fused), all_of(loop), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * RATE)
        assert fused.state[a].keys() == loop.state[b].keys()
        for name, value in loop.state[b].items():
            torch.testing.assert_close(fused.state[a][name], value, rtol=1e-5, atol=1e-7, check_device=False)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_steps_are_those_of_the_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = getattr(torch, KERNELS[kind])
    monkeypatch.setattr(torch, KERNELS[kind], lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    start = parameters()
    fused, loop = make(kind, start, True), make(kind, start, False)
    for _ in range(5):
        step([fused, loop], parameters())
    check_equal(fused, loop)
    assert len(calls) == 5 * len(fused.param_groups)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved_by_fused", [True, False])
def test_either_continues_from_the_other(saved_by_fused: bool, kind: str) -> None:
    start = parameters()
    saved, other = make(kind, start, saved_by_fused), make(kind, start, False)
    for _ in range(3):
        step([saved, other], parameters())
    resumed = make(kind, [p.detach() for p in all_of(saved)], True)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert [group["fused"] for group in resumed.param_groups] == [True, True]
    assert [group["weight_decay"] for group in resumed.param_groups] == [0.0, 0.1]
    step([resumed, other], parameters())
    check_equal(resumed, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_brings_state_and_no_group(kind: str) -> None:
    """As megatron-core gives it for groups that it cannot tell apart: all are those of one, parameters included."""
    saved, resumed = (make(kind, parameters(), True) for _ in range(2))
    step([saved], parameters())
    own = {"lr": 3.0, "weight_decay": 0.5, "betas": (0.1, 0.2), "eps": 1.0, "momentum": 0.3, "max_lr": 4.0}
    resumed.param_groups[0].update(own)
    before = [{name: value for name, value in group.items() if name != "params"} for group in resumed.param_groups]
    state = copy.deepcopy(saved.state_dict())
    resumed.load_state_dict({**state, "param_groups": [state["param_groups"][1]] * 2})
    assert [len(group["params"]) for group in resumed.param_groups] == [1, 2]
    for group, expected in zip(resumed.param_groups, before, strict=True):
        assert {name: value for name, value in group.items() if name != "params"} == expected
    for mine, theirs in zip(all_of(resumed), all_of(saved), strict=True):
        for name, value in saved.state[theirs].items():
            assert torch.equal(resumed.state[mine][name], value), name


def test_momentum_that_begins_at_zero_is_that_of_the_first_step() -> None:
    start = parameters()
    allocated, other = make("sgd", start, True), make("sgd", start, True)
    _allocate(allocated)
    assert all(not allocated.state[parameter]["momentum_buffer"].any() for parameter in all_of(allocated))
    for _ in range(3):
        step([allocated, other], parameters())
    assert all(torch.equal(a, b) for a, b in zip(all_of(allocated), all_of(other), strict=True))


def test_without_momentum_there_is_no_state() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=RATE)
    _allocate(optimizer)
    assert not optimizer.state
