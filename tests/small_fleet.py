"""Entries of a fleet, for tests that need some."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.driver.rollout_manager import RolloutManager
from slime.fleet.routers import Routers
from slime.fleet.spec import EngineSpec, ModelSpec
from slime.rollout.batches.reward_log import RewardLog
from slime.rollout.batches.warmup_log import WarmupLog
from slime.rollout.runtime import RolloutRuntime

ACTOR = ModelSpec("actor", "to generate", "model", trained=True, tolerates_loss=True, generates=True)
REWARD = ModelSpec("reward", "for a reward model", "judge", trained=False, tolerates_loss=False)


def entry(
    model: ModelSpec = ACTOR, count: int = 1, width: int = 1, per_node: int = 8, *, beside: bool = True
) -> EngineSpec:
    """Engines of one kind; those of the actor are beside trainers, if any are."""
    flag = "--rollout-num-gpus" if model is ACTOR else "--rm-num-gpus"
    return EngineSpec(model, count, width, per_node, flag, beside_trainers=beside and model is ACTOR)


def slot_options(kind: str, train: int, rollout: int, reward: int = 0, width: int = 1, **more: Any) -> Namespace:
    """What the command line says of slots, and of the models on them."""
    values = {"placement": kind, "actor_num_gpus": train, "actor_num_gpus_per_node": train, "num_gpus_per_node": 8}
    values |= {"rollout_num_gpus": rollout, "rollout_num_gpus_per_engine": width, "hf_checkpoint": "model"}
    values |= {"rm_num_gpus": reward, "rm_num_gpus_per_engine": 1, "rm_model_path": "judge", "rm_sglang_cli": []}
    values |= {"sglang_models": [], "sglang_config": None, "sglang_router_ip": None, "sglang_router_port": None}
    values |= {"use_rollout_routing_replay": False, "true_on_policy_mode": False, "deterministic_mode": False}
    values |= {"attention_backend": "auto", "record_memory_history": False}
    return Namespace(**values | {"sglang_cli": [], "router_cli": [], "external_engine_urls": []} | more)


def bare_manager(args: Namespace, runtime: RolloutRuntime, **parts: Any) -> RolloutManager:
    """One without the functions that ``args`` name, without data and without engines, but for ``parts``."""
    manager = RolloutManager.__new__(RolloutManager)
    own = {"args": args, "runtime": runtime, "routers": Routers(args, None, runtime), "reward_log": RewardLog()}
    own |= {"warmup_log": WarmupLog(), "data_source": None, "made": {}, "under_way": {}, "num_cancels": 0}
    vars(manager).update({f"_{name}": value for name, value in (own | parts).items()})
    return manager
