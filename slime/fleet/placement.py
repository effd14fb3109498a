"""One placement group for the run; its bundles, sorted by host and GPU, are the logical slots 0..n-1. An engine that
joins takes those of one that left, or a group of its own."""

from __future__ import annotations

import argparse
import functools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.fleet.external import is_elsewhere
from slime.fleet.spec import EngineSpec, Fleet, fleet_of
from slime.options.checks.attention import check_attention
from slime.options.errors import OptionError
from slime.options.serving.sglang_config import CONFIG
from slime.processes.server_process import last_value
from slime.ray.supervision import InputError, RunError
from slime.utils import device
from slime.utils.http_utils import LOOPBACK
from slime.utils.stores import NODE_ADDRESS_VARIABLE

# Trainer and engine of a colocated slot share one unit of its resource.
_TRAIN_SHARE, _ENGINE_SHARE = 0.4, 0.2
_SAME_IN_DECODING = 128
"""Channels of heads for which FlashAttention 3 gives a token the same bits in decoding and in a prompt; of 64 it does
not, by `tools/compare_log_probs.py` on an H100."""


@dataclass(frozen=True)
class Slot:
    """One bundle of a placement group: a GPU, or a CPU on a host without GPUs."""

    bundle: int
    host: str
    gpu: str | None
    """As CUDA_VISIBLE_DEVICES names it: a number or an id."""
    group: PlacementGroup | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Placement:
    """The slots in logical order, which of them train, and which each entry of the fleet has."""

    slots: list[Slot]
    train: list[Slot]
    engines: list[list[Slot]]
    """In the order of the fleet's entries."""
    reaches_out: bool = False
    """Whether there are external engines on other hosts."""
    _left: list[list[Slot]] = field(default_factory=list, init=False, repr=False)
    """Of engines that have left, or died."""

    @property
    def on_gpus(self) -> bool:
        """Whether the slots are GPUs."""
        return any(slot.gpu is not None for slot in self.slots)

    @property
    def on_one_host(self) -> bool:
        """Whether trainers and engines are on one host."""
        return len({slot.host for slot in self.slots}) == 1

    @property
    def meets_on_loopback(self) -> bool:
        """Whether no other host has a part in the run's collectives."""
        return self.on_one_host and not self.reaches_out

    def interface(self) -> dict[str, str]:
        """Variables for actors: on one host ranks meet on loopback, and gloo would listen where its name leads."""
        if not self.meets_on_loopback:
            return {}
        return {NODE_ADDRESS_VARIABLE: LOOPBACK, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}

    def options(self, slot: Slot, *, trains: bool) -> dict[str, Any]:
        """Ray options that put an actor on ``slot``."""
        share = _TRAIN_SHARE if trains else _ENGINE_SHARE
        resources = {"num_cpus": 0, "num_gpus": share} if slot.gpu is not None else {"num_cpus": share}
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=slot.group, placement_group_bundle_index=slot.bundle
        )
        return {**resources, "scheduling_strategy": strategy}

    def slots_beside(self, slot: Slot) -> int:
        """How many of the run's slots are on the host of ``slot``, with it."""
        return sum(other.host == slot.host for other in self.slots)

    def number(self, slot: Slot) -> int:
        """Its place in the logical order; one of another group than the run's comes after them all."""
        return self._numbers.get(slot, len(self.slots))

    @functools.cached_property
    def _numbers(self) -> dict[Slot, int]:
        return {slot: number for number, slot in enumerate(self.slots)}

    def take(self, spec: EngineSpec, timeout: float) -> list[Slot]:
        """Slots for one more engine: those of one that left, or of the cluster's that are free in ``timeout`` seconds.
        RunError where there are none, or none where the run's servers may be."""
        for slots in self._left:
            if len(slots) == spec.width and not set(slots) & set(self.train):
                self._left.remove(slots)
                return slots
        slots = _reserve(spec.width, "GPU" if self.on_gpus else "CPU", timeout)
        try:
            _check_engines(slots, spec)
            elsewhere = sorted({slot.host for slot in slots} - {slot.host for slot in self.slots})
            if elsewhere and self.meets_on_loopback:
                # There trainers listen on loopback to the engines that they push to, and servers without keys do.
                raise RunError(
                    f"placement: the free slots are on {', '.join(elsewhere)}, and the run's are all on "
                    f"{self.slots[0].host}: an engine cannot join from another host there"
                )
        except BaseException:
            _release(slots)
            raise
        return slots

    def give_back(self, slots: list[Slot]) -> None:
        """Free the slots of an engine that is gone; an external one had none."""
        if not slots:
            return
        if slots[0] in self.slots:
            self._left.append(slots)
        else:
            _release(slots)

    def release(self) -> None:
        """Give the run's own slots back."""
        _release(self.slots)


