"""What the memory of a run's hosts holds at its peak: the host-memory plan of ``--dry-run``.

A plan is of a *node*: so many slots of a host that has ``--num-gpus-per-node`` of them, or, where a run starts its own
Ray, all slots on this host. It is computed from the model's shape and the options; docs/memory.md says how near it
comes.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from slime.batching.parameters import Matrices, cached_numbers, matrices
from slime.driver.preflight.places import checkpoint_bytes, moment_bytes, weight_bytes
from slime.files.storage import amount, nearest_directory
from slime.fleet.spec import EngineSpec, Fleet, fleet_of
from slime.options.checks.hook_paths import columns_of
from slime.processes.server_process import last_value
from slime.ray.cluster import running_address
from slime.ray.janitor import MEMORY
from slime.rollout.batches.train_data import decoder_shape
from slime.utils import device

_GIB = 2**30
_DRIVER_SIDE, _TRAINER, _ENGINE, _ENGINE_RANK = 1.2 * _GIB, 0.4 * _GIB, 0.9 * _GIB, 0.5 * _GIB
"""Of processes without a model, measured on a CPU: Ray, driver, manager and router; a training rank; an engine's
server, and each of its ranks."""
_CUDA = 2 * _GIB
"""What CUDA's libraries take of the host in each process on a GPU: assumed."""
_BUFFERS = 4.5
"""Buckets of a push that a training rank has at once (docs/memory.md)."""
_SAMPLE_TOKEN = 80
"""Bytes of a token in a `Sample`: Python's own numbers for its id and its log-prob."""
_CPU_CACHE = 65536
"""Tokens in the cache of an engine without a GPU, unless told."""
_ENDS_AT = 0.95
"""Ray ends processes of a host of whose memory more is in use."""
_MORE = "train on more GPUs"
_SHOWN = 0.005
"""Of the whole; lines of less are not printed."""
_ADVICE = 3
"""Of the largest lines there is advice."""
_GRADIENT = 4
"""Bytes of one, and of a main parameter."""
_IN_HALVES = 1.5
"""How often each byte of a model's state is there on the way to a disk where gated matrices, half of it, are twice."""
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_FLAGS_OF_ENGINES = {"--cpu-offload-gb": _GIB, "--hicache-size": 10**9}
"""SGLang's, of host memory for each rank, and in what they count it."""


@dataclass(frozen=True)
class Share:
    """A line of a plan: bytes at the peak.

    Attributes:
        shared: whether they are in /dev/shm, which is memory of the host too.
        less: what makes it less, in words for a user.
    """

    what: str
    nbytes: float
    shared: bool = False
    less: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """What of a run is on one host: its slots, training ranks among them, engines' slots, and the driver's side."""

    slots: range
    trainers: int
    engines: tuple[tuple[EngineSpec, int], ...]
    has_driver: bool


@dataclass(frozen=True)
class _Rank:
    """One model on one training rank, in the mean over pipeline stages: elements, and bytes of optimizer state."""

    elements: float
    state: float


def lines(args: Namespace) -> list[str]:
    """The plan of the node that needs the most, beside what this host has, and warnings where it does not fit."""
    node, shares = fullest(args, device.is_cuda())
    used, shared = (sum(s.nbytes for s in shares if s.shared or not only) for only in (False, True))
    ram, free = _ram(), shutil.disk_usage(MEMORY).free
    width = max(len(share.what) for share in shares)
    large = [share for share in shares if share.nbytes > _SHOWN * used]
    rows = [f"  {s.what:<{width}}  {amount(s.nbytes):>9}{f' in {MEMORY}' if s.shared else ''}" for s in large]
    where = f"slots {node.slots.start} to {node.slots.stop - 1}" if len(node.slots) else "of no slots"
    rows.append(f"  {'in all':<{width}}  {amount(used):>9} of the {amount(ram)} that this host has")
    if args.save:
        size = checkpoint_bytes(args, _elements(args)) * (1 + args.use_critic)
        disk = shutil.disk_usage(nearest_directory(Path(args.save))).free
        rows.append(f"  {'a checkpoint in --save':<{width}}  {amount(size):>9} of the {amount(disk)} free on its disk")
    found = []
    for what, need, has in ((f"{_ENDS_AT:.0%} of this host's memory", used, _ENDS_AT * ram), (MEMORY, shared, free)):
        if need > has:
            those = [share for share in shares if share.less and (share.shared or what != MEMORY)]
            largest = sorted(those, key=lambda share: -share.nbytes)[:_ADVICE]
            helps = "; ".join(dict.fromkeys(word for share in largest for word in share.less)) or "take a larger host"
            found.append(f"warning: about {amount(need)} do not fit into the {amount(has)} of {what}: {helps}")
    if found and not device.is_cuda():
        found.append(
            "  this host has no GPU, so that all of it is on CPUs; of GPUs: python3 tools/simulate.py step --help"
        )
    return [f"host memory at the peak, of the node that needs the most ({where}):", *rows, *found]


