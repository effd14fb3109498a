"""Ten thousand samples at once through the rollout path, and what that costs the process that runs it."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.data import Sample, Status
from slime.data.source.rollout_context import rollout_context
from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.batches.metrics import accounting
from slime.rollout.batches.train_data import to_train_batches
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sampling import request_seed, seeded
from slime.rollout.sglang_rollout import generate_rollout
from tools.benchmarks.report import BenchError
from tools.benchmarks.stub_engine import FAULTS, VERSION, reply_key, script

_STUB = Path(__file__).with_name("stub_engine.py")
_STOP_S = 10.0
_PROMPT = "Problem {}: a train leaves at {} and goes {} km an hour; another one follows it. When do the two meet?"


@dataclass(frozen=True)
class Load:
    """What one rollout took."""

    samples: int
    tokens: int
    """Of one response."""
    cpu_s: float
    """Processor time of all threads, in user mode and in the kernel."""
    system_s: float
    """The kernel's part of it."""
    wall_s: float
    peak_rss: int
    """Bytes, of the process so far."""
    counts: dict[str, int]
    """The stub's."""


def prompt_rows(num_prompts: int) -> list[dict[str, str]]:
    """Lines of a prompt file, no two alike."""
    return [{"prompt": _PROMPT.format(i, i * 7, i * 13), "label": str(i)} for i in range(num_prompts)]


async def reward(args: Namespace, sample: Sample) -> float:
    """Next to nothing, so that what is measured is the path to it."""
    return float(len(sample.response) % 2)


@contextlib.contextmanager
def stub_engine(hold_until: int, error_rate: float = 0.0) -> Iterator[int]:
    """The port of a stub in a process of its own.

    Raises:
        BenchError: it did not start.
    """
    command = [sys.executable, str(_STUB), "--hold-until", str(hold_until), "--error-rate", str(error_rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = process.stdout.readline()
            if not port:
                raise BenchError(f"{_STUB.name} ended with status {process.wait(_STOP_S)}")
            yield int(port)
        finally:
            process.stdin.close()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def run(args: Namespace, port: int, rollout_id: int) -> tuple[Load, list[Sample]]:
    """One rollout against the stub at ``port``, every sample of it checked; what it took, and the samples.

    Args:
        args: of ``--rollout-batch-size`` groups, with seeds for every request.

    Raises:
        BenchError: a sample was lost, came twice, or has another's response.
    """
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", port
    num_samples = args.rollout_batch_size * args.n_samples_per_prompt
    source = RolloutDataSourceWithBuffer(args)
    wall, usage = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    with rollout_context(rollout_id):
        output = generate_rollout(args, rollout_id, source)
    used, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - wall
    assert isinstance(output, RolloutFnTrainOutput)
    samples = flatten_samples(output.samples)
    counts = _counts(port)
    check(args, rollout_id, output.samples)
    check_counts(counts, num_samples)
    source.count_trained(samples)
    accounting(args, source)
    done = Load(
        samples=num_samples,
        tokens=args.rollout_max_response_len,
        cpu_s=_seconds(used) - _seconds(usage),
        system_s=used.ru_stime - usage.ru_stime,
        wall_s=wall,
        peak_rss=used.ru_maxrss * 1024,
        counts=counts,
    )
    return done, samples


def conversion_s(args: Namespace, samples: list[Sample]) -> float:
    """Processor time until samples are training batches, which the process that runs rollouts makes next."""
    started = time.process_time()
    to_train_batches(args, samples, dp_size=1)
    return time.process_time() - started


def _seconds(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _counts(port: int) -> dict[str, int]:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the host names
    with direct.open(f"http://127.0.0.1:{port}/counts", timeout=30) as reply:
        counts: dict[str, int] = json.load(reply)
    return counts


def check_counts(counts: dict[str, int], num_samples: int) -> None:
    """Raise BenchError unless the stub answered once for every sample, and failed all other requests on purpose."""
    faults = sum(counts.get(fault, 0) for fault in FAULTS)
    if (counts["answered"], counts["requests"]) != (num_samples, num_samples + faults):
        raise BenchError(f"{num_samples} samples and {faults} faults do not add up with what the stub saw: {counts}")


def check(args: Namespace, rollout_id: int, groups: list[list[Sample]]) -> None:
    """Raise BenchError unless every sample is there once, with its own tokens, log-probs and text."""
    wanted = args.rollout_batch_size * args.n_samples_per_prompt
    indices = [sample.index for group in groups for sample in group]
    if sorted(indices, key=lambda index: index or 0) != list(range(wanted)):
        raise BenchError(f"{wanted} samples were to come back once; {len(indices)} came, {len(set(indices))} of them")
    for group in groups:
        seed = seeded(args, {}, "rollout", rollout_id, group[0].group_index)["sampling_seed"]
        for position, sample in enumerate(group):
            _check_own(sample, request_seed(seed, position), args.rollout_max_response_len)


def _check_own(sample: Sample, seed: int, length: int) -> None:
    start = reply_key(sample.tokens[: len(sample.tokens) - length], seed)
    part, whole = slice(start, start + length), script()
    own: dict[str, tuple[Any, Any]] = {
        "tokens": (sample.tokens[len(sample.tokens) - length :], whole.tokens[part]),
        "log-probs": (sample.rollout_log_probs, whole.log_probs[part]),
        "text": (sample.response, "".join(whole.texts[part])),
        "loss mask": (sample.loss_mask, [1] * length),
        "weight version": (sample.weight_versions, [VERSION]),
        "status": (sample.status, Status.TRUNCATED),
        "reward": (sample.reward, float(len(sample.response) % 2)),
    }
    wrong = [name for name, (has, should) in own.items() if has != should]
    if wrong:
        raise BenchError(f"sample {sample.index} came back with another's {', '.join(wrong)}")
