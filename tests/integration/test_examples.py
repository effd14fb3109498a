"""examples/ with a real engine: each one's turns on random weights that a grammar keeps in form, and each run.sh."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from aiohttp import web

from examples.multi_agent import rollout_with_multi_agents as agents
from examples.retool import generate_with_retool as retool
from examples.search_r1 import generate_with_search as search
from examples.search_r1.search_server import make_app
from slime.rollout.loop import run_all
from slime.rollout.sampling import train_sampling_params
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.http_utils import PortReservation
from slime.utils.types import Sample, Status
from tests.integration.harness import ROOT, series
from tests.integration.tiny import KEYS, Service

NUM_GPUS = 0
pytestmark = pytest.mark.integration

RUN_S = 1200
GRAMMARS = {
    search: r"(<search>[a-c]{2}</search>|<answer>[a-c]{2}</answer>)",
    retool: r"(<code>print\([0-9]{2}\*[0-9]\)</code>|\\boxed\{[0-9]{2}\})",
    agents: r"\\boxed\{[1-2]\}",
}


def example_args(service: Service, model: Path, module: ModuleType) -> Namespace:
    """Options of a rollout on the tests' engine, the example's own at their defaults."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return Namespace(
        **vars(service.args)
        | vars(parser.parse_args([]))
        | {
            "hf_checkpoint": str(model),
            "num_engines": 1,
            "max_turns": 3,
            "rollout_max_response_len": 300,
            "rollout_max_context_len": 500,
            "rollout_temperature": 2.0,
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": urlsplit(service.router.url).port,
            "sglang_router_api_key": KEYS[0],
        }
    )


async def generated(args: Namespace, module: ModuleType, count: int) -> list[Any]:
    """That many samples of an example, rewarded."""

    async def one(index: int) -> Any:
        sample = Sample(index=index, rollout_id=index, group_index=0, prompt=f"question {index}: ", label="42")
        done = await module.generate(args, sample, train_sampling_params(args) | {"regex": GRAMMARS[module]})
        if isinstance(done, Sample):
            done.reward = await module.reward_func(args, done)
        return done

    return await run_all([one(index) for index in range(count)], timeout=120)


def assert_token_exact(args: Namespace, sample: Sample, ours: str) -> list[str]:
    """Tokens, text and mask agree; returns what the model said, turn by turn.

    Args:
        ours: a pattern of the observations, which are the masked tokens and nothing else.
    """
    sample.check()
    decode = load_tokenizer(args.hf_checkpoint).decode
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    assert decode(response) == sample.response
    runs: list[tuple[int, list[int]]] = []
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    for token, mask, log_prob in zip(response, sample.loss_mask, sample.rollout_log_probs, strict=True):
        assert log_prob == 0.0 or mask
        if not runs or runs[-1][0] != mask:
            runs.append((mask, []))
        runs[-1][1].append(token)
    assert [mask for mask, _ in runs] == [1 - i % 2 for i in range(len(runs))]
    assert all(re.fullmatch(ours, decode(ids), re.DOTALL) for mask, ids in runs if not mask)
    assert sample.segment_lengths == [len(ids) for mask, ids in runs if mask]
    return [decode(ids) for mask, ids in runs if mask]


@contextlib.asynccontextmanager
async def search_server(args: Namespace) -> AsyncIterator[None]:
    """A real search server that knows every query of the grammar but those with an a."""
    texts = [x + y for x in "abc" for y in "abc"]
    runner = web.AppRunner(make_app([{"contents": f"{text} is {text[::-1]}"} for text in texts if "a" not in text]))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        args.search_url = f"http://127.0.0.1:{runner.addresses[0][1]}/retrieve"
        yield
    finally:
        await runner.cleanup()


