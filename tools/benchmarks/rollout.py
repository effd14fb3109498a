"""The rollout path (router, samples, log-probs, rewards) against a minimal client of the same engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from slime.backends.sglang.engine import Engine
from slime.backends.sglang.router import Router
from slime.data import Group
from slime.entry.arguments import parse_args
from slime.fleet.spec import fleet_of
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.groups.collect import collect
from slime.rollout.sampling import train_sampling_params
from slime.rollout.sglang_rollout import prompt_tokens
from tools.benchmarks.lengths import length_of
from tools.benchmarks.loop import arguments
from tools.benchmarks.report import Report, name_of

RUNS = 3
_PROMPTS, _SAMPLES = 64, 8
_RESPONSE, _SHORT_RESPONSE = 1024, 128


def measure(options: argparse.Namespace, report: Report) -> None:
    """The median of the ratios of alternating runs, both at full concurrency, and the throughput of both."""
    if report.out_of_time("the rollout path", 150.0):
        return
    args = _args(options, response=_RESPONSE)
    with _served(args, options.log_dir) as engine:
        ratios, ours, bare = asyncio.run(_alternate(args, engine.url))
    details = {"concurrent": _PROMPTS * _SAMPLES, "response": _RESPONSE, "runs": [round(r, 4) for r in ratios]}
    model = name_of(options)
    report.add("rollout path / bare client", model, 1, statistics.median(ratios), "", at_least=0.97, **details)
    report.add("rollout path", model, 1, statistics.median(ours), "tok/s")
    report.add("bare client", model, 1, statistics.median(bare), "tok/s")


def measure_prefix(options: argparse.Namespace, report: Report) -> None:
    """Seconds of a rollout with and without ``--rollout-prefix-warmup``, by turns, each with an empty cache."""
    if report.out_of_time("prompts computed once", 120.0):
        return
    args = _args(options, response=_SHORT_RESPONSE)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with _served(args, options.log_dir) as engine:
        source = RolloutDataSource(args)
        groups = source.get_samples(_PROMPTS)
        for number, group in enumerate(groups):
            draw = random.Random(number)
            prompt = [draw.randrange(100) for _ in range(options.prompt_tokens)]
            for sample in group:
                sample.tokens = list(prompt)
        for run in range(1 + RUNS):
            for warms_up in seconds:
                args.rollout_prefix_warmup = warms_up
                engine.control(timeout=60.0).flush_cache()
                fresh = copy.deepcopy(groups)
                started = time.perf_counter()
                asyncio.run(collect(args, run, source, fresh, _PROMPTS))
                if run:  # kernels compile on first use
                    seconds[warms_up].append(time.perf_counter() - started)
    model, of_each = name_of(options), {warms_up: statistics.median(runs) for warms_up, runs in seconds.items()}
    details = {"prompts": _PROMPTS, "responses": _SAMPLES, "prompt": options.prompt_tokens, "response": _SHORT_RESPONSE}
    report.add("rollout, each response's prompt computed", model, 1, of_each[False], "s", **details)
    report.add("rollout, prompts computed once", model, 1, of_each[True], "s", **details)


def _args(options: argparse.Namespace, response: int) -> argparse.Namespace:
    """Options of a run that only generates, on one GPU."""
    words = arguments(options, options.scratch / "rollout", [], response=response)
    words += ["--debug-rollout-only", "--rollout-num-gpus", "1"]
    words += ["--rollout-batch-size", str(_PROMPTS), "--n-samples-per-prompt", str(_SAMPLES)]
    args = parse_args(words)
    args.long_tail = False
    return args


@contextlib.contextmanager
def _served(args: argparse.Namespace, log_dir: Path) -> Iterator[Engine]:
    """The engine, behind a router of which ``args`` say where it is."""
    engine = engine_of(args, log_dir)
    router = Router(args, "127.0.0.1", None, log_dir / "router.log")
    try:
        engine.start()
        router.start()
        router.add(engine.url)
        router.wait_registered([engine.url], timeout=60)
        args.sglang_router_ip, port = router.url.removeprefix("http://").rsplit(":", 1)
        args.sglang_router_port = int(port)
        yield engine
    finally:
        router.stop()
        engine.stop()


def engine_of(args: argparse.Namespace, log_dir: Path) -> Engine:
    """The one engine of a run with these options, on the first GPU."""
    (spec,) = fleet_of(args).engines
    return Engine(spec.options(args, on_gpus=True), 0, "127.0.0.1", None, log_dir / "engine.log", cuda_devices=["0"])


async def _alternate(args: argparse.Namespace, url: str) -> tuple[list[float], list[float], list[float]]:
    source = RolloutDataSource(args)
    groups = source.get_samples(_PROMPTS)
    await _bare(args, url, groups)  # kernels compile on first use, and graders start
    await collect(args, RUNS, source, copy.deepcopy(groups), _PROMPTS)
    ours, bare = [], []
    for run in range(RUNS):
        bare.append(await _bare(args, url, groups))
        fresh = copy.deepcopy(groups)
        started = time.perf_counter()
        output = await collect(args, run, source, fresh, _PROMPTS)
        tokens = sum(sample.response_length for group in output.samples for sample in group)
        ours.append(tokens / (time.perf_counter() - started))
    return [a / b for a, b in zip(ours, bare, strict=True)], ours, bare


async def _bare(args: argparse.Namespace, url: str, groups: list[Group]) -> float:
    """Tokens per second of the same requests, sent at once, of which nothing but the count of tokens is kept."""
    payloads: list[dict[str, Any]] = []
    for sample in (sample for group in groups for sample in group):
        length = length_of(sample.index or 0, args.rollout_max_response_len, args.long_tail)
        params = train_sampling_params(args) | {"max_new_tokens": length, "ignore_eos": True}
        payloads.append({"input_ids": prompt_tokens(args, sample), "sampling_params": params, "return_logprob": True})
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def send(payload: dict[str, Any]) -> int:
            async with session.post(f"{url}/generate", json=payload) as reply:
                return (await reply.json())["meta_info"]["completion_tokens"]

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(send(payload) for payload in payloads)))
        return tokens / (time.perf_counter() - started)
