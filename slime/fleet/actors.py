"""The Ray actor of each engine: where it runs, and with which plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from slime.fleet.external import Keys
from slime.fleet.placement import Placement, Slot
from slime.fleet.spec import EngineSpec
from slime.ray.cluster import actor_environment, as_actor, on_this_host, worker_options
from slime.ray.engine_actor import EXAMINATION, EngineActor, EngineNode, EnginePlan, ExternalPlan


class ActorMaker:
    """Makes those of a run's engines."""

    def __init__(self, args: argparse.Namespace, placement: Placement, keys: Keys) -> None:
        """``keys`` are the run's, which every server of its own asks for."""
        self._args, self._placement, self._keys = args, placement, keys

    def keys_of(self, spec: EngineSpec) -> Keys:
        """Those that engines of an entry ask for."""
        return self._keys if spec.keyed else None

    def make(self, spec: EngineSpec, slots: Sequence[Slot], rank: int) -> tuple[str, Any]:
        """An engine's name and its actor, on the first of its slots; it makes those of the engine's other nodes. That
        of an external engine is on the driver's host."""
        plan: EnginePlan | ExternalPlan
        where = {"runtime_env": actor_environment(self._placement.interface())}
        if spec.urls:
            options: dict[str, Any] = {**where, **on_this_host()}
            its_args = spec.options(worker_options(self._args))
            plan = ExternalPlan(its_args, rank, spec.urls[0], self.keys_of(spec), spec.model.called("engine"))
        else:
            nodes = [
                EngineNode(
                    {**where, **self._placement.options(slots[first], trains=False)},
                    [slot.gpu for slot in slots[first : first + spec.on_node] if slot.gpu is not None] or None,
                )
                for first in range(0, spec.width, spec.on_node)
            ]
            options = nodes[0].options
            its_args = spec.options(worker_options(self._args), self._placement.on_gpus)
            plan = EnginePlan(its_args, rank, self._keys, nodes, spec.model.called("engine"))
        actor = as_actor(EngineActor, **{EXAMINATION: 1}).options(**options).remote(plan)
        return f"{plan.name} {rank}", actor
