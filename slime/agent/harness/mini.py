"""Our own agent: `mini_agent.py`, one file for any Python 3 in the sandbox, with no package, no npm and no network."""

from __future__ import annotations

import shlex
from pathlib import Path

from slime.agent.harness.common import BaseHarness, HarnessContext, is_there
from slime.agent.sandbox.protocol import Sandbox, SandboxError, place

_SOURCE = Path(__file__).with_name("mini_agent.py")
_PROGRAM = "/opt/agent/mini_agent.py"


class MiniHarness(BaseHarness):
    """One tool, bash; the conversation only grows, so every turn's prompt starts with the last one and its answer."""

    name = "mini"
    extra_args_env = "SLIME_AGENT_MINI_EXTRA_ARGS"
    extra_envs_env = "SLIME_AGENT_MINI_EXTRA_ENVS"

    async def install_cli(self, sb: Sandbox) -> None:
        if not await is_there(sb, "python3"):
            raise SandboxError("the sandbox has no python3, which the agent mini runs on")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        await sb.write_file(place(sb, _PROGRAM), _SOURCE.read_text())

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        env = {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1",
            "MINI_MODEL": ctx.model_label,
        }
        command = f"python3 {place(sb, _PROGRAM)} --request-timeout {time_budget_sec:g} {shlex.quote(prompt)}"
        return await self.run_program(sb, ctx, command, env, time_budget_sec)


MINI = MiniHarness()
