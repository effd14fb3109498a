"""A Hugging Face directory in blocks of float8, as DeepSeek and Moonshot publish theirs, to one in bfloat16."""

from __future__ import annotations

from pathlib import Path

from slime.convert.hf_files import Spec, warn_of_tensors
from slime.convert.running import check_output, run_all, written_model
from slime.utils.errors import BadInputError
from slime.utils.hf_reader import HFWeights, kept_dtype, whole


def convert(source: Path, output: Path, *, shard_bytes: int, workers: int, force: bool) -> None:
    """Write a Hugging Face directory with every float8 tensor multiplied out; others keep their types.

    Args:
        source: a Hugging Face directory in float8 with scales.
        output, shard_bytes, workers, force: as of `fp8.convert`.

    Raises:
        BadInputError: there is nothing in float8, or no room for the output.
        ValueError: tensors that are quantized in another way.
    """
    check_output(output, [source], force=force)
    with HFWeights(source) as weights:
        if not weights.is_quantized:
            raise BadInputError(f"{source} is not in float8: its config.json has no quantization_config")
        warn_of_tensors(source, weights)
        # This opens every file too, so that threads only read.
        specs = {name: Spec(tuple(weights[name].shape), kept_dtype(weights[name])) for name in weights}
        with written_model("fp8 to bf16", output, specs, shard_bytes, source) as write:
            run_all(specs, lambda name: write(name, whole(weights[name])), workers)
