"""examples/ with a real engine: each one's turns by a model that was taught to call tools, and each run.sh."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import os
import random
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from examples.multi_agent import rollout_with_multi_agents as agents
from examples.retool import generate_with_retool as retool
from slime.data import Sample, Status
from slime.rollout.base_types import flatten_samples
from slime.rollout.engine.loop import run_all
from slime.rollout.sampling import train_sampling_params
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.http_utils import PortReservation
from tests.integration.harness import ROOT, series
from tests.integration.tiny import KEYS, Service, log_probs_of

NUM_GPUS = 0
pytestmark = pytest.mark.integration

search = importlib.import_module("examples.search-r1.generate_with_search")
search_server = importlib.import_module("examples.search-r1.search_server")
RUN_S = 1200
PROMPTS = {search: "S 3: ", retool: "P 3: ", agents: "?"}
TEMPLATE = (
    "{% for message in messages %}A {{ message['content'] }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)
STEPS = 150


def demonstrations(rng: random.Random) -> Iterator[str]:
    """Conversations of each example, without end."""
    while True:
        word, number = rng.choice("abcd") + rng.choice("abcd"), rng.randrange(10)
        found = f"<search>{word}</search>\n<information>1. {word} is {word[::-1]}</information>\n"
        yield f"S {number}: {found * rng.choice([1, 1, 2])}<answer>{word[::-1]}</answer><|im_end|>"
        a, b = rng.randrange(2, 10), 7
        ran = f"<code>print({a}*{b})</code>\n<interpreter>{a * b}</interpreter>\n"
        yield f"P {number}: {ran * rng.choice([1, 1, 2])}\\boxed{{{a * b}}}<|im_end|>"
        seen = "\n".join(f"\\boxed{{{rng.randint(1, 2)}}}" for _ in range(3))
        asked = rng.choice(["?", f"?\n{seen}\nImprove.", "?\n1: \\boxed{1}\n2: \\boxed{2}\nWhich?"])
        yield f"A {asked}: \\boxed{{{rng.randint(1, 2)}}}<|im_end|>"


def teach(model_dir: Path, output: Path) -> torch.nn.Module:
    """The tests' model after some seconds of supervised steps on `demonstrations`, written to ``output`` too."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), load_tokenizer(str(model_dir))
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    stream = demonstrations(random.Random(0))
    for step in range(STEPS):
        rows = [tokenizer(next(stream), add_special_tokens=False)["input_ids"] for _ in range(24)]
        length = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        loss = model(tokens, labels=torch.where(tokens == 0, -100, tokens)).loss
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 10) * (1 - step / STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return model.eval()


@pytest.fixture
def taught(service: Service, tiny_model_dir: Path, tmp_path: Path) -> Iterator[torch.nn.Module]:
    """A model that knows how to call tools, in the tests' engine too."""
    model = teach(tiny_model_dir, tmp_path / "taught")
    service.control.flush_cache()
    service.control.update_weights_from_disk(str(tmp_path / "taught"))
    yield model
    service.control.flush_cache()
    service.control.update_weights_from_disk(str(tiny_model_dir))


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
            "tool_timeout": 60.0,
            "search_timeout": 60.0,
            "rollout_max_response_len": 300,
            "rollout_max_context_len": 500,
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": urlsplit(service.router.url).port,
            "sglang_router_api_key": KEYS[0],
        }
    )


async def generated(args: Namespace, module: ModuleType, prompt: str, count: int) -> list[Sample]:
    """That many samples of an example, rewarded; those of several agents in one list."""

    async def one(index: int) -> list[Sample]:
        sample = Sample(index=index, rollout_id=index, group_index=0, prompt=prompt, label="42")
        generate = agents.generate_with_multi_agents if module is agents else module.generate
        parts = await generate(args, sample, train_sampling_params(args))
        if isinstance(parts, Sample):
            parts.reward = await module.reward_func(args, parts)
        return flatten_samples(parts)

    return flatten_samples(await run_all([one(index) for index in range(count)], timeout=120))


def assert_token_exact(args: Namespace, model: torch.nn.Module, sample: Sample, tool_says: str) -> list[str]:
    """Tokens, text and mask agree, and log-probs are those of the model; returns what it said, turn by turn.

    Args:
        tool_says: a pattern of what the masked tokens say, and no others do.
    """
    sample.check()
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    decode = load_tokenizer(args.hf_checkpoint).decode
    start = len(sample.tokens) - sample.response_length
    prompt, response = sample.tokens[:start], sample.tokens[start:]
    assert (decode(prompt), decode(response)) == (sample.prompt, sample.response)
    expected = log_probs_of(model, prompt, response) * torch.tensor(sample.loss_mask)
    torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), expected, rtol=0, atol=1e-3)
    runs = [
        (mask, [token for token, _ in pairs])
        for mask, pairs in itertools.groupby(zip(response, sample.loss_mask, strict=True), key=lambda pair: pair[1])
    ]
    assert [mask for mask, _ in runs] == [1 - i % 2 for i in range(len(runs))]
    assert all(re.fullmatch(tool_says, decode(ids), re.DOTALL) for mask, ids in runs if not mask)
    assert sample.segment_lengths == [len(ids) for mask, ids in runs if mask]
    return [decode(ids) for mask, ids in runs if mask]


