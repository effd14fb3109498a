"""One rank of one layout, under torchrun: for each model directory, everything is compared with Hugging Face.

``torchrun --nproc-per-node N worker.py '{"tensor_model_parallel_size": 2}' WORK_DIR MODEL_DIR...``
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron import patches

patches.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from slime.backends.megatron import model, optimizer, parallel  # noqa: E402
from slime.backends.megatron.layers import attention  # noqa: E402
from slime.backends.megatron.weights import weights_io  # noqa: E402
from slime.files import hf_reader  # noqa: E402
from slime.models import family_of, hf_config, weight_shape  # noqa: E402
from slime.training import packing  # noqa: E402
from slime.training.loss import log_probs  # noqa: E402
from slime.utils import device  # noqa: E402
from tests.parallel import tiny  # noqa: E402

EXPERT = re.compile(r"\.experts\.\d")
BIASES = "e_score_correction_bias"
"""Of routers: buffers, which stay float32 and are not trained."""


def micro_batch(reference: dict[str, Tensor], number: int) -> dict[str, Any]:
    """Micro-batch ``number`` as this rank sees it: its part of the tokens, and of what Hugging Face made of them."""
    lengths = tiny.LENGTHS[number]
    cp = parallel_state.get_context_parallel_group()
    index = packing.zigzag_index(lengths, cp.size(), cp.rank())
    where = device.current_device()
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "tokens": reference[f"tokens{number}"][index][None].to(where),
        "positions": positions[index][None].to(where),
        "coefficients": reference[f"coefficients{number}"][index].to(where),
        "logits": reference[f"logits{number}"][index].to(where),
        "params": attention.packed_params(lengths),
    }


def forward_step(batches: Any, module: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(batches)
    out = module(batch["tokens"], batch["positions"], None, packed_seq_params=batch["params"])

    def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logits = log_probs.logits(hidden[0], model.head_weight(module))[None]
        first = parallel_state.get_tensor_model_parallel_rank() * logits.size(-1)
        own = batch["coefficients"][:, first : first + logits.size(-1)]
        total = (logits[0, :, : own.size(-1)] * own).sum()
        full = tensor_parallel.gather_from_tensor_model_parallel_region(logits.detach())[0, :, : tiny.VOCAB]
        worst = (full - batch["logits"]).abs().max()
        return total, torch.tensor(1), {"worst": worst}

    return out, loss


def check_logits_and_gradients(chunks: list[torch.nn.Module], directory: Path) -> tuple[float, float]:
    """Largest difference of a logit; largest difference of a gradient in units of its tensor's largest entry."""
    worst = pass_through(chunks, tiny.reference(directory))
    gradients = weights_io.global_parameters(chunks, lambda parameter: parameter.main_grad)
    for (_, tensor), (_, gradient) in zip(weights_io.global_parameters(chunks), gradients, strict=True):
        tensor.copy_(gradient)
    wanted = load_file(directory / "grads" / "model.safetensors")
    got = {name: tensor.cpu() for name, tensor in exported(chunks, directory, 10_000)}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in got.items() if name.endswith(BIASES))
    relative = max(
        float((tensor - wanted[name]).abs().max() / wanted[name].abs().max()) for name, tensor in got.items()
    )
    return worst, relative


def pass_through(chunks: list[torch.nn.Module], reference: dict[str, Tensor]) -> float:
    """Forward and backward passes of all micro-batches, as training makes them; the largest difference of a logit."""
    config = model.unwrap(chunks[0]).config
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config, ddp_config, c, disable_bucketing=True) for c in model.wrap(chunks)]
    for chunk in wrapped:
        optimizer.add_gradients_in_products(chunk)
    # Gradients are sums over micro-batches: without a number of tokens nothing divides them.
    config.finalize_model_grads_func = lambda models, num_tokens=None, **kw: finalize_model_grads(models, None, **kw)
    dp = parallel_state.get_data_parallel_group()
    batches = [micro_batch(reference, i) for i in range(dp.rank(), len(tiny.LENGTHS), dp.size())]
    done = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in wrapped] if len(wrapped) > 1 else iter(batches),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(batches),
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    for layer in [layer for chunk in chunks for layer in model.unwrap(chunk).decoder.modules()]:
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) and layer.weight.requires_grad:
            assert layer.weight.grad_added_to_main_grad
    return max([float(step["worst"]) for step in done], default=0.0)