def fullest(args: Namespace, on_gpus: bool) -> tuple[Node, list[Share]]:
    """The node that needs the most, and its plan."""
    plans = [(node, plan(args, node, on_gpus)) for node in nodes(args, fleet_of(args))]
    return max(plans, key=lambda found: sum(share.nbytes for share in found[1]))


def nodes(args: Namespace, fleet: Fleet) -> list[Node]:
    """The hosts of a run, in the order of their slots; the driver is on the first."""
    size = args.num_gpus_per_node if running_address() else max(1, fleet.total)
    found = []
    for start in range(0, max(1, fleet.total), size):
        slots = range(start, min(start + size, fleet.total))
        engines = [
            (spec, len(range(max(start, spec.place.start), min(slots.stop, spec.place.stop)))) for spec in fleet.engines
        ]
        trainers = len(range(start, min(slots.stop, fleet.trainers)))
        found.append(Node(slots, trainers, tuple((spec, n) for spec, n in engines if n > 0), start == 0))
    return found


def plan(args: Namespace, node: Node, on_gpus: bool) -> list[Share]:
    """The lines of one node's plan, without those of nothing."""
    parts = [_driver_side(args)] if node.has_driver else []
    if node.trainers:
        parts.append(_trainers(args, node.trainers, on_gpus))
    parts += [_engines(args, spec, slots, on_gpus) for spec, slots in node.engines]
    return [share for part in parts for share in part if share.nbytes >= 1]


def _driver_side(args: Namespace) -> Iterator[Share]:
    yield Share("Ray, driver, rollout manager with its prompts", _DRIVER_SIDE)
    tokens = args.rollout_batch_size * args.n_samples_per_prompt * _longest(args)
    rollouts = args.async_buffer_size + 2 if args.asynchronous else 1
    fewer = ("lower --rollout-batch-size, --n-samples-per-prompt or --rollout-max-response-len",)
    yield Share("samples of a rollout, all of the longest", rollouts * tokens * _SAMPLE_TOKEN, less=fewer)
    if args.placement != "rollout_only":
        batches = rollouts * tokens * _bytes_of_token(args)
        yield Share(f"batches of {rollouts} rollout{'s' * (rollouts > 1)}, all of the longest", batches, True, fewer)
    if args.trainer_snapshot_interval and args.placement != "rollout_only":
        size = 2 * checkpoint_bytes(args, _elements(args)) * (1 + args.use_critic)
        yield Share("two snapshots of the trainers", size, True, ("drop --trainer-snapshot-interval",))


def _longest(args: Namespace) -> int:
    """Tokens of a sample at the most: where no flag says how long prompts are, as long as responses; of functions that
    may call the engine several times, what the model takes."""
    room = args.rollout_max_context_len or args.model_context
    response = args.rollout_max_response_len or room
    if args.custom_generate_function_path is not None:
        return int(room)
    is_given = "rollout_max_prompt_len" in args.given_options
    return int(min(room, response + (args.rollout_max_prompt_len if is_given else response)))


def _bytes_of_token(args: Namespace) -> int:
    """Of a rollout's batch: what columns have for each token, as if all were of the response."""
    columns = [column for column in columns_of(args) if column.made_by != "trainer" and column.wanted(args)]
    per_token = [column for column in columns if column.span in ("response", "sequence")]
    return sum(np.dtype(column.dtype).itemsize * int(np.prod(column.trailing)) for column in per_token)


def _trainers(args: Namespace, count: int, on_gpus: bool) -> Iterator[Share]:
    yield Share(f"{count} training rank{'s' * (count > 1)} without a model", count * (_TRAINER + on_gpus * _CUDA))
    rank, models = _rank(args), 1 + args.use_critic
    weights = rank.elements * weight_bytes(args)
    gradients = 0 if args.lora_rank else rank.elements * _GRADIENT
    offloads = args.offload_train if args.offload_train is not None else on_gpus and args.placement == "colocate"
    in_host = args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
    of_all = count * models
    if not on_gpus:
        yield Share("weights, gradients, optimizer of trainers", of_all * (weights + gradients + rank.state))
        buckets = min(_BUFFERS * args.update_weight_buffer_size, 2 * _elements(args) * weight_bytes(args))
        yield Share("buckets of a push", count * buckets, less=("lower --update-weight-buffer-size",))
    elif in_host:
        yield Share("optimizer state (--optimizer-cpu-offload)", of_all * in_host * rank.state, less=(_MORE,))
    if offloads:
        pinned = "copies of sleeping trainers, pinned" if on_gpus else "copies of sleeping trainers"
        less = ("--no-offload-train, where GPUs have room", _MORE)
        stays = count * args.offload_budget_gib * 2**30
        if stays < count * weights:  # which are one tensor or few, and stay whole or not at all
            stays = 0
        copies = of_all * (weights + (1 - in_host * on_gpus) * rank.state)
        yield Share(pinned, max(0.0, copies - stays), less=("raise --offload-budget-gib, where GPUs have room", *less))
    sets = _weight_sets(args)
    less = ("drop what needs another set of weights", _MORE)
    yield Share(f"sets of weights: {', '.join(sets)}", count * sum(sets.values()) * weights, less=less)
    if args.save or args.trainer_snapshot_interval:
        less = (_MORE, "save weights alone (--save-hf, no --save)")
        yield Share("a checkpoint on its way to a disk", _saving(args, count, on_gpus), less=less)


