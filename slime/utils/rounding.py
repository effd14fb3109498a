"""What may be between two passes over the same tokens by the same weights."""

from __future__ import annotations

from slime.utils import device


def rounding(dtype: str, kl_type: str = "k1") -> float:
    """How far single tokens that round otherwise in one of two passes may move a mean over tokens.

    On GPUs four of some 200 first steps had such tokens: in 16 bits their log-probs were apart by 0.006 to 0.008, in
    float32 by some 1e-7 (docs/performance.md). On CPUs nothing was ever seen to differ, and nothing may.

    Args:
        dtype: in which the model computes.
        kl_type: whose mean it is, an estimate as of ``--kl-loss-type``; ``k1`` is a difference of log-probs, the others
            are of the square of one. All tokens of 16 bits rounded otherwise make these 8e-6; of float32, whose squares
            are nothing, they are what is lost where the estimate adds 1.
    """
    if not device.is_cuda():
        return 0.0
    of_difference, of_square = (1e-6, 1e-8) if dtype == "float32" else (5e-4, 2e-6)
    return of_difference if kl_type == "k1" else of_square
