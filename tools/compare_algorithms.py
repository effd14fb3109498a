#!/usr/bin/env python3
"""Train the quickstart's task with every algorithm, several seeds each: a table and curves of held-out accuracy.

    python3 -m tools.compare_algorithms --output-dir outputs/algorithms --report docs/learning

Every algorithm of a seed starts from the same supervised warm-up. Runs that are there already are not repeated, so the
command may be stopped and called again. It fails if an algorithm rises by less than it must.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.processes.signals import signals_as_exceptions  # noqa: E402
from tools.quickstart import Phases, QuickstartError, choose_start, cleared, end_running  # noqa: E402

if TYPE_CHECKING:
    from slime.data import Sample

_RUN_LIMIT_S = 30 * 60


@dataclass(frozen=True)
class Algorithm:
    """Flags of train.py, and the least by which accuracy must rise; a negative one is the least fall."""

    flags: tuple[str, ...]
    rise: float


# Two optimizer steps a rollout: the second is off policy, so that ratios and clipping matter.
_COMMON = ("--global-batch-size", "128")
ALGORITHMS = {
    "grpo": Algorithm(("--advantage-estimator", "grpo"), 0.20),
    "gspo": Algorithm(("--advantage-estimator", "gspo", "--eps-clip", "3e-2", "--eps-clip-high", "4e-2"), 0.20),
    "rloo": Algorithm(("--advantage-estimator", "rloo"), 0.20),
    "reinforce_plus_plus_baseline": Algorithm(
        ("--advantage-estimator", "reinforce_plus_plus_baseline", "--normalize-advantages"), 0.20
    ),
    "ppo": Algorithm(
        (
            *("--advantage-estimator", "ppo", "--normalize-advantages", "--critic-lr", "1e-3"),
            *("--critic-lr-warmup-iters", "0", "--num-critic-only-steps", "4"),
        ),
        0.10,
    ),
    "flipped": Algorithm(("--custom-reward-post-process-path", "tools.compare_algorithms.flipped_rewards"), -0.05),
}


_PAGE = """# What each algorithm learns

Held-out accuracy on the quickstart's task (greedy, 512 problems) before and after 60 rollouts of 64 x 4 samples,
each with two optimizer steps. All algorithms of a seed start from the same supervised warm-up; `flipped` is GRPO with
the sign of its rewards turned, and has to get worse. Curves are means over the seeds, with their range.

Made by `python3 -m tools.compare_algorithms --report docs/learning`.
"""


def flipped_rewards(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """GRPO's rewards with the other sign: a model trained on them must get worse."""
    import numpy as np

    from slime.algorithms.rewards import normalize_rewards

    raw = [sample.get_reward_value(args) for sample in samples]
    groups, rollouts = (np.array([getattr(s, name) for s in samples]) for name in ("group_index", "rollout_id"))
    return raw, (-normalize_rewards(np.array(raw), groups, rollouts, divide_by_std=True)).tolist()


def warm_up(output: Path, seed: int) -> None:
    """Model, data and the warm-up's chosen export of a seed, as the quickstart makes them."""
    if (output / "sft" / "hf").is_dir():
        return
    phases = Phases(_RUN_LIMIT_S)
    with cleared(output):
        for tool, made in (("make_tiny_model", "model"), ("make_arithmetic_data", "data")):
            phases.run([sys.executable, f"tools/{tool}.py", str(output / made), "--seed", str(seed)])
        phases.run(["bash", "scripts/run-quickstart-sft.sh"], _environment(output, seed))
        choose_start(phases, output)


def train(output: Path, name: str, seed: int, more_flags: list[str]) -> None:
    """One algorithm from the warm-up of its seed; its metrics land in ``output/NAME``."""
    run_dir = output / name
    if (run_dir / "done").exists():
        return
    flags = [
        "--run-dir",
        str(run_dir),
        "--save-hf",
        str(run_dir / "hf"),
        *_COMMON,
        *ALGORITHMS[name].flags,
        *more_flags,
    ]
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    command = ["bash", "scripts/run-quickstart-grpo.sh", *flags]
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "log", "w") as log:
        Phases(_RUN_LIMIT_S).run(command, _environment(output, seed), output=log)
    (run_dir / "done").touch()
    accuracy = curve(run_dir)
    print(f"{name:<30} seed {seed}: {accuracy[0][1]:.3f} -> {accuracy[-1][1]:.3f}", flush=True)


