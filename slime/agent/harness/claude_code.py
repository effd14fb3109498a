"""Claude Code, headless, against the gateway's Anthropic API."""

from __future__ import annotations

import json
import math
import shlex

from slime.agent.harness.common import BaseHarness, HarnessContext, install_archives, write_home
from slime.agent.sandbox.protocol import Sandbox

_SETTINGS = {"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True}


class ClaudeCodeHarness(BaseHarness):
    """Installed from SLIME_AGENT_NODE_TARBALL and SLIME_AGENT_CC_TARBALL, or SLIME_AGENT_CC_NATIVE_TARBALL."""

    name = "claude_code"
    extra_args_env = "SLIME_AGENT_CC_EXTRA_ARGS"
    extra_envs_env = "SLIME_AGENT_CC_EXTRA_ENVS"
    launch_flags = "--permission-mode bypassPermissions --output-format stream-json --verbose"
    static_env = {  # noqa: RUF012
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        # It puts a line into the prompt that changes from turn to turn.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }

    async def install_cli(self, sb: Sandbox) -> None:
        await install_archives(sb, "claude", variable="CC", strip=1, path="claude")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        for path in (".claude.json", ".claude/settings.json"):
            await write_home(sb, path, json.dumps(_SETTINGS))

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        env = {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            # For what it does on the side, titles and summaries, it would otherwise ask for another model.
            "ANTHROPIC_SMALL_FAST_MODEL": ctx.model_label,
            # Else it asks again after 10 minutes, within which a push of weights may still hold the answer up.
            "API_TIMEOUT_MS": str(math.ceil(time_budget_sec * 1000)),
            **self.static_env,
        }
        command = f"claude -p {shlex.quote(prompt)} {self.launch_flags}"
        return await self.run_program(sb, ctx, command, env, time_budget_sec)


CLAUDE_CODE = ClaudeCodeHarness()
