"""Copies from host memory, and memory of the host that is pinned."""

from __future__ import annotations

import pytest
import torch

from slime.utils import device

NUM_GPUS = 1


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (4096,), (4097,), (300, 1001)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_copies_have_the_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2**31, shape).to(dtype).permute(tuple(reversed(range(len(shape)))))
    assert torch.equal(device.from_host(tensor, device.current_device()).cpu(), tensor)


def test_what_is_copied_may_change_at_once() -> None:
    """Though the GPU is busy with other work for a while before it comes to the copy."""
    for size in (7, 2**13, 2**20):
        tensor = torch.randn(size)
        kept = tensor.clone()
        torch.cuda._sleep(10**8)
        copy = device.from_host(tensor, device.current_device())
        tensor.zero_()
        assert torch.equal(copy.cpu(), kept)


def test_copies_wait_for_neither_the_host_nor_large_ones() -> None:
    """As optimizer state wakes while micro-batches are packed. The large copies take a third of a second."""
    large = device.pinned(2**30)
    own = torch.empty(2**30, dtype=torch.uint8, device=device.current_device())
    tensor = torch.randn(2**18)
    device.from_host(tensor, own.device)
    device.synchronize()
    with device.side_stream():
        for _ in range(16):
            own.copy_(large, non_blocking=True)
        goes_on = torch.cuda.current_stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = device.from_host(tensor, own.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    device.synchronize_stream()
    assert not goes_on.query()
    assert torch.equal(copy.cpu(), tensor)
    device.wait_side_stream()
    device.synchronize()


def test_pinned_memory_that_goes_leaves_its_addresses() -> None:
    """To host memory, and to the device's: those of memory that was pinned before are likely to be given out again."""
    for _ in range(4):
        host = device.pinned(2**28)
        own = torch.empty(2**28, dtype=torch.uint8, device=device.current_device()).fill_(7)
        assert torch.equal(host.copy_(own)[-100:], own[-100:].cpu())
        del host, own
        device.release_unused()
