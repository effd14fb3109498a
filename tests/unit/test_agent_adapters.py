"""Upstream's names for serving agents, as its users' generate functions call them; stand-ins are the engine and the
programs of agents."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import CLAUDE_CODE, CODEX
from slime.agent.sandbox import LocalSandbox, SandboxLimits, detached
from slime.data import Sample, Status
from slime.rollout.runtime import RolloutRuntime
from tests import chat_templates

NUM_GPUS = 0
QUESTION: Any = [{"role": "user", "content": "What?"}]


class Engine:
    """An HTTP server that answers with the same words, less likely each time, and keeps what it is asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids = [*tokenizer("<think>Hm</think>Yes", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.waits = asyncio.Event()
        self.routes: int | None = None
        """Layers whose routes, all of one expert, it tells to who asks."""
        self.app = web.Application()
        self.app.router.add_post("/generate", self._generate)

    async def _generate(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("X-SMG-Routing-Key"))
        self.asked.append(await request.json())
        if len(self.asked) > 2:
            await self.waits.wait()
        pairs = [[-0.25 * len(self.asked), token, None] for token in self.ids]
        meta: dict[str, Any] = {
            "output_token_logprobs": pairs,
            "finish_reason": {"type": "stop"},
            "weight_version": "4",
        }
        if self.routes and (wanted := self.asked[-1].get("session_params", {})).get("return_routed_experts"):
            computed = len(self.asked[-1]["input_ids"]) + len(self.ids) - 1 - wanted["routed_experts_start_len"]
            meta["routed_experts"] = base64.b64encode(bytes(4 * computed * self.routes)).decode()
        return web.json_response({"text": "", "output_ids": self.ids, "meta_info": meta})


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[[str | None], Path]) -> Any:
    return AutoTokenizer.from_pretrained(str(make_tokenizer(chat_templates.QWEN_3)))


@pytest.fixture
def engine(tokenizer: Any) -> Iterator[tuple[Engine, str]]:
    made = Engine(tokenizer)
    handle = run_app_in_thread(made.app, "127.0.0.1", 0, thread_name="engine")
    yield made, handle.url
    handle.stop()


async def _by_anthropic(url: str, key: str) -> str:
    async with anthropic.AsyncAnthropic(base_url=url, auth_token=key, max_retries=0) as client:
        reply = await client.messages.create(model="m", messages=QUESTION, max_tokens=50)
        return "".join(block.text for block in reply.content if block.type == "text")


async def _by_openai(url: str, key: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        reply = await client.chat.completions.create(model="m", messages=QUESTION, max_tokens=50)
        return reply.choices[0].message.content or ""


@pytest.mark.parametrize(("kind", "ask"), [(AnthropicAdapter, _by_anthropic), (OpenAIAdapter, _by_openai)])
def test_a_session_of_the_openers_id_becomes_samples(
    kind: Any, ask: Callable[[str, str], Awaitable[str]], tokenizer: Any, engine: tuple[Engine, str]
) -> None:
    stand_in, url = engine
    told: list[tuple[Any, ...]] = []
    adapter = kind(
        tokenizer=tokenizer,
        sglang_url=f"{url}/",
        reasoning_parser="qwen3",
        max_turns_per_sid=2,
        fork_threshold_tokens=7,
        debug_callback=lambda *what: told.append(what),
    )
    handle = run_app_in_thread(adapter.app, host="127.0.0.1", port=0)

    async def use() -> None:
        adapter.open_session(
            "sid-1", sampling_defaults={"temperature": 0.5, "max_new_tokens": 80}, max_context_tokens=900
        )
        with pytest.raises(ValueError, match="a session of this id is open"):
            adapter.open_session("sid-1")
        assert [await ask(handle.url, "sid-1") for _ in range(2)] == ["Yes", "Yes"]
        with pytest.raises((openai.RateLimitError, anthropic.RateLimitError), match="has had its 2 turns"):
            await ask(handle.url, "sid-1")
        base = Sample(index=3, prompt="What?", label="x")
        samples = await adapter.finish_session("sid-1", base_sample=base, reward=0.5, extra_metadata={"a": 1})
        assert await adapter.finish_session("sid-1", base_sample=base) == []
        with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError)):
            await ask(handle.url, "sid-1")
        assert [sample.reward for sample in samples] == [0.5, 0.5]
        for sample in samples:
            assert sample.tokens[-sample.response_length :] == stand_in.ids
            assert (sample.loss_mask, sample.weight_versions) == ([1] * len(stand_in.ids), ["4"])
            assert (sample.metadata["a"], sample.label) == (1, "x")

    asyncio.run(use())
    handle.stop()
    assert stand_in.keys == ["sid-1", "sid-1"]
    assert {asked["sampling_params"]["max_new_tokens"] for asked in stand_in.asked} == {50}
    assert {asked["sampling_params"]["temperature"] for asked in stand_in.asked} == {0.5}
    sid, messages, tools, reply, turn = told[0]
    assert (sid, messages, tools) == ("sid-1", QUESTION, None)
    assert (reply["reasoning_content"], list(turn.output_ids)) == ("Hm", stand_in.ids)


