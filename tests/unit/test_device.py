"""Fused functions: compiled once for all numbers of rows, and only where there is a GPU."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from slime.utils import device

NUM_GPUS = 0


def _weighted(x: Tensor, weights: Tensor, factor: float) -> Tensor:
    return (x * weights).sum(-1) * factor


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Of functions that are fused as on a GPU."""
    counter = CompileCounter()
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    device.fused.cache_clear()
    yield counter
    device.fused.cache_clear()


def test_without_a_gpu_it_is_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda: False)
    device.fused.cache_clear()
    assert device.fused(_weighted) is _weighted


def test_all_numbers_of_rows_share_one_compilation(compilations: CompileCounter) -> None:
    for rows in (5, 64, 3, 1000):
        x, weights = torch.randn(rows, 4, 8, requires_grad=rows > 5), torch.randn(rows, 1, 8)
        result = device.fused(_weighted)(x, weights, 0.5)
        assert torch.equal(result, _weighted(x, weights, 0.5))
        assert not result.requires_grad
    assert compilations.frame_count == 1
    device.fused(_weighted)(torch.randn(5, 4, 6), torch.randn(5, 1, 6), 0.5)
    assert compilations.frame_count == 2


def test_strides_that_mean_nothing_share_one_compilation(compilations: CompileCounter) -> None:
    weights, some = torch.randn(5, 1, 8), torch.randn(1, 5, 8)
    for x in (some.transpose(0, 1), some.transpose(0, 1).clone(), some.view(5, 8)[:, None], some.view(5, 1, 8)):
        assert torch.equal(device.fused(_weighted)(x, weights, 0.5), _weighted(x, weights, 0.5))
    assert compilations.frame_count == 1
    heads = torch.randn(1, 5, 3, 16)[..., 8:].transpose(0, 1)
    assert torch.equal(device.fused(_weighted)(heads, weights[:, None], 0.5), _weighted(heads, weights[:, None], 0.5))


def test_pinned_memory_is_known_to_the_device_for_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[int] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: known.append(address) or 0, cudaHostUnregister=known.remove
    )
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensor = device.pinned(3 * 2**20)
    part = tensor[2**20 :]
    assert known == [tensor.data_ptr()]
    del tensor
    part.fill_(1)
    assert len(known) == 1
    del part
    assert not known


@pytest.mark.parametrize(("in_forks", "status"), [(True, 0), (False, -signal.SIGSEGV)])
def test_pinned_memory_is_in_forked_processes_only_where_asked(in_forks: bool, status: int) -> None:
    """Elsewhere nothing of it is copied for them: there is no such memory."""
    seen = device.pinned(100, in_forks=in_forks).fill_(7).numpy()
    if (child := os.fork()) == 0:
        faulthandler.disable()
        os._exit(int(seen[99] != 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