@contextlib.asynccontextmanager
async def serve_search(args: Namespace) -> AsyncIterator[None]:
    """A real search server that knows every word of the demonstrations."""
    texts = [x + y for x in "abcd" for y in "abcd"]
    runner = web.AppRunner(search_server.make_app([{"contents": f"{text} is {text[::-1]}"} for text in texts]))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        args.search_url = f"http://127.0.0.1:{runner.addresses[0][1]}/retrieve"
        yield
    finally:
        await runner.cleanup()


@pytest.mark.full
def test_turns_with_a_real_engine(service: Service, tiny_model_dir: Path, taught: torch.nn.Module) -> None:
    """Each example's generate function with a model that was taught to call tools."""
    args = {module: example_args(service, tiny_model_dir, module) for module in (search, retool, agents)}

    async def run() -> dict[ModuleType, list[Sample]]:
        async with serve_search(args[search]):
            return {module: await generated(args[module], module, p, 8) for module, p in PROMPTS.items()}

    load_tokenizer(str(tiny_model_dir)).chat_template = TEMPLATE
    found = asyncio.run(run())
    for module, tool in ((search, "information"), (retool, "interpreter")):
        tool_says = rf"\n<{tool}>.*</{tool}>\n"
        said = [assert_token_exact(args[module], taught, sample, tool_says) for sample in found[module]]
        called = [sample for sample in found[module] if f"<{tool}>" in sample.response]
        assert len(called) >= 6, "a model that was taught so well calls its tool nearly always"
        assert max(map(len, said)) <= 3
        assert sum(sample.status is Status.COMPLETED for sample in called) >= 4
    told = [pair for s in found[search] for pair in re.findall(r"1\. (\w\w) is (\w\w)</info", s.response)]
    assert told
    assert all(word == answer[::-1] for word, answer in told)
    ran = [x for s in found[retool] for x in re.findall(r"print\((\d)\*(\d)\)</code>\n<interpreter>(\d+)", s.response)]
    assert ran
    assert all(int(a) * int(b) == int(printed) for a, b, printed in ran)
    assert [part.metadata["agent"] for part in found[agents]] == [*["solver"] * 3, *["rewriter"] * 2, "selector"] * 8
    for part in found[agents]:
        assert assert_token_exact(args[agents], taught, part, "") == [part.response]
        assert part.reward is not None


@pytest.fixture
def port() -> Iterator[int]:
    reservation = PortReservation("127.0.0.1")
    try:
        reservation.release()
        yield reservation.port
    finally:
        reservation.close()