def test_a_run_that_replays_routes_asks_for_them(
    tokenizer: Any, engine: tuple[Engine, str], runtime: RolloutRuntime
) -> None:
    """Its adapters' users have nothing to do for it; each turn asks for those that are not known."""
    stand_in, url = engine
    shape = {"num_layers": 2, "moe_layer_freq": 1, "moe_router_topk": 1, "num_experts": 4}
    runtime.route_options = {"use_rollout_routing_replay": True, **shape}
    stand_in.routes = 2
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=url)
    handle = run_app_in_thread(adapter.app, host="127.0.0.1", port=0)

    async def use() -> list[Sample]:
        adapter.open_session("sid-4")
        assert [await _by_openai(handle.url, "sid-4") for _ in range(2)] == ["Yes", "Yes"]
        return await adapter.finish_session("sid-4", base_sample=Sample())

    samples = asyncio.run(use())
    handle.stop()
    asked = [{**body.get("session_params", {})} for body in stand_in.asked]
    prompt = len(samples[0].tokens) - samples[0].response_length
    assert asked == [{"return_routed_experts": True, "routed_experts_start_len": start} for start in (0, prompt)]
    for sample in samples:
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, 2, 1)


def test_a_turn_under_way_ends_with_its_session(tokenizer: Any, engine: tuple[Engine, str]) -> None:
    """Those of other sessions do not, and a session that was shut down tells so until it is finished."""
    stand_in, url = engine
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=url)
    adapter.open_session("sid-2")  # where no event loop runs, too
    handle = run_app_in_thread(adapter.app, host="127.0.0.1", port=0)

    async def use() -> None:
        adapter.open_session("sid-3")
        for _ in range(2):
            assert await _by_openai(handle.url, "sid-2") == "Yes"
        late = asyncio.create_task(_by_openai(handle.url, "sid-3"))
        while len(stand_in.asked) < 3:
            await asyncio.sleep(0.01)
        await adapter.shutdown_session("sid-3", wait_timeout=0.05)
        with pytest.raises(openai.APIError):
            await late
        with pytest.raises(openai.InternalServerError, match="the session is closed"):
            await _by_openai(handle.url, "sid-3")
        await adapter.drop_session("sid-3")
        assert await adapter.finish_session("sid-3", base_sample=Sample()) == []
        assert len(await adapter.finish_session("sid-2", base_sample=Sample())) == 2

    asyncio.run(use())
    handle.stop()


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer default"}, {"X-Api-Key": "sid-9"}])
def test_nobody_opens_a_session_by_asking(tokenizer: Any, headers: dict[str, str]) -> None:
    adapter = AnthropicAdapter(tokenizer=tokenizer, sglang_url="http://127.0.0.1:1")
    for sid in ("default", ""):
        with pytest.raises(ValueError, match="is what clients without a key have"):
            adapter.open_session(sid)
    handle = run_app_in_thread(adapter.app, host="127.0.0.1", port=0)

    async def use() -> None:
        body = {"messages": QUESTION, "max_tokens": 3, "user": "sid-9", "metadata": {"session_id": "sid-9"}}
        async with aiohttp.ClientSession() as client:
            for path in ("/v1/messages", "/v1/chat/completions"):
                async with client.post(handle.url + path, json=body, headers=headers) as reply:
                    assert reply.status == 401

    asyncio.run(use())
    handle.stop()


def test_every_interface_is_no_address() -> None:
    with pytest.raises(ValueError, match=r"host '0\.0\.0\.0' is every interface: name the one address"):
        run_app_in_thread(web.Application(), host="0.0.0.0", port=0)


def test_a_server_that_does_not_come_up_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    app = web.Application()
    app.on_startup.append(lambda app: asyncio.sleep(60))
    monkeypatch.setattr("slime.agent.aiohttp_threaded._START_S", 0.05)
    with pytest.raises(TimeoutError, match=r"'mine' at 127\.0\.0\.1:0 was not up within 0\.05 s"):
        run_app_in_thread(app, host="127.0.0.1", port=0, thread_name="mine")


