#!/usr/bin/env python3
"""Compare a step of the quickstart's GRPO on CPUs with one of TRL: same model, problems, batch and optimizer.

    python3 -m venv outputs/trl && outputs/trl/bin/pip install 'trl==1.16.*'
    python3 -m tools.compare_trl --trl-python outputs/trl/bin/python

It begins where the quickstart's GRPO does, with what `scripts/quickstart.sh` left in outputs/quickstart, and runs both
in turns. slime runs as its script says; TRL with its defaults, and all responses of a step in one batch, which is what
it does fastest. It fails where the two did not train on as much, or one did not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

from slime.processes.signals import signals_as_exceptions  # noqa: E402
from tools.benchmarks.report import BenchError, Report  # noqa: E402
from tools.benchmarks.trl_grpo import MARK, Settings  # noqa: E402
from tools.quickstart import Phases, QuickstartError  # noqa: E402

_STEP_ENDS = "perf/step_time"
"""The last metric of a rollout."""
_PARTS = {"generation": "perf/rollout_time", "training": "perf/train_time", "push": "perf/update_weights_time"}
_LENGTHS_DIFFER = 0.1
_LEARNT = 0.03
_FEW = 5
"""Steps at the beginning and the end of a run whose rewards are compared; as many warm up."""
_RUN_LIMIT_S = 1800


@dataclass(frozen=True)
class Step:
    """One step of either.

    Attributes:
        seconds: from the end of the step before to its own.
        parts: seconds of what it consists of, by name.
        reward: mean over its responses.
        responses: how many it trained on.
        length: their mean number of tokens.
    """

    seconds: float
    parts: dict[str, float]
    reward: float
    responses: int
    length: float


def steps_of_slime(lines: Iterable[str]) -> list[Step]:
    """The steps of a run's metrics.jsonl but the first, before which nothing ends."""
    steps, known, ended = [], dict[str, float](), None
    for line in lines:
        known |= json.loads(line)
        if _STEP_ENDS not in known:
            continue
        if ended is not None:
            parts = {name: known[key] for name, key in _PARTS.items()}
            responses, length = int(known["rollout/num_samples"]), known["rollout/response_len/mean"]
            steps.append(Step(known["time"] - ended, parts, known["rollout/raw_reward"], responses, length))
        ended, known = known["time"], {}
    return steps


def steps_of_trl(lines: Iterable[str], responses: int) -> list[Step]:
    """The steps that `trl_grpo` told of but the first, which compiles and allocates."""
    told = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    return [
        Step(
            step["seconds"],
            {"generation": step["generation"], "training": step["seconds"] - step["generation"]},
            step["reward"],
            responses,
            step["length"],
        )
        for step in told[1:]
    ]


def seconds(runs: Sequence[Sequence[Step]]) -> dict[str, float]:
    """Median seconds of a step and of its parts, after each run's warm-up."""
    steps = [step for run in runs for step in run[_FEW:]]
    parts = {name: median(step.parts[name] for step in steps) for name in steps[0].parts}
    return {"step": median(step.seconds for step in steps), **parts}


def rise(run: Sequence[Step]) -> float:
    """Of the reward, from the first steps to the last."""
    return fmean(step.reward for step in run[-_FEW:]) - fmean(step.reward for step in run[:_FEW])


def problems(slime: Sequence[Sequence[Step]], trl: Sequence[Sequence[Step]]) -> list[str]:
    """Why a comparison of these runs would mean nothing."""
    found = []
    of_both = {"slime": slime, "TRL": trl}
    batches = {name: {step.responses for run in runs for step in run} for name, runs in of_both.items()}
    if batches["slime"] != batches["TRL"]:
        found.append(f"steps of {batches['slime']} responses by slime, of {batches['TRL']} by TRL")
    ours, theirs = (fmean(step.length for run in runs for step in run) for runs in (slime, trl))
    if abs(ours - theirs) > _LENGTHS_DIFFER * theirs:
        found.append(f"responses of {ours:.2f} tokens by slime, of {theirs:.2f} by TRL")
    for name, runs in of_both.items():
        if (risen := fmean(map(rise, runs))) < _LEARNT:
            found.append(f"{name} has not learnt: its reward rose by {risen:+.3f}, not {_LEARNT:+.2f}")
    return found


