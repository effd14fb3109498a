"""Does the agent learn, and by its rewards? Seeds with and without: a table and curves of held-out success.

    python3 -m examples.agent_tool_use.compare --output-dir outputs/agent_tool_use --plot docs/agents.png

For each seed `run.sh` trains twice from one warm-up: with the agent's rewards, and with random ones, the control. What
is there already is not made again, so the command may be stopped and called again. It fails if success ends less than
0.20 above the control. ``OUTPUT_DIR/evaluations.jsonl`` has the figures, and is all that ``--no-runs`` needs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slime.files.storage import write_text
from tools.compare_algorithms import curve, plot
from tools.quickstart import Phases, QuickstartError, end_running

EXAMPLE = "agent_tool_use"
RUNS = {"rewards": "0", "random rewards": "1"}
"""Name -> RANDOM_REWARDS."""
_ABOVE_CONTROL = 0.20
_EVALUATIONS = "evaluations.jsonl"

Curves = Mapping[str, Mapping[int, Sequence[tuple[int, float]]]]
"""Name -> seed -> (rollouts trained on, held-out success)."""


class Trials:
    """The runs below one directory, each `run.sh` with further flags of train.py."""

    def __init__(self, output: Path, flags: Sequence[str], limit_s: float) -> None:
        self._output, self._flags, self._limit_s = output, flags, limit_s

    def warm_up(self, seed: int) -> None:
        """The warmed-up model and the data of a seed."""
        home = self._output / f"seed_{seed}"
        if not (home / "sft" / "hf").is_dir():
            # The script warms up, and of what comes then it only checks whether it could run.
            self._run("warm-up", seed, home, {"HF_CHECKPOINT": ""}, ["--dry-run"])

    def train(self, name: str, seed: int) -> None:
        """One run from the warm-up of its seed."""
        home, own = self._output / f"seed_{seed}", self._own(name, seed)
        if (own / "done").exists():
            return
        env = {"HF_CHECKPOINT": str(home / "sft" / "hf"), "RANDOM_REWARDS": RUNS[name]}
        env |= {f"{kind}_DATA": str(home / "data" / f"{file}.jsonl") for kind, file in _FILES.items()}
        (own / "grpo" / "metrics.jsonl").unlink(missing_ok=True)
        self._run(name, seed, own, env, [])
        (own / "done").touch()
        points = self.curve(name, seed)
        print(f"{name:<16} seed {seed}: {points[0][1]:.3f} -> {points[-1][1]:.3f}", flush=True)

    def curve(self, name: str, seed: int) -> list[tuple[int, float]]:
        """The evaluations of a run."""
        return curve(self._own(name, seed) / "grpo", EXAMPLE)

    def _own(self, name: str, seed: int) -> Path:
        return self._output / f"seed_{seed}" / name.replace(" ", "_")

    def _run(self, what: str, seed: int, output: Path, env: dict[str, str], flags: list[str]) -> None:
        output.mkdir(parents=True, exist_ok=True)
        env |= {"OUTPUT_DIR": str(output), "SEED": str(seed), "PYTHON": sys.executable}
        with open(output / "log", "w") as log:
            try:
                command = ["bash", f"examples/{EXAMPLE}/run.sh", *self._flags, *flags]
                Phases(self._limit_s).run(command, env, output=log)
            except QuickstartError as error:
                raise QuickstartError(f"{what}, seed {seed}, see {output / 'log'}: {error}") from None


_FILES = {"PROMPT": "train", "EVAL": "eval"}


def table(curves: Curves) -> tuple[str, list[str]]:
    """Success before and after as Markdown, a column a seed; what is not far enough above the control."""
    seeds = list(curves["rewards"])
    lines = [f"| | {' | '.join(f'seed {seed}' for seed in seeds)} |", f"|---|{'---|' * len(seeds)}"]
    for name in RUNS:
        cells = [f"{points[0][1]:.3f} -> {points[-1][1]:.3f}" for points in curves[name].values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    above = {seed: curves["rewards"][seed][-1][1] - curves["random rewards"][seed][-1][1] for seed in seeds}
    lines.append(f"| above the control | {' | '.join(f'{gain:+.3f}' for gain in above.values())} |")
    failures = [f"seed {seed}: {gain:+.3f}" for seed, gain in above.items() if gain < _ABOVE_CONTROL]
    return "\n".join(lines), failures


def write_curves(path: Path, curves: Curves) -> None:
    """One line an evaluation."""
    lines = [
        {"run": name, "seed": seed, "rollouts": rollouts, "success": success}
        for name, of_seed in curves.items()
        for seed, points in of_seed.items()
        for rollouts, success in points
    ]
    write_text("--output-dir", path, "".join(json.dumps(line) + "\n" for line in lines))


def read_curves(path: Path) -> Curves:
    """What `write_curves` has written."""
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        points = curves.setdefault(line["run"], {}).setdefault(line["seed"], [])
        points.append((line["rollouts"], line["success"]))
    return curves


def run_all(trials: Trials, seeds: Sequence[int], jobs: int) -> Curves:
    """Make all runs, ``jobs`` at a time, warm-ups first."""
    todo = [(name, seed) for seed in seeds for name in RUNS]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(trials.warm_up, seeds))
            list(pool.map(lambda job: trials.train(*job), todo))
        except (KeyboardInterrupt, SystemExit):  # those not begun are cancelled, but the others are waited for
            end_running()
            raise
    return {name: {seed: trials.curve(name, seed) for seed in seeds} for name in RUNS}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs") / EXAMPLE)
    parser.add_argument("--plot", type=Path, help="a PNG of the curves")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--time-limit", type=float, default=30, help="minutes of one run; default: %(default)g")
    parser.add_argument("--no-runs", action="store_true", help="the table and the curves of evaluations.jsonl")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="last: more flags of train.py, for all")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    evaluations = args.output_dir.absolute() / _EVALUATIONS
    if not args.no_runs:
        trials = Trials(args.output_dir.absolute(), args.flags, args.time_limit * 60)
        try:
            write_curves(evaluations, run_all(trials, args.seeds, args.jobs))
        except QuickstartError as error:
            sys.exit(f"compare.py: failed: {error}")
    curves = read_curves(evaluations)
    if args.plot is not None:
        plot(curves, args.plot, "held-out success (sampled)")
    text, failures = table(curves)
    print(text)
    if failures:
        sys.exit(f"compare.py: failed: less than {_ABOVE_CONTROL:+.2f} above the control: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
