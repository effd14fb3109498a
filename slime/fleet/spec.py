"""What a run starts besides its trainers, as a list: each entry says what its model and its engines need.

`fleet_of` alone reads the options that entries are written by; placement, creation, routers, start, pushes, health and
metrics follow from the list.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import chain
from typing import Any

from slime.rollout.model_urls import ACTOR, REWARD

_AS_ITS_FILES_ARE = {"random_weights": False, "lora_sync": "merged", "pushes_float8": False}
"""Options of engines to which nothing is pushed."""


@dataclass(frozen=True)
class ModelSpec:
    """A model that a run serves, behind a router of its own."""

    name: str
    """As hooks ask `get_model_url` for it."""
    role: str
    """What its engines are for, in messages: "to generate"."""
    checkpoint: str
    """The directory that engines start from."""
    trained: bool
    """Whether its engines get the trainers' weights, whenever these are pushed."""
    tolerates_loss: bool
    """Whether the run goes on without one of its engines that dies or hangs, as long as there is another."""
    sglang_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()

    def called(self, part: str) -> str:
        """Its "engine" or "router" in messages and, with underscores, in names of files."""
        return part if self.name == ACTOR else f"{self.name} {part}"


@dataclass(frozen=True)
class EngineSpec:
    """Engines of one kind, and the slots that they take."""

    model: ModelSpec
    count: int
    """Of engines that a run starts with."""
    width: int
    """Slots of one engine."""
    per_node: int
    """Slots of one host that one engine may have; a wider one is a server on each of several hosts."""
    flag: str
    """What sets the number of slots: ``--rollout-num-gpus``."""
    beside_trainers: bool = False
    """Whether its slots are the trainers', from the first on, who get its engines' memory while they train."""

    @property
    def slots(self) -> int:
        """Of all its engines together."""
        return self.count * self.width

    @property
    def on_node(self) -> int:
        """Slots of one engine on each of its hosts."""
        return min(self.width, self.per_node)

    def options(self, args: argparse.Namespace, on_gpus: bool | None = None) -> argparse.Namespace:
        """The run's options as one of these engines sees them: beside trainers it sleeps if that is asked for, or by
        default where it is ``on_gpus``; where nobody knows yet, that is left open, as None."""
        own: dict[str, Any] = {
            "hf_checkpoint": self.model.checkpoint,
            "rollout_num_gpus_per_engine": self.width,
            "sglang_cli": list(self.model.sglang_flags),
        }
        if not self.beside_trainers:
            own["offload_rollout"] = False
        elif args.offload_rollout is None:
            own["offload_rollout"] = on_gpus
        if not self.model.trained:
            own |= _AS_ITS_FILES_ARE
        return argparse.Namespace(**vars(args) | own)


@dataclass(frozen=True)
class Fleet:
    """The trainers and the engines of a run, on logical slots: trainers have the first ones, then each entry has the
    next ones that are free, unless its engines are beside the trainers."""

    trainers: int
    engines: tuple[EngineSpec, ...]

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """Those that are served."""
        return tuple({spec.model.name: spec.model for spec in self.engines}.values())

    def places(self) -> list[range]:
        """The logical slots of each entry."""
        end, places = self.trainers, []
        for spec in self.engines:
            first = 0 if spec.beside_trainers else end
            places.append(range(first, first + spec.slots))
            end = max(end, first + spec.slots)
        return places

    @property
    def total(self) -> int:
        """Slots in all."""
        return max(chain([self.trainers], (place.stop for place in self.places())))


def fleet_of(args: argparse.Namespace) -> Fleet:
    """The run's fleet: ``--rollout-num-gpus`` and ``--rm-num-gpus`` are two ways to write an entry."""
    colocated = args.placement == "colocate"
    actor = ModelSpec(
        ACTOR,
        "to generate",
        args.hf_checkpoint,
        trained=True,
        tolerates_loss=True,
        sglang_flags=tuple(args.sglang_cli),
        router_flags=tuple(args.router_cli),
    )
    entries = [_entry(args, actor, args.rollout_num_gpus or 0, "--rollout-num-gpus", beside_trainers=colocated)]
    if args.rm_num_gpus:
        reward = ModelSpec(
            REWARD,
            "for a reward model",
            args.rm_model_path,
            trained=False,
            tolerates_loss=False,
            sglang_flags=tuple(args.rm_sglang_cli),
        )
        entries.append(_entry(args, reward, args.rm_num_gpus, "--rm-num-gpus"))
    trainers = 0 if args.placement == "rollout_only" else args.actor_num_gpus
    return Fleet(trainers, tuple(entry for entry in entries if entry.count))


def _entry(
    args: argparse.Namespace, model: ModelSpec, slots: int, flag: str, *, beside_trainers: bool = False
) -> EngineSpec:
    width: int = getattr(args, flag[2:].replace("-", "_") + "_per_engine")
    return EngineSpec(model, slots // width, width, args.num_gpus_per_node, flag, beside_trainers)
