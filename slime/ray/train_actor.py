"""The Ray actor of one training rank: the trainer, and the publisher of its weights."""

from __future__ import annotations

import argparse
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch.distributed import TCPStore

from slime.backends.trainers import trainer_of
from slime.data import TrainBatch
from slime.data.source.users_class import saved_state
from slime.files.checkpoints import ROLLOUT_STATE, checkpoint_directory
from slime.files.hf_writer import NamedTensors
from slime.files.storage import writing
from slime.observability import logs
from slime.observability.trace import span
from slime.options.flags.schema import flag_named
from slime.ray.cluster import enter_actor
from slime.training import checkpoint_dirs
from slime.training.protocol import Trainer
from slime.utils import device, patching
from slime.utils.environment import as_environment, forget_secrets
from slime.utils.http_utils import LOOPBACK
from slime.utils.stores import NODE_ADDRESS_VARIABLE, RENDEZVOUS, serve_store
from slime.weights import EngineAddress

if TYPE_CHECKING:
    from slime.weights.publisher import WeightPublisher

_STILL_WHOLE = "earlier checkpoints are whole"
_STORE_IS_THERE = "TORCHELASTIC_USE_AGENT_STORE"


class TrainActor:
    """One rank; every method but ``watch`` and ``serve_rendezvous`` is collective over all ranks."""

    _pushes = 0

    def __init__(
        self, args: argparse.Namespace, rank: int, world_size: int, gpu: str | None, sharing: int | None = None
    ) -> None:
        """``sharing`` is how many slots have the cores of this host, of which this one's part computes; by None torch
        has as many threads as the environment says."""
        enter_actor(args, f"trainer_{rank}")
        forget_secrets()
        os.environ |= as_environment(args.train_env_vars)
        self._args = args
        self._rank = rank
        self._store: TCPStore | None = None
        self._trainer: Trainer  # from `start` on
        self._publisher: WeightPublisher | None = None
        if sharing is not None:
            torch.set_num_threads(max(len(os.sched_getaffinity(0)) // sharing, 1))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank(gpu)))

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns: the death of this process is what the caller waits for."""
        threading.Event().wait()

    def serve_rendezvous(self, on_one_host: bool) -> tuple[str, int]:
        """Serve, on rank 0, the store at which all ranks meet, on loopback if ``on_one_host``; its host and port."""
        host = LOOPBACK if on_one_host else ray.util.get_node_ip_address()
        self._store = serve_store(host, wait_for_workers=False)
        return host, self._store.port

    def start(self, master: tuple[str, int], num_rollout: int) -> tuple[int, int, dict[str, Any] | None]:
        """Load the model: the first rollout, the data-parallel size and, on rank 0, the data's state to resume."""
        os.environ.update(MASTER_ADDR=master[0], MASTER_PORT=str(master[1]))
        os.environ.setdefault(NODE_ADDRESS_VARIABLE, ray.util.get_node_ip_address())
        patching.apply([RENDEZVOUS], None)
        self._args = argparse.Namespace(**vars(self._args) | {"num_rollout": num_rollout})
        if self._args.deterministic_mode:
            device.compute_deterministically()
        # So torch looks for the store of `serve_rendezvous` instead of serving one; other groups serve their own later.
        os.environ[_STORE_IS_THERE] = "True"
        self._trainer = trainer_of(self._args)
        del os.environ[_STORE_IS_THERE]
        for option in ("save", "critic_save") if self._args.use_critic else ("save",):
            if (place := getattr(self._args, option)) is not None:
                with writing(flag_named(option), place):
                    checkpoint_dirs.check_shared(place, flag_named(option))
        state = None
        if self._trainer.resumed_from and self._rank == 0:
            state = saved_state(self._trainer.resumed_from)
        return self._trainer.start_rollout_id, self._trainer.dp_size, state

    def dp_rank(self) -> int:
        """Which data-parallel shard this rank trains on."""
        return self._trainer.dp_rank

    def sleep(self, keep_weights: bool) -> None:
        """Give the GPU memory of everything but, if they are to be pushed, the actor's weights."""
        self._trainer.sleep(keep_weights=keep_weights)

    def wake(self, weights_only: bool) -> device.Memory:
        """Undo `sleep`, or only for the actor's weights; what was in use before."""
        return self._trainer.wake(weights_only=weights_only)

    def publish(self, version: int, engines: list[EngineAddress], group: str) -> dict[str, float]:
        """Push the present weights as ``version`` to these engines, which may be others than the last time: a
        collective group with them is called ``group``."""
        from slime.weights import make_publisher
        from slime.weights.agreement import OtherRankError
        from slime.weights.float8 import Float8Blocks
        from slime.weights.tensor import can_push_local_experts

        logs.hide(key for engine in engines for key in (engine.generate_key, engine.admin_key))
        self._pushes += 1
        if self._pushes <= 2:  # by the second the first step has imported and compiled what it needs
            _keep_for_good()
        started = time.monotonic()  # with the agreement of the ranks on who has what, before engines pause
        if self._publisher is None:
            self._publisher = make_publisher(self._args, self._rank)
            self._float8 = Float8Blocks.of(Path(self._args.hf_checkpoint))
        self._publisher.group_name = group
        own_experts = can_push_local_experts(self._args, engines)
        checks = own_experts and self._args.check_weight_update_equal
        try:
            with self._trainer.pushing(version):
                buckets = self._export(version, own_experts=own_experts)
                full_buckets = self._export(version, own_experts=False) if checks else None
                figures = self._publisher.publish(version, buckets, engines, full_buckets)
        except OtherRankError:
            return {}  # that rank raises it, and knows more
        return {
            "perf/update_weights_time": time.monotonic() - started,
            "perf/update_weights_paused_time": figures["paused_seconds"],
            "perf/update_weights_wire_bytes": figures["bytes"],
        }

    def score(self, tokens: list[int]) -> list[float] | None:
        """What `Trainer.score` makes of some tokens."""
        with span("push/probe"):
            return self._trainer.score(tokens)

    def _export(self, version: int, *, own_experts: bool) -> Iterator[NamedTensors]:
        buckets = self._trainer.export_buckets(version, own_experts=own_experts)
        return buckets if self._float8 is None else self._float8.quantised(buckets)

    def train(self, rollout_id: int, batch: TrainBatch) -> list[dict[str, float]]:
        """Train on one rollout; one dict of metrics an optimizer step."""
        return self._trainer.train(rollout_id, batch)

    def save(
        self, rollout_id: int, rollout_state: dict[str, Any] | None, save: str, critic_save: str | None = None
    ) -> None:
        """Write one complete checkpoint below ``save``, and the critic's below ``critic_save``, with the data side's
        state, which rank 0 alone gets, or none."""
        place = "--save" if save == self._args.save else "--trainer-snapshot-interval, in memory at"
        with writing(place, save, note=_STILL_WHOLE):
            directory = checkpoint_dirs.begin_save(save, rollout_id)
            self._trainer.save(directory)
            if self._rank == 0:
                torch.save(rollout_state, Path(directory, ROLLOUT_STATE))
        if critic_save is not None:
            # First: a run resumes by the actor's latest, and finds the critic's of the same rollout.
            critic_place = "--critic-save" if critic_save == self._args.critic_save else place
            with writing(critic_place, critic_save, note=_STILL_WHOLE):
                self._trainer.save_critic(checkpoint_dirs.begin_save(critic_save, rollout_id))
                checkpoint_dirs.commit_save(critic_save, rollout_id)
        with writing(place, save, note=_STILL_WHOLE):
            checkpoint_dirs.commit_save(save, rollout_id)

    def go_back(self, rollout_id: int, save: str, critic_save: str | None) -> None:
        """Have weights and optimizers as they were after a rollout, of which there is a checkpoint below ``save``."""
        critic = None if critic_save is None else str(checkpoint_directory(critic_save, rollout_id))
        self._trainer.go_back(str(checkpoint_directory(save, rollout_id)), critic)

    def export(self, option: str, directory: str, rollout_id: int) -> None:
        """Write what is there after a rollout: by ``save_hf`` weights in a Hugging Face directory, by ``save_lora``
        adapters in PEFT's format."""
        with writing(flag_named(option), directory):
            getattr(self._trainer, option)(directory, rollout_id)

    def stop(self) -> None:
        """Leave the transport's process groups."""
        if self._publisher is not None:
            self._publisher.close()


def _keep_for_good() -> None:
    """Have Python look for garbage among what is made from now on alone. It would go through a million objects again
    and again: a push makes thousands of tensors, each of which counts towards the next look."""
    gc.collect()
    gc.freeze()


def local_rank(gpu: str | None) -> int:
    """The number of ``gpu`` among the devices that this process sees; 0 without GPUs."""
    if gpu is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu) if visible else int(gpu)
