"""Agents in rollouts: each sample is a session of the gateway, which an agent of the user's talks to.

    --custom-generate-function-path slime.agent.rollout.generate --custom-agent-function-path my_agent.py:run

The agent is a function ``async run(base_url, prompt, request_kwargs, metadata)``; ``base_url`` is that of an
OpenAI-compatible server, of this session alone. What the model says there is what the sample is trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from numbers import Real
from typing import Any

from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.agent.gateway import Gateway
from slime.agent.in_rollout import InRollout
from slime.agent.parsing import parser_of
from slime.agent.rendering import TurnRenderer
from slime.agent.session import Budget, Session
from slime.data import Sample, Status
from slime.data.rows.tokenizer import load_tokenizer
from slime.options.checks.agents import gateway_host
from slime.options.serving.agents import GENERATE
from slime.rollout.engine.state import is_ending
from slime.rollout.runtime import current
from slime.rollout.user.hooks import accepted, call_hook
from slime.utils.errors import HookError
from slime.utils.misc import load_function

_FLAG = "--custom-agent-function-path"
_MODEL = "slime"
_CLOSE_S = 5.0
"""For turns of an agent that has returned without waiting for them."""


class AgentError(HookError, RuntimeError):
    """An agent that did nothing that could be trained."""


class AgentSession:
    """A session of the gateway's.

    Attributes:
        url: the gateway's, without a path: for Anthropic's client, with ``key``.
        base_url: for OpenAI's, whose key may be anything.
        key: what opens the session.
        timeout: seconds that a client is to wait for an answer: ``--rollout-timeout``, as a turn may wait for a place,
            for weights that are pushed and for other engines, each within the run's own deadlines.
    """

    def __init__(self, session: Session, url: str, key: str, engine: InRollout, timeout: float) -> None:
        self.url, self.key, self.base_url, self.timeout = url, key, f"{url}/sessions/{key}/v1", timeout
        self._session, self._engine = session, engine

    @property
    def aborted(self) -> bool:
        """Whether a turn was refused because the rollout has enough samples."""
        return self._engine.aborted

    def samples(self, base: Sample, reward: float | dict[str, Any] | None = None) -> list[Sample]:
        """What is trained, one sample a path, all with this reward; none where the model has said nothing."""
        return self._session.samples(base, reward)


@contextlib.asynccontextmanager
async def open_session(
    args: Namespace, sample: Sample, sampling_params: Mapping[str, Any], budget: Budget | None = None
) -> AsyncIterator[AgentSession]:
    """Within the block, a session whose turns are requests of the sample's: they wait for places and weight updates as
    others do, and end with the rollout. Its samples are there after the block, too."""
    budget = budget or Budget(
        turns=args.agent_max_turns,
        tokens=args.agent_max_tokens,
        context=args.rollout_max_context_len or 0,
        seconds=args.agent_max_seconds,
    )
    kwargs = json.dumps(sample.apply_chat_template_kwargs or args.apply_chat_template_kwargs or {})
    renderer, parser = await asyncio.to_thread(_renderer, args.hf_checkpoint, kwargs)
    if (given := getattr(args, "sglang_tool_call_parser", None)) not in (None, "auto"):
        parser = given
    engine = InRollout(args, sample)
    session = Session(engine, renderer, parser=parser, params=sampling_params, budget=budget)
    gateway, handle = await asyncio.to_thread(_gateway, args)
    key = gateway.open_session(session)
    try:
        yield AgentSession(session, handle.url, key, engine, args.rollout_timeout)
    finally:
        closing = asyncio.run_coroutine_threadsafe(gateway.close_session(key, _CLOSE_S), handle.loop)
        await asyncio.wrap_future(closing)


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """One session of the agent that ``--custom-agent-function-path`` names. A ``reward`` in what the agent returns is
    that of all its samples; else they are rewarded as others are. In an evaluation the last path alone counts."""
    path = args.custom_agent_function_path
    if path is None:
        raise AgentError(f"{GENERATE} needs {_FLAG}")
    function = load_function(path, flag=_FLAG, default_names=("run", "agent"))
    room = sampling_params["max_new_tokens"]
    asked = {"model": _MODEL, "timeout": args.rollout_timeout} | ({} if room is None else {"max_tokens": room})
    metadata = {"label": sample.label, **sample.metadata}
    async with open_session(args, sample, sampling_params) as session:
        known = accepted(function, sample=sample, session=session, evaluation=evaluation)
        try:
            result = await call_hook(
                function, f"{_FLAG} {path}", session.base_url, sample.prompt, asked, metadata, limit=None, **known
            )
        except Exception:
            if not session.aborted:
                raise
            result = None
    # Of a session that was cut short, what the agent made of it does not count.
    result = {} if session.aborted else _checked(result, f"{_FLAG} {path}")
    parts = [] if session.aborted else session.samples(sample, result.get("reward"))
    if session.aborted or (not parts and is_ending()):
        sample.status = Status.ABORTED
        return sample
    if not parts:
        raise AgentError(
            f"{_FLAG} {path}: of sample {sample.index} it returned without a turn of the model at base_url"
        )
    for part in parts:
        part.metadata |= result.get("metadata") or {}
    return parts[-1] if evaluation else parts


def _checked(result: Any, where: str) -> dict[str, Any]:
    """What an agent has returned."""
    if not isinstance(result, dict | None):
        raise AgentError(f"{where}: it must return None or a dict, not {result!r:.80}")
    result = result or {}
    if unknown := [name for name in result if name not in ("reward", "metadata")]:
        raise AgentError(f"{where}: it returned {unknown[0]!r:.80}, which nothing reads: 'reward' and 'metadata' are")
    reward = result.get("reward")
    if not isinstance(reward, dict | None) and not (isinstance(reward, Real) and math.isfinite(reward)):
        raise AgentError(f"{where}: the reward must be a finite number, or a dict (--reward-key), not {reward!r:.80}")
    if not isinstance(metadata := result.get("metadata"), dict | None):
        raise AgentError(f"{where}: the metadata must be a dict, not {metadata!r:.80}")
    return result


@functools.lru_cache(maxsize=8)
def _renderer(checkpoint: str, kwargs: str) -> tuple[TurnRenderer, str | None]:
    """Of a model, and the parser of its tool calls: one for all sessions, as a template is proven once."""
    tokenizer = load_tokenizer(checkpoint)
    return TurnRenderer(tokenizer, kwargs), parser_of(tokenizer.get_chat_template())


_starting = threading.Lock()


def _gateway(args: Namespace) -> tuple[Gateway, AppHandle]:
    """That of this process, which runs from now on."""
    runtime = current()
    if runtime is None:
        raise AgentError("an agent's session is one of a rollout")
    with _starting:
        found = runtime.services.get("agent gateway")
        if found is None:
            gateway = Gateway()
            handle = run_app_in_thread(gateway.app(), gateway_host(args), args.agent_port)
            found = runtime.services["agent gateway"] = gateway, handle
        return found
