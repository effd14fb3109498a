"""Agents: the function that is one, what its session may take, and where the gateway listens."""

from __future__ import annotations

from dataclasses import dataclass

from slime.options.flags.schema import option
from slime.options.rollout import DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT, written
from slime.options.rules import Rule
from slime.utils.calls import Call

GENERATE = "slime.agent.rollout.generate"
"""What opens a session of the gateway for each sample, and has the agent talk to it."""
_BY_PATH = f"custom_generate_function_path={written(GENERATE)}"
EVERY_INTERFACE = ("", "0.0.0.0", "::")
"""What a server may listen at, and no client reaches it by."""
_OWN_ROLLOUTS = written(DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT)


@dataclass
class AgentOptions:
    """Agents: sessions of the gateway, which agents talk to."""

    custom_agent_function_path: str | None = option(
        None,
        f"Function (base_url, prompt, request_kwargs, metadata) that is the agent of --custom-generate-function-path "
        f"{GENERATE}: it talks to the model at that address.",
        hook=("run", "agent"),
        call=(
            Call(
                "base_url, prompt, request_kwargs, metadata, *, sample=None, session=None, evaluation=False",
                "dict | None",
                is_async=True,
            ),
        ),
    )
    agent_max_turns: int = option(0, "Answers of one session at most; 0 is any number.", at_least=0)
    agent_max_tokens: int = option(
        0,
        "A session gets no turn beyond so many tokens, nor answers of more; of several turns at once each may take "
        "what is left. 0 is any number.",
        at_least=0,
    )
    agent_max_seconds: float = option(
        0.0, "After which a session gets no further turn; one under way is answered. 0 is any time.", at_least=0
    )
    agent_host: str | None = option(
        None, "Address of this host at which agents reach the gateway; by default the router's."
    )
    agent_port: int = option(0, "The gateway's port; 0 is any that is free.", at_least=0, at_most=65535)


RULES = (
    Rule(
        "custom_agent_function_path @agent_max_turns @agent_max_tokens @agent_max_seconds @agent_host @agent_port",
        "has no effect without",
        f"custom_generate_function_path eval_config @eval_function_path rollout_function_path!={_OWN_ROLLOUTS}",
        ": nothing opens sessions",
    ),
    Rule(_BY_PATH, "needs", "custom_agent_function_path"),
    Rule("apply_chat_template", "would render what agents get as rows have it: drop it", when=_BY_PATH),
)
