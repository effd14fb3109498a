#!/usr/bin/env python3
"""Load the rollout path with ten thousand samples at once, and print what it costs: per request and per token.

    python tools/bench_rollout_load.py --samples 10000 --tokens 64,512 --group 8
    python tools/bench_rollout_load.py --samples 10000 --tokens 512 --error-rate 0.01

A stub engine, in a process of its own, answers no request before all are in flight. Everything else is slime's own:
data source, tokenizer, HTTP client, samples, a reward that costs nothing. Each response length is one rollout; every
sample is checked to have come back once, with its own tokens. Two lengths or more tell the cost of a request from that
of a token. One JSON line a figure, a table at the end; exit status 1 where a target is missed or a sample is not right.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

import numpy as np  # noqa: E402

from slime.entry.arguments import parse_args  # noqa: E402
from slime.rollout.tokenizer import load_tokenizer  # noqa: E402
from tools import make_tiny_model  # noqa: E402
from tools.benchmarks import load  # noqa: E402
from tools.benchmarks.report import BenchError, Report  # noqa: E402
from tools.benchmarks.stub_engine import FAULTS, LONGEST, VOCABULARY, script  # noqa: E402

PER_TOKEN_US, PER_REQUEST_US = 5.0, 1000.0
"""What the manager's processor time is to stay below."""
_WARM_UP_GROUPS = 8
_OTHER_FILES = 512


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000, help="in flight at once; default: %(default)s")
    parser.add_argument("--group", type=int, default=8, help="samples of one prompt; default: %(default)s")
    parser.add_argument("--tokens", default="64,512", help="response lengths; default: %(default)s")
    parser.add_argument(
        "--error-rate", type=float, default=0.0, help=f"of requests, {', '.join(FAULTS)} in turn; default: %(default)s"
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one rollout; default: %(default)s")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
    options = parser.parse_args(argv)
    try:
        options.tokens = sorted({int(word) for word in options.tokens.split(",")})
    except ValueError:
        parser.error(f"--tokens {options.tokens} is not a list of numbers such as 64,512")
    if not 0 < options.tokens[0] <= options.tokens[-1] <= LONGEST:
        parser.error(f"--tokens {options.tokens} is not within 1 and {LONGEST}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < options.samples + _OTHER_FILES:
        parser.error(f"--samples {options.samples} are as many open files, and this host allows {hard} (ulimit -Hn)")
    if options.group < 1 or options.samples < 1 or options.samples % options.group:
        parser.error(f"--samples {options.samples} is not a multiple of --group {options.group}")
    if not 0 <= options.error_rate < 1:
        parser.error(f"--error-rate {options.error_rate} is not within 0 and 1")
    return options


def rollout_args(options: argparse.Namespace, scratch: Path) -> argparse.Namespace:
    """Options of train.py for one rollout, with the tokenizer and the prompts that are written to ``scratch``."""
    model = scratch / "model"
    make_tiny_model.write(make_tiny_model.parse([str(model)]))
    groups = options.samples // options.group
    rows = load.prompt_rows(max(groups, _WARM_UP_GROUPS))
    data = scratch / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--input-key", "prompt", "--label-key", "label"]
    words += ["--run-dir", str(scratch / "run"), "--num-rollout", "1", "--rollout-num-gpus", "1"]
    words += ["--rollout-batch-size", str(groups), "--n-samples-per-prompt", str(options.group)]
    words += ["--rollout-max-response-len", str(options.tokens[-1]), "--debug-rollout-only"]
    words += ["--custom-rm-path", "tools.benchmarks.load.reward", "--sglang-server-concurrency", str(options.samples)]
    words += ["--rollout-timeout", str(options.timeout_s), "--request-timeout", str(options.timeout_s)]
    words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(2 * LONGEST)]
    # Every request has a seed of its own, by which its reply is known.
    args = parse_args([*words, "--sglang-enable-deterministic-inference"])
    args.vocab_size = VOCABULARY
    return args


def warm_up(args: argparse.Namespace) -> None:
    """A small rollout, so that what is imported and loaded at first use is not measured."""
    script()
    load_tokenizer(args.hf_checkpoint)
    small = argparse.Namespace(**vars(args) | {"rollout_batch_size": _WARM_UP_GROUPS, "rollout_max_response_len": 8})
    small.global_batch_size = _WARM_UP_GROUPS * args.n_samples_per_prompt
    with load.stub_engine(hold_until=1) as port:
        load.run(small, port, rollout_id=0)


def measure(options: argparse.Namespace, report: Report, scratch: Path) -> dict[str, list[float]]:
    """One rollout of each length, from the shortest on; the processor time of each, in seconds a sample."""
    args = rollout_args(options, scratch)
    warm_up(args)
    rollouts, wholes = [], []
    for tokens in options.tokens:
        args.rollout_max_response_len = tokens
        with load.stub_engine(options.samples, options.error_rate) as port:
            done, samples = load.run(args, port, rollout_id=0)
        convert_s = load.conversion_s(args, samples)
        rollouts.append(done.cpu_s / done.samples)
        wholes.append((done.cpu_s + convert_s) / done.samples)
        details = {
            "tokens": tokens,
            "group": options.group,
            "system_s": round(done.system_s, 3),
            "wall_s": round(done.wall_s, 2),
            "peak_rss_gib": round(done.peak_rss / 2**30, 2),
            "stub": done.counts,
        }
        name = f"{options.samples} samples of {tokens} tokens"
        report.add(name, "stub", 0, round(done.cpu_s, 3), "s CPU", **details)
        report.add(f"{name}, at once", "stub", 0, done.counts["most_in_flight"], "", at_least=options.samples)
        report.add(f"{name}, into batches", "stub", 0, round(convert_s, 3), "s CPU")
    return {"rollout": rollouts, "rollout and batches": wholes}


def fit(lengths: list[int], costs: dict[str, list[float]], report: Report) -> None:
    """The cost of a request and of a token, where there are lengths to tell them apart."""
    if len(lengths) < 2:
        return
    for name, seconds in costs.items():
        per_token, per_request = np.polyfit(lengths, seconds, 1).tolist()
        report.add(f"{name}, a token", "stub", 0, round(1e6 * per_token, 3), "us CPU", at_most=PER_TOKEN_US)
        report.add(f"{name}, a request", "stub", 0, round(1e6 * per_request, 1), "us CPU", at_most=PER_REQUEST_US)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 when every sample came back right and every target was met, 1 otherwise."""
    options = parse(argv)
    command = " ".join(["tools/bench_rollout_load.py", *(sys.argv[1:] if argv is None else argv)])
    report = Report(command, time.monotonic() + options.timeout_s, options.output)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            fit(options.tokens, measure(options, report, Path(scratch)), report)
        except BenchError as error:
            print(f"bench_rollout_load: {error}", file=sys.stderr)
            return 1
        finally:
            report.table()
    return 0 if all(row["met"] in (True, None) for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
