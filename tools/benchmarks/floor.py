"""What a GPU's memory alone takes for generation: weights and cache, read once a token."""

from __future__ import annotations

from pathlib import Path

from tools.simulating.generation import weights_read
from tools.simulating.hardware import GPUS
from tools.simulating.model import read_model


def generation_floor(model: Path, gpu: str, requests: int, prompt: float, response: int) -> float | None:
    """Seconds of one engine on one GPU, for responses of one length; None of a GPU whose bandwidth is not known.

    Args:
        model: directory with a config.json.
        gpu: its name, as the driver has it.
        requests: run at once, from their first token to their last.
        prompt: tokens of a prompt, in the mean.
        response: tokens of each response.
    """
    bandwidth = next((each.bandwidth for each in GPUS.values() if each.name == gpu), None)
    if bandwidth is None:
        return None
    shape = read_model(str(model))
    cached = requests * (response * prompt + response * (response - 1) / 2)  # tokens in the cache, summed over steps
    return (response * weights_read(shape, requests) + cached * shape.cached_bytes) / bandwidth
