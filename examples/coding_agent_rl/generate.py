"""Agents that mend programs: each sample is one agent's work on a repository in a sandbox, judged in another.

    --custom-generate-function-path examples.coding_agent_rl.generate.generate

The sandboxes are those of SLIME_AGENT_SANDBOX, the agents those of `slime.agent.harness`. A row is described in
`examples.coding_agent_rl.swe`; the variables of the environment that are read here are in the README.
"""

from __future__ import annotations

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from examples.coding_agent_rl import swe
from slime.agent.harness import CLAUDE_CODE, CODEX, HARNESSES, BaseHarness, last_words
from slime.agent.rollout import AgentError, AgentSession, open_session
from slime.agent.sandbox import Sandbox, SandboxLimits, SandboxPool, make_sandbox
from slime.agent.sandbox.protocol import place, setting
from slime.utils.types import Sample

PROMPT = (
    f"Read {swe.STATEMENT} in the current directory and resolve the issue. Edit source files only, not the tests. "
    "Run the tests that matter to see that they pass. Do not commit. When you are done, say in one line what you did."
)
_NODE = SandboxLimits(memory_mb=4096, address_space_mb=0, disk_mb=2048, processes=256)
"""Of local sandboxes for agents that Node or a large binary runs."""
_MARGIN_S = 180


@dataclass(frozen=True)
class Knobs:
    """What the environment says of a run.

    Attributes:
        harness: the agent.
        agent_s: how long it may work.
        eval_s: how long the tests may take.
        guard_s: how long the whole of a sample may take.
        boots: how many sandboxes start at a time.
        boot_retries: how often a start is tried again.
        prompt: what the agent is told.
        public_host: where sandboxes reach the gateway; empty: where it listens.
        bind: the gateway's ``agent_host`` and ``agent_port``, in place of the options.
    """

    harness: BaseHarness
    agent_s: float
    eval_s: float
    guard_s: float
    boots: int
    boot_retries: int
    prompt: str
    public_host: str
    bind: dict[str, Any]


def read_knobs() -> Knobs:
    """What the environment says.

    Raises:
        ValueError: a variable's value cannot be used.
    """
    name = setting("SWE_AGENT", default="mini")
    if name not in HARNESSES:
        raise ValueError(f"SWE_AGENT={name} must be one of {', '.join(HARNESSES)}")
    for variable in ("SWE_TRAIN_PROTOCOL", "SWE_EVAL_PROTOCOL"):
        if (protocol := setting(variable, default="scaleswe")) != "scaleswe":
            raise ValueError(f"{variable}={protocol} must be scaleswe: swebench's own grader is not here")
    agent_s = _number("SWE_AGENT_TIME_BUDGET_SEC", 1800)
    eval_s = _number("SWE_EVAL_TIMEOUT_SEC", 600)
    if (host := setting("ADAPTER_BIND_HOST")) in ("0.0.0.0", "::"):
        raise ValueError(f"ADAPTER_BIND_HOST={host} is every interface: name this host's address that sandboxes reach")
    bind: dict[str, Any] = {"agent_host": host, "agent_port": int(_number("ADAPTER_PORT", 0))}
    return Knobs(
        harness=HARNESSES[name],
        agent_s=agent_s,
        eval_s=eval_s,
        guard_s=_number("SWE_ROLLOUT_GUARD_SEC", agent_s + eval_s + _MARGIN_S),
        boots=max(1, int(_number("SWE_BOOT_CONCURRENCY", 16))),
        boot_retries=int(_number("SWE_BOOT_RETRIES", 2)),
        prompt=setting("SWE_CC_PROMPT", default=PROMPT),
        public_host=setting("ADAPTER_PUBLIC_HOST"),
        bind={option: value for option, value in bind.items() if value},
    )


def _number(name: str, default: float) -> float:
    text = setting(name, default=str(default))
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name}={text} must be a number from 0")
    return number


KNOBS = read_knobs()
"""Read when the module is: a value that cannot be used ends the run before anything is started."""


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """The samples of one agent's work, with reward 1 where its diff solves the task, else 0; one in an evaluation.

    Raises:
        AgentError: the agent had no turn, or all of it took longer than SWE_ROLLOUT_GUARD_SEC.
        SandboxError: a sandbox failed.
    """
    try:
        async with asyncio.timeout(KNOBS.guard_s) as guard:
            parts = await _worked(args, sample, sampling_params)
    except TimeoutError as error:
        if not guard.expired():
            raise
        raise AgentError(f"sample {sample.index} took longer than SWE_ROLLOUT_GUARD_SEC={KNOBS.guard_s:g}") from error
    return parts[-1] if evaluation else parts


async def _worked(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    task = swe.task_of(sample)
    if KNOBS.bind:
        args = Namespace(**{**vars(args), **KNOBS.bind})
    async with open_session(args, sample, sampling_params) as session:
        status, patch, told = await _work(task, session)
    if session.aborted:
        sample.status = Sample.Status.ABORTED
        return [sample]
    parts = session.samples(sample)
    if not parts:
        end = f"{KNOBS.harness.name} ended with status {status} and no turn, on sample {sample.index}"
        raise AgentError(f"{end}: {told or 'it printed nothing'}")
    grade = swe.Grade(False, "nothing was changed")
    if patch.strip():
        async with _sandbox(task) as sandbox:
            grade = await swe.grade(sandbox, task, patch, KNOBS.eval_s)
    seen = {"agent": KNOBS.harness.name, "status": status, "patch": patch.decode(errors="replace")}
    seen |= {"solved": grade.solved, "told": grade.told}
    for part in parts:
        part.reward = float(grade.solved)
        part.metadata |= {"swe": seen}
    return parts


async def _work(task: swe.Task, session: AgentSession) -> tuple[int, bytes, str]:
    """Let the agent work; its exit status, what it has changed, and the end of what it printed."""
    url = session.url
    if KNOBS.public_host:
        url = f"http://{KNOBS.public_host}:{urlsplit(url).port}"
    async with _sandbox(task, reach=url, installs=KNOBS.harness) as sandbox:
        base = await swe.prepare(sandbox, task)
        await swe.state(sandbox, task)
        workdir = place(sandbox, task.workdir)
        status = await KNOBS.harness.run(
            sandbox,
            workdir=workdir,
            session_id=session.key,
            adapter_url=url,
            time_budget_sec=KNOBS.agent_s,
            prompt=KNOBS.prompt,
        )
        return status, await swe.diff(sandbox, task, base), await last_words(sandbox, workdir)


_starting: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def _sandbox(
    task: swe.Task, reach: str | None = None, installs: BaseHarness | None = None
) -> AsyncIterator[Sandbox]:
    """One that is ready, and gone after the block; not more than SWE_BOOT_CONCURRENCY start at a time."""
    limits = _NODE if installs in (CLAUDE_CODE, CODEX) else None
    starts = _starting.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(KNOBS.boots))
    async with SandboxPool(make_sandbox, 1, KNOBS.boot_retries) as pool, contextlib.AsyncExitStack() as stack:
        async with starts:
            sandbox = await stack.enter_async_context(pool.sandbox(task.image, reach=reach, limits=limits))
            if installs is not None:
                await installs.install_cli(sandbox)
        yield sandbox
