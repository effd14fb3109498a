"""Sandboxes for agents: machines of their own, local or of a service, behind one protocol (docs/agents.md)."""

from slime.agent.sandbox.detached import ensure_agent_user, exec_and_wait
from slime.agent.sandbox.local import LocalSandbox, SandboxLimits
from slime.agent.sandbox.pool import SandboxPool
from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, ExecResult, FileContent, Sandbox, SandboxError

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "ExecResult",
    "FileContent",
    "LocalSandbox",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxPool",
    "ensure_agent_user",
    "exec_and_wait",
]
