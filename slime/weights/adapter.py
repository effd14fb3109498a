"""Adapters alone to engines that have the model's own weights: by HTTP, to SGLang's LoRA endpoint."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from slime.backends.sglang.client import EngineControl
from slime.files.hf_writer import NamedTensors
from slime.models import family_of, hf_config
from slime.models.adapters import completed, peft_config
from slime.weights.equality import digest
from slime.weights.payload import by_value, flat_layout, serialize
from slime.weights.publisher import WeightPublisher


class AdapterPublisher(WeightPublisher):
    """Rank 0 gathers the adapters and posts all of them to every engine, in the place of those before.

    Requests that engines have go on while adapters are gathered, and pause only to take them. SGLang 0.5.17 could not
    be given the model's own weights as well: its loaders do not find them below its LoRA layers, where they have other
    names.
    """

    pauses_for_buckets = False
    engines_check = True

    def __init__(self, args: Namespace, rank: int) -> None:
        super().__init__(args, rank)
        self._tensors: dict[str, torch.Tensor] = {}
        self._payload = ""
        self._checksums: dict[str, str] | None = None

    def _deliver(self, bucket: NamedTensors, staged: Any) -> None:
        # The bucket's memory is used again for the next one.
        self._tensors |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in bucket}

    def _seal(self, version: int) -> None:
        tensors = completed(self._tensors, family_of(hf_config(self.args.hf_checkpoint)))
        self._tensors = {}
        self._proof.send_instead(tensors.items())
        layout, size = flat_layout(list(tensors.items()))
        flat = torch.empty(size, dtype=torch.uint8)
        for place, tensor in zip(layout, tensors.values(), strict=True):
            flat[place.start_idx : place.end_idx].copy_(tensor.reshape(-1).view(torch.uint8))
        self._payload = serialize({"flattened_tensor": flat, "metadata": layout}, by_value)
        check = self.args.check_weight_update_equal
        self._checksums = {name: digest(tensor) for name, tensor in tensors.items()} if check else None

    def _complete(self, version: int) -> None:
        ranks = {engine.url: engine.num_gpus for engine in self.engines}
        self.each_engine("push", lambda control: self._replace(control, ranks[control.url]))
        self._payload = ""

    def _replace(self, control: EngineControl, ranks: int) -> None:
        args = self.args
        config = peft_config(args.lora_rank, args.lora_alpha, args.hf_checkpoint, args.lora_modules)
        if control.has_adapter():
            control.unload_adapter()
        control.load_adapter(config, [self._payload] * ranks, self._checksums)

    def _abandon(self) -> None:
        self._tensors, self._payload = {}, ""
