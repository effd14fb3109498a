"""The model, the machine and the flags that all runs of a ladder share."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slime.models import family_of, hf_config, shape_from_hf
from tools.validation.launches import Launcher, Run

LORA = ("--lora-rank", "4")
_ENGINE_FAILED = re.compile(
    # Its server ended, or answered a request with an error of its own; a deadline is not among them.
    r"train\.py: error: [^:]+: (engine \d+ failed \((?!.* had not )|.*POST \S+/generate: status 5\d\d)"
)


@dataclass(frozen=True)
class Tolerance:
    """How far figures that should be equal may be apart."""

    log_prob: float
    """Mean difference of log-probs of trainer and engine, absolute."""
    transformers: float
    """Mean difference of log-probs of random, and so unlikely, tokens from those of transformers in float32."""
    loss: float
    """Relative."""
    grad_norm: float
    """Relative."""


TOLERANCES = {"float32": Tolerance(1e-4, 1e-4, 1e-4, 1e-3), "bfloat16": Tolerance(0.03, 0.06, 0.02, 0.1)}


@dataclass
class Generation:
    """Whether engines serve the model on this host, and how that is known."""

    works: bool
    failed: bool
    """Whether it was the engine itself that did not start or serve, and not something else that ended the run."""
    reason: str
    log: Path


@dataclass
class Setting:
    """What a ladder is climbed with.

    Attributes:
        dummy: whether the model's weights are random.
        slots: GPUs, or processes that may train at once on a host without any.
        flags: more flags of train.py for every run; they win.
    """

    model: Path
    dummy: bool
    dtype: str
    on_gpus: bool
    slots: int
    seed: int
    flags: list[str]
    launcher: Launcher
    engines: dict[tuple[str, ...], Generation] = field(default_factory=dict)
    """What `ask_engine` has found, by the flags."""

    @property
    def output(self) -> Path:
        """The directory of everything that the runs write."""
        return self.launcher.output

    @cached_property
    def config(self) -> Any:
        """The model's Hugging Face config."""
        return hf_config(self.model)

    @cached_property
    def shape(self) -> dict[str, Any]:
        """The model's shape under Megatron-LM's argument names."""
        return shape_from_hf(self.config)

    @property
    def family(self) -> Any:
        """The table of the model's family."""
        return family_of(self.config)

    @property
    def tolerance(self) -> Tolerance:
        """For this ladder's type of numbers."""
        return TOLERANCES[self.dtype]

    def for_width(self, rate: float) -> float:
        """A learning rate that is right for a model 128 wide, less for a wider one."""
        return rate * 128 / max(128, self.shape["hidden_size"])

    @property
    def rate(self) -> float:
        """A learning rate for all weights; less for those that were trained before."""
        return self.for_width(1e-3 if self.dummy else 1e-4)

    def training(self, rollouts: int, batch: int, *more: str, model: Path | None = None, ranks: int = 1) -> list[str]:
        """Supervised training on addition problems, without an engine.

        Args:
            batch: samples of a rollout, which is one optimizer step.
            more: further flags, which win.
        """
        words = ["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss"]
        words += ["--disable-compute-advantages-and-returns", "--debug-train-only", "--input-key", "messages"]
        words += ["--actor-num-gpus-per-node", str(ranks)]
        return [*self.common("sft", rollouts, batch, model), *words, *more, *self.flags]

    def loop(
        self, rollouts: int, prompts: int, samples: int, *more: str, model: Path | None = None, ranks: int = 1
    ) -> list[str]:
        """GRPO on addition problems, with engines.

        Args:
            prompts: of a rollout, with so many ``samples`` each.
            ranks: that train.
        """
        words = ["--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rm-type", "random"]
        words += ["--n-samples-per-prompt", str(samples), "--rollout-max-response-len", "16"]
        words += ["--advantage-estimator", "grpo", "--ci-test"]
        words += ["--actor-num-gpus-per-node", str(ranks)]
        # Without GPUs slots are only counted: one engine beside the trainers costs less than one for each of them.
        words += ["--colocate"] if self.on_gpus else ["--rollout-num-gpus", "1"]
        if self.on_gpus:
            words += ["--sglang-mem-fraction-static", "0.5"]
        return [*self.common("train", rollouts, prompts, model), *words, *more, *self.flags]

    def common(self, data: str, rollouts: int, batch: int, model: Path | None = None) -> list[str]:
        """Model, data, batch and optimizer of a run."""
        words = [
            "--hf-checkpoint",
            str(model or self.model),
            "--prompt-data",
            str(self.output / "data" / f"{data}.jsonl"),
        ]
        words += ["--num-rollout", str(rollouts), "--rollout-batch-size", str(batch), "--rollout-shuffle"]
        words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--seed", str(self.seed)]
        words += ["--fp32" if self.dtype == "float32" else "--bf16", "--optimizer", "adam", "--weight-decay", "0.0"]
        return [*words, "--lr", f"{self.rate:.2e}", "--lr-decay-style", "constant"]

    def make_data(self) -> Run:
        """Addition problems, as rows of conversations and of prompts."""
        return self.launcher.run("data", "tools/make_arithmetic_data.py", [str(self.output / "data")])

    def ask_engine(self, *flags: str) -> Generation:
        """Let SGLang serve the model with these flags and no trainer in the run, and generate; asked once."""
        if flags not in self.engines:
            words = self.loop(1, 2, 2, "--debug-rollout-only", "--rollout-num-gpus", "1", *flags)
            without = ("--colocate", "--actor-num-gpus-per-node")
            words = [w for i, w in enumerate(words) if w not in without and words[i - 1] != without[1]]
            words = without_adapters(words)
            run = self.launcher.train("-".join(["engine", *(flag.removeprefix("--sglang-") for flag in flags)]), words)
            failed = run.status == 1 and bool(_ENGINE_FAILED.match(run.error()))
            self.engines[flags] = Generation(run.ok, failed, "" if run.ok else run.why(), run.log)
        return self.engines[flags]

    def unserved(self, *flags: str) -> bool:
        """Whether it is known by now that no engine serves the model with these flags."""
        return any(self.engines[key].failed for key in {(), flags} & set(self.engines))


def without_adapters(words: list[str]) -> list[str]:
    """Flags of train.py but for those of adapters, which a run without a trainer refuses."""
    kept, drops = [], False
    for word in words:
        if word.startswith("--"):
            drops = word.startswith(("--lora-", "--save-lora"))
        if not drops:
            kept.append(word)
    return kept


def processes() -> int:
    """How many may train at once where there are no GPUs: the cores, two at least and four at most."""
    return min(4, max(2, os.cpu_count() or 1))