def test_turns_with_a_real_engine(service: Service, tiny_model_dir: Path) -> None:
    """Each example's generate function: random weights, kept in form by a grammar, call tools and end."""

    async def run() -> dict[ModuleType, list[Any]]:
        found = {}
        for module in GRAMMARS:
            async with search_server(arguments[module]):
                found[module] = await generated(arguments[module], module, 8)
        return found

    arguments = {module: example_args(service, tiny_model_dir, module) for module in GRAMMARS}
    found = asyncio.run(run())
    for module, ours in (
        (search, r"\n<information>.*</information>\n"),
        (retool, r"\n<interpreter>\d+</interpreter>\n"),
    ):
        said = [assert_token_exact(arguments[module], sample, ours) for sample in found[module]]
        assert all(re.fullmatch(GRAMMARS[module], text) for turns in said for text in turns)
        assert 8 < sum(map(len, said)) <= 3 * 8, "some samples took several turns"
        for sample, turns in zip(found[module], said, strict=True):
            ended = "answer" in turns[-1] or "boxed" in turns[-1]
            assert sample.status is (Status.COMPLETED if ended else Status.TRUNCATED)
            assert sample.metadata.get("search_errors", 0) == sample.metadata.get("tool_errors", 0) == 0
    for sample in found[search]:
        for query in sample.metadata["searches"][: sample.response.count("<information>")]:
            told = "nothing found" if "a" in query else f"1. {query} is {query[::-1]}"
            assert f"<search>{query}</search>\n<information>{told}</information>\n" in sample.response
    for sample in found[retool]:
        for a, b, printed in re.findall(r"print\((\d+)\*(\d)\)</code>\n<interpreter>(\d+)", sample.response):
            assert int(a) * int(b) == int(printed)
    for parts in found[agents]:
        assert [part.metadata["agent"] for part in parts] == ["solver"] * 3 + ["rewriter"] * 2 + ["selector"]
        assert len({part.rollout_id for part in parts}) == 1
        assert all(assert_token_exact(arguments[agents], part, "") == [part.response] for part in parts)


@pytest.fixture
def port() -> Iterator[int]:
    reservation = PortReservation("127.0.0.1")
    try:
        reservation.release()
        yield reservation.port
    finally:
        reservation.close()


def run_example(name: str, output: Path, **env: str) -> list[Sample]:
    """Run an example's run.sh to its end; the samples of its last rollout."""
    environment = {"OUTPUT_DIR": str(output), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | env
    started, samples = time.monotonic(), str(output / "samples_{rollout_id}.pt")
    with open(f"{output}.log", "w") as log:
        done = subprocess.run(
            ["bash", str(ROOT / "examples" / name / "run.sh"), "--ci-test", "--save-debug-rollout-data", samples],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | environment,
            timeout=RUN_S,
        )
    assert done.returncode == 0, Path(f"{output}.log").read_text()[-4000:]
    print(f"{name}: {time.monotonic() - started:.0f} s")
    dumped = sorted(output.glob("samples_*.pt"), key=lambda path: int(path.stem.split("_")[1]))
    return [Sample.from_dict(sample) for sample in torch.load(dumped[-1], weights_only=False)["samples"]]


def assert_learns(run_dir: Path, name: str, gain: float) -> None:
    """The trainer computes the engine's log-probs on tokens that tools interrupt, and rewards rise."""
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    accuracy = series(run_dir, f"eval/{name}")
    assert accuracy[-1] - accuracy[0] >= gain, accuracy


@pytest.mark.full
def test_search_r1_learns_to_search(tmp_path: Path, port: int) -> None:
    samples = run_example("search_r1", tmp_path / "out", SEARCH_PORT=str(port))
    assert_learns(tmp_path / "out" / "grpo", "search_r1", 0.15)
    searching = [sample for sample in samples if sample.metadata["searches"]]
    assert len(searching) > 0.8 * len(samples)
    assert all(0 in (sample.loss_mask or []) for sample in searching)


@pytest.mark.full
def test_retool_learns_to_use_python(tmp_path: Path) -> None:
    samples = run_example("retool", tmp_path / "out")
    assert_learns(tmp_path / "out" / "grpo", "retool", 0.15)
    assert sum(sample.metadata["tool_calls"] > 0 for sample in samples) > 0.8 * len(samples)


@pytest.mark.full
def test_agents_learn_together(tmp_path: Path) -> None:
    samples = run_example("multi_agent", tmp_path / "out")
    assert_learns(tmp_path / "out" / "grpo", "multi_agent", 0.1)
    assert {sample.metadata["agent"] for sample in samples} == set(agents.ROLES)
    rollouts = {sample.rollout_id for sample in samples}
    assert len(samples) == 6 * len(rollouts)
