"""The types of tau-bench that an agent sees, with its names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

RESPOND_ACTION_NAME = "respond"


class Action(BaseModel):
    """What an agent does: a tool's call, or `RESPOND_ACTION_NAME` with what it says to the user as ``content``."""

    name: str
    kwargs: dict[str, Any]


class Task(BaseModel):
    """What a user wants, and the actions that do it."""

    user_id: str
    actions: list[Action]
    instruction: str
    outputs: list[str] = []


class EnvInfo(BaseModel):
    """What an environment tells beside what it says."""

    task: Task
    source: str | None = None


class EnvResponse(BaseModel):
    """What follows an action; the reward counts where it is ``done``."""

    observation: str
    reward: float
    done: bool
    info: EnvInfo


class EnvResetResponse(BaseModel):
    """The user's first words."""

    observation: str
    info: EnvInfo


class RunConfig(BaseModel):
    """What of a run's configuration is used."""

    model_provider: str
    user_model_provider: str
    model: str
    user_model: str = "gpt-4o"
    env: str = "retail"
    task_split: str = "test"
    user_strategy: str = "llm"
