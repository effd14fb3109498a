"""Draw how far students are from their teacher on held-out prompts, and print it: one run's directory a curve.

python3 -m examples.on_policy_distillation.curve distilled=outputs/a/grpo control=outputs/b/grpo --plot curve.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

_METRIC = "eval/distance"


def distances(run_dir: Path) -> list[tuple[int, float]]:
    """(rollouts trained on, nats a token), as `distance.reward_func` has measured them in a run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(int(line["eval/step"]), line[_METRIC]) for line in lines if _METRIC in line]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    parser.add_argument("--plot", type=Path, required=True, help="the picture to write")
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, _, run_dir in (run.partition("=") for run in options.runs):
        steps, values = zip(*distances(Path(run_dir)), strict=True)
        axes.plot(steps, values, marker="o", label=name)
        print(f"| {name} |", " | ".join(f"{value:.3f}" for value in values), f"| {values[0] / values[-1]:.1f} |")
    axes.set(xlabel="rollouts trained on", ylabel="KL(student ‖ teacher), nats a token", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()
