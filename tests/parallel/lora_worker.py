"""One rank of one layout, under torchrun: adapters with PEFT's weights, compared with what PEFT computed.

``torchrun --nproc-per-node N lora_worker.py '{"tensor_model_parallel_size": 2}' WORK_DIR TARGETS [BASE ADAPTERS]...``
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron import patches

patches.install()

from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from slime.backends.megatron import lora, model, parallel  # noqa: E402
from slime.backends.megatron.weights import weights_io  # noqa: E402
from slime.backends.megatron.weights.lora_base import fingerprint  # noqa: E402
from slime.models import family_of, weight_shape  # noqa: E402
from slime.models import hf_config as read_config  # noqa: E402
from slime.models.adapters import adapter_family, is_adapter_name  # noqa: E402
from slime.models.family import ADAPTER_MARK  # noqa: E402
from tests.parallel import tiny  # noqa: E402
from tests.parallel.lora_reference import ALPHA, RANK  # noqa: E402
from tests.parallel.worker import exported, pass_through  # noqa: E402


class Case:
    """One model with adapters, and what is known of it."""

    def __init__(self, layout: dict[str, Any], targets: tuple[str, ...], base: Path, adapters: Path) -> None:
        self.config = hf_config = read_config(base)
        self.base, self.adapters, self.targets = base, adapters, targets
        self.options = Namespace(
            hf_checkpoint=str(base), ref_load=None, lora_rank=RANK, lora_alpha=ALPHA, lora_target_modules=list(targets)
        )
        self.family, self.shape = family_of(hf_config), weight_shape(hf_config)
        self.chunks = model.build_model(tiny.arguments(base, **layout))
        weights_io.load_hf(self.chunks, base)
        settings = lora.LoraSettings(RANK, ALPHA, targets, seed=3)
        lora.attach(self.chunks, self.family, self.shape, settings)

    def fill(self) -> None:
        """Take PEFT's weights; modules without adapters have none."""
        stored = load_file(self.adapters / "adapter_model.safetensors")
        of_weights = load_file(self.base / "model.safetensors")

        def get(name: str) -> Tensor:
            weight = of_weights[name.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight"]
            return stored.get(name, torch.zeros(len(weight), RANK))

        table = adapter_family(self.family, self.targets)
        for name, tensor in weights_io.global_parameters(self.chunks, of_adapters=True):
            is_expert, tp = ".experts." in name, parallel_state.get_tensor_model_parallel_rank()
            tensor.copy_(table.shard(name, get, self.shape, tuple(tensor.shape), 0 if is_expert else tp))

    def exported(self) -> dict[str, Tensor]:
        buckets = weights_io.export_adapter_buckets(self.chunks, self.family, self.shape, self.targets, 10_000)
        named = (named for bucket in buckets for named in bucket)
        return {name: tensor.cpu() for name, tensor in named if is_adapter_name(name, self.targets)}

    def check(self, saved: Path) -> dict[str, float]:
        """How far each result is from what is wanted, in units of the largest entry.

        Args:
            saved: the directory in which to leave the adapters.
        """
        fresh = self.exported()
        assert all(not tensor.any() for name, tensor in fresh.items() if ".lora_B." in name)
        report = {"first": float(sum(t.double().abs().sum() for n, t in fresh.items() if ".lora_A." in n))}
        self.fill()
        self.fingerprint = fingerprint(self.chunks, self.family, self.shape)
        stored = load_file(self.adapters / "adapter_model.safetensors")
        report["adapters"] = _difference(self.exported(), stored)
        weights_io.save_adapters(self.chunks, self.family, self.shape, self.options, saved)
        merged, carried = load_file(self.adapters / "merged" / "model.safetensors"), self.family.carried(self.config)
        wanted = {name: tensor for name, tensor in merged.items() if not name.startswith(carried)}
        exports = []
        for lora._MERGED_NUMEL in (1, 2**26):  # experts one by one, and all of a layer at once
            exports.append(dict(exported(self.chunks, self.base, 10_000)))
        report["merged"] = max(_difference(export, wanted) for export in exports)
        trained = {name for chunk in self.chunks for name, p in chunk.named_parameters() if p.requires_grad}
        assert all(ADAPTER_MARK in name for name in trained)
        report["logits"] = pass_through(self.chunks, load_file(self.adapters / "reference.safetensors"))
        gradients = weights_io.global_parameters(self.chunks, lambda p: getattr(p, "main_grad", p), of_adapters=True)
        for (_, tensor), (_, gradient) in zip(
            weights_io.global_parameters(self.chunks, of_adapters=True), gradients, strict=True
        ):
            tensor.copy_(gradient)
        report["gradients"] = _difference(self.exported(), load_file(self.adapters / "gradients.safetensors"))
        return report


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert sorted(found) == sorted(wanted), sorted(set(found) ^ set(wanted))[:5]
    return max(float((found[n].cpu() - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted)


def main(layout: dict[str, Any], work: Path, targets: tuple[str, ...], pairs: list[tuple[Path, Path]]) -> None:
    parallel.initialize_distributed(tiny.arguments(pairs[0][0], **layout))
    report: dict[str, dict[str, Any]] = {}
    for base, adapters in pairs:
        saved = adapters / "saved"
        saved.mkdir(exist_ok=True)
        case = Case(layout, targets, base, adapters)
        report[base.name] = {**case.check(saved), "base": case.fingerprint}
    (work / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[4:]]
    main(
        json.loads(sys.argv[1]),
        Path(sys.argv[2]),
        tuple(sys.argv[3].split(",")),
        list(zip(paths[::2], paths[1::2], strict=True)),
    )
