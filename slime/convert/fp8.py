"""Weights to 8 bit floating point with one scale a block, as DeepSeek and Moonshot publish theirs and SGLang reads
them; and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slime.convert.hf_files import Spec, natural, stored_specs, warn_of_tensors
from slime.convert.running import check_output, run_all, written_model
from slime.files.block_scaled import FP8, SCALE_END, is_linear, num_blocks, quantise
from slime.files.hf_reader import HFWeights, kept_dtype, opened, read_headers, whole
from slime.utils.errors import BadInputError


def is_quantised(name: str, spec: Spec) -> bool:
    """Whether a tensor is the matrix of a linear layer that runs in fp8."""
    floating = spec.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return floating and is_linear(name, spec.shape)


def quantization_config(specs: Mapping[str, Spec], chosen: set[str], block: tuple[int, int]) -> dict[str, Any]:
    """What config.json says of it, as DeepSeek's do; with the linear layers that are left as they are."""
    matrices = (name for name, spec in specs.items() if name.endswith(".weight") and len(spec.shape) == 2)
    kept = [name.removesuffix(".weight") for name in matrices if name not in chosen and "embed" not in name]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": sorted({*kept, "lm_head"}, key=natural),
    }


def convert(source: Path, output: Path, *, block: tuple[int, int], shard_bytes: int, workers: int, force: bool) -> None:
    """Write a Hugging Face directory, of ``source`` in 16 or 32 bit, in fp8. BadInputError where there is nothing to
    quantise, weights are not finite, or there is no room for the output.

    Args:
        block: the rows and columns that share a scale.
        shard_bytes: size of one safetensors file.
        workers: threads; each holds one tensor.
        force: replace an existing ``output``.
    """
    check_output(output, [source], force=force)
    headers = read_headers(source)
    originals = stored_specs(source, headers)
    if any(name.endswith(SCALE_END) or spec.dtype.itemsize == 1 for name, spec in originals.items()):
        raise BadInputError(f"{source} is quantised already")
    chosen = {name for name, spec in originals.items() if is_quantised(name, spec)}
    if not chosen:
        raise BadInputError(f"{source} has no matrices of linear layers (*.layers.*.weight)")
    warn_of_tensors(source, originals)
    specs = dict(originals)
    for name in chosen:
        shape = originals[name].shape
        specs |= {name: Spec(shape, FP8), name + SCALE_END: Spec(num_blocks(shape, block), torch.float32)}
    changes = {"quantization_config": quantization_config(originals, chosen, block)}
    with written_model("hf to fp8", output, specs, shard_bytes, source, changes) as write:

        def do(name: str) -> None:
            with opened(source / headers[name].file) as handle:
                tensor = handle.get_tensor(name)
            if name not in chosen:
                write(name, tensor)
                return
            if not tensor.isfinite().all():
                raise BadInputError(f"{source / headers[name].file}: {name} has entries that are not finite")
            values, scales = quantise(tensor, block)
            write(name, values)
            write(name + SCALE_END, scales)

        run_all(originals, do, workers)


def convert_to_bf16(source: Path, output: Path, *, shard_bytes: int, workers: int, force: bool) -> None:
    """Write a Hugging Face directory in bfloat16, with every float8 tensor multiplied out; others keep their types. The
    arguments are those of `convert`. ValueError where there is nothing in float8, or another quantization, or no room.
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
