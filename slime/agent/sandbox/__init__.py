"""Sandboxes for agents: machines of their own, local or of a service, behind one protocol (docs/agents.md)."""

from slime.agent.sandbox.choose import make_sandbox
from slime.agent.sandbox.daytona import DaytonaSandbox
from slime.agent.sandbox.detached import ensure_agent_user, exec_and_wait
from slime.agent.sandbox.docker import ContainerLimits, DockerSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.local import LocalSandbox, SandboxLimits
from slime.agent.sandbox.modal import ModalSandbox
from slime.agent.sandbox.pool import SandboxPool
from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, ExecResult, FileContent, Sandbox, SandboxError

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "ContainerLimits",
    "DaytonaSandbox",
    "DockerSandbox",
    "E2BSandbox",
    "ExecResult",
    "FileContent",
    "LocalSandbox",
    "ModalSandbox",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxPool",
    "ensure_agent_user",
    "exec_and_wait",
    "make_sandbox",
]
