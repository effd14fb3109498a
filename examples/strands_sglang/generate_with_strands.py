"""An agent of strands-agents with Python as its tool, over the gateway's OpenAI API; the answer is in ``\\boxed{}``.

--custom-generate-function-path examples.strands_sglang.generate_with_strands.generate
--custom-rm-path examples.strands_sglang.generate_with_strands.reward_func
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from typing import Any
from weakref import WeakKeyDictionary

try:
    import strands
    from strands.models.openai import OpenAIModel
    from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}; this example needs strands-agents: examples/strands_sglang/README.md says how"
    ) from None

from examples.strands_sglang.make_data import SYSTEM_PROMPT
from slime.agent.rollout import AgentError, AgentSession, open_session
from slime.agent.sandbox.protocol import SandboxError
from slime.agent.sandbox.python_code import Limits, run_python
from slime.grading.graders import boxed_dapo_reward, dapo_reward
from slime.utils.types import Sample

MAX_TURNS = 6
LIMITS = Limits()
_CUT = (MaxTokensReachedException, ContextWindowOverflowException)
"""What strands raises where an answer was cut, or had no room."""


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """The samples of one session of the agent, of ``--max-turns`` turns at most; rewards are `reward_func`'s.

    Raises:
        AgentError: the model was given no room for a word.
        SandboxError: a program could not be run, which the agent has taken for the program's failure.
    """
    async with open_session(args, sample, sampling_params) as session:
        agent, failures = make_agent(session)
        finished = False
        try:
            result = await agent.invoke_async(asked(sample), limits={"turns": args.max_turns or MAX_TURNS})
            finished = result.stop_reason == "end_turn"
        except _CUT:
            pass
        except Exception:
            if not session.aborted:
                raise
    if session.aborted:
        sample.status = Sample.Status.ABORTED
        return sample
    if failures:
        raise failures[0]
    parts = session.samples(sample)
    if not parts:
        raise AgentError(f"the model had no room for a word on sample {sample.index}")
    if not finished:
        parts[-1].status = Sample.Status.TRUNCATED
    seen = {"answer": said(agent.messages) if finished else "", "tool_iterations": tool_iterations(agent.messages)}
    for part in parts:
        part.metadata |= seen
    return parts[-1] if evaluation else parts


def make_agent(session: AgentSession) -> tuple[Any, list[SandboxError]]:
    """An agent that talks to this session's model, and the failures of its sandboxes, which are none of its own."""
    failures: list[SandboxError] = []

    @strands.tool
    async def execute_python_code(code: str) -> str:
        """Run a Python program; what it prints is returned.

        Args:
            code: The program.
        """
        try:
            async with _places():
                return (await run_python(code, LIMITS)).output or "(no output)"
        except SandboxError as error:
            failures.append(error)
            raise

    client = {"base_url": session.base_url, "api_key": "any", "max_retries": 0, "timeout": session.timeout}
    agent = strands.Agent(
        model=OpenAIModel(client_args=client, model_id="slime"),
        tools=[execute_python_code],
        system_prompt=SYSTEM_PROMPT,
        callback_handler=None,
        # Nothing is tried again, and nothing left out of the conversation: the gateway waits, and bounds the context.
        retry_strategy=None,
        conversation_manager=strands.agent.conversation_manager.NullConversationManager(),
    )
    return agent, failures


_running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _places() -> asyncio.Semaphore:
    """The running event loop's bound on programs at a time."""
    return _running.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))


def asked(sample: Sample) -> str:
    """The text of the prompt."""
    return sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt[-1]["content"])


def said(messages: list[Any]) -> str:
    """The text of the agent's last message."""
    return "".join(block.get("text", "") for block in messages[-1]["content"])


def tool_iterations(messages: list[Any]) -> int:
    """In how many turns the model called the tool, once or several times."""
    return sum(any("toolUse" in block for block in message["content"]) for message in messages)


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """DAPO's reward of the agent's last answer, 1 or -1; a wrong one's is up to -0.6 for the turns with tools."""
    answer = sample.metadata["answer"]
    result = await dapo_reward(args, sample, answer)
    if result["pred"] == "[INVALID]":
        result = await boxed_dapo_reward(args, sample, answer)
    if result["score"] > 0:
        return 1.0
    return min(-0.6, -1.0 + 0.05 * (sample.metadata["tool_iterations"] - 2))
