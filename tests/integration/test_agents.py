"""Agents over a real engine and router: what they hear is what is trained, with the log-probs of the model."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.agent.harness.mini_agent import DONE, FULL
from slime.agent.rollout import AgentSession, open_session
from slime.backends.sglang.engine import Engine
from slime.backends.sglang.router import Router
from slime.data import Sample, Status
from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.runtime import RolloutRuntime, current
from slime.rollout.sglang_rollout import generate_rollout
from tests.integration.tiny import KEYS, Service, log_probs_of
from tests.small_rollout import CHATML

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_TOKENS = 12
_AGENT = """
import anthropic, openai

async def run(base_url, prompt, request_kwargs, metadata, session, sample):
    messages = [{"role": "user", "content": prompt}]
    heard = []
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any") as client:
        for turn in range(3):
            reply = await client.chat.completions.create(messages=messages, **request_kwargs)
            said = reply.choices[0].message
            heard.append(said.content)
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": str(turn)}]
        text = ""
        async with client.chat.completions.stream(messages=messages, **request_kwargs) as events:
            async for event in events:
                text += event.delta if event.type == "content.delta" else ""
        heard.append(text)
    # Another way, from the first turn on.
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key=session.key) as client:
        messages = [*messages[:2], {"role": "user", "content": "!"}]
        messages = [{"role": message["role"], "content": message["content"] or "-"} for message in messages]
        reply = await client.messages.create(messages=messages, **request_kwargs)
        heard.append(reply.content[0].text if reply.content else "")
    return {"reward": float(sample.index), "metadata": {"heard": heard, "label": metadata["label"]}}
"""


_HARNESS = """
from slime.agent.harness import MINI
from slime.agent.rollout import open_session
from slime.agent.sandbox import make_sandbox

async def generate(args, sample, sampling_params):
    async with open_session(args, sample, sampling_params) as session:
        async with make_sandbox(reach=session.url) as sandbox:
            await MINI.install_cli(sandbox)
            workdir = f"{sandbox.root}/workspace"
            status = await MINI.run(sandbox, workdir=workdir, session_id=session.key, adapter_url=session.url,
                                    time_budget_sec=60, prompt=sample.prompt)
            told = await sandbox.read_file(f"{workdir}/.harness/trajectory.jsonl", user="agent")
    samples = session.samples(sample, reward=1.0)
    for each in samples:
        each.metadata |= {"status": status, "told": told}
    return samples
"""


@pytest.fixture
def served(service: Service, tiny_model_dir: Path, tmp_path: Path) -> Iterator[Namespace]:
    """Options of small rollouts over the session's engine, with agents."""
    (tmp_path / "agent.py").write_text(_AGENT)
    (tmp_path / "harness.py").write_text(_HARNESS)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{i}?", "label": f"l{i}"}) + "\n" for i in range(9)))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    service.control.flush_cache()
    service.control.update_weights_from_disk(str(tiny_model_dir))
    host, port = service.router.url.removeprefix("http://").rsplit(":", 1)
    changes: dict[str, Any] = {
        "hf_checkpoint": str(tmp_path / "tokenizer"),
        "prompt_data": str(prompts),
        "label_key": "label",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": _TOKENS,
        "rollout_timeout": 240.0,
        "rollout_num_gpus": 1,
        "custom_generate_function_path": "slime.agent.rollout.generate",
        "custom_agent_function_path": f"{tmp_path / 'agent.py'}:run",
        "num_engines": 1,
        "sglang_router_ip": host,
        "sglang_router_port": int(port),
        "sglang_router_api_key": KEYS[0],
        "sglang_enable_deterministic_inference": False,
    }
    args = Namespace(**{**vars(service.args), **changes})
    runtime = RolloutRuntime(args)
    runtime.set_engines([service.engine.url], KEYS[1])
    with runtime.active():
        yield args
    runtime.services["agent gateway"][1].stop()


def test_what_an_agent_hears_is_trained_once_with_the_models_log_probs(served: Namespace, tiny_model_dir: Path) -> None:
    output = generate_rollout(served, 0, RolloutDataSourceWithBuffer(served))
    assert isinstance(output, RolloutFnTrainOutput)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(served.hf_checkpoint)
    by_rollout: dict[int | None, list[Sample]] = {}
    for sample in flatten_samples(output.samples):
        by_rollout.setdefault(sample.index, []).append(sample)
    assert len(by_rollout) == 4
    for index, samples in by_rollout.items():
        first, second = samples  # two paths, which share their first turn
        assert first.rollout_id == second.rollout_id
        assert [sample.reward for sample in samples] == [float(index or 0)] * 2
        assert first.metadata["agent"]["turns"] == 5
        assert first.metadata["agent"]["forks"] == 0
        texts = []
        for sample in samples:
            assert sample.status in (Status.TRUNCATED, Status.COMPLETED)
            assert sample.loss_mask is not None
            assert sample.rollout_log_probs is not None
            start = len(sample.tokens) - sample.response_length
            expected = log_probs_of(model, sample.tokens[:start], sample.tokens[start:]).tolist()
            for mask, log_prob, wanted in zip(sample.loss_mask, sample.rollout_log_probs, expected, strict=True):
                assert not mask or abs(log_prob - wanted) < 1e-4
            for begin, length in zip(sample.segment_starts, sample.segment_lengths, strict=True):
                assert 0 < length <= _TOKENS
                ids = sample.tokens[start + begin :][:length]
                texts.append(tokenizer.decode([token for token in ids if token not in tokenizer.all_special_ids]))
            assert sum(sample.loss_mask) == sum(sample.segment_lengths)
        heard = first.metadata["heard"]
        assert [text.lstrip("\n") for text in texts] == heard, "each turn once, in the order of the paths"
        assert second.tokens[: len(first.tokens) - first.response_length] == first.tokens[: -first.response_length]


