"""The APIs that the gateway speaks, and upstream's adapters, which are gateways by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.agent.adapters.adapter import AnthropicAdapter, BaseAdapter, OpenAIAdapter, ResponsesAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter", "ResponsesAdapter"]


def __getattr__(name: str) -> Any:
    """Later than the APIs, which the gateway imports: adapters import the gateway."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slime.agent.adapters import adapter

    return getattr(adapter, name)