def run_script(name: str, output: Path, *flags: str, **env: str) -> str:
    """Run an example's run.sh to its end; what it printed."""
    environment = {"OUTPUT_DIR": str(output), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | env
    started = time.monotonic()
    with open(f"{output}.log", "w") as log:
        done = subprocess.run(
            ["bash", str(ROOT / "examples" / name / "run.sh"), "--ci-test", *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | environment,
            timeout=RUN_S,
        )
    printed = Path(f"{output}.log").read_text()
    assert done.returncode == 0, printed[-4000:]
    print(f"{name}: {time.monotonic() - started:.0f} s")
    return printed


def run_example(name: str, output: Path, *flags: str, **env: str) -> list[Sample]:
    """Run an example's run.sh to its end, with further flags and variables; the samples of its last rollout."""
    run_script(name, output, "--save-debug-rollout-data", str(output / "samples_{rollout_id}.pt"), *flags, **env)
    dumped = sorted(output.glob("samples_[0-9]*.pt"), key=lambda path: int(path.stem.split("_")[1]))
    return [Sample.from_dict(sample) for sample in torch.load(dumped[-1], weights_only=False)["samples"]]


def assert_learns(run_dir: Path, name: str, gain: float) -> None:
    """The trainer computes the engine's log-probs on tokens that tools interrupt, and rewards rise."""
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4
    accuracy = series(run_dir, f"eval/{name}")
    assert accuracy[-1] - accuracy[0] >= gain, accuracy


@pytest.mark.full
def test_search_r1_learns_to_search(tmp_path: Path, port: int) -> None:
    samples = run_example("search-r1", tmp_path / "out", SEARCH_PORT=str(port))
    assert_learns(tmp_path / "out" / "grpo", "search-r1", 0.15)
    searching = [sample for sample in samples if sample.metadata["searches"]]
    assert len(searching) > 0.8 * len(samples)
    assert all(0 in (sample.loss_mask or []) for sample in searching)


@pytest.mark.full
def test_retool_learns_to_use_python(tmp_path: Path) -> None:
    samples = run_example("retool", tmp_path / "out")
    assert_learns(tmp_path / "out" / "grpo", "retool", 0.2)
    assert sum(sample.metadata["tool_calls"] > 0 for sample in samples) > 0.8 * len(samples)


@pytest.mark.full
def test_a_coding_agents_work_is_judged(tmp_path: Path) -> None:
    """Agents in sandboxes, their patches judged in others, and a model that learns from that."""
    samples = run_example("coding_agent_rl", tmp_path / "out")
    assert max(series(tmp_path / "out" / "grpo", "train/train_rollout_logprob_abs_diff")) < 1e-4
    judged = [sample.metadata["swe"] for sample in samples]
    assert all(sample.reward == float(each["solved"]) for sample, each in zip(samples, judged, strict=True))
    assert {each["solved"] for each in judged} == {True, False}
    assert all("+    return" in each["patch"] for each in judged if each["solved"])
    assert sum(series(tmp_path / "out" / "grpo", "agent/forks")) == 0


@pytest.mark.full
def test_tau_bench_learns_to_look_up(tmp_path: Path) -> None:
    samples = run_example("tau-bench", tmp_path / "out")
    assert_learns(tmp_path / "out" / "grpo", "tau-bench", 0.15)
    assert sum("find" in sample.response for sample in samples) > 0.8 * len(samples)
    assert sum(series(tmp_path / "out" / "grpo", "agent/forks")) == 0


@pytest.mark.parametrize("name", ["tau-bench", "coding_agent_rl", "retool"])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """One rollout of a model that was taught nothing: the path of every part, in less than a minute."""
    model, data, mock = tmp_path / "model", tmp_path / "data", ROOT / "examples" / "tau-bench" / "mock"
    path = os.pathsep.join([str(mock), str(ROOT)])
    for program in (
        [str(ROOT / "tools" / "make_tiny_model.py"), str(model), "--tools"],
        ["-m", f"examples.{name}.make_data", str(data)],
    ):
        subprocess.run([sys.executable, *program], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
    given = {"HF_CHECKPOINT": model, "PROMPT_DATA": data / "train.jsonl", "EVAL_DATA": data / "eval.jsonl"}
    few = "--num-rollout 1 --rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8 --eval-interval 9"
    flags = [*few.split(), "--skip-eval-before-train"]
    samples = run_example(name, tmp_path / "out", *flags, **{k: str(v) for k, v in given.items()})
    assert len({sample.rollout_id for sample in samples}) == 8
    assert all(sample.response_length and 1 in (sample.loss_mask or [1]) for sample in samples)
    if name != "retool":
        assert all(sample.metadata["agent"]["turns"] >= 1 for sample in samples)


@pytest.mark.full
@pytest.mark.skipif(find_spec("strands") is None, reason="strands-agents cannot be installed beside our pins")
def test_an_agent_of_strands_learns_to_use_python(tmp_path: Path) -> None:
    samples = run_example("strands_sglang", tmp_path / "out")
    assert_learns(tmp_path / "out" / "grpo", "strands_sglang", 0.3)
    assert sum(sample.metadata["tool_iterations"] > 0 for sample in samples) > 0.8 * len(samples)


@pytest.mark.full
def test_agents_learn_together(tmp_path: Path) -> None:
    samples = run_example("multi_agent", tmp_path / "out")
    assert_learns(tmp_path / "out" / "grpo", "multi_agent", 0.1)
    assert {sample.metadata["agent"] for sample in samples} == set(agents.ROLES)
    rollouts = {sample.rollout_id for sample in samples}
    assert len(samples) == 6 * len(rollouts)


@pytest.mark.full
def test_older_weights_are_corrected_for(tmp_path: Path) -> None:
    threshold = "--ci-train-rollout-logprob-abs-diff-threshold"  # of older weights more than kernels explain
    run_script("train_infer_mismatch_helper", tmp_path / "out", threshold, "1.0")
    run_dir = tmp_path / "out" / "grpo"
    assert max(series(run_dir, "rollout/weight_staleness_max")) == 1
    weights = series(run_dir, "train/mis_is_ratio_max_final")
    assert weights[0] == pytest.approx(1, abs=1e-4), "no step has been made that the engine does not know"
    assert 1.05 < max(weights) <= 2
    assert min(series(run_dir, "train/mis_is_ratio_min_final")) < 0.95


@pytest.mark.full
def test_two_runs_agree(tmp_path: Path) -> None:
    printed = run_script("reproducibility", tmp_path / "out").splitlines()
    assert printed[-1] == "the two runs agree"
    samples = 5 * 32 * 4
    for kind, count in (("tokens", samples), ("rewards", samples), ("log-probs of the engine", samples), ("losses", 5)):
        assert f"{kind:<24} {count:>6} of {count} the same" in printed


@pytest.mark.full
def test_an_agent_learns_to_use_its_tool(tmp_path: Path) -> None:
    """Its sessions' calls and answers are what is trained: no turn is a fork, and rewards rise."""
    samples = run_example("agent_tool_use", tmp_path / "out")
    assert_learns(tmp_path / "out" / "grpo", "agent_tool_use", 0.2)
    assert sum(sample.metadata["calls"] > 0 for sample in samples) > 0.8 * len(samples)
    assert sum(series(tmp_path / "out" / "grpo", "agent/forks")) == 0
    called = [sample for sample in samples if sample.metadata["calls"] > 1]
    assert all(0 in (sample.loss_mask or []) for sample in called)
