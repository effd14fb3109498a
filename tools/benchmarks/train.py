"""Training alone: tokens per second and MFU of the real trainer on packed random sequences, and where the time goes.

Run by ``tools/bench.py train``, one process a rank; rank 0 writes a JSON object to ``--result``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from slime.options.flags.schema import flag_named
from slime.utils import device
from tools.benchmarks.report import BenchError, Report, make_model, name_of, weights_of

ROOT = Path(__file__).resolve().parents[2]
_SLACK = 64
"""Tokens of a micro-batch that stay free, so that packing finds as few as are meant."""
_SIZES = ("tokens", "micro_batches", "shortest", "longest", "steps")
_LONGEST_GAPS = 12
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Dense bf16 per second, by the GPU's name; PCIe and NVL cards have other names, and do less."""
MFU_FORMULA = "3 x forward FLOPs (projections, MLP or chosen experts, LM head, causal attention) / (989e12 x GPUs x s)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What one training measurement can be told."""
    parser.add_argument("--tokens", type=int, default=16384, help="of one micro-batch; default: %(default)s")
    parser.add_argument("--micro-batches", type=int, default=4, help="of one rank and step; default: %(default)s")
    parser.add_argument("--shortest", type=int, default=2048, help="sequence; default: %(default)s")
    parser.add_argument("--longest", type=int, default=4096, help="sequence; default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="timed, after two that are not; default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one more step, and their times")


def measure(options: argparse.Namespace, report: Report) -> None:
    """Start the ranks and report what rank 0 found."""
    if report.out_of_time("training", 60.0):
        return
    result, log = options.scratch / "train.json", options.log_dir / "train.log"
    sizes = [f"{flag_named(name)}={getattr(options, name)}" for name in _SIZES]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    command += ["--module", "tools.benchmarks.train", "--model", str(make_model(options)), "--result", str(result)]
    command += [*sizes, *(["--profile"] if options.profile else []), "--flags", *options.flags]
    with open(log, "w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    if options.profile:
        print(log.read_text())
    if status:
        raise BenchError(f"training ended with status {status}:\n{log.read_text()[-3000:]}")
    found = json.loads(result.read_text())
    model, gpus = name_of(options), options.gpus
    gpu = device.hardware().partition(" x ")[2]
    if peak := PEAK_FLOPS.get(gpu):
        mfu, at_least = found["flops_per_s_per_gpu"] / peak, 0.25 if options.model.endswith("a3b") else 0.42
        report.add("train, MFU", model, gpus, mfu, "", at_least=at_least, formula=MFU_FORMULA)
    else:
        print(f"bench: the MFU is left out: no peak is known of {gpu}, but of {', '.join(PEAK_FLOPS)}", file=sys.stderr)
    details = {name: found[name] for name in ("tokens", "micro_batches", "step_s", "memory", "phases")}
    report.add("train, tokens", model, gpus, found["tokens_per_s_per_gpu"], "tok/s/GPU", **details)
    report.add("train, asleep", model, gpus, found["asleep_gib"], "GiB", at_most=3.0)
    handed = {name: found[name] for name in ("sleep_s", "wake_s", "wake_all_s")}
    report.add("train, sleep and wake", model, gpus, found["sleep_s"] + found["wake_s"], "s", **handed)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line of one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--result", required=True, help="file for rank 0's figures")
    add_arguments(parser)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags of train.py, last")
    return parser.parse_args(argv)


def training_options(options: argparse.Namespace, num_samples: int, world_size: int) -> argparse.Namespace:
    """`parse_args` of a run that trains on ``num_samples`` a step."""
    from slime.entry.arguments import parse_args

    words = [*weights_of(options.model), "--load-debug-rollout-data", "unused_{rollout_id}"]
    words += ["--num-rollout", "100", "--rollout-batch-size", str(num_samples), "--n-samples-per-prompt", "1"]
    words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(options.tokens)]
    words += ["--advantage-estimator", "grpo", "--disable-rewards-normalization"]
    words += ["--actor-num-gpus-per-node", str(world_size), "--lr", "1e-6", "--bf16"]
    return parse_args(words + options.flags)


def lengths_of(options: argparse.Namespace, dp_size: int) -> list[int]:
    """Of random sequences that fill each rank's micro-batches nearly, the same at every call."""
    rng = random.Random(0)
    lengths: list[int] = []
    for _ in range(dp_size * options.micro_batches):
        left = options.tokens - _SLACK
        while left >= options.longest + options.shortest:
            lengths.append(rng.randint(options.shortest, options.longest))
            left -= lengths[-1]
        # The rest in one or two equal pieces, so that packing finds the same bins.
        pieces = 1 if left <= options.longest else 2
        lengths += [left // pieces] * pieces
    return lengths


def make_samples(lengths: list[int], vocab_size: int) -> list[Any]:
    """Samples of random tokens, an eighth of each the prompt."""
    from slime.data import Sample, Status

    rng = random.Random(1)
    samples = []
    for i, length in enumerate(lengths):
        response = length - length // 8
        samples.append(
            Sample(
                group_index=i,
                index=i,
                rollout_id=i,
                prompt="",
                tokens=[rng.randrange(vocab_size) for _ in range(length)],
                response_length=response,
                loss_mask=[1] * response,
                rollout_log_probs=[-11.9] * response,
                reward=rng.random(),
                status=Status.COMPLETED,
            )
        )
    return samples


def main() -> None:
    options = parse()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from slime.backends.megatron.trainer import MegatronTrainer
    from slime.batching.flops import forward_flops
    from slime.rollout.batches.train_data import decoder_shape, to_train_batches

    args = training_options(options, world_size, world_size)
    dp_size = args.data_parallel_size
    lengths = lengths_of(options, dp_size)
    args = training_options(options, len(lengths), world_size)
    started = time.monotonic()
    trainer = MegatronTrainer(args)
    batches, _ = to_train_batches(args, make_samples(lengths, args.vocab_size), dp_size)
    batch = batches[trainer.dp_rank]
    start_s = time.monotonic() - started
    for rollout_id in range(2):
        trainer.train(rollout_id, batch)
    seconds, last = [], {}
    for rollout_id in range(2, 2 + options.steps):
        last = trainer.train(rollout_id, batch)[-1]
        seconds.append(last["perf/train_time"])
    asleep = sleep_and_wake(trainer)
    if options.profile:
        profile(lambda: trainer.train(99, batch), rank)
    if rank:
        return
    step = sorted(seconds)[len(seconds) // 2]
    flops = 3 * float(forward_flops(np.array(lengths), decoder_shape(args)).sum())
    result = {
        "tokens_per_s_per_gpu": sum(lengths) / step / world_size,
        "flops_per_s_per_gpu": flops / step / world_size,
        "step_s": step,
        "steps_s": seconds,
        "tokens": sum(lengths),
        "micro_batches": [len(s.micro_batches) for s in batch.steps],
        "start_s": start_s,
        **asleep,
        "phases": {k: v for k, v in last.items() if k.startswith("perf/")},
        "memory": trainer._memory.table().splitlines(),
    }
    Path(options.result).write_text(json.dumps(result))


def sleep_and_wake(trainer: Any) -> dict[str, Any]:
    """Seconds of each, the second time; the first pins host memory."""
    figures: dict[str, Any] = {}
    for _ in range(2):
        started = time.perf_counter()
        trainer.sleep(keep_weights=False)
        slept = time.perf_counter()
        asleep = trainer.wake(weights_only=False)
        figures = {"sleep_s": slept - started, "wake_s": time.perf_counter() - slept, "asleep_gib": asleep.used / 2**30}
        device.synchronize()
        figures["wake_all_s"] = time.perf_counter() - slept
    return figures


def profile(step: Any, rank: int) -> None:
    """Print the longest kernels of a step on rank 0, and how long its GPU waited."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
    if rank == 0:
        averages = recorded.key_averages()
        print(averages.table(sort_by="self_cuda_time_total", row_limit=32, max_name_column_width=70)[:9000])
        on_gpu = (event for event in recorded.events() if event.device_type == DeviceType.CUDA)
        ran = [event for event in on_gpu if not event.is_user_annotation]
        print("\n".join(idle([(event.time_range.start, event.time_range.end, event.name) for event in ran])))


def idle(ran: list[tuple[float, float, str]]) -> list[str]:
    """In words, how long a GPU had nothing to do from its first work to its last, and before what it waited longest.

    Args:
        ran: start and end in microseconds, and name, of each kernel and copy.
    """
    if not ran:
        return ["idle: the profiler recorded no kernel"]
    ran = sorted(ran)
    until, gaps = ran[0][0], list[tuple[float, float, str]]()
    for start, end, name in ran:
        if start > until:
            gaps.append((start - until, start - ran[0][0], name))
        until = max(until, end)
    whole, lost = until - ran[0][0], sum(length for length, _, _ in gaps)
    lines = [f"idle {lost / 1e3:.1f} ms of {whole / 1e3:.1f}, {len(gaps)} gaps between {len(ran)} kernels and copies"]
    for most, least in itertools.pairwise([math.inf, 1000.0, 100.0, 10.0, 0.0]):
        some = [length for length, _, _ in gaps if least < length <= most]
        lines.append(f"  above {least:.0f} us: {len(some)} gaps, {sum(some) / 1e3:.1f} ms")
    for length, at, name in sorted(gaps, reverse=True)[:_LONGEST_GAPS]:
        lines.append(f"  {length / 1e3:.2f} ms at {at / 1e3:.1f} ms, before {name[:80]}")
    return lines


if __name__ == "__main__":
    main()