def exported(chunks: list[torch.nn.Module], directory: Path, bucket_bytes: int) -> list[tuple[str, Tensor]]:
    """All tensors of all buckets."""
    config = hf_config(directory)
    buckets = list(weights_io.export_hf_buckets(chunks, family_of(config), weight_shape(config), bucket_bytes))
    for names in ([name for name, _ in bucket] for bucket in buckets):
        # SGLang makes one matrix of these two, and drops either that comes without the other.
        halves = [name.replace("q_a_proj", "kv_a_proj_with_mqa") for name in names if "q_a_proj" in name]
        assert set(halves) <= set(names), names
    return [pair for bucket in buckets for pair in bucket]


def check_own_experts(chunks: list[torch.nn.Module], directory: Path, wanted: dict[str, Tensor]) -> None:
    """Each expert-parallel rank exports its own experts, as they are, in buckets of the same sizes as the others'."""
    config, size = hf_config(directory), 4096
    model = chunks, family_of(config), weight_shape(config), size
    buckets = [[(n, t.cpu()) for n, t in bucket] for bucket in weights_io.export_hf_buckets(*model, own_experts=True)]
    everybodys: list[Any] = [None] * dist.get_world_size(group := parallel_state.get_expert_model_parallel_group())
    dist.all_gather_object(everybodys, buckets, group=group)
    sizes = [[sum(tensor.nbytes for _, tensor in bucket) for bucket in other] for other in everybodys]
    assert sizes == [sizes[0]] * len(sizes)
    assert len(sizes[0]) > 1
    experts = [{name for bucket in other for name, _ in bucket if EXPERT.search(name)} for other in everybodys]
    assert sum(map(len, experts)) == len(set.union(*experts)) == sum(bool(EXPERT.search(name)) for name in wanted)
    for other, own in zip(everybodys, experts, strict=True):
        tensors = dict(pair for bucket in other for pair in bucket)
        assert tensors.keys() == own | {name for name in wanted if not EXPERT.search(name)}
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items())


def check_export(chunks: list[torch.nn.Module], directory: Path, target: Path) -> None:
    """What was loaded comes out bit for bit, on every rank, in an order that does not depend on the bucket size."""
    dtype = model.unwrap(chunks[0]).config.params_dtype
    origin = tensors_of(directory)
    carried = {name: tensor for name, tensor in origin.items() if name.startswith(carried_names(directory))}
    wanted = {name: as_held(name, tensor, dtype) for name, tensor in origin.items() if name not in carried}
    small, large = exported(chunks, directory, 1), exported(chunks, directory, 2**30)
    assert [name for name, _ in small] == [name for name, _ in large]
    assert sorted(wanted) == sorted(name for name, _ in small), set(wanted) ^ {name for name, _ in small}
    for name, tensor in small + large:
        assert torch.equal(tensor.cpu(), wanted[name]), name
    check_own_experts(chunks, directory, wanted)
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
    dist.barrier()
    weights_io.save_hf(chunks, target, directory)
    written = tensors_of(target)
    assert written.keys() == origin.keys()
    for name, tensor in (wanted | carried).items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name], tensor), name
    config, own = (json.loads((path / "config.json").read_text()) for path in (target, directory))
    assert config == {**own, "dtype": str(dtype).removeprefix("torch.")}


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """All weights of a Hugging Face directory."""
    with hf_reader.HFWeights(directory) as weights:
        return {name: weights[name][:,] for name in weights.file_of}


def carried_names(directory: Path) -> tuple[str, ...]:
    """How the names of tensors begin that the model does without."""
    config = hf_config(directory)
    return family_of(config).carried(config)


def as_held(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as a model of ``dtype`` holds it."""
    return tensor if name.endswith(BIASES) else tensor.to(dtype)


def main(layout: dict[str, Any], work: Path, directories: list[Path]) -> None:
    parallel.initialize_distributed(tiny.arguments(directories[0], **layout))
    report = {}
    for directory in directories:
        chunks = model.build_model(tiny.arguments(directory, **layout))
        weights_io.load_hf(chunks, directory)
        check_export(chunks, directory, work / "saved" / directory.name)
        report[directory.name] = check_logits_and_gradients(chunks, directory)
    (work / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
