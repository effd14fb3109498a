"""What may be between two passes over the same tokens by the same weights."""

from __future__ import annotations

from slime.utils import device


def rounding(dtype: str, kl_type: str = "k1") -> float:
    """How far single tokens that round otherwise in one of two passes may move a mean over tokens.

    In 16 bits on GPUs three of some 150 first steps had such tokens, whose log-probs were apart by 0.006 to 0.008
    (docs/benchmarks.md). On CPUs, and in float32, nothing was ever seen to differ, and nothing may.

    Args:
        dtype: in which the model computes.
        kl_type: whose mean it is, an estimate as of ``--kl-loss-type``; ``k1`` is a difference of log-probs, the others
            are of the square of one. All tokens rounded otherwise make these 8e-6.
    """
    if dtype == "float32" or not device.is_cuda():
        return 0.0
    return 5e-4 if kl_type == "k1" else 2e-6
