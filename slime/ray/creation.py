"""Creating the actors of a run, each on its slot."""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.ray.cluster import actor_environment, as_actor
from slime.ray.engine_actor import EXAMINATION, EngineActor, EngineNode, EnginePlan
from slime.ray.placement import Placement, Slot
from slime.ray.rollout_manager import EVALUATION, ROLLOUTS, ROUTERS, RolloutManager, rollouts_overlap
from slime.ray.train_actor import TrainActor
from slime.utils.environment import as_environment
from slime.utils.http_utils import LOOPBACK
from slime.utils.redaction import is_secret
from slime.utils.stores import NODE_ADDRESS_VARIABLE


def create_manager(args: argparse.Namespace, api_keys: tuple[str, str] | None) -> Any:
    """The rollout manager, on the driver's host: there are the files that the driver has checked."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "runtime_env": actor_environment(), "scheduling_strategy": here}
    overlap = args.async_buffer_size + 2 if args.asynchronous and rollouts_overlap(args) else 1
    threads = {ROLLOUTS: overlap, EVALUATION: 1, ROUTERS: 1}
    return as_actor(RolloutManager, **threads).options(**options).remote(args, api_keys)


def create_engines(
    args: argparse.Namespace, placement: Placement, slots: list[Slot], api_keys: tuple[str, str] | None, name: str
) -> dict[str, Any]:
    """One actor an engine, on the first of its slots, by "<name> <rank>"; it makes those of the engine's other nodes.

    Args:
        args: the engines' options: `reward_engine_args` for the reward model's.
        slots: those of all these engines.
    """
    width, actors = args.rollout_num_gpus_per_engine, {}
    on_node = min(width, args.num_gpus_per_node)
    for rank in range(len(slots) // width):
        firsts = range(rank * width, (rank + 1) * width, on_node)
        nodes = [_engine_node(placement, slots[first : first + on_node]) for first in firsts]
        plan = EnginePlan(_for_workers(args), rank, api_keys, nodes, name)
        actors[f"{name} {rank}"] = as_actor(EngineActor, **{EXAMINATION: 1}).options(**nodes[0].options).remote(plan)
    return actors


def _engine_node(placement: Placement, slots: list[Slot]) -> EngineNode:
    options = {"runtime_env": actor_environment(_interface(placement)), **placement.options(slots[0], trains=False)}
    gpus = [slot.gpu for slot in slots if slot.gpu is not None]
    return EngineNode(options, gpus or None)


def reward_engine_args(args: argparse.Namespace) -> argparse.Namespace:
    """The run's options as an engine of the reward model sees them: another model, never asleep, SGLang's defaults."""
    own = {
        "hf_checkpoint": args.rm_model_path,
        "rollout_num_gpus_per_engine": args.rm_num_gpus_per_engine,
        "sglang_cli": args.rm_sglang_cli,
        "offload_rollout": False,
        "random_weights": False,
        "lora_sync": "merged",
        "pushes_float8": False,
    }
    return argparse.Namespace(**vars(args) | own)


def create_trainers(args: argparse.Namespace, placement: Placement) -> list[Any]:
    """One actor a training rank."""
    # torch and megatron-core warn of their own deprecations, many lines a rank; no code of users runs there.
    variables = {"PYTHONWARNINGS": "ignore", **_interface(placement)}
    if getattr(args, "sglang_enable_symm_mem", False):
        variables["NCCL_CUMEM_ENABLE"] = "1"  # as in those engines, whatever the host says
    # Ray shows that environment to everyone who may ask it: what is named for a secret is set by the rank itself.
    wanted = as_environment(args.train_env_vars)
    variables |= {name: value for name, value in wanted.items() if not is_secret(name, value)}
    environment = actor_environment(variables)
    its_args, actors = _for_workers(args), []
    for rank, slot in enumerate(placement.train):
        options = {"runtime_env": environment, **placement.options(slot, trains=True)}
        actors.append(as_actor(TrainActor).options(**options).remote(its_args, rank, len(placement.train), slot.gpu))
    return actors


def _interface(placement: Placement) -> dict[str, str]:
    """On one host nobody else needs to reach where ranks meet; gloo would listen where the host's name leads to."""
    if not placement.on_one_host:
        return {}
    return {NODE_ADDRESS_VARIABLE: LOOPBACK, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}


def _for_workers(args: argparse.Namespace) -> argparse.Namespace:
    """The options for a process that logs no metrics: without the tracker's key."""
    return argparse.Namespace(**vars(args) | {"wandb_key": None})