# ---- from end to end: a harness runs an agent's program in a sandbox, which asks an adapter, which asks the engine


PROGRAM = """#!/usr/bin/env python3
import json, os, sys, urllib.request

def post(path, headers, body):
    url = os.environ["ANTHROPIC_BASE_URL" if "ANTHROPIC_BASE_URL" in os.environ else "OPENAI_BASE_URL"] + path
    headers = {{"Content-Type": "application/json", **headers}}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)

{turns}
"""
CLAUDE = """
key = {"Authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}
messages = [{"role": "user", "content": "mend it"}]
for _ in range(2):
    body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 64, "messages": messages}
    said = [block for block in post("/v1/messages", key, body)["content"] if block["type"] != "thinking"]
    words = [{"type": "text", "text": "go on"}]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": words}]
"""
CODEX_CHAT = """
key, messages = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}, [{"role": "user", "content": "mend it"}]
for _ in range(2):
    reply = post("/chat/completions", key, {"model": "m", "max_tokens": 64, "messages": messages})
    said = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    messages += [said, {"role": "user", "content": "go on"}]
"""
CODEX_RESPONSES = """
key, items = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}, [{"role": "user", "content": "mend it"}]
for _ in range(2):
    reply = post("/responses", key, {"model": "m", "max_output_tokens": 64, "input": items})
    items += [item for item in reply["output"] if item["type"] == "message"] + [{"role": "user", "content": "go on"}]
"""
SILENT = "sys.exit(4)"


@pytest.mark.parametrize(
    ("harness", "kind", "turns", "status"),
    [
        pytest.param(CLAUDE_CODE, AnthropicAdapter, CLAUDE, 0, id="claude code"),
        pytest.param(CODEX, OpenAIAdapter, CODEX_RESPONSES, 0, id="codex"),
        pytest.param(CODEX, OpenAIAdapter, CODEX_CHAT, 0, id="codex, chat completions"),
        pytest.param(CLAUDE_CODE, AnthropicAdapter, SILENT, 4, id="silent"),
    ],
)
def test_what_an_agent_in_a_sandbox_was_told_is_one_sample(
    harness: Any,
    kind: Any,
    turns: str,
    status: int,
    tokenizer: Any,
    engine: tuple[Engine, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in, url = engine
    monkeypatch.setattr(detached, "_LAST_POLL_S", 0.1)
    adapter = kind(tokenizer=tokenizer, sglang_url=url)
    handle = run_app_in_thread(adapter.app, host="127.0.0.1", port=0)

    async def rollout() -> list[Sample]:
        adapter.open_session("sid-of-this-one", sampling_defaults={"max_new_tokens": 80})
        async with LocalSandbox(SandboxLimits(memory_mb=1024), jail=False) as sandbox:
            program = f"{sandbox.root}/opt/agent/bin/{'claude' if harness is CLAUDE_CODE else 'codex'}"
            await sandbox.write_file(program, PROGRAM.format(turns=turns))
            await sandbox.exec(f"chmod 755 {program}", check=True)
            code = await harness.run(
                sandbox,
                workdir=f"{sandbox.root}/workspace",
                session_id="sid-of-this-one",
                adapter_url=handle.url,
                time_budget_sec=30,
                prompt="mend it",
            )
            log = await sandbox.read_file(f"{sandbox.root}/workspace/.harness/trajectory.jsonl", user="agent")
        assert code == status, log
        base = Sample(index=7, group_index=2, rollout_id=7, metadata={"image": "i"})
        found: list[Sample] = await adapter.finish_session(
            "sid-of-this-one", base_sample=base, reward=1.0, extra_metadata={"agent_exit_code": code}
        )
        return found

    samples = asyncio.run(asyncio.wait_for(rollout(), 60))
    handle.stop()
    if turns is SILENT:
        assert samples == [], "there is nothing to be trained"
        return
    (sample,) = samples
    sample.check()
    first, second = (asked["input_ids"] for asked in stand_in.asked)
    before = [*first, *stand_in.ids]
    assert second[: len(before)] == before, "though the client has left the thoughts out"
    assert sample.tokens == [*second, *stand_in.ids]
    said, told = len(stand_in.ids), len(second) - len(before)
    assert sample.loss_mask == [1] * said + [0] * told + [1] * said
    assert sample.rollout_log_probs == [-0.25] * said + [0.0] * told + [-0.5] * said
    assert (sample.status, sample.reward, sample.rollout_id) == (Status.COMPLETED, 1.0, 7)
    assert sample.metadata["agent_exit_code"] == 0
    assert sample.metadata["image"] == "i"
