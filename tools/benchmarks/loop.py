"""The whole loop, run as users run it, and what its metrics say of the steps after the first two."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from slime.utils import device
from tools.benchmarks import push_profile
from tools.benchmarks.floor import generation_floor
from tools.benchmarks.report import BenchError, Report, make_model, name_of, weights_of

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 2
"""Steps that are not counted: they compile, pin and capture."""
STEPS = 3
_ASYNC_STEPS = 5
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Requests at once for which engines capture graphs, a second each when they start: two rollouts of 256, where they
overlap. Beyond the largest a 4B model's token takes 33 ms, not 14."""
_REFIT_S = {"qwen3-30b-a3b": 0.4}
"""To reach, colocated, pause to continue."""
_DENSE_REFIT_S = 0.1
_NCCL_REFIT_S = 0.4
_RESPONSE = 512
"""Tokens of a response, where all are alike."""
_LONGEST = 4096
"""Tokens of the longest of long-tailed responses."""
SPANS = {
    "perf/rollout_time": "generation and reward",
    "perf/convert_time": "samples to batches",
    "perf/release_engines_time": "engines give memory back",
    "perf/wake_trainers_time": "trainers take memory",
    "perf/transfer_time": "batches to trainers, metrics back",
    "perf/pack_time": "packing",
    "perf/ref_log_probs_time": "reference log-probs",
    "perf/log_probs_time": "log-probs",
    "perf/values_time": "values",
    "perf/advantages_time": "advantages",
    "perf/critic_train_time": "critic's forward, backward, step",
    "perf/actor_train_time": "forward, backward, step",
    "perf/sleep_trainers_time": "trainers give memory back",
    "perf/update_weights_time": "weight push",
    "perf/resume_engines_time": "engines take memory",
    "perf/wait_for_eval_time": "evaluation",
    "perf/save_model_time": "checkpoint",
}
"""Parts of a step: one after another, none within another."""


def arguments(
    options: argparse.Namespace,
    run_dir: Path,
    gpus: list[str],
    *,
    response: int = _RESPONSE,
    rollouts: int = WARM_UP + STEPS,
) -> list[str]:
    """A command line of train.py: 256 responses of ``response`` tokens a rollout, trained on in one step.

    Args:
        gpus: the flags that say which GPUs train and which generate.
        rollouts: how many.
    """
    data = options.scratch / "data"
    if not data.is_dir():
        subprocess.run([sys.executable, str(ROOT / "tools/make_arithmetic_data.py"), str(data)], check=True)
    words = [*weights_of(make_model(options)), "--run-dir", str(run_dir)]
    words += ["--prompt-data", str(data / "train.jsonl"), "--input-key", "prompt", "--label-key", "label"]
    words += ["--apply-chat-template", "--rm-type", "math", "--num-rollout", str(rollouts)]
    words += ["--rollout-batch-size", "32", "--n-samples-per-prompt", "8"]
    words += ["--rollout-max-response-len", str(response)]
    words += ["--custom-generate-function-path", "tools.benchmarks.lengths.generate"]
    words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
    words += ["--advantage-estimator", "grpo", "--lr", "1e-6", "--bf16"]
    words += ["--update-weight-buffer-size", str(2**31)]
    words += [*engine_attention(), "--sglang-sampling-backend", "pytorch"]
    words += ["--sglang-grammar-backend", "none", "--sglang-disable-prefill-cuda-graph"]
    words += ["--sglang-cuda-graph-bs-decode", *map(str, GRAPH_SIZES), "--sglang-mem-fraction-static", "0.7"]
    return words + gpus + options.flags


def engine_attention() -> list[str]:
    """Flags of the engine's attention: none, as it has a default, but where the installed sgl_kernel was packed without
    FlashAttention 3, which is the default of Hopper."""
    found = importlib.util.find_spec("sgl_kernel")  # which a host without GPUs need not have
    places = found.submodule_search_locations or [] if found else []
    if any(path for place in places for path in Path(place).glob("flash_ops*")):
        return []
    return ["--sglang-attention-backend", "triton"]