def table(of_slime: dict[str, float], of_trl: dict[str, float]) -> str:
    """Seconds of both, and their ratio."""
    rows = [f"{'median seconds of':<18} {'slime':>8} {'TRL':>8} {'ratio':>7}"]
    for name, ours in of_slime.items():
        theirs = of_trl.get(name)
        rest = f"{'-':>8} {'-':>7}" if theirs is None else f"{theirs:>8.3f} {ours / theirs:>7.2f}"
        rows.append(f"{name:<18} {ours:>8.3f} {rest}")
    return "\n".join(rows)


def run_slime(inputs: Path, output: Path, steps: int) -> list[Step]:
    """The quickstart's script, with fewer rollouts and without evaluations."""
    flags = ["--run-dir", str(output), "--save-hf", str(output / "hf"), "--num-rollout", str(steps)]
    command = ["bash", "scripts/run-quickstart-grpo.sh", *flags, "--eval-interval", str(steps + 1)]
    output.mkdir()
    with open(output / "log", "w") as log:
        environment = {"OUTPUT_DIR": str(inputs), "PYTHON": sys.executable}
        Phases(_RUN_LIMIT_S).run(command, environment, output=log)
    return steps_of_slime((output / "metrics.jsonl").read_text().splitlines())


def run_trl(python: Path, settings: Settings) -> list[Step]:
    """`trl_grpo` by another Python, which sees nothing of this one's packages."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(ROOT / "tools" / "benchmarks" / "trl_grpo.py"), json.dumps(asdict(settings))]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=settings.output)
    if ran.returncode:
        raise BenchError(f"TRL failed: {(ran.stderr.strip().splitlines() or ['it says nothing'])[-1]}")
    return steps_of_trl(ran.stdout.splitlines(), settings.responses)


def settings_of(inputs: Path, output: Path, steps: int) -> Settings:
    """What scripts/run-quickstart-grpo.sh says."""
    return Settings(
        model=str(inputs / "sft" / "hf"),
        data=str(inputs / "data" / "train.jsonl"),
        output=str(output),
        steps=steps,
        responses=256,
        samples_per_prompt=4,
        max_new_tokens=16,
        lr=2e-4,
        warmup_steps=10,
        eps_clip=0.2,
        eps_clip_high=0.28,
        betas=(0.9, 0.98),
        seed=0,
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, help="the Python of an environment with TRL")
    parser.add_argument(
        "--inputs",
        type=Path,
        default=ROOT / "outputs" / "quickstart",
        help="what a quickstart left; default: %(default)s",
    )
    parser.add_argument("--steps", type=int, default=60, help="of each run; default: %(default)s")
    parser.add_argument("--turns", type=int, default=2, help="runs of each, in turns; default: %(default)s")
    parser.add_argument("--output", type=Path, help="a file that the figures are added to, as JSON lines")
    args = parser.parse_args(argv)
    if args.steps <= 3 * _FEW or args.turns < 1:
        parser.error(f"--steps must be more than {3 * _FEW}, and --turns at least 1")
    for needed in (args.trl_python, args.inputs / "sft" / "hf", args.inputs / "data" / "train.jsonl"):
        if not needed.exists():
            parser.error(
                f"{needed} does not exist: `scripts/quickstart.sh` makes --inputs, and --help says how to "
                "make the environment"
            )
    args.inputs, args.trl_python = args.inputs.absolute(), args.trl_python.absolute()
    return args


@signals_as_exceptions()
def main() -> None:
    """Command line."""
    args = parse()
    slime: list[list[Step]] = []
    trl: list[list[Step]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="compare-trl-") as work:
            for turn in range(args.turns):
                slime.append(run_slime(args.inputs, Path(work, f"slime_{turn}"), args.steps))
                trl.append(run_trl(args.trl_python, settings_of(args.inputs, Path(work), args.steps)))
                told = (
                    f"{name} {seconds(runs[-1:])['step']:.3f} s a step, reward {rise(runs[-1]):+.3f}"
                    for name, runs in (("slime", slime), ("TRL", trl))
                )
                print(f"turn {turn + 1}: {'; '.join(told)}", flush=True)
    except (BenchError, QuickstartError) as error:
        sys.exit(f"compare_trl: {error}")
    if found := problems(slime, trl):
        sys.exit("compare_trl: no comparison: " + "; ".join(found))
    ours, theirs = seconds(slime), seconds(trl)
    print(table(ours, theirs))
    report = Report(" ".join(sys.argv), time.monotonic(), args.output, published=False)
    details = {"slime": ours, "trl": theirs, "cores": os.cpu_count(), "steps": args.steps, "turns": args.turns}
    report.add("step by TRL's", "quickstart", 0, ours["step"] / theirs["step"], "ratio", **details)


if __name__ == "__main__":
    main()
