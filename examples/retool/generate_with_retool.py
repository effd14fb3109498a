"""ReTool (arXiv:2504.11536): the model writes Python in the middle of its response and reads what it printed.

A response reads ``<code>print(6*7)</code>`` (the model), ``<interpreter>42</interpreter>`` (the sandbox, masked), and
so on up to an end without code, or ``--max-turns`` turns. The answer is in ``\\boxed{}``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import time
from argparse import Namespace
from typing import Any
from weakref import WeakKeyDictionary

from slime.agent.sandbox.protocol import SandboxError
from slime.agent.sandbox.python_code import Limits, run_python
from slime.grading.graders import math_reward
from slime.options.flags.schema import positive
from slime.rollout.observation import append_observation, response_text
from slime.rollout.sglang_rollout import generate as generate_turn
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
FENCE = re.compile(r"\s*```(?:python|py)?\s*\n(.*?)```\s*", re.DOTALL)
FAILED = "the interpreter failed"
_MAX_TURNS = 4


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    """Flags of this example; slime adds them because a ``--custom-*-path`` names this module."""
    limits = Limits()
    parser.add_argument("--tool-timeout", type=float, default=limits.wall_s, help="Seconds a program may run.")
    parser.add_argument("--tool-memory-mb", type=int, default=limits.memory_mb, help="Memory of a program.")
    parser.add_argument("--tool-output-chars", type=int, default=limits.output_chars, help="Characters it may print.")
    parser.add_argument("--tool-concurrency", type=positive, default=os.cpu_count() or 1, help="Programs at a time.")
    parser.add_argument("--tool-no-jail", action="store_true", help="For hosts without namespaces; see the README.")
    parser.add_argument("--tool-bonus", type=float, default=0.1, help="Reward of a wrong answer after code that ran.")


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turns of the model and of the interpreter, until a turn has no code or no turn or room is left."""
    # The engine stops behind a stop string. What is kept is the ids it made: a last token may hold more characters than
    # the string, and those stay, since the model's next turn follows the tokens and not the text.
    params = sampling_params | {"stop": [*(sampling_params.get("stop") or []), "</code>"]}
    if not sample.response_length:
        sample.metadata |= {"turn_starts": [0], "tool_calls": 0, "tool_calls_ok": 0, "tool_errors": 0}
    starts = sample.metadata["turn_starts"]
    while True:
        if (code := code_of(args, sample)) is None:  # the turn is not finished
            sample = await generate_turn(args, sample, params)
            if sample.status is not Sample.Status.COMPLETED or (code := code_of(args, sample)) is None:
                break  # no room is left; or the rollout ends, and another one goes on from here; or this was the answer
        if len(starts) >= (args.max_turns or _MAX_TURNS):
            sample.status = Sample.Status.TRUNCATED
            break
        sample.status = Sample.Status.ABORTED  # what it is if the rollout ends here: a later one repeats the call
        output = await interpret(args, sample, code)
        if not append_observation(args, sample, params, f"\n<interpreter>{output}</interpreter>\n"):
            break
        sample.status = Sample.Status.PENDING
        starts.append(sample.response_length)
    # What the model did on wrong premises teaches it nothing: no token of such a sample is trained.
    sample.remove_sample = sample.metadata["tool_errors"] > 0
    return sample


def _last_turn(args: Namespace, sample: Sample) -> str:
    return response_text(args, sample, sample.metadata["turn_starts"][-1])


def code_of(args: Namespace, sample: Sample) -> str | None:
    """The program in the model's last turn, out of its Markdown fence if it has one."""
    found = CODE.search(_last_turn(args, sample))
    if found is None:
        return None
    fenced = FENCE.fullmatch(found[1])
    return fenced[1] if fenced else found[1].strip()


async def interpret(args: Namespace, sample: Sample, code: str) -> str:
    """What the model gets to read; a sandbox that fails is noted in the metadata, and never ends the run."""
    limits = Limits(
        wall_s=args.tool_timeout,
        memory_mb=args.tool_memory_mb,
        output_chars=args.tool_output_chars,
        jail=not args.tool_no_jail,
    )
    started = time.monotonic()
    try:
        async with _places(args.tool_concurrency):
            result = await run_python(code, limits)
    except (SandboxError, OSError) as error:
        logger.warning("the sandbox failed: %s", error)
        sample.metadata["tool_errors"] += 1
        return FAILED
    finally:
        sample.non_generation_time += time.monotonic() - started
    sample.metadata["tool_calls"] += 1
    sample.metadata["tool_calls_ok"] += result.ok
    return result.output or "(no output)"


_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _places(count: int) -> asyncio.Semaphore:
    """The running event loop's bound on programs at a time."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(count))


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1 for a right ``\\boxed{}``, as ``--rm-type math`` grades it; else ``--tool-bonus`` if some code ran, else 0.

    Only the model's last turn is judged: a box that a program printed is not an answer.
    """
    right = await math_reward(args, sample, _last_turn(args, sample))
    return right or args.tool_bonus * (sample.metadata["tool_calls_ok"] > 0)
