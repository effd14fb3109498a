"""A shop with orders, and a user by script in place of a model: who asks to have an order cancelled, and then goes."""

from __future__ import annotations

import random
from typing import Any

from tau_bench.types import RESPOND_ACTION_NAME, Action, EnvInfo, EnvResetResponse, EnvResponse, Task

_TASKS = {"train": 200, "dev": 16, "test": 16, "sft": 2000}
_NAMES = [a + b + c for a in "BDKLMNRST" for b in "aeiou" for c in "klmnrs"]
_ORDERS = range(10, 100)


def _tool(name: str, parameter: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Env:
    """One user's visit.

    Attributes:
        tasks: of the split.
        tools_info: in OpenAI's form.
        wiki: the shop's rules, which are the agent's system prompt.
    """

    def __init__(self, task_split: str, task_index: int | None) -> None:
        rng = random.Random(task_split)
        drawn = [(rng.sample(_NAMES, 4), rng.sample(_ORDERS, 4)) for _ in range(_TASKS[task_split])]
        self._orders = [dict(zip(names, orders, strict=True)) for names, orders in drawn]
        self.tasks = [self._task(orders) for orders in self._orders]
        self.tools_info = [
            _tool("find", "name", "The order of a customer."),
            _tool("cancel", "order", "Cancel an order."),
        ]
        self.wiki = "Find the order, cancel it, say so."
        self.reset(task_index or 0)

    @staticmethod
    def _task(orders: dict[str, int]) -> Task:
        name, order = next(iter(orders.items()))
        actions = [Action(name="cancel", kwargs={"order": str(order)})]
        return Task(user_id=name, actions=actions, instruction=f"You are {name}. Cancel your order.")

    def reset(self, task_index: int) -> EnvResetResponse:
        """Begin a task anew."""
        self.task, self._known = self.tasks[task_index], self._orders[task_index]
        self._cancelled: set[str] = set()
        return EnvResetResponse(observation=f"{self.task.user_id} here. Cancel.", info=EnvInfo(task=self.task))

    def step(self, action: Action) -> EnvResponse:
        """Do what the agent does; the user goes when the agent has said something."""
        done = action.name == RESPOND_ACTION_NAME
        wanted = {each.kwargs["order"] for each in self.task.actions}
        return EnvResponse(
            observation="###STOP###" if done else self._do(action),
            reward=float(done and self._cancelled == wanted),
            done=done,
            info=EnvInfo(task=self.task, source="user" if done else action.name),
        )

    def _do(self, action: Action) -> str:
        try:
            if action.name == "find":
                return str(self._known[action.kwargs["name"]])
            if action.name == "cancel":
                if int(action.kwargs["order"]) not in self._known.values():
                    raise ValueError("no such order")
                self._cancelled.add(str(action.kwargs["order"]))
                return "cancelled"
        except (LookupError, ValueError, TypeError) as error:
            return f"Error: {error}"
        return f"Unknown action {action.name}"


def get_env(
    env_name: str,
    user_strategy: str,
    user_model: str,
    task_split: str,
    user_provider: str | None = None,
    task_index: int | None = None,
) -> Env:
    """An environment, by tau-bench's arguments, of which this one heeds the split and the task."""
    return Env(task_split, task_index)
