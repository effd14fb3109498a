"""Figures as JSON lines while they come, and as a table at the end."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from slime.files.model_directory import has_weights
from slime.options.flags.installed import version_of
from slime.utils import device
from tools import make_tiny_model

PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn-4", "sglang", "ray")


class BenchError(Exception):
    """Something could not be measured; the message says what, and why."""


@dataclass
class Report:
    """Where the figures of one call of the tool go.

    Attributes:
        deadline: of `time.monotonic`; a case that would begin after it is left out.
        published: whether the model is one that goals are for, with all of its layers.
    """

    command: str
    deadline: float
    output: Path | None = None
    published: bool = True
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: str, model: str, gpus: int, value: float, unit: str, **details: Any) -> None:
        """One figure.

        Args:
            details: more to know about it; ``at_most`` or ``at_least`` is the figure to reach, by a published model.
        """
        at_most, at_least = details.pop("at_most", None), details.pop("at_least", None)
        if not self.published:
            at_most = at_least = None
        target = at_most if at_most is not None else at_least
        met = None if target is None else value <= target if at_most is not None else value >= target
        row = {
            "case": case,
            "model": model,
            "gpus": gpus,
            "value": value,
            "unit": unit,
            "target": target,
            "met": met,
            "hardware": device.hardware(),
            "date": time.strftime("%Y-%m-%d"),
            "command": self.command,
            "versions": {name: version_of(name) for name in PACKAGES},
            **details,
        }
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if self.output is not None:
            with open(self.output, "a") as file:
                file.write(line + "\n")

    def out_of_time(self, case: str, needs: float) -> bool:
        """Whether ``needs`` seconds are more than what is left; says so."""
        left = self.deadline - time.monotonic()
        if left < needs:
            print(f"bench: {case} is left out: it needs about {needs:.0f} s, {left:.0f} s are left", file=sys.stderr)
        return left < needs

    def table(self, stream: TextIO = sys.stdout) -> None:
        """All figures, one line each, where there are any."""
        if not self.rows:
            return
        print(f"\n{'case':<34} {'model':<24} {'GPUs':>4} {'value':>12} {'unit':<10} {'to reach':>9}", file=stream)
        for row in self.rows:
            target = "" if row["target"] is None else f"{row['target']:g} {'yes' if row['met'] else 'NO'}"
            print(
                f"{row['case']:<34} {row['model']:<24} {row['gpus']:>4} {row['value']:>12.4g} {row['unit']:<10} "
                f"{target:>9}",
                file=stream,
            )


def make_model(options: argparse.Namespace) -> Path:
    """The user's own model, or the directory of one of ``options.model``'s shape, written at the first call."""
    if options.hf_checkpoint:
        return options.hf_checkpoint.resolve()
    directory = options.scratch / "model"
    if not directory.is_dir():
        layers = [] if options.num_layers is None else ["--num-layers", str(options.num_layers)]
        make_tiny_model.write(make_tiny_model.parse([str(directory), "--like", options.model, *layers]))
    return Path(directory)


def weights_of(directory: str | Path) -> list[str]:
    """The flags of train.py for a model's directory, which may have no weights."""
    return ["--hf-checkpoint", str(directory), *([] if has_weights(str(directory)) else ["--random-weights"])]


def name_of(options: argparse.Namespace) -> str:
    """What figures call the model: the name of its directory; one with other layers than the published has another."""
    if options.hf_checkpoint:
        return str(options.hf_checkpoint.resolve().name)
    return str(options.model) if options.num_layers is None else f"{options.model}, {options.num_layers} layers"