def _environment(output: Path, seed: int) -> dict[str, str]:
    return {"OUTPUT_DIR": str(output), "SEED": str(seed), "PYTHON": sys.executable}


def curve(run_dir: Path, dataset: str = "addition") -> list[tuple[int, float]]:
    """(rollouts trained on, held-out accuracy) of every evaluation."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["eval/step"], line[key]) for line in lines if (key := f"eval/{dataset}") in line]


def report(curves: dict[str, dict[int, list[tuple[int, float]]]], target: Path, note: str) -> list[str]:
    """Write ``target.md`` (a table) and ``target.png``; what did not rise (or fall) as it must."""
    rows, failures = [], []
    for name, of_seed in curves.items():
        rises = {seed: points[-1][1] - points[0][1] for seed, points in of_seed.items()}
        cells = [f"{points[0][1]:.3f} -> {points[-1][1]:.3f} ({rises[seed]:+.3f})" for seed, points in of_seed.items()]
        rows.append(f"| {name} | {' | '.join(cells)} | {fmean(rises.values()):+.3f} |")
        least = ALGORITHMS[name].rise
        wrong = {seed: rise for seed, rise in rises.items() if (rise < least if least > 0 else rise > least)}
        failures += [f"{name}, seed {seed}: {rise:+.3f}, not {least:+.2f}" for seed, rise in wrong.items()]
    seeds = list(next(iter(curves.values())))
    head = f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | mean rise |\n|---|{'---|' * (len(seeds) + 1)}\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    page = f"{_PAGE}{note}\n\n{head}" + "\n".join(rows) + f"\n\n![Held-out accuracy]({target.name}.png)\n"
    target.with_suffix(".md").write_text(page)
    plot(curves, target.with_suffix(".png"), "held-out accuracy (greedy)")
    print(head + "\n".join(rows))
    return failures


def plot(curves: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]], path: Path, label: str) -> None:
    """Draw a curve a name, of (rollouts trained on, value) by seed: their mean, with their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, of_seed in curves.items():
        runs = list(of_seed.values())
        steps = [step for step, _ in runs[0]]
        values = list(zip(*([accuracy for _, accuracy in points] for points in runs), strict=True))
        (line,) = axes.plot(steps, [fmean(v) for v in values], marker="o", label=name)
        axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], alpha=0.15, color=line.get_color())
    axes.set(xlabel="rollouts trained on", ylabel=label, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _jobs(algorithms: list[str], seeds: list[int]) -> Iterator[tuple[str, int]]:
    yield from ((name, seed) for seed in seeds for name in algorithms)


@signals_as_exceptions()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/algorithms"))
    parser.add_argument("--report", type=Path, help="where the table (.md) and the curves (.png) go; default: there")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--note", default="", help="a sentence for the report, such as what it ran on")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="last: more flags of train.py, for all")
    args = parser.parse_args()
    output = args.output_dir.absolute()
    of_seed = {seed: output / f"seed_{seed}" for seed in args.seeds}

    def run(job: tuple[str, int]) -> None:
        train(of_seed[job[1]], *job, args.flags)

    try:
        for seed, directory in of_seed.items():
            warm_up(directory, seed)
        with ThreadPoolExecutor(args.jobs) as pool:
            try:
                list(pool.map(run, _jobs(args.algorithms, args.seeds)))
            except (KeyboardInterrupt, SystemExit):  # those not begun are cancelled, but the others are waited for
                end_running()
                raise
    except QuickstartError as error:
        sys.exit(f"compare_algorithms: failed: {error}")
    curves: dict[str, Any] = {name: {s: curve(of_seed[s] / name) for s in args.seeds} for name in args.algorithms}
    failures = report(curves, args.report or output / "report", args.note)
    if failures:
        sys.exit("compare_algorithms: failed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
