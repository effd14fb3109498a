#!/usr/bin/env python3
"""The quickstart: make a tiny model, warm it up with supervised steps, and let GRPO make it better at addition.

Every number printed comes from the files that the run wrote. `bash scripts/quickstart.sh` installs and calls this.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.files.storage import StorageError, write_text, writing  # noqa: E402
from slime.processes.signals import signals_as_exceptions  # noqa: E402

_GAIN_NEEDED = 0.20
_START_AT, _START_BELOW = 0.36, 0.60
_WELL_FORMED_NEEDED = 0.95
_STOP_S = 60
_RESULTS = {"model", "data", "sft", "grpo", "hf", "curve.png", "result.json"}
_RECORD = ".quickstart-files.json"
"""In the output directory: what the last quickstart left there, and as what; only that may be removed."""
_RUNNING: set[subprocess.Popen[str]] = set()
"""The commands that run now, of all threads."""


class QuickstartError(Exception):
    """The quickstart did not reach what it promises; the message says what is missing."""


class Phases:
    """Seconds spent in each phase, under one deadline for all of them."""

    def __init__(self, limit_s: float) -> None:
        self.seconds: dict[str, float] = {}
        self._deadline = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase."""
        print(f"\n== {name}", flush=True)
        started, self._phase = time.monotonic(), name
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def run(
        self,
        command: list[str],
        env: dict[str, str] | None = None,
        capture: bool = False,
        output: IO[str] | None = None,
    ) -> str:
        """Run a command to its end, or end it at the deadline; what it prints goes to ``output``, or is returned."""
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | (env or {}),
            text=True,
            stdout=subprocess.PIPE if capture else output,
            stderr=output,
        )
        _RUNNING.add(process)
        try:
            printed, _ = process.communicate(timeout=max(self._deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise QuickstartError(
                f"not done after {self._limit_s / 60:g} minutes (--time-limit), in the phase {self._phase!r}: a "
                "machine that others use too, or of few cores, is slow; give it more minutes"
            ) from None
        finally:
            end(process)
            _RUNNING.discard(process)
        if process.returncode:
            raise QuickstartError(f"{' '.join(command[:3])} ... ended with status {process.returncode}")
        return printed or ""


def end(process: subprocess.Popen[str]) -> None:
    """End a child that still runs; train.py ends its servers and Ray when it is told to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)


def end_running() -> None:
    """End the commands of other threads, which wait for them."""
    for process in list(_RUNNING):
        end(process)


def quickstart(output: Path, seed: int, rm_type: str, phases: Phases) -> None:
    """All phases; results land in ``output``.

    Raises:
        QuickstartError: it did not reach what it promises, or ``output`` holds other things than a quickstart's.
    """
    with cleared(output):
        _train(output, seed, rm_type, phases)


@contextmanager
def cleared(output: Path) -> Iterator[None]:
    """Make ``output`` an empty directory as `clear` does; of what the block left there the next one may clear it.

    Raises:
        QuickstartError: something else is in it.
    """
    clear(output)
    try:
        yield
    finally:
        left = {name: state for name, state in _content(output).items() if Path(name).parts[0] in _RESULTS}
        write_text("--output-dir", output / _RECORD, json.dumps(left))


def _train(output: Path, seed: int, rm_type: str, phases: Phases) -> None:
    python = sys.executable
    env = {"OUTPUT_DIR": str(output), "SEED": str(seed), "RM_TYPE": rm_type, "PYTHON": python}
    with phases.phase("make model and data"):
        phases.run([python, "tools/make_tiny_model.py", str(output / "model"), "--seed", str(seed)])
        phases.run([python, "tools/make_arithmetic_data.py", str(output / "data"), "--seed", str(seed)])
    with phases.phase("supervised warm-up"):
        phases.run(["bash", "scripts/run-quickstart-sft.sh"], env)
    with phases.phase("choose where GRPO starts"):
        before = choose_start(phases, output)
    with phases.phase("GRPO"):
        phases.run(["bash", "scripts/run-quickstart-grpo.sh"], env)
    with phases.phase("score the result"):
        after = _score(phases, output, [output / "hf"])[-1]
    metrics = [json.loads(line) for line in (output / "grpo" / "metrics.jsonl").read_text().splitlines()]
    plot(metrics, output / "curve.png")
    report(metrics, before, after, rm_type, output)


def clear(output: Path) -> None:
    """Make ``output`` an empty directory, if all that is in it is as an earlier quickstart left it.

    Raises:
        QuickstartError: something else is in it.
    """
    with writing("--output-dir", output):
        output.mkdir(parents=True, exist_ok=True)
    record = output / _RECORD
    left: dict[str, list[int]] = {}
    with suppress(FileNotFoundError, json.JSONDecodeError):
        left = json.loads(record.read_text())
    foreign = sorted(name for name, state in _content(output).items() if left.get(name) != state)
    if foreign:
        parents = {str(parent) for name in foreign for parent in Path(name).parents}
        foreign = [name for name in foreign if name not in parents]
        raise QuickstartError(
            f"{output} holds {', '.join(foreign[:3])}, which no quickstart is known to have left so: choose another "
            "--output-dir, nothing was removed"
        )
    for path in output.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != record:
            path.unlink()
    record.unlink(missing_ok=True)  # the last, so that an interrupted removal can be gone on with


def _content(output: Path) -> dict[str, list[int]]:
    """Relative paths of all that is in ``output`` -> size and time of the last change; of a directory, nothing."""
    content: dict[str, list[int]] = {}
    for where, directories, files in os.walk(output):
        for path in (Path(where, name) for name in directories + files):
            is_directory, state = path.is_dir() and not path.is_symlink(), path.lstat()
            content[str(path.relative_to(output))] = [] if is_directory else [state.st_size, state.st_mtime_ns]
    content.pop(_RECORD, None)
    return content


def choose_start(phases: Phases, output: Path) -> dict[str, Any]:
    """The first export of the warm-up that is right on some problems, but not most; GRPO starts from it, ``sft/hf``.

    Raises:
        QuickstartError: there is none, or its answers are not of the form that the warm-up taught.
    """
    exports = sorted((output / "sft").glob("hf_*"), key=lambda path: int(path.name.removeprefix("hf_")))
    scores = _score(phases, output, exports, "--stop-at", str(_START_AT))
    for score in scores:
        print(
            f"{Path(score['model']).name:<10} accuracy {score['accuracy']:.3f}, well-formed {score['well_formed']:.3f}"
        )
    chosen = scores[-1]
    if not _START_AT <= chosen["accuracy"] < _START_BELOW:
        raise QuickstartError(
            f"the warm-up has no export that is right on {_START_AT:.0%} of the problems, but not on {_START_BELOW:.0%}"
        )
    if chosen["well_formed"] < _WELL_FORMED_NEEDED:
        raise QuickstartError(f"only {chosen['well_formed']:.1%} of the answers are well-formed before RL")
    # Staged, so that what is there is whole: `tools/compare_algorithms.py` goes on from it.
    with writing("--output-dir", output):
        staged = shutil.copytree(chosen["model"], output / "sft" / ".hf")
        staged.rename(output / "sft" / "hf")
    return chosen


def _score(phases: Phases, output: Path, models: list[Path], *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "tools/score_arithmetic.py", *options, str(output / "data" / "eval.jsonl")]
    lines = phases.run(command + [str(model) for model in models], capture=True).splitlines()
    return [json.loads(line) for line in lines]


def _series(metrics: list[dict[str, Any]], key: str, axis: str) -> tuple[list[int], list[float]]:
    points = [(line[axis], line[key]) for line in metrics if key in line and axis in line]
    return [x for x, _ in points], [y for _, y in points]


def plot(metrics: list[dict[str, Any]], path: Path) -> None:
    """Reward of every rollout and evaluation accuracy, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(*_series(metrics, "rollout/raw_reward", "rollout/step"), label="training reward (sampled)", alpha=0.6)
    axes.plot(*_series(metrics, "eval/addition", "eval/step"), marker="o", label="held-out accuracy (greedy)")
    axes.set(xlabel="rollouts trained on", ylabel="share of right answers", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    with writing("--output-dir", path):
        figure.savefig(path, dpi=120)


def report(
    metrics: list[dict[str, Any]], before: dict[str, float], after: dict[str, float], rm_type: str, output: Path
) -> None:
    """Print what the run reached.

    Raises:
        QuickstartError: accuracy did not rise enough, or transformers does not confirm what the run reported.
    """
    accuracy = _series(metrics, "eval/addition", "eval/step")[1]
    gain = accuracy[-1] - accuracy[0]

    def mean(key: str) -> float:
        values = [line[key] for line in metrics if key in line]
        return sum(values) / len(values)

    rows = [
        ("held-out problems", f"{after['problems']}"),
        ("accuracy before GRPO", f"{accuracy[0]:.3f}  (transformers: {before['accuracy']:.3f})"),
        ("accuracy after GRPO", f"{accuracy[-1]:.3f}  (transformers: {after['accuracy']:.3f})"),
        ("gain", f"{gain:+.3f}"),
        ("rollout", f"{mean('perf/rollout_time'):.2f} s, {mean('perf/tokens_per_gpu_per_sec'):.0f} tokens/s"),
        ("training step", f"{mean('perf/actor_train_time'):.2f} s, {mean('perf/actor_train_tok_per_s'):.0f} tokens/s"),
        ("weight update", f"{mean('perf/update_weights_time'):.2f} s"),
        ("largest log-prob difference", f"{max(_series(metrics, _DIFFERENCE, 'train/step')[1]):.1e}"),
        ("checkpoint", str(output / "hf")),
        ("curve", str(output / "curve.png")),
    ]
    print("\n" + "\n".join(f"{name:<28} {value}" for name, value in rows))
    result = {"before": accuracy[0], "after": accuracy[-1], "gain": gain, "hf_before": before, "hf_after": after}
    write_text("--output-dir", output / "result.json", json.dumps(result))
    if abs(after["accuracy"] - accuracy[-1]) > 2 / after["problems"]:
        raise QuickstartError("transformers scores the saved checkpoint otherwise than the run reported")
    if rm_type != "random" and gain < _GAIN_NEEDED:
        raise QuickstartError(f"accuracy rose by {gain:+.3f}, less than {_GAIN_NEEDED}")


_DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def parse_args() -> argparse.Namespace:
    """The command line; `scripts/quickstart.sh` checks it by this before there is an environment."""
    parser = argparse.ArgumentParser(
        prog="quickstart.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=ROOT / "outputs" / "quickstart",
        help="what an earlier quickstart left there is removed; default: outputs/quickstart beside scripts/",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data, the initial weights and the sampling")
    parser.add_argument("--rm-type", default="math", help="`random` is the control: accuracy must not rise")
    parser.add_argument(
        "--time-limit", type=float, default=20, help="minutes after which it gives up; default: %(default)s"
    )
    return parser.parse_args()


@signals_as_exceptions()
def main() -> None:
    """Command line."""
    args = parse_args()
    phases = Phases(args.time_limit * 60)
    error = None
    try:
        quickstart(args.output_dir.absolute(), args.seed, args.rm_type, phases)
    except (QuickstartError, StorageError) as failure:
        error = failure
    except KeyboardInterrupt:
        sys.exit(130)
    print("\n" + "\n".join(f"{name:<28} {seconds:7.1f} s" for name, seconds in phases.seconds.items()))
    print(f"{'total':<28} {sum(phases.seconds.values()):7.1f} s")
    if error is not None:
        sys.exit(f"quickstart: failed: {error}")


if __name__ == "__main__":
    main()
