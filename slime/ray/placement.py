"""One placement group for the run; its bundles, sorted by host and GPU, are the logical slots 0..n-1."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.ray.supervision import InputError, RunError
from slime.utils import device

# Trainer and engine of a colocated slot share one unit of its resource.
_TRAIN_SHARE, _ENGINE_SHARE = 0.4, 0.2


@dataclass(frozen=True)
class Slot:
    """One bundle of the placement group: a GPU, or a CPU on a host without GPUs."""

    bundle: int
    host: str
    gpu: str | None
    """As CUDA_VISIBLE_DEVICES names it: a number or an id."""


@dataclass(frozen=True)
class Placement:
    """The slots in logical order, and which of them train, generate and serve the reward model."""

    group: PlacementGroup | None
    slots: list[Slot]
    train: list[Slot]
    rollout: list[Slot]
    reward: list[Slot]

    @property
    def on_gpus(self) -> bool:
        """Whether the slots are GPUs."""
        return any(slot.gpu is not None for slot in self.slots)

    @property
    def trains_on_one_host(self) -> bool:
        """Whether all trainers are on one host."""
        return len({slot.host for slot in self.train}) == 1

    @property
    def on_one_host(self) -> bool:
        """Whether trainers and engines are on one host."""
        return len({slot.host for slot in self.slots}) == 1

    def options(self, slot: Slot, *, trains: bool) -> dict[str, Any]:
        """Ray options that put an actor on ``slot``."""
        share = _TRAIN_SHARE if trains else _ENGINE_SHARE
        resources = {"num_cpus": 0, "num_gpus": share} if slot.gpu is not None else {"num_cpus": share}
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=slot.bundle
        )
        return {**resources, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Give the slots back."""
        if self.group is not None:
            remove_placement_group(self.group)


def slot_counts(args: argparse.Namespace) -> tuple[int, int, int, int]:
    """(slots in all, training slots, index of the first rollout slot, and of the reward model's) of the run."""
    train = args.actor_num_gpus
    rollout = args.rollout_num_gpus or 0
    others, train, rollout_start = {
        "train_only": (train, train, train),
        "rollout_only": (rollout, 0, 0),
        "colocate": (max(train, rollout), train, 0),
        "disaggregate": (train + rollout, train, train),
    }[args.placement]
    return others + args.rm_num_gpus, train, rollout_start, others


def core_shortage(args: argparse.Namespace) -> str | None:
    """A warning where our own local Ray would count more CPU slots than there are cores; None otherwise."""
    slots, cores = slot_counts(args)[0], os.cpu_count() or 1
    if slots <= cores or device.is_cuda() or os.environ.get("RAY_ADDRESS"):
        return None
    flags = f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node}"
    if args.placement in ("disaggregate", "rollout_only"):
        flags += f", --rollout-num-gpus {args.rollout_num_gpus}"
    if args.rm_num_gpus:
        flags += f", --rm-num-gpus {args.rm_num_gpus}"
    return f"{slots} slots share the {cores} cores of this host, which has no GPU: fewer may well be faster ({flags})"


def describe_placement(args: argparse.Namespace) -> str:
    """One line a slot: who trains and who generates there."""
    total, train, rollout_start, reward_start = slot_counts(args)
    width, per_node = args.rollout_num_gpus_per_engine, args.num_gpus_per_node
    lines = [f"placement: {args.placement}, {total} slots of one {'GPU' if device.is_cuda() else 'CPU'}"]
    for slot in range(total):
        users = [f"training rank {slot}"] if slot < train else []
        if slot >= reward_start:
            users.append(f"reward engine {(slot - reward_start) // args.rm_num_gpus_per_engine}")
        elif slot >= rollout_start:
            engine, part = divmod(slot - rollout_start, width)
            users.append(f"engine {engine}" + (f" node {part // per_node}" if width > per_node else ""))
        lines.append(f"  slot {slot}: {', '.join(users)}")
    if shortage := core_shortage(args):
        lines.append(f"warning: {shortage}")
    return "\n".join(lines)


