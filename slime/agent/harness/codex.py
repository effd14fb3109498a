"""Codex, non-interactive, against the gateway's OpenAI API."""

from __future__ import annotations

import math
import shlex

from slime.agent.harness.common import BaseHarness, HarnessContext, install_archives, write_home
from slime.agent.sandbox.protocol import Sandbox, setting

# Only its own provider's address is read from the environment; ours must stand in the file.
_CONFIG = """\
model = "{model}"
model_provider = "slime"
web_search = "disabled"

[model_providers.slime]
name = "slime"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "{wire_api}"
requires_openai_auth = false
supports_websockets = false

[agents]
enabled = false
"""


class CodexHarness(BaseHarness):
    """Installed from SLIME_AGENT_NODE_TARBALL and SLIME_AGENT_CODEX_TARBALL, or SLIME_AGENT_CODEX_NATIVE_TARBALL.

    SLIME_AGENT_CODEX_WIRE_API is ``responses`` (the default, all that newer versions speak) or ``chat``.
    """

    name = "codex"
    extra_args_env = "SLIME_AGENT_CODEX_EXTRA_ARGS"
    extra_envs_env = "SLIME_AGENT_CODEX_EXTRA_ENVS"
    # The sandbox around it is the protection; its own cannot be made inside of one.
    exec_flags = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json"

    async def install_cli(self, sb: Sandbox) -> None:
        await install_archives(sb, "codex", variable="CODEX", strip=3, path="bin/codex")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        api = setting("SLIME_AGENT_CODEX_WIRE_API", default="responses")
        if api not in ("responses", "chat"):
            raise ValueError(f"SLIME_AGENT_CODEX_WIRE_API={api} must be one of responses, chat")
        config = _CONFIG.format(model=ctx.model_label, base_url=f"{ctx.adapter_url}/v1", wire_api=api)
        await write_home(sb, ".codex/config.toml", config)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        env = {"OPENAI_API_KEY": ctx.session_id, "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1"}
        # Else it asks again when a stream is silent for 5 minutes, as one is while weights are pushed.
        silence = f"-c model_providers.slime.stream_idle_timeout_ms={math.ceil(time_budget_sec * 1000)}"
        command = f"codex exec {self.exec_flags} {silence} {shlex.quote(prompt)}"
        return await self.run_program(sb, ctx, command, env, time_budget_sec)


CODEX = CodexHarness()
