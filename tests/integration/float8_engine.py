"""Run by test_float8: SGLang's own class of a model, in float8 without a server, takes pushes and a checkpoint.

    python -m tests.integration.float8_engine BEFORE_FP8 AFTER AFTER_FP8

Prints a JSON object: what differs, when AFTER is pushed with pairs in one bucket, or a bucket for each tensor, from
what the same class loads of AFTER_FP8; and what else than its weights a model loses by sleep.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from slime.backends.sglang import fixes, patches
from slime.backends.sglang.fixes import refuse_other_layouts
from slime.backends.sglang.loads.load_record import note_of, prepare
from slime.utils.http_utils import PortReservation
from slime.weights.float8 import Float8Blocks

PAIR = ("q_a_proj", "kv_a_proj_with_mqa")
"""What `Row.same_bucket` has of these families."""


def sglang_model(checkpoint: Path) -> Any:
    """What builds one rank's model with the weights of a checkpoint."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    args = ServerArgs(model_path=str(checkpoint), device="cpu", dtype="bfloat16", attention_backend="torch_native")
    set_global_server_args_for_scheduler(args)
    reservation = PortReservation("127.0.0.1")
    reservation.release()
    where = f"tcp://127.0.0.1:{reservation.port}"
    parallel_state.init_distributed_environment(1, 0, where, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel()
    config = ModelConfig.from_server_args(args)
    _say_where_it_is()
    initialize_dp_attention(*(args, config)[: len(inspect.signature(initialize_dp_attention).parameters)])
    model_class, _ = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    quantization = json.loads((checkpoint / "config.json").read_text()).get("quantization_config")
    torch.set_default_dtype(torch.bfloat16)

    def build() -> Any:
        model = model_class(config.hf_config, quant_config=quantization and Fp8Config.from_config(quantization))
        model.load_weights(list(tensors_of(checkpoint).items()))
        return model

    return build


def _say_where_it_is() -> None:
    """To 0.5.23, of which a scheduler tells each process its ranks: the only one."""
    context: Any = importlib.import_module("sglang.srt.runtime_context")
    names = getattr(context, "_parallel_fields", set)()
    alone = {n: 0 for n in names if n.endswith("_rank")} | {n: 1 for n in names if n.endswith("_size")}
    if alone:
        context.get_parallel().override_permanently(**alone)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def in_buckets(weights: dict[str, Tensor], *, with_pairs: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """One a tensor, or a pair."""
    for name, tensor in weights.items():
        if PAIR[0] in name and with_pairs:
            yield [(name, tensor), (other := name.replace(*PAIR), weights[other])]
        elif PAIR[1] not in name or not with_pairs:
            yield [(name, tensor)]


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name, tensor in left.items() if not torch.equal(as_bytes(tensor), as_bytes(right[name]))]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def held(model: Any) -> dict[str, Tensor]:
    """All that a push should change: parameters but the scales of cached keys and values, which no checkpoint here
    has, and what latent attention derives of its own."""
    parameters = ((n, p) for n, p in model.named_parameters() if not n.endswith((".k_scale", ".v_scale")))
    found = {name: parameter.detach().clone() for name, parameter in parameters}
    for name, module in model.named_modules():
        for derived in ("w_kc", "w_vc"):
            if isinstance(getattr(module, derived, None), Tensor):
                found[f"{name}.{derived}"] = getattr(module, derived).float().contiguous()
    return found


def over_sleep(model: Any) -> dict[str, list[str]]:
    """Names of what no push brings, and what of it SGLang's release and resume lose when sleep leaves zeros."""
    from sglang.srt.managers.scheduler_components import weight_updater

    brought = held(model)
    others = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if n not in brought}
    before = {name: tensor.detach().clone() for name, tensor in others.items()}
    stashed = weight_updater._export_static_state(model)
    for tensor in others.values():
        tensor.detach().zero_()
    weight_updater._import_static_state(model, stashed)
    return {"not_pushed": sorted(others), "lost_by_sleep": differing(others, before)}


def main(before: Path, after: Path, after_float8: Path) -> dict[str, Any]:
    """Load, push, compare."""
    build, blocks = sglang_model(before), Float8Blocks.of(before)
    assert blocks is not None
    models = {"pushed": build(), "loaded": build(), "halved": build()}
    first = held(models["loaded"])
    dropped: dict[str, int] = {}
    for how, with_pairs in (("pushed", True), ("halved", False)):
        prepare(models[how])
        for bucket in blocks.quantised(in_buckets(tensors_of(after), with_pairs=with_pairs)):
            models[how].load_weights(bucket)
        told = note_of(models[how]).answer(models[how], 0)
        dropped[how] = told.given.nbytes - (told.taken or 0)
    models["loaded"].load_weights(list(tensors_of(after_float8).items()))
    wanted = held(models["loaded"])
    # The installed SGLang has all that is asked of it, and a Hopper GPU would be let through.
    gpu = {"device": "cuda", "moe_runner_backend": "auto", "moe_a2a_backend": "none"}
    refuse_other_layouts(SimpleNamespace(**gpu, fp8_gemm_runner_backend="auto"))
    return {
        "float8": sum(tensor.dtype == torch.float8_e4m3fn for tensor in wanted.values()),
        "kept": sorted(first.keys() - differing(first, wanted)),
        "dropped": dropped,
        "differ": differing(held(models["pushed"]), wanted),
        "differ_in_halves": differing(held(models["halved"]), wanted),
        **over_sleep(models["pushed"]),
    }


if __name__ == "__main__":
    patches.install()
    fixes.keep_cache_scales()
    print(json.dumps(main(*map(Path, sys.argv[1:]))))