def _saving(args: Namespace, count: int, on_gpus: bool) -> float:
    """What so many ranks have in host memory while they save, one model after the other: each the part of the
    checkpoint that it writes. A distributed optimizer's state has the parameters' values in float32 too, and is copied
    there first where it is on a GPU, or cut as with gradients in buckets: of gated matrices Megatron's writer then
    copies the halves once more."""
    if args.lora_rank or not (on_gpus or args.use_distributed_optimizer):
        return 0.0
    state = float(_main_bytes(args) + moment_bytes(args))
    if args.use_distributed_optimizer:
        state = 3 * _GRADIENT * (_IN_HALVES if on_gpus or args.overlap_grad_reduce else 1)
    return count * _elements(args) / args.world_size * (weight_bytes(args) + state)


def _weight_sets(args: Namespace) -> dict[str, int]:
    """How many wait in host memory of each kind; the current one has a copy too once another has been in its place. Of
    adapters, which then are all that differs, they take next to nothing."""
    sets = {"reference": int(args.needs_reference), "teacher": int(args.opd_type == "megatron")}
    if args.keep_old_actor:
        sets["older versions"] = args.max_weight_staleness + 1
    found = {name: count for name, count in sets.items() if count}
    return {} if args.lora_rank or not found else {"current": 1, **found}


def _rank(args: Namespace) -> _Rank:
    """Of the actor; a critic has as much, but for its head."""
    elements = 0.0
    for matrix in _matrices(args):
        is_expert = matrix.part == "experts"
        cut = args.expert_tensor_parallel_size if is_expert else args.tensor_model_parallel_size
        ranks = args.pipeline_model_parallel_size * (args.expert_model_parallel_size if is_expert else 1)
        elements += matrix.count / ranks * -(-matrix.size // cut)
    held = _elements(args) / args.world_size if args.use_distributed_optimizer else elements
    return _Rank(elements, 0.0 if args.lora_rank else held * (_main_bytes(args) + moment_bytes(args)))


def _main_bytes(args: Namespace) -> int:
    """Of a main parameter; in float32 the model's own are."""
    return 0 if args.params_dtype == "float32" else _GRADIENT


def _engines(args: Namespace, spec: EngineSpec, slots: int, on_gpus: bool) -> Iterator[Share]:
    called, count = spec.model.called("engine"), slots / spec.width
    yield Share(f"{called}s without a model", math.ceil(count) * _ENGINE + slots * (_ENGINE_RANK + on_gpus * _CUDA))
    weights, own = _served(args, spec), spec.options(args, on_gpus)
    if not on_gpus:
        yield Share(f"weights of {called}s", count * weights)
        tokens = int(last_value(spec.sglang_flags, "--max-total-tokens") or _CPU_CACHE)
        cache = tokens * cached_numbers(decoder_shape(args)) * weight_bytes(args)
        yield Share(f"caches of {called}s", count * cache, less=("lower --sglang-max-total-tokens",))
    elif own.offload_rollout and (own.keeps_weights or own.lora_sync == "adapter"):
        yield Share(
            f"copies of sleeping {called}s", count * weights, less=("--no-offload-rollout, where GPUs have room",)
        )
    for flag, unit in _FLAGS_OF_ENGINES.items():
        given = float(last_value(spec.sglang_flags, flag) or 0)
        yield Share(f"{flag} of {called}s", slots * given * unit, less=(f"lower --sglang-{flag[2:]}",))


def _served(args: Namespace, spec: EngineSpec) -> float:
    """Bytes of one engine's weights: of the model that is trained, or of another's files."""
    if spec.model.checkpoint == args.hf_checkpoint:
        return _elements(args) * weight_bytes(args)
    return sum(file.stat().st_size for file in Path(spec.model.checkpoint).glob("*.safetensors"))


def _matrices(args: Namespace) -> list[Matrices]:
    return matrices(decoder_shape(args), tied=not args.untie_embeddings_and_output_weights)


def _elements(args: Namespace) -> int:
    return sum(matrix.elements for matrix in _matrices(args))


def _ram() -> int:
    """Of this host, or what its container may have."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(_LIMIT.read_text()))
    return total
