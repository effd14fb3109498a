"""The GPUs that a plan may have, by their makers' figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU and the host that it is in."""

    name: str
    flops: float
    """A second, dense, in bfloat16."""
    memory_gib: float
    bandwidth: float
    """Bytes a second of its memory."""
    link: float
    """Bytes a second to the other GPUs of its host, one way."""
    network: float
    """Bytes a second to other hosts, one way: a network card of 400 Gbit/s for each GPU."""
    per_host: int = 8


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 989e12, 79.1, 3.35e12, 450e9, 50e9),
    "h200": Gpu("NVIDIA H200", 989e12, 139.8, 4.8e12, 450e9, 50e9),
}
"""SXM; memory is what the driver shows. The cards of the network are what such hosts mostly have."""