def core_shortage(args: argparse.Namespace) -> str | None:
    """A warning where our own local Ray would count more CPU slots than there are cores; None otherwise."""
    fleet, cores = fleet_of(args), os.cpu_count() or 1
    if fleet.total <= cores or device.is_cuda() or os.environ.get("RAY_ADDRESS"):
        return None
    given = [f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node}"]
    slots: Counter[str] = Counter()
    for spec in fleet.engines:
        if not spec.beside_trainers and not spec.urls:
            slots[spec.flag] += spec.slots
    given += [f"{count} slots in {flag}" if flag == CONFIG else f"{flag} {count}" for flag, count in slots.items()]
    return (
        f"{fleet.total} slots share the {cores} cores of this host, which has no GPU: fewer may well be faster "
        f"({', '.join(given)})"
    )


def describe_placement(args: argparse.Namespace) -> str:
    """One line a slot: who trains and who generates there. InputError for engines that this host's GPUs cannot run."""
    fleet = fleet_of(args)
    _check_precision(args, fleet, gpus=device.is_cuda())
    users = [[f"training rank {slot}"] if slot < fleet.trainers else [] for slot in range(fleet.total)]
    for spec, first in zip(fleet.engines, fleet.first_numbers(), strict=True):
        for slot in spec.place:
            engine, part = divmod(slot - spec.first_slot, spec.width)
            node = f" node {part // spec.per_node}" if spec.width > spec.per_node else ""
            users[slot].append(f"{spec.model.called('engine')} {first + engine}{node}")
    lines = [f"placement: {args.placement}, {fleet.total} slots of one {'GPU' if device.is_cuda() else 'CPU'}"]
    lines += [f"  slot {slot}: {', '.join(names) or 'left empty'}" for slot, names in enumerate(users)]
    # A script for GPUs may be looked at where there are none.
    reasons = (core_shortage(args), *_what_trainers_lack(args, fleet, device.is_cuda()))
    lines += [f"warning: {reason}" for reason in reasons if reason]
    return "\n".join(lines)


def place(args: argparse.Namespace, fleet: Fleet) -> Placement:
    """Reserve the run's slots. InputError, with the command that would start enough, where the cluster has too few, and
    for engines that its GPUs cannot run; RunError where they did not become free in time."""
    total = fleet.total
    reaches_out = any(map(is_elsewhere, fleet.external))
    if total == 0:
        return Placement([], [], [[] for _ in fleet.engines], reaches_out)
    # The driver's own host may have none: `ray job submit` runs it on a head node.
    resource = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    available = int(ray.cluster_resources().get(resource, 0))
    if available < total:
        flag = "--num-gpus" if resource == "GPU" else "--num-cpus"
        ours = [spec for spec in fleet.engines if not spec.urls]
        users = ", ".join([f"{fleet.trainers} to train", *(f"{spec.slots} {spec.model.role}" for spec in ours)])
        flags = " / ".join(dict.fromkeys(["--actor-num-gpus-per-node", *(spec.flag for spec in ours)]))
        raise InputError(
            f"placement: the run needs {total} {resource} slots ({users}) and Ray has {available}; lower "
            f"{flags}, or start more: `ray start --head {flag} {total}`"
        )
    _check_precision(args, fleet, gpus=resource == "GPU")
    if reasons := list(_what_trainers_lack(args, fleet, gpus=resource == "GPU")):
        raise InputError(f"placement: {'; '.join(reasons)}")
    slots = _reserve(total, resource, args.placement_timeout)
    try:
        engines = [slots[place.start : place.stop] for place in fleet.places()]
        for spec, its_slots in zip(fleet.engines, engines, strict=True):
            _check_engines(its_slots, spec)
        if args.no_api_keys and fleet.engines:
            _check_loopback(slots, ray.util.get_node_ip_address())
    except BaseException:
        _release(slots)
        raise
    return Placement(slots, slots[: fleet.trainers], engines, reaches_out)


