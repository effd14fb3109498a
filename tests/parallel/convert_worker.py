"""Two ranks convert Hugging Face models to torch_dist, then load them under tensor parallelism as train.py does.

Models without a reference beside them are converted only.

``torchrun --nproc-per-node 2 convert_worker.py WORK_DIR MODEL_DIR...``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from slime.backends.megatron import hf_to_torch_dist
from slime.convert.arguments import parse_model_args

from megatron.core import parallel_state  # isort: skip

from slime.backends.megatron import model, parallel
from slime.backends.megatron.learner import load_weights
from slime.backends.megatron.weights.lora_base import fingerprint
from slime.models import family_of, hf_config, weight_shape
from tests.parallel import tiny
from tests.parallel.worker import check_export, check_logits_and_gradients

LAYOUT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def main(work: Path, directories: list[Path]) -> None:
    report = {}
    with hf_to_torch_dist.joined_ranks():
        for directory in directories:
            words = ["--hf-checkpoint", str(directory), "--save", str(work / directory.name)]
            words += ["--transformer-impl", "transformer_engine"]  # as MODEL_ARGS may have it; nothing of it is needed
            hf_to_torch_dist.convert(parse_model_args("", words), work / directory.name)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        parallel.set_seeds(1)
        for directory in directories:
            if not (directory / "reference.safetensors").exists():
                continue
            chunks = model.build_model(tiny.arguments(directory, **LAYOUT))
            load_weights(chunks, str(work / directory.name))
            check_export(chunks, directory, work / "saved" / directory.name)
            config = hf_config(directory)
            base = fingerprint(chunks, family_of(config), weight_shape(config))
            report[directory.name] = *check_logits_and_gradients(chunks, directory), base
        (work / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
