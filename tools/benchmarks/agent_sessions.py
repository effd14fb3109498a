"""What a turn of an agent's session costs beside generation: many sessions of many turns, over HTTP, with no engine.

    python3 -m tools.benchmarks.agent_sessions MODEL_DIR --sessions 64 --turns 200

Each session calls a tool with every turn and is told its result. Printed are milliseconds of processor time that the
token memory takes to give a prompt and to keep the turn, by the length of the conversation; in the same run what
rendering and tokenising all of it takes, as a server without a memory does with every turn, and what reading the
request's JSON takes; turns a second with HTTP, reading and replies; and memory, with that of the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.gateway import Gateway
from slime.agent.memory import Prompt, TokenMemory
from slime.agent.rendering import TurnRenderer
from slime.agent.session import Generated, Session
from slime.agent.trajectory import MessageNode, TurnRecord
from slime.data.rows.messages import Messages
from slime.data.rows.tokenizer import load_tokenizer
from slime.utils.errors import SlimeError

_CALL = '<tool_call>\n{{"name": "bash", "arguments": {{"command": "cat file_{0}.txt"}}}}\n</tool_call>'
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
_WORDS = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with")
_EVERY = 25
T = TypeVar("T")


class _Engine:
    """Calls the tool with every turn."""

    def __init__(self, renderer: TurnRenderer, end: list[int]) -> None:
        self._renderer, self._end, self._turn = renderer, end, 0

    async def generate(
        self, prompt: list[int], params: dict[str, Any], on_tokens: Callable[[Sequence[int]], None] | None
    ) -> Generated:
        self._turn += 1
        ids = [*self._renderer.encode(_CALL.format(self._turn)), *self._end]
        return Generated(ids, [-1.0] * len(ids), "stop", [("1", len(ids))])

    async def read_calls(self, parser: str, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        raise ValueError("the calls are in tags")


class _Timed(TokenMemory):
    """Notes the processor time, in seconds, that each turn takes: what other programs do meanwhile is not in it."""

    seconds = 0.0

    def prompt(self, messages: Messages, tools: Any = None) -> Prompt:
        made, self.seconds = _timed(super().prompt, messages, tools)
        return made

    def record(
        self, prompt: Prompt, turn: TurnRecord, reply: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> MessageNode:
        node, seconds = _timed(super().record, prompt, turn, reply, metadata)
        self.seconds += seconds
        return node


def _timed(work: Callable[..., T], *args: Any) -> tuple[T, float]:
    began = time.thread_time()
    return work(*args), time.thread_time() - began


async def run(args: argparse.Namespace) -> None:
    """All sessions at the same time."""
    tokenizer = load_tokenizer(args.model)
    renderer = TurnRenderer(tokenizer)
    if why := renderer.why_not(tools=True):
        raise SystemExit(f"agent_sessions: error: {args.model}: {why}")
    end = [tokenizer.eos_token_id]
    gateway = Gateway()
    handle = run_app_in_thread(gateway.app(), "127.0.0.1", 0)
    sessions = [Session(_Engine(renderer, end), renderer) for _ in range(args.sessions)]
    memories = [_Timed(renderer) for _ in sessions]
    for session, memory in zip(sessions, memories, strict=True):
        session.memory = memory
    spent: dict[int, list[float]] = defaultdict(list)
    whole: dict[int, list[float]] = defaultdict(list)
    read: dict[int, list[float]] = defaultdict(list)
    began, memory_before = time.monotonic(), _memory()

    async def talk(session: Session, number: int) -> None:
        rng = random.Random(number)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Read all files."}]
        url = f"{handle.url}/sessions/{gateway.open_session(session)}/v1/chat/completions"
        async with aiohttp.ClientSession() as client:
            for turn in range(args.turns):
                async with client.post(url, json={"messages": messages, "tools": _TOOLS}) as reply:
                    message = (await reply.json())["choices"][0]["message"]
                spent[turn].append(memories[number].seconds)
                if turn % _EVERY == _EVERY - 1 and number < args.compared:
                    whole[turn].append(_timed(renderer.first, messages, _TOOLS)[1])
                    body = json.dumps({"messages": messages, "tools": _TOOLS})
                    read[turn].append(_timed(json.loads, body)[1])
                told = " ".join(rng.choices(_WORDS, k=args.words))
                message = {name: value for name, value in message.items() if value is not None}
                result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": told}
                messages += [{"content": "", **message}, result]

    await asyncio.gather(*(talk(session, number) for number, session in enumerate(sessions)))
    seconds = time.monotonic() - began
    handle.stop()
    print(
        f"{args.sessions} sessions of {args.turns} turns, {args.words} words a tool result: {seconds:.0f} s, ", end=""
    )
    forks = sum(session.memory.counters.forks for session in sessions)
    print(f"{args.sessions * args.turns / seconds:.0f} turns/s, {forks} forks, ", end="")
    print(f"{(_memory() - memory_before) / args.sessions:.1f} MiB a session")
    print("Milliseconds:")
    print("| turn | tokens | JSON read | token memory | rendered whole | times |\n|---|---|---|---|---|---|")
    nodes = sessions[0].memory.trajectory.nodes
    for turn, times in sorted(whole.items()):
        near = [value for other in range(max(0, turn - 4), turn + 1) for value in spent[other]]
        parsed, known, all_of_it = (1000 * median(some) for some in (read[turn], near, times))
        figures = f"{parsed:.2f} | {known:.2f} | {all_of_it:.2f} | {all_of_it / known:.1f}"
        print(f"| {turn + 1} | {nodes[turn].length} | {figures} |")


def _memory() -> float:
    """MiB of this process at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory with a tokenizer and a chat template that knows tools")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--words", type=int, default=100, help="of a tool's result")
    parser.add_argument("--compared", type=int, default=4, help="sessions of which whole prompts are rendered too")
    try:
        asyncio.run(run(parser.parse_args()))
    except SlimeError as error:
        raise SystemExit(f"agent_sessions: error: {error}") from error


if __name__ == "__main__":
    main()