def place(args: argparse.Namespace) -> Placement:
    """Reserve the run's slots.

    Raises:
        InputError: the cluster has too few; with the command that would start enough.
        RunError: they did not become free in time.
    """
    total, train, rollout_start, reward_start = slot_counts(args)
    if total == 0:
        return Placement(None, [], [], [], [])
    # The driver's own host may have none: `ray job submit` runs it on a head node.
    resource = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    available = int(ray.cluster_resources().get(resource, 0))
    if available < total:
        flag = "--num-gpus" if resource == "GPU" else "--num-cpus"
        raise InputError(
            f"placement: the run needs {total} {resource} slots ({train} to train, {reward_start - rollout_start} to "
            f"generate, {total - reward_start} for a reward model) and Ray has {available}; lower "
            "--actor-num-gpus-per-node / --rollout-num-gpus / --rm-num-gpus, or start more: "
            f"`ray start --head {flag} {total}`"
        )
    bundle = {"GPU": 1, "CPU": 1} if resource == "GPU" else {"CPU": 1}
    group = placement_group([bundle] * total, strategy="PACK")
    if not group.wait(args.placement_timeout):
        free = ray.available_resources().get(resource, 0)
        remove_placement_group(group)
        raise RunError(
            f"placement: {total} {resource} slots were not free within {args.placement_timeout:.0f} s "
            f"(free now: {free:.0f}; --placement-timeout)"
        )
    try:
        slots = _probe(group, total, resource == "GPU", args.placement_timeout)
        rollout, reward = slots[rollout_start:reward_start], slots[reward_start:]
        _check_engines(rollout, args.rollout_num_gpus_per_engine, args.num_gpus_per_node, "rollout")
        _check_engines(reward, args.rm_num_gpus_per_engine, args.num_gpus_per_node, "rm")
        if args.no_api_keys and slots[rollout_start:]:
            _check_loopback(slots, ray.util.get_node_ip_address())
    except BaseException:
        remove_placement_group(group)
        raise
    return Placement(group, slots, slots[:train], rollout, reward)


def _check_engines(slots: list[Slot], width: int, per_node: int, flag: str) -> None:
    """Raise InputError for a server with slots on two hosts: an engine has one, or one for each of its nodes."""
    together = min(width, per_node)
    for first in range(0, len(slots), together):
        hosts = sorted({slot.host for slot in slots[first : first + together]})
        if len(hosts) > 1:
            part = f"{together} slots of " if width > together else ""
            raise InputError(
                f"placement: {part}engine {first // width} of {width} slots would lie on the hosts "
                f"{', '.join(hosts)}; choose --{flag}-num-gpus-per-engine, --actor-num-gpus-per-node and "
                "--num-gpus-per-node so that servers end where hosts do"
            )


def _check_loopback(slots: list[Slot], here: str) -> None:
    """Raise InputError for slots on other hosts than the driver's: servers without keys listen on loopback."""
    elsewhere = sorted({slot.host for slot in slots} - {here})
    if elsewhere:
        raise InputError(
            f"placement: --no-api-keys is for servers on loopback, and there are slots on {', '.join(elsewhere)}, not "
            f"only on the driver's host {here}: drop the flag"
        )


def _probe(group: PlacementGroup, count: int, with_gpu: bool, timeout: float) -> list[Slot]:
    """Ask each bundle where it is, and sort by host address and GPU."""

    def report() -> tuple[str, str | None]:
        return ray.util.get_node_ip_address(), str(ray.get_gpu_ids()[0]) if with_gpu else None

    def probe(bundle: int) -> ray.ObjectRef:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        share = {"num_cpus": 0, "num_gpus": 0.1} if with_gpu else {"num_cpus": 0.1}
        return ray.remote(report).options(scheduling_strategy=strategy, **share).remote()

    try:
        found = ray.get([probe(i) for i in range(count)], timeout=timeout)
    except RayError as error:
        raise RunError(
            f"placement: the slots did not say within {timeout:.0f} s (--placement-timeout) where they are: {error}"
        ) from None
    slots = [Slot(bundle, host, gpu) for bundle, (host, gpu) in enumerate(found)]
    return sorted(slots, key=_logical_order)


def _logical_order(slot: Slot) -> tuple[list[int], str, int, str]:
    """By host address, then by GPU number, or by id where GPUs are named so."""
    address = [int(part) if part.isdigit() else -1 for part in slot.host.split(".")]
    gpu = slot.gpu or ""
    return address, slot.host, int(gpu) if gpu.isdigit() else -1, gpu