def run(options: argparse.Namespace, name: str, words: list[str], script: str = "train.py") -> list[dict[str, Any]]:
    """Run a driver to its end; the lines of its metrics.

    Raises:
        BenchError: it failed; with the end of its output. Or its directory holds another run's metrics.
    """
    run_dir = Path(words[words.index("--run-dir") + 1])
    if run_dir.exists():
        raise BenchError(f"{run_dir} holds another run, whose figures would count: name another --log-dir")
    log = options.log_dir / f"{name}.log"
    with open(log, "w") as output:
        command = [sys.executable, str(ROOT / script), *words]
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    if status:
        raise BenchError(f"{name}: {script} ended with status {status}:\n{log.read_text()[-3000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def warm(lines: list[dict[str, Any]], key: str) -> list[float]:
    """A metric's values in the counted steps."""
    values = [line[key] for line in lines if key in line]
    return values[-STEPS:]


def median(lines: list[dict[str, Any]], key: str) -> float:
    """0 where the run has no such part."""
    values = warm(lines, key)
    return statistics.median(values) if values else 0.0


def colocated(options: argparse.Namespace, report: Report) -> list[dict[str, Any]] | None:
    """Run the loop on GPUs that both sides share; nothing where there is no time for it."""
    if report.out_of_time("the colocated loop", 100.0):
        return None
    gpus = ["--colocate", "--actor-num-gpus-per-node", str(options.gpus)]
    return run(options, "colocated", arguments(options, options.log_dir / "colocated", gpus))


def _disaggregated(options: argparse.Namespace, report: Report) -> list[dict[str, Any]] | None:
    if options.gpus < 2 or report.out_of_time("the disaggregated loop", 100.0):
        return None
    half = options.gpus // 2
    gpus = ["--actor-num-gpus-per-node", str(half), "--rollout-num-gpus", str(options.gpus - half)]
    return run(options, "disaggregated", arguments(options, options.log_dir / "disaggregated", gpus))


def measure_step(options: argparse.Namespace, report: Report) -> None:
    """A colocated step, part by part, and what comes with it."""
    lines = colocated(options, report)
    if lines is None:
        return
    step = median(lines, "perf/step_time")
    parts = {text: round(value, 4) for key, text in SPANS.items() if (value := median(lines, key))}
    tokens = median(lines, "rollout/total_lengths") * median(lines, "rollout/num_samples")
    model, gpus = name_of(options), options.gpus
    report.add("step", model, gpus, step, "s", parts=parts)
    report.add("step, tokens", model, gpus, tokens / step / gpus, "tok/s/GPU")
    _add_floor(lines, options, report)
    rest = [
        1 - sum(parts) / whole
        for whole, *parts in zip(warm(lines, "perf/step_time"), *_spans_by_step(lines), strict=True)
    ]
    report.add("step, share of no part", model, gpus, statistics.median(rest), "", at_most=0.03)
    difference = median(lines, "train/train_rollout_logprob_abs_diff")
    report.add("log-prob difference, mean", model, gpus, difference, "", at_most=0.02)
    _add_refit(lines, "refit, colocated", options, report)
    _add_sleep_wake(lines, options, report)


def _add_floor(lines: list[dict[str, Any]], options: argparse.Namespace, report: Report) -> None:
    """Of engines of one GPU each, as they are unless flags say otherwise."""
    lengths, samples = median(lines, "rollout/total_lengths"), median(lines, "rollout/num_samples")
    gpu, requests = device.hardware().partition(" x ")[2], round(samples / options.gpus)
    floor = generation_floor(make_model(options), gpu, requests, lengths - _RESPONSE, _RESPONSE)
    if floor is not None and "--rollout-num-gpus-per-engine" not in options.flags:
        seconds = median(lines, "perf/rollout_time")
        details = {
            "floor_s": round(floor, 3),
            "requests": requests,
            "bandwidth": "weights and cache, read once a token",
        }
        report.add("generation over its floor", name_of(options), options.gpus, seconds / floor, "", **details)


def _spans_by_step(lines: list[dict[str, Any]]) -> list[list[float]]:
    return [values for key in SPANS if len(values := warm(lines, key)) == STEPS]


def measure_refit(options: argparse.Namespace, report: Report) -> None:
    """Pause to continue: by handles on the same GPUs, and with two GPUs or more by NCCL to others."""
    lines = colocated(options, report)
    if lines is not None:
        _add_refit(lines, "refit, colocated", options, report, profiled="colocated")
    disaggregated = _disaggregated(options, report)
    if disaggregated is not None:
        _add_refit(disaggregated, "refit, NCCL", options, report, profiled="disaggregated")


def measure_async(options: argparse.Namespace, report: Report) -> None:
    """Trained tokens per second of three ways to use the same GPUs, on lengths with a long tail."""
    if options.gpus < 2:
        raise BenchError("async needs --gpus 2 or more: engines and trainers apart")
    half = options.gpus // 2
    apart = ["--actor-num-gpus-per-node", str(half), "--rollout-num-gpus", str(options.gpus - half)]
    shared = ["--colocate", "--actor-num-gpus-per-node", str(options.gpus)]
    ways = {
        "synchronous, colocated": ("train.py", shared),
        "synchronous, apart": ("train.py", apart),
        "asynchronous": ("train_async.py", [*apart, "--max-weight-staleness", "1", "--use-tis"]),
    }
    rates: dict[str, float] = {}
    for name, (script, gpus) in ways.items():
        if report.out_of_time(name, 150.0):
            return
        run_dir = options.log_dir / name.replace(", ", "-")
        words = arguments(options, run_dir, gpus, response=_LONGEST, rollouts=WARM_UP + _ASYNC_STEPS)
        words.append("--long-tail")
        lines = run(options, run_dir.name, words, script)
        rates[name] = _tokens_per_second(lines)
        report.add(f"{name}, long tail", name_of(options), options.gpus, rates[name], "tok/s")
        if name == "synchronous, apart":
            _add_refit(lines, "refit, NCCL", options, report)
    staleness = max((line.get("rollout/weight_staleness_max", 0.0) for line in lines), default=0.0)
    ratio = rates.pop("asynchronous") / max(rates.values())
    case, model = "async / better synchronous", name_of(options)
    report.add(case, model, options.gpus, ratio, "", at_least=1.5, staleness=staleness)


def _tokens_per_second(lines: list[dict[str, Any]]) -> float:
    """Tokens that the counted steps trained on, over the wall time that they took together."""
    ends = [line["time"] for line in lines if "perf/step_time" in line]
    tokens = [
        line["rollout/total_lengths"] * line["rollout/num_samples"] for line in lines if "rollout/num_samples" in line
    ]
    return sum(tokens[-_ASYNC_STEPS:]) / (ends[-1] - ends[-1 - _ASYNC_STEPS])


def _add_refit(
    lines: list[dict[str, Any]], case: str, options: argparse.Namespace, report: Report, profiled: str | None = None
) -> None:
    """With ``--profile`` the parts of the run ``profiled`` are printed as well."""
    at_most = _NCCL_REFIT_S if case.endswith("NCCL") else _REFIT_S.get(options.model, _DENSE_REFIT_S)
    seconds = median(lines, "perf/update_weights_paused_time")
    gigabytes = median(lines, "perf/update_weights_wire_bytes") / 1e9
    report.add(case, name_of(options), options.gpus, seconds, "s", at_most=at_most, gigabytes=round(gigabytes, 2))
    if profiled and options.profile:
        print("\n".join(push_profile.table(options.log_dir / profiled, seconds, STEPS)), flush=True)


def measure_sleep_wake(options: argparse.Namespace, report: Report) -> None:
    """Handing memory over and back, both sides."""
    lines = colocated(options, report)
    if lines is not None:
        _add_sleep_wake(lines, options, report)


def _add_sleep_wake(lines: list[dict[str, Any]], options: argparse.Namespace, report: Report) -> None:
    names = ("sleep_trainers", "wake_trainers", "release_engines", "resume_engines")
    parts = {name: median(lines, f"perf/{name}_time") for name in names}
    report.add("sleep and wake", name_of(options), options.gpus, sum(parts.values()), "s", at_most=2.0, parts=parts)
    asleep = median(lines, "perf/asleep_gib")
    report.add("memory while both sleep", name_of(options), options.gpus, asleep, "GiB", at_most=6.0)
