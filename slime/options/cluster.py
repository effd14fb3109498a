"""Where processes run, how long each wait may last, and how weights travel from the trainer to the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slime.options.flags.schema import option
from slime.options.rules import Rule


@dataclass
class ClusterOptions:
    """Cluster: which slots train and which generate (a slot is a GPU, or a CPU on a host without GPUs)."""

    actor_num_nodes: int = option(1, "Number of training nodes.", at_least=1, at_most=100_000)
    actor_num_gpus_per_node: int = option(8, "Training slots on each training node.", at_least=1, at_most=10_000)
    rollout_num_gpus: int | None = option(
        None,
        "Slots for generation; with --colocate the training slots are used and this is ignored.",
        at_least=0,
        at_most=1_000_000,
    )
    rollout_num_gpus_per_engine: int = option(
        1, "Slots of one SGLang engine (its tensor-parallel size).", at_least=1, at_most=100_000
    )
    num_gpus_per_node: int = option(
        8,
        "Slots that one node has. An engine with more slots spans several nodes, with this many on each.",
        at_least=1,
    )
    colocate: bool = option(False, "Generate on the training slots, taking turns.")
    offload_train: bool | None = option(
        None,
        "Move the trainers' GPU memory to host memory while the engines generate (default with --colocate on GPUs).",
    )
    offload_budget_gib: float = option(
        0.0,
        "GiB of each GPU, at most, that sleeping trainers keep, in whole tensors: weights first, then optimizer state. "
        "That is not copied to host memory and back. Engines take their share (--sglang-mem-fraction-static) of what "
        "is left.",
        at_least=0,
    )
    offload_rollout: bool | None = option(
        None,
        "Free the engines' GPU memory while the trainers train; weights are pushed again afterwards (default "
        "with --colocate on GPUs).",
    )
    train_backend: Literal["megatron"] = option("megatron", "Training backend.")
    train_env_vars: dict[str, Any] | None = option(None, "Environment variables of the training workers, as JSON.")
    distributed_timeout_minutes: float = option(10.0, "Deadline of one collective among training ranks.", above=0)
    trainer_restart_limit: int = option(
        5, "How often in an hour trainers, or the rollout manager, are made anew before the run ends.", at_least=0
    )
    trainer_snapshot_interval: int | None = option(
        None,
        "After every so many rollouts keep a checkpoint in host memory, from which trainers that are made anew go on; "
        "otherwise from the newest in --save.",
        at_least=1,
    )
    allow_untested_versions: bool = option(
        False,
        "Where a package is installed in another release than slime's patches to it are for, do without these patches "
        "instead of refusing to start (docs/patches.md lists them).",
    )
    no_api_keys: bool = option(False, "Run servers without API keys; allowed only if every server listens on loopback.")


@dataclass
class DeadlineOptions:
    """Deadlines: in seconds; every wait has one."""

    placement_timeout: float = option(300.0, "Until the cluster has given the slots.", above=0)
    engine_start_timeout: float = option(600.0, "Until an engine or the router answers and is registered.", above=0)
    data_load_timeout: float = option(1800.0, "Reading, checking and tokenising the prompts of all files.", above=0)
    rollout_timeout: float = option(3600.0, "One generate or eval call, while no older one is under way.", above=0)
    request_timeout: float = option(1800.0, "One generation request.", above=0)
    rollout_health_check_interval: float = option(
        10.0, "Seconds between two health checks of an engine or router.", above=0
    )
    rollout_health_check_timeout: float = option(
        30.0, "One health check; a server that misses two in a row counts as hanging.", above=0
    )
    generate_timeout: float | None = option(
        None, "One call of a custom generate function or of a sample hook; default as --rollout-timeout.", above=0
    )
    reward_timeout: float = option(120.0, "One reward call, of a custom function or a remote service too.", above=0)
    train_timeout: float = option(3600.0, "One training call on a rollout's batch.", above=0)
    weight_update_timeout: float = option(600.0, "One push of the weights to all engines.", above=0)
    checkpoint_timeout: float = option(1800.0, "Writing a checkpoint, or starting trainers, which read it.", above=0)


@dataclass
class RecoveryOptions:
    """Recovery: engines and routers that die or hang while the run goes on."""

    use_fault_tolerance: bool = option(
        True,
        "Start a lost engine again, in the background, and give it requests when it has the current weights; start a "
        "lost router again, at its address; make lost trainers, and a lost rollout manager, anew. Without, a run goes "
        "on with the engines that are left, and ends when it loses anything else.",
    )
    engine_restart_limit: int = option(
        3, "Starts of one lost engine, or router, within an hour; one that is lost once more is given up.", at_least=0
    )
    min_engines: int = option(
        1, "Of the trained model: the run ends when fewer are left, those that start again included.", at_least=1
    )


@dataclass
class WeightUpdateOptions:
    """Weight update: from the trainer to the engines."""

    update_weight_transport: Literal["tensor", "distributed", "nccl", "disk"] | None = option(
        None,
        "tensor: handles on the same host (default with --colocate); distributed (or nccl): one collective group "
        "(default otherwise); disk: an HF directory per version.",
    )
    update_weight_mode: Literal["full"] = option("full", "full: every push carries every weight.")
    update_weight_buffer_size: int = option(
        512 * 2**20,
        "Bytes of one bucket of weights; a push needs memory for up to 4.5 buckets on each training rank.",
        at_least=1,
    )
    update_weight_disk_dir: str | None = option(None, "Directory shared with the engines for transport disk.")
    update_weight_disk_keep_files: bool = option(False, "Keep the directories of earlier versions.")
    check_weight_update_equal: bool = option(
        False, "After every push prove that engine and trainer agree byte by byte."
    )


RULES = (
    Rule("trainer_snapshot_interval", "has no effect with", "placement=rollout_only", ": nothing is trained"),
    Rule("offload_train offload_rollout", "needs", "placement=colocate", ": nobody else wants that memory"),
    Rule("offload_budget_gib", "needs", "placement=colocate", ": nobody else wants that memory"),
    Rule("offload_budget_gib", "has no effect with", "offload_train=False", ": trainers do not sleep"),
    Rule(
        "update_weight_transport=distributed|nccl",
        "needs separate slots, not",
        "placement=colocate",
        "; use tensor or disk",
    ),
    Rule(
        "update_weight_transport=tensor",
        "needs",
        "placement=colocate",
        "; use distributed or disk",
        when="placement=disaggregate",
    ),
    Rule(
        "custom_update_weight_post_write_path",
        "needs",
        "update_weight_transport=disk",
        ": no other transport writes files",
    ),
)
