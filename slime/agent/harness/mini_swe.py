"""mini-swe-agent (PyPI), which asks the gateway's OpenAI API through litellm."""

from __future__ import annotations

import shlex

from slime.agent.harness.common import BaseHarness, HarnessContext, is_there, one_line, write_home
from slime.agent.sandbox.detached import exec_and_wait
from slime.agent.sandbox.protocol import Sandbox, SandboxError, place, setting

_INSTALL_S = 900
_VERSION = "2.4.6"
# Laid over its own mini.yaml, which has the prompts. The address comes from the environment.
_CONFIG = """\
model:
  model_name: openai/{model}
  cost_tracking: ignore_errors
agent:
  mode: yolo
  confirm_exit: false
  cost_limit: 0
"""


class MiniSweHarness(BaseHarness):
    """Installed by pip in the sandbox, from SLIME_AGENT_MINI_SWE_WHEELS, a directory there, or else from the index."""

    name = "mini_swe_agent"
    extra_args_env = "SLIME_AGENT_MINI_SWE_EXTRA_ARGS"
    extra_envs_env = "SLIME_AGENT_MINI_SWE_EXTRA_ENVS"

    async def install_cli(self, sb: Sandbox) -> None:
        if await is_there(sb, "mini"):
            return
        tools = place(sb, "/opt/agent")
        wheels = setting("SLIME_AGENT_MINI_SWE_WHEELS")
        source = f"--no-index --find-links {shlex.quote(wheels)} " if wheels else ""
        command = (
            f"set -e; python3 -m venv {tools}/mini-swe; mkdir -p {tools}/bin; "
            f"{tools}/mini-swe/bin/pip install -q {source}mini-swe-agent=={_VERSION}; "
            f"ln -sf {tools}/mini-swe/bin/mini {tools}/bin/mini"
        )
        code, output = await exec_and_wait(
            sb, cmd=command, time_budget_sec=_INSTALL_S, tag="harness-pip-install", want_output=True
        )
        if code != 0:
            hint = (
                "" if wheels else " (without a network: wheels, in the sandbox's directory SLIME_AGENT_MINI_SWE_WHEELS)"
            )
            raise SandboxError(f"mini-swe-agent could not be installed{hint}, status {code}: {one_line(output)}")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        await write_home(sb, "mini-swe.yaml", _CONFIG.format(model=ctx.model_label))

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        home = place(sb, "/home/agent")
        env = {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1",
            "OPENAI_API_BASE": f"{ctx.adapter_url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{home}/.mini-swe",
            # Its prices of models are read from the network otherwise.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        output = f"{ctx.workdir}/.harness/mini-swe.traj.json"
        limit = f"-c model.model_kwargs.timeout={time_budget_sec:g}"  # litellm's is 10 minutes
        command = f"mini -y --exit-immediately -c mini.yaml -c {home}/mini-swe.yaml {limit} -o {shlex.quote(output)}"
        task = f"-t {shlex.quote(prompt)} < /dev/null"
        return await self.run_program(sb, ctx, f"{command} {task}", env, time_budget_sec)


MINI_SWE = MiniSweHarness()
