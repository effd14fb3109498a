"""Measure slime on this host's GPUs: one JSON line a figure as it comes, a table at the end.

    python tools/bench.py train --model qwen3-1.7b
    python tools/bench.py attention --model qwen3-4b
    python tools/bench.py step --model qwen3-4b --budget-s 300 --output docs/benchmarks/h200.jsonl
    python tools/bench.py step --hf-checkpoint models/Qwen3-4B

Models have a published shape and random weights (`tools/make_tiny_model.py --like`), unless
`--hf-checkpoint` names one's own, so nothing is downloaded, and responses have the length that is asked for. A case
that does not fit into the budget any more is left out, and says so.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

from slime.files.model_directory import has_weights  # noqa: E402
from slime.options.flags.schema import flag_named, positive  # noqa: E402
from slime.utils import device  # noqa: E402
from tools.benchmarks import attention, loop, rollout, train, trained  # noqa: E402
from tools.benchmarks.report import BenchError, Report  # noqa: E402
from tools.make_tiny_model import PUBLISHED  # noqa: E402

CASES: dict[str, tuple[Callable[[argparse.Namespace, Report], None], str]] = {
    "train": (train.measure, "training alone: tokens/s, MFU (of H100 and H200 SXM only), memory that sleeps and wakes"),
    "attention": (attention.measure, "attention's kernels alone: what GPU and host take, by lengths and micro-batch"),
    "step": (loop.measure_step, "the whole colocated loop: each part of a step, log-prob difference"),
    "refit": (loop.measure_refit, "pushing weights: colocated, and from one half of the GPUs to the other"),
    "sleep-wake": (loop.measure_sleep_wake, "handing the GPUs' memory over and back"),
    "async": (loop.measure_async, "train_async.py against train.py on the same GPUs, long-tailed lengths"),
    "trained": (trained.measure, "log-probs of trainer and engine after some supervised training of the model"),
    "rollout": (rollout.measure, "the rollout path against a minimal client of the same engine"),
    "prefix": (rollout.measure_prefix, "rollouts of long prompts, with and without --rollout-prefix-warmup"),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subcommands = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    for name, (_, text) in CASES.items():
        case = subcommands.add_parser(name, help=text, description=text, allow_abbrev=False)
        model = case.add_mutually_exclusive_group()
        shape = "a published shape, with random weights; default: %(default)s"
        model.add_argument("--model", choices=sorted(PUBLISHED), default="qwen3-1.7b", help=shape)
        model.add_argument("--hf-checkpoint", type=Path, help="a model's directory, of which no goals are known")
        case.add_argument("--num-layers", type=positive, help="where all of the model's do not fit; default: all")
        case.add_argument("--gpus", type=positive, default=1, help="default: %(default)s")
        case.add_argument("--budget-s", type=float, default=600.0, help="seconds for all of it; default: %(default)s")
        case.add_argument("--output", type=Path, help="append the JSON lines to this file too")
        case.add_argument("--log-dir", type=Path, help="where runs and their logs go; default: a temporary directory")
        case.add_argument("--flags", default="", help="more flags of train.py, in one word: --flags='--x 1'")
        if name == "train":
            train.add_arguments(case)
        if name == "prefix":
            case.add_argument("--prompt-tokens", type=positive, default=2048, help="default: %(default)s")
        if name == "refit":
            case.add_argument("--profile", action="store_true", help="print what pushes spend their time on, by rank")
    options = parser.parse_args(argv)
    if options.hf_checkpoint:
        if options.num_layers is not None:
            parser.error(f"--num-layers {options.num_layers}: --hf-checkpoint has a number of its own")
        if not (options.hf_checkpoint / "config.json").is_file() or not has_weights(str(options.hf_checkpoint)):
            parser.error(f"--hf-checkpoint {options.hf_checkpoint}: no directory with config.json and *.safetensors")
    try:
        options.flags = shlex.split(options.flags)
    except ValueError as error:
        parser.error(f"--flags {options.flags}: {error}")
    return options


def command_of(options: argparse.Namespace) -> str:
    """What measures the same again; where its output went is nobody else's business."""
    given = {name: value for name, value in vars(options).items() if name not in ("case", "output", "log_dir")}
    given["flags"] = shlex.join(options.flags)
    defaults = vars(parse([options.case])) | {"flags": ""}
    words = ["python3", "tools/bench.py", options.case]
    for name, value in given.items():
        if value != defaults[name]:
            flag = flag_named(name)
            words.append(flag if value is True else f"{flag}={value}")
    return shlex.join(words)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when everything that was begun was measured, 1 otherwise."""
    options = parse(argv)
    if (present := device.count()) < options.gpus:
        print(f"bench: error: --gpus {options.gpus}: GPUs that torch sees on this host: {present}", file=sys.stderr)
        if not present:
            print("bench: tools/bench_rollout_load.py, and scripts/quickstart.sh, measure without any", file=sys.stderr)
        return 1
    published = options.num_layers is None and options.hf_checkpoint is None
    report = Report(command_of(options), time.monotonic() + options.budget_s, options.output, published)
    with tempfile.TemporaryDirectory() as scratch:
        options.scratch = Path(scratch)
        options.log_dir = (options.log_dir or options.scratch).resolve()
        options.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            CASES[options.case][0](options, report)
        except BenchError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        finally:
            report.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
