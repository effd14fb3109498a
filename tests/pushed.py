"""What a server makes of a bucket that is pushed to it by its flat buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.files.hf_writer import NamedTensors
from slime.weights.payload import flat_layout, stacked


def received(bucket: NamedTensors) -> list[tuple[str, Tensor]]:
    """Tensors of the flat buffer by the names that they travel by: experts in stacks."""
    layout, size = flat_layout(bucket)
    flat = torch.zeros(size, dtype=torch.uint8)
    for place, (_, tensor) in zip(layout, bucket, strict=True):
        flat[place.start_idx : place.end_idx].copy_(tensor.reshape(-1).view(torch.uint8))
    return [(e.name, flat[e.start_idx : e.end_idx].view(e.dtype).reshape(e.shape)) for e in stacked(layout)]
