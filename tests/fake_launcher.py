"""What tests of tools/validate_model.py have in place of its runs, and what these leave."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from slime.observability.metrics import MetricsLogger
from tools.validation.launches import Launcher, Run

ENGINE_ENDED = "start engines: engine 0 failed (weight version none yet): engine 0 at http://a:1 ended with status 1"
"""What a run says whose engine did not start."""


class FakeLauncher(Launcher):
    """Runs that begin with a word of ``failing`` end as ``ends`` says; the others write what ``write`` has of them."""

    ends: Mapping[str, tuple[int | None, str]] = {"engine": (1, ENGINE_ENDED)}
    """Status and error by the begin of the name; else it is 1, and there is no kernel."""

    def __init__(
        self, output: Path, failing: Sequence[str] = (), write: Callable[[Run, list[str]], None] | None = None
    ):
        super().__init__(output, 1.0)
        self.failing, self.write = tuple(failing), write
        self.words: dict[str, list[str]] = {}

    def run(self, name: str, script: str, words: Sequence[str]) -> Run:
        directory = self.directory(name)
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "log"
        fails = name.startswith(self.failing) if self.failing else False
        begins = (end for begin, end in self.ends.items() if name.startswith(begin))
        status, error = next(begins, (1, f"{name} has no kernel"))
        log.write_text(f"$ {script}\n" + (f"train.py: error: {error}\n" if fails else "done\n"))
        run = Run(name, directory, log, status if fails else 0, 1.0)
        self.words[name] = list(words)
        self.runs.append(run)
        if self.write is not None and not fails:
            self.write(run, self.words[name])
        return run


def write_steps(run: Run, words: list[str], **changes: float) -> None:
    """What a good run leaves: metrics of every rollout, its configuration, and adapters."""
    ranks = int(words[words.index("--actor-num-gpus-per-node") + 1]) if "--actor-num-gpus-per-node" in words else 1
    rank = 4 if "--lora-rank" in words else None
    (run.directory / "config.yaml").write_text(yaml.safe_dump({"a": {"data_parallel_size": ranks, "lora_rank": rank}}))
    steps = int(words[words.index("--num-rollout") + 1])
    values = {"train/loss": 2.0, "train/grad_norm": 0.5, "train/train_rollout_logprob_abs_diff": 1e-6} | changes
    if "--use-kl-loss" in words:
        values.setdefault("train/kl_loss", 0.0)
    metrics = MetricsLogger(Namespace(run_dir=run.directory, use_tensorboard=False, use_wandb=False))
    for step in range(steps):
        metrics.log(values, "train/step", step)
    for step in range(steps + 1):
        metrics.log({"perf/update_weights_time": 1.0}, "rollout/step", step)
    metrics.close()
    if "--save-lora" in words:
        directory = Path(words[words.index("--save-lora") + 1])
        directory.mkdir(parents=True)
        names = [f"base_model.model.model.layers.0.mlp.{kind}.lora_B.weight" for kind in ("up_proj", "down_proj")]
        save_file(
            dict.fromkeys(names[:1], torch.ones(2)) | {names[1]: torch.ones(3)}, directory / "adapter_model.safetensors"
        )


def write_weights(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A Hugging Face directory, as far as weights are compared."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
