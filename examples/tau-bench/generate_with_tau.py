"""tau-bench: the model serves a user whom another model plays, with the tools of a shop or an airline.

    --custom-generate-function-path examples/tau-bench/generate_with_tau.py:generate --input-key index

A row's prompt is the number of a task, its metadata may have the ``task_split``; `tau1_mock.py` writes such rows.
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from typing import Any

import openai

try:
    from tau_bench.envs import get_env
    from tau_bench.types import RESPOND_ACTION_NAME, Action, RunConfig
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}; this example needs tau-bench or its mock: examples/tau-bench/README.md says how"
    ) from None

from slime.agent.rollout import AgentError, open_session
from slime.utils.types import Sample

TAU_CONFIGS = {
    "env": "retail",  # or airline
    "user_strategy": "llm",  # or react, verify, reflection: how the user is played
    "user_model": "gemini-2.5-flash-lite",
    "user_model_provider": "gemini",
    "task_split": "train",  # where a row does not say
    "model": "slime",  # these two a run of tau-bench's own would need
    "model_provider": "openai",
}
CONFIG = RunConfig(**TAU_CONFIGS)
MAX_STEPS = 30
ONE_AT_A_TIME = "Error: one tool at a time, this call was not made"


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """The samples of one visit, with tau-bench's reward; 0 where the user was still there after ``--max-turns``.

    Raises:
        AgentError: the model was given no room for a word.
    """
    task, split = int(str(sample.prompt)), sample.metadata.get("task_split", CONFIG.task_split)
    # tau-bench waits for the model that plays the user: in a thread of its own, others go on.
    env = await asyncio.to_thread(
        get_env,
        env_name=CONFIG.env,
        user_strategy=CONFIG.user_strategy,
        user_model=CONFIG.user_model,
        user_provider=CONFIG.user_model_provider,
        task_split=split,
        task_index=task,
    )
    response = None
    async with (
        open_session(args, sample, sampling_params) as session,
        openai.AsyncOpenAI(base_url=session.base_url, api_key="any", max_retries=0, timeout=session.timeout) as client,
    ):
        try:
            response = await serve(client, env, task, args.max_turns or MAX_STEPS)
        except openai.APIStatusError as error:
            if not session.aborted and error.status_code != 429:  # of the session's bounds
                raise
    if session.aborted:
        sample.status = Sample.Status.ABORTED
        return sample
    parts = session.samples(sample, reward=float(response.reward) if response else 0.0)
    if not parts:
        raise AgentError(f"the model had no room for a word on task {task} of {split}")
    if response is None:
        parts[-1].status = Sample.Status.TRUNCATED
    return parts[-1] if evaluation else parts


async def serve(client: openai.AsyncOpenAI, env: Any, task_index: int, max_steps: int) -> Any:
    """Let the model serve the user until that one goes; tau-bench's last response, None where it did not come to it."""
    first = await asyncio.to_thread(env.reset, task_index=task_index)
    messages: list[Any] = [{"role": "system", "content": env.wiki}, {"role": "user", "content": first.observation}]
    for _ in range(max_steps):
        reply = await client.chat.completions.create(model="slime", messages=messages, tools=env.tools_info)
        choice = reply.choices[0]
        if choice.finish_reason == "length":
            return None  # nobody gets to hear half an answer
        messages.append(choice.message.model_dump(exclude_none=True))  # as it came: the next prompt goes on from it
        response = await asyncio.to_thread(env.step, action_of(choice.message))
        messages += answers(choice.message, response.observation)
        if response.done:
            return response
    return None


def action_of(message: Any) -> Action:
    """What the model does: the first of its calls, or what it says to the user."""
    for call in message.tool_calls or ():
        return Action(name=call.function.name, kwargs=json.loads(call.function.arguments))
    return Action(name=RESPOND_ACTION_NAME, kwargs={"content": message.content or ""})


def answers(message: Any, observation: str) -> list[dict[str, Any]]:
    """What the model hears: the user, or the tool; of further calls that they were not made."""
    calls = message.tool_calls or ()
    told = [observation, *[ONE_AT_A_TIME] * (len(calls) - 1)]
    return [
        {"role": "tool", "tool_call_id": call.id, "content": content}
        for call, content in zip(calls, told, strict=False)
    ] or [{"role": "user", "content": observation}]
