"""Agents that run inside a sandbox against the gateway (docs/agents.md)."""

from slime.agent.harness.claude_code import CLAUDE_CODE, ClaudeCodeHarness
from slime.agent.harness.codex import CODEX, CodexHarness
from slime.agent.harness.common import BaseHarness, HarnessContext, last_words
from slime.agent.harness.mini import MINI, MiniHarness
from slime.agent.harness.mini_swe import MINI_SWE, MiniSweHarness

HARNESSES: dict[str, BaseHarness] = {each.name: each for each in (CLAUDE_CODE, CODEX, MINI, MINI_SWE)}
"""By the name that options give them."""

__all__ = [
    "CLAUDE_CODE",
    "CODEX",
    "HARNESSES",
    "MINI",
    "MINI_SWE",
    "BaseHarness",
    "ClaudeCodeHarness",
    "CodexHarness",
    "HarnessContext",
    "MiniHarness",
    "MiniSweHarness",
    "last_words",
]