def _reserve(count: int, resource: str, timeout: float) -> list[Slot]:
    """So many slots, in logical order, in a placement group of their own; raises RunError."""
    bundle = {"GPU": 1, "CPU": 1} if resource == "GPU" else {"CPU": 1}
    group = placement_group([bundle] * count, strategy="PACK")
    try:
        if not group.wait(timeout):
            free = ray.available_resources().get(resource, 0)
            raise RunError(
                f"placement: {count} {resource} slots were not free within {timeout:.0f} s "
                f"(free now: {free:.0f}; --placement-timeout)"
            )
        return _probe(group, count, resource == "GPU", timeout)
    except BaseException:
        remove_placement_group(group)
        raise


def _release(slots: list[Slot]) -> None:
    for group in {slot.group.id: slot.group for slot in slots if slot.group is not None}.values():
        remove_placement_group(group)


def _what_trainers_lack(args: argparse.Namespace, fleet: Fleet, gpus: bool) -> Iterator[str]:
    """What the options ask of trainers that they do not have there."""
    if not fleet.trainers:
        return
    try:
        check_attention(args, "cuda" if gpus else "cpu")
    except OptionError as error:
        yield str(error)
    if args.record_memory_history and args.memory_recorder == "torch" and not gpus:
        yield (
            "--record-memory-history: --memory-recorder torch records what is allocated on GPUs, and there are none: "
            "take memray, which records the host's memory, or drop it"
        )


def _check_precision(args: argparse.Namespace, fleet: Fleet, gpus: bool) -> None:
    """Raise InputError for engines that would compute in float32 on GPUs by kernels that are not made for it: they
    would start, and die at their first request."""
    if args.true_on_policy_mode:
        _check_same_kernels(args, gpus)
    if not gpus:
        return
    for spec in fleet.engines:
        flags = spec.sglang_flags
        dtype = last_value(flags, "--dtype") or args.params_dtype
        switched_on = "--enable-deterministic-inference" in flags or args.deterministic_mode
        if spec.slots and dtype == "float32" and not switched_on:
            raise InputError(
                f"placement: {spec.model.called('engine')}s would compute in float32, for which SGLang's RMSNorm has "
                "no kernel on GPUs: give --bf16 instead of --fp32, or --sglang-enable-deterministic-inference"
            )


def _check_same_kernels(args: argparse.Namespace, gpus: bool) -> None:
    """Raise InputError where engines have no kernels that are the same for prompts and in decoding."""
    if (args.params_dtype == "float32") == gpus:
        where, flag = ("with", "--bf16") if gpus else ("without", "--fp32")
        raise InputError(f"placement: --true-on-policy-mode on hosts {where} GPUs is for {flag}: give that")
    if gpus and args.kv_channels != _SAME_IN_DECODING:
        raise InputError(
            f"placement: --true-on-policy-mode on GPUs is for heads of {_SAME_IN_DECODING} channels, and this model's "
            f"have {args.kv_channels}, for which FlashAttention 3 rounds otherwise in decoding than in prompts"
        )
    if gpus and (given := last_value(args.sglang_cli, "--attention-backend") or "fa3") != "fa3":
        raise InputError(
            f"placement: --true-on-policy-mode: trainers share FlashAttention 3 with engines, and "
            f"--sglang-attention-backend is {given}: drop it"
        )


def _check_engines(slots: list[Slot], spec: EngineSpec) -> None:
    """Raise InputError for a server with slots on two hosts: an engine has one, or one for each of its nodes."""
    width, together = spec.width, spec.on_node
    for first in range(0, len(slots), together):
        hosts = sorted({slot.host for slot in slots[first : first + together]})
        if len(hosts) > 1:
            part = f"{together} slots of " if width > together else ""
            raise InputError(
                f"placement: {part}engine {first // width} of {width} slots would lie on the hosts "
                f"{', '.join(hosts)}; choose {spec.width_flag}, --actor-num-gpus-per-node and "
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
    slots = [Slot(bundle, host, gpu, group) for bundle, (host, gpu) in enumerate(found)]
    return sorted(slots, key=_logical_order)


def _logical_order(slot: Slot) -> tuple[list[int], str, int, str]:
    address = [int(part) if part.isdigit() else -1 for part in slot.host.split(".")]
    gpu = slot.gpu or ""
    return address, slot.host, int(gpu) if gpu.isdigit() else -1, gpu
