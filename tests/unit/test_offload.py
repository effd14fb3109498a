"""The optimizer in host memory: its steps are those of the resident one, in any chunks, and AdamW's in float64."""

from __future__ import annotations

import copy
import os
from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron import offload
from slime.backends.megatron.offload import HostState
from slime.backends.megatron.optimizer import _allocate, _fuse, _keep_groups, _moments

NUM_GPUS = 0
SHAPES = ((7, 9), (1,), (130,), (33, 5), (64,))
RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
STEPS = 20
SETTINGS: dict[str, Any] = {"fraction": 1.0, "pin": True, "overlap": True}


def weights(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def rate(step: int) -> float:
    return RATE * (1 - step / 40)


class Part(Namespace):
    """What is used of a `Float16OptimizerWithFloat16Params`, or for float32 weights of an `FP32Optimizer`."""

    def __init__(self, kind: str, dtype: torch.dtype, settings: dict[str, Any] | None) -> None:
        models = weights(dtype)
        mains = models if dtype is torch.float32 else [model.detach().clone().float() for model in models]
        groups = [{"params": mains[:2], "weight_decay": 0.0}, {"params": mains[2:], "weight_decay": DECAY}]
        inner = (
            torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
            if kind == "adam"
            else torch.optim.SGD(groups, lr=RATE, momentum=0.9)
        )
        super().__init__(optimizer=inner, models=models, mains=mains)
        if dtype is not torch.float32:
            self.fp32_from_float16_groups, self.float16_groups = [mains[:2], mains[2:]], [models[:2], models[2:]]
        self.host = None if settings is None else HostState(self, _moments(inner), **settings)  # type: ignore[arg-type]
        _fuse(inner)
        _keep_groups(inner)
        _allocate(inner)

    def _copy_main_params_to_model_params(self) -> None:
        for model, main in zip(self.models, self.mains, strict=True):
            model.data.copy_(main)

    def step(self, number: int) -> None:
        """As Megatron makes it."""
        if self.host is None:
            self._step(number)
            return
        with self.host.ready():
            self._step(number)

    def _step(self, number: int) -> None:
        for main, gradient in zip(self.mains, gradients(number), strict=True):
            main.grad = gradient
        for group in self.optimizer.param_groups:  # which a load makes anew
            group["lr"] = rate(number)
        self.optimizer.step()
        self._copy_main_params_to_model_params()

    def same(self, other: Part) -> bool:
        pairs = list(zip(self.models + self.mains, other.models + other.mains, strict=True))
        for mine, theirs in zip(self.mains, other.mains, strict=True):
            states = self.optimizer.state[mine], other.optimizer.state[theirs]
            assert states[0].keys() == states[1].keys()
            pairs += [(states[0][name], states[1][name]) for name in states[0]]
        return all(torch.equal(a, b) and a.shape == b.shape for a, b in pairs)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """That parameters share, and of which the larger ones take several; whole vectors of the CPU's kernel."""
    monkeypatch.setattr(offload, "_CHUNK", 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(
    "changes", [{}, {"overlap": False}, {"pin": False}, {"fraction": 0.4}], ids=["", "in turn", "unpinned", "part"]
)
def test_steps_are_those_of_the_resident_optimizer(changes: dict[str, Any], kind: str, dtype: torch.dtype) -> None:
    resident, moved = Part(kind, dtype, None), Part(kind, dtype, SETTINGS | changes)
    for number in range(STEPS):
        resident.step(number)
        moved.step(number)
    assert moved.same(resident)
    assert len(moved.optimizer.state) == len(SHAPES)
    assert moved.optimizer.param_groups[1]["params"] == moved.mains[2:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("from_host", [True, False])
@pytest.mark.parametrize("to_host", [True, False])
def test_either_goes_on_from_the_others_checkpoint(
    to_host: bool, from_host: bool, kind: str, dtype: torch.dtype
) -> None:
    saved = Part(kind, dtype, SETTINGS if from_host else None)
    for number in range(STEPS):
        saved.step(number)
    state = copy.deepcopy(saved.optimizer.state_dict())
    resumed = Part(kind, dtype, SETTINGS if to_host else None)
    resumed.optimizer.load_state_dict(state)
    for mine, theirs in zip(resumed.mains + resumed.models, saved.mains + saved.models, strict=True):
        mine.data.copy_(theirs.data)
    for number in range(STEPS, STEPS + 3):
        saved.step(number)
        resumed.step(number)
    assert resumed.same(saved)
    if resumed.host:
        moments = [state[name] for state in resumed.optimizer.state.values() for name in _moments(resumed.optimizer)]
        assert all(resumed.host.holds(moment) for moment in moments)


def test_steps_are_adamw_in_float64() -> None:
    """I. Loshchilov and F. Hutter, "Decoupled weight decay regularization" (arXiv:1711.05101), algorithm 2."""
    moved = Part("adam", torch.float32, SETTINGS)
    exact = [weight.detach().double() for weight in weights(torch.float32)]
    first, second = ([torch.zeros_like(weight) for weight in exact] for _ in range(2))
    for number in range(STEPS):
        moved.step(number)
        for i, gradient in enumerate(map(Tensor.double, gradients(number))):
            first[i] = BETAS[0] * first[i] + (1 - BETAS[0]) * gradient
            second[i] = BETAS[1] * second[i] + (1 - BETAS[1]) * gradient.square()
            mean, square = first[i] / (1 - BETAS[0] ** (number + 1)), second[i] / (1 - BETAS[1] ** (number + 1))
            exact[i] = exact[i] * (1 - rate(number) * DECAY * (i >= 2)) - rate(number) * mean / (square.sqrt() + EPS)
    for mine, theirs in zip(moved.mains, exact, strict=True):
        torch.testing.assert_close(mine.detach().double(), theirs, rtol=0, atol=STEPS * 2.5e-7)


def test_a_forked_process_reads_the_state() -> None:
    """As Megatron's checkpoint writers do, where slime's patch `write_by_threads` does not apply."""
    part = Part("adam", torch.bfloat16, SETTINGS)
    part.step(0)
    moments = [state["exp_avg"] for state in part.optimizer.state.values()]
    seen, want = [moment.numpy() for moment in moments], [moment.numpy().copy() for moment in moments]
    assert all(array.any() for array in want)
    if (child := os.fork()) == 0:
        os._exit(int(not all((one == other).all() for one, other in zip(seen, want, strict=True))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_step_that_is_skipped_leaves_everything() -> None:
    moved, same = (Part("adam", torch.bfloat16, SETTINGS) for _ in range(2))
    for part in (moved, same):
        part.step(0)
    assert moved.host is not None
    with moved.host.ready():
        assert not any(moved.host.holds(main) for main in moved.mains)
        for main, gradient in zip(moved.mains, gradients(1), strict=True):
            main.grad = gradient
    assert moved.same(same)
    assert all(main.grad is None for main in moved.mains)


def test_parameters_without_a_gradient_stay() -> None:
    moved = Part("adam", torch.bfloat16, SETTINGS)
    assert moved.host is not None
    before = copy.deepcopy([main.data for main in moved.mains])
    with moved.host.ready():
        moved.mains[2].grad = gradients(0)[2]
        moved.optimizer.step()
    changed = [not torch.equal(main, old) for main, old in zip(moved.mains, before, strict=True)]
    assert changed == [False, False, True, False, False]
    assert [float(moved.optimizer.state[main]["step"]) for main in moved.mains] == [0, 0, 1, 0, 0]