@pytest.mark.full  # in CI the coding agent's example does so
def test_an_agent_in_a_sandbox_reaches_the_model_by_its_session(
    served: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks by a program of its own, and stops as the model calls no tool: what it said is one trained turn."""
    monkeypatch.setenv("SLIME_AGENT_MINI_EXTRA_ARGS", "--system ''")  # the tiny model's context is short
    served.custom_generate_function_path = f"{tmp_path / 'harness.py'}:generate"
    served.n_samples_per_prompt = 1
    output = generate_rollout(served, 0, RolloutDataSourceWithBuffer(served))
    assert isinstance(output, RolloutFnTrainOutput)
    tokenizer = AutoTokenizer.from_pretrained(served.hf_checkpoint)
    samples = flatten_samples(output.samples)
    assert len(samples) == 2
    for sample in samples:
        cut = sample.status is Status.TRUNCATED
        assert sample.metadata["status"] == (FULL if cut else DONE), sample.metadata["told"]
        said = json.loads(sample.metadata["told"].splitlines()[-1])
        ids = [token for token in sample.tokens[-sample.response_length :] if token not in tokenizer.all_special_ids]
        assert said["content"] == tokenizer.decode(ids).lstrip("\n")
        assert sample.loss_mask == [1] * sample.response_length
        assert sample.weight_versions


_LONG = 400
"""Tokens of a turn that something happens to."""
_UNBROKEN: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": _LONG, "ignore_eos": True}


async def _heard(session: AgentSession, after: Callable[[], Awaitable[None]] | None = None) -> str:
    """A streamed turn, as a client hears it; once it has begun, ``after`` is awaited."""
    text, finish = "", None
    messages: Any = [{"role": "user", "content": "?"}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key="any", max_retries=0) as client:
        async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason
            if after is not None and len(text) > 10:
                await after()
                after = None
    assert finish == "length"
    return text


def _check_one_turn(args: Namespace, session: AgentSession, heard: str, model_dir: Path) -> Sample:
    """The session's only sample: what was heard, each token trained once with the log-prob that the model gives it."""
    (sample,) = session.samples(Sample(index=0), reward=1.0)
    ids = sample.tokens[-sample.response_length :]
    special = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    assert heard == special.decode(ids).lstrip("\n")
    assert sample.loss_mask == [1] * _LONG
    assert sum(sample.segment_lengths) == _LONG
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    expected = log_probs_of(model, sample.tokens[:-_LONG], ids).tolist()
    assert sample.rollout_log_probs is not None
    assert max(abs(a - b) for a, b in zip(sample.rollout_log_probs, expected, strict=True)) < 1e-4
    return sample


@pytest.mark.full
def test_a_turn_goes_on_behind_a_push_which_others_wait_for(
    served: Namespace, service: Service, tiny_model_dir: Path
) -> None:
    runtime = current()
    assert runtime is not None

    def push() -> None:  # of weights that are the same, so that log-probs can be compared
        service.control.pause()
        service.control.flush_cache()
        service.control.set_weight_version("7")
        service.control.continue_()

    async def run() -> None:
        async with (
            open_session(served, Sample(index=0), _UNBROKEN) as first,
            open_session(served, Sample(index=1), _UNBROKEN) as second,
        ):
            waiting: list[asyncio.Task[str]] = []

            async def pushed() -> None:
                runtime.pause_generation()
                waiting.append(asyncio.create_task(_heard(second)))
                await asyncio.to_thread(push)
                assert not waiting[0].done()
                await runtime.resume_generation(7)

            heard = await _heard(first, pushed)
            later = await waiting[0]
        sample = _check_one_turn(served, first, heard, tiny_model_dir)
        assert sample.weight_versions == ["default", "7"]
        assert min(sample.segment_lengths) > 0
        sample = _check_one_turn(served, second, later, tiny_model_dir)
        assert sample.weight_versions == ["7"], "it was asked for while nothing was generated"

    asyncio.run(run())


@pytest.mark.full
def test_a_turn_whose_engine_dies_goes_on_at_another(
    served: Namespace, service: Service, tiny_model_dir: Path, tmp_path: Path
) -> None:
    engine = Engine(service.args, 1, "127.0.0.1", KEYS, tmp_path / "engine_1.log", None)
    router = Router(service.args, "127.0.0.1", KEYS, tmp_path / "router.log")

    def die() -> None:
        router.add(service.engine.url)
        router.wait_registered([engine.url, service.engine.url], timeout=60)
        assert engine._process is not None
        for process in psutil.Process(engine._process.pid).children(recursive=True):
            process.kill()

    async def run() -> None:
        async with open_session(served, Sample(index=0), _UNBROKEN) as session:
            heard = await _heard(session, lambda: asyncio.to_thread(die))
        sample = _check_one_turn(served, session, heard, tiny_model_dir)
        assert len(sample.segment_lengths) == 2, "one part by each engine"

    try:
        engine.start()
        router.start()
        router.add(engine.url)
        router.wait_registered([engine.url], timeout=60)
        served.sglang_router_port = int(router.url.rpartition(":")[2])
        asyncio.run(run())
    finally:
        router.stop()
        engine.stop()
