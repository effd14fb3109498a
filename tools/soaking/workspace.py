"""A soak's directory: the tiny model and its data, the command lines of its runs, and how far it has come.

``DIR/model``, ``DIR/data``; ``DIR/run`` of the run that is struck and ``DIR/reference`` of one that is not;
``DIR/switches`` of `hooks`; ``DIR/plan.json``; ``DIR/injected.jsonl``, a line a strike; ``DIR/shards.jsonl``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.files.checkpoints import rollouts_done
from slime.files.storage import write_text
from tools.quickstart import ROOT
from tools.soaking import hooks
from tools.soaking.plan import EXTERNAL_OPTION, Fault, draw, draw_kinds

_MODEL = ("--num-layers", "2", "--hidden-size", "64")
_ENDLESS = 1_000_000
_RESTARTS = 1_000
_MAKE_S = 300
_KEPT = 4
"""Checkpoints: one may be half read, another half written."""
_REFERENCE_SAVES = 25
"""The reference saves every so many rollouts: a shard that ends loses less than these."""
_HOOKS = hooks.__name__
PROMPTS, SAMPLES = 4, 4
"""Of a rollout, and of a prompt."""
_FLAGS: dict[str, Any] = {
    "input-key": "prompt",
    "label-key": "label",
    "apply-chat-template": True,
    "rollout-shuffle": True,
    "custom-rm-path": f"{_HOOKS}.reward_func",
    "custom-generate-function-path": f"{_HOOKS}.generate",
    "rollout-batch-size": PROMPTS,
    "n-samples-per-prompt": SAMPLES,
    "rollout-max-response-len": 48,
    "use-dynamic-batch-size": True,
    "max-tokens-per-gpu": 1024,
    "advantage-estimator": "grpo",
    "lr": "1e-3",
    "lr-decay-style": "constant",
    "fp32": True,
    "actor-num-gpus-per-node": 2,
    "rollout-num-gpus": 2,
    "router-policy": "round_robin",
    "sglang-enable-deterministic-inference": True,
    "save-interval": 1,
    "engine-restart-limit": _RESTARTS,
    "trainer-restart-limit": _RESTARTS,
    "rollout-health-check-interval": 1,
    "rollout-health-check-timeout": 8,
    "reward-timeout": 4,
    "train-timeout": 30,
    "weight-update-timeout": 45,
    "checkpoint-timeout": 90,
    "request-timeout": 60,
    "rollout-timeout": 300,
}
"""Of every run of a soak: two trainers and two engines, and deadlines as short as a busy host of two cores allows."""


class Workspace:
    """One soak's directory."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.seed = directory, seed
        self.run_dir, self.reference_dir = directory / "run", directory / "reference"
        self.switches, self.log = directory / "switches", directory / "run.log"
        self.left_over: list[str] = []
        """Processes that were there after a run of this shard had ended."""
        self.injected, self._shards = directory / "injected.jsonl", directory / "shards.jsonl"

    def make(self) -> None:
        """Make the model and the data, where they are not there yet. subprocess.CalledProcessError where that fails."""
        self.switches.mkdir(parents=True, exist_ok=True)
        for switch in self.switches.glob("*_*"):
            switch.unlink()  # that nobody has taken before the shard before ended
        for place, command in (
            ("model", [str(ROOT / "tools/make_tiny_model.py"), str(self.directory / "model"), *_MODEL]),
            ("data", [str(ROOT / "tools/make_arithmetic_data.py"), str(self.directory / "data"), "--num-eval", "64"]),
        ):
            if not (self.directory / place).exists():
                words = [sys.executable, *command, "--seed", str(self.seed)]
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=_MAKE_S)

    # ---- the plan

    def plan(self, count: int, kinds: list[str]) -> list[str]:
        """The kind of each fault, drawn by the first shard. ValueError where that had other arguments."""
        path, given = self.directory / "plan.json", {"seed": self.seed, "faults": count, "kinds": sorted(kinds)}
        if path.exists():
            found = json.loads(path.read_text())
            if {name: found[name] for name in given} != given:
                raise ValueError(
                    f"{path} is of --seed {found['seed']} --faults {found['faults']} --kinds "
                    f"{' '.join(found['kinds'])}: go on with these, or name another --out"
                )
            return list(found["drawn"])
        drawn = draw_kinds(self.seed, count, kinds)
        write_text("--out", path, json.dumps(given | {"drawn": drawn}, indent=1))
        return drawn

    def num_rollout(self, wanted: int) -> int:
        """After how many rollouts the run ends: as many as are ``wanted`` when this is called for the first time."""
        path = self.directory / "end.json"
        if not path.exists():
            write_text("--out", path, json.dumps(wanted))
        return int(json.loads(path.read_text()))

    def note(self, line: str) -> None:
        """Append one to the injector's log."""
        with self.injected.open("a") as log:
            log.write(line + "\n")

    def strikes(self) -> list[dict[str, Any]]:
        """The injector's log: strikes that were waited for, and what became of each."""
        return _lines(self.injected)

    def left(self, kinds: list[str]) -> list[Fault]:
        """Faults of the plan that have not bitten yet, in their order, each as it is drawn next."""
        strikes = self.strikes()
        done = {line["number"] for line in strikes if line["bit"]}
        tries = {number: sum(line["number"] == number for line in strikes) for number in range(len(kinds))}
        return [draw(self.seed, n, kind, tries[n]) for n, kind in enumerate(kinds) if n not in done]

    def add_shard(self, **values: Any) -> None:
        """Note how a shard has ended."""
        with self._shards.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def shards(self) -> list[dict[str, Any]]:
        """Those that have ended."""
        return _lines(self._shards)

    # ---- its runs

    def command(self, run_dir: Path, num_rollout: int | None = None, external: str | None = None) -> list[str]:
        """The words that start a run, or go on with it, to its ``num_rollout``-th rollout or until it is stopped, and
        again when it fails; with the address of an external engine, if it has one."""
        flags = _FLAGS | {
            "hf-checkpoint": self.directory / "model",
            "prompt-data": self.directory / "data" / "train.jsonl",
            "soak-switches": self.switches,
            "run-dir": run_dir,
            "save": run_dir,
            "save-debug-rollout-data": f"{run_dir}/samples_{{rollout_id}}.pt",
            "num-rollout": num_rollout or _ENDLESS,
            "seed": self.seed,
            "rollout-seed": self.seed,
        }
        if external is not None:
            flags[EXTERNAL_OPTION.replace("_", "-")] = external
        if num_rollout is not None:
            flags["save-hf"] = f"{run_dir}/hf_{{rollout_id}}"
        if run_dir == self.reference_dir:
            flags["save-interval"] = _REFERENCE_SAVES
        if rollouts_done(str(run_dir)):
            flags["load"] = run_dir
        words = [word for name, value in flags.items() for word in _words(name, value)]
        driver = [sys.executable, str(ROOT / "train.py"), *words]
        return [sys.executable, str(ROOT / "tools" / "restart_run.py"), str(_RESTARTS), "--", *driver]

    def prune(self, run_dir: Path) -> None:
        """Remove checkpoints that no life of the run will go on from: each is of some megabytes."""
        whole = sorted(path for path in run_dir.glob("iter_*") if path.name[len("iter_") :].isdecimal())
        for path in whole[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)


def _words(name: str, value: Any) -> Iterable[str]:
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
