"""An agent that asks a tool for what it cannot know, in plain Python over OpenAI's chat completions.

It is asked what a key comes to, such as "c7?". A table, which only the tool sees, has for each key a number or another
key to ask for: one to three calls, then the answer. Nothing here knows of training but the last two functions.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import aiohttp

from slime.data import Sample

FIND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "What the table has for a key: a number, or another key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
MAX_TURNS = 5
NOTHING = "none"


async def run(
    base_url: str, prompt: list[dict[str, Any]], request_kwargs: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Talk to the model until it answers without a call; the reward of the session, and what became of it.

    Any client of OpenAI's API would do. To make an ``openai.AsyncOpenAI`` takes tens of milliseconds of a processor, as
    the tiny model does for a session: share one among sessions (``with_options(base_url=...)``) if you use it.
    """
    messages, calls, said, asked = list(prompt), 0, {}, dict(request_kwargs)
    limit = aiohttp.ClientTimeout(asked.pop("timeout"))  # the run's: a turn may wait for weights that are pushed
    async with aiohttp.ClientSession(raise_for_status=True, timeout=limit) as http:
        for _ in range(MAX_TURNS):
            body = {"messages": messages, "tools": [FIND], **asked}
            async with http.post(f"{base_url}/chat/completions", json=body) as reply:
                said = (await reply.json())["choices"][0]["message"]
            messages.append(said)
            made = said.get("tool_calls") or []
            for call in made:
                found = find(metadata["table"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
            calls += len(made)
            if not made:
                break
    return {"reward": reward(said, metadata["label"]), "metadata": {"calls": calls}}


def find(table: Mapping[str, str], arguments: str) -> str:
    """The tool: what the table has for a key; `NOTHING` for a key that it has not, or a call that names none."""
    key = json.loads(arguments).get("key")
    return table.get(key, NOTHING) if isinstance(key, str) else NOTHING


def reward(said: Mapping[str, Any], label: str) -> float:
    """1 for the right number as the last words of the session, else 0."""
    return float((said.get("content") or "").strip() == label)


def random_rewards(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """The control (``--custom-reward-post-process-path``): what is trained on is a coin's toss for each session.

    Logged, and counted in evaluations, are the true rewards.
    """
    import numpy as np

    from slime.algorithms.rewards import normalize_rewards

    groups, rollouts = (np.array([getattr(s, name) for s in samples]) for name in ("group_index", "rollout_id"))
    tosses = {rollout: float(random.getrandbits(1)) for rollout in dict.fromkeys(rollouts.tolist())}
    tossed = np.array([tosses[rollout] for rollout in rollouts.tolist()])
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, normalize_rewards(tossed, groups, rollouts, divide_by_std=True).tolist()
