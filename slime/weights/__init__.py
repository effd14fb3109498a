"""Publishing weights: from buckets of Hugging Face tensors, the same on every training rank, to every engine."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from slime.weights.engines import EngineAddress

if TYPE_CHECKING:
    from slime.weights.publisher import WeightPublisher

__all__ = ["EngineAddress", "make_publisher"]


def make_publisher(args: Namespace, rank: int) -> WeightPublisher:
    """The publisher for training rank ``rank``: of adapters with ``--lora-sync adapter``, otherwise of
    ``args.update_weight_transport``. It meets engines when it first publishes to them."""
    # Imported here: a driver needs the addresses only, and not torch.
    from slime.weights.adapter import AdapterPublisher
    from slime.weights.disk import DiskPublisher
    from slime.weights.distributed import DistributedPublisher
    from slime.weights.mixed import MixedPublisher

    publishers: dict[str, type[WeightPublisher]] = {
        "tensor": MixedPublisher,  # an engine elsewhere may join whenever it likes
        "distributed": DistributedPublisher,
        "disk": DiskPublisher,
    }
    if args.lora_sync == "adapter":
        return AdapterPublisher(args, rank)
    return publishers[args.update_weight_transport](args, rank)
