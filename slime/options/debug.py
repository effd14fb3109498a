"""Looking closer: where metrics go, parts of the loop alone, and what was configured."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from argparse import Namespace
from dataclasses import dataclass
from string import Formatter
from typing import Literal

from slime.files.checkpoints import find_checkpoint, same_place
from slime.options.checkpoint import where_loaded
from slime.options.errors import OptionError, naming
from slime.options.flags.schema import flag_named, function_path, option
from slime.options.rules import Rule

_TEMPLATES: dict[str, tuple[str, ...]] = {
    "save_hf": (),
    "save_lora": (),
    "load_debug_rollout_data": (),
    "save_debug_rollout_data": ("rollout_id",),
    "save_debug_train_data": ("rollout_id", "rank"),
}
"""Options that are paths with places for numbers, and which of these must be in them, since every file is kept."""
_PACKAGES = ("mlflow", "swanlab", "trackio")
"""Of trackers, those that are not installed with slime."""
_DUMPS = ("save_debug_rollout_data", "save_debug_train_data")
_NUMBERS = {"rollout_id": r"(?:eval_)? *(\d+)", "rank": r" *\d+"}
_WIDTH = re.compile(r"([ 0]?>)?0?\d{0,2}d?")
"""How a number may be written: filled up with zeros or blanks in front."""


def kept_groups(groups: int, share: float | None) -> list[int]:
    """Which of so many groups ``--load-debug-rollout-data-subsample`` keeps: at least one, evenly spaced."""
    if share is None:
        return list(range(groups))
    count = max(1, round(groups * share))
    return [kept * groups // count for kept in range(count)] if groups else []


@dataclass
class TrackingOptions:
    """Tracking: metrics.jsonl is always written; these add more."""

    use_wandb: bool = option(False, "Log to Weights & Biases.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = option(None, "Default: what WANDB_MODE says.")
    wandb_dir: str | None = option(None, "Directory for W&B files; default the run directory.")
    wandb_key: str | None = option(None, "API key; default WANDB_API_KEY.")
    wandb_host: str | None = option(None, "URL of a self-hosted server.")
    wandb_team: str | None = option(None, "Team or user that owns the run.")
    wandb_project: str | None = option(None, "Project; default slime.")
    wandb_group: str | None = option(None, "Group of the run.")
    wandb_run_id: str | None = option(None, "Continue the run with this id.")
    disable_wandb_random_suffix: bool = option(False, "Do not add a random suffix to the run's name.")
    wandb_always_use_train_step: bool = option(False, "Use the optimizer step as x axis of every metric.")
    use_tensorboard: bool = option(False, "Log to TensorBoard.")
    tb_project_name: str | None = option(None, "Directory of the project's runs; default the run directory.")
    tb_experiment_name: str | None = option(None, "Directory of this run below it.")
    use_mlflow: bool = option(False, "Log to MLflow (pip install mlflow).")
    mlflow_tracking_uri: str | None = option(
        None, "Its server or store; default MLFLOW_TRACKING_URI, else mlflow.db in the run directory."
    )
    mlflow_experiment_name: str | None = option(None, "Experiment; default slime.")
    mlflow_run_name: str | None = option(None, "Name of the run; default one that MLflow makes up.")
    use_swanlab: bool = option(False, "Log to SwanLab (pip install swanlab); its key is in SWANLAB_API_KEY.")
    swanlab_mode: Literal["cloud", "local", "offline", "disabled"] | None = option(
        None, "Default: what SWANLAB_MODE says, else cloud."
    )
    swanlab_project: str | None = option(None, "Project; default slime.")
    swanlab_workspace: str | None = option(None, "Workspace that owns it; default that of the key.")
    swanlab_experiment_name: str | None = option(None, "Name of the run; default one that SwanLab makes up.")
    use_trackio: bool = option(False, "Log to Trackio (pip install trackio), where TRACKIO_DIR says.")
    trackio_project: str | None = option(None, "Project; default slime.")
    trackio_run_name: str | None = option(None, "Name of the run; default one that Trackio makes up.")
    trackio_space_id: str | None = option(None, "Hugging Face Space to log to instead, owner/name.")
    prometheus_host: str = option("127.0.0.1", "Address at which the driver serves /metrics and /healthz.")
    prometheus_port: int = option(
        0,
        "Its port; 0 is a free one, which prometheus/driver.json of the run directory names.",
        at_least=0,
        at_most=65535,
    )
    custom_rollout_log_function_path: str | None = function_path(
        "(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool",
        " that logs a rollout; True: slime logs only times, the training batch and the counts of prompts.",
        ("log_rollout_data",),
        may_be_async=True,
    )
    log_passrate: bool = option(False, "Log passrate/pass@k of the training groups, where a reward of 1 is a pass.")
    log_multi_turn: bool = option(False, "Log multi_turn/: turns, and response lengths with and without tools' tokens.")
    log_reward_category: str | None = option(
        None, "Entry of a dict reward; rollout/error_cat/<value> is the share of samples that have this value there."
    )
    log_correct_samples: bool = option(False, "Log lengths and log-probs of the samples with reward 1.")


@dataclass
class DebugOptions:
    """Debug."""

    dry_run: Literal["changed", "full"] | None = option(
        None,
        "Validate everything, print the placement and all values that are not the defaults, and stop; full prints them "
        "all.",
        bare="changed",
    )
    custom_config_path: str | None = option(
        None, "YAML file: its keys set options (and win over flags), and other keys become attributes of args."
    )
    debug_rollout_only: bool = option(False, "Only generate; no trainer is started.")
    debug_train_only: bool = option(False, "Only train; no engine is started.")
    save_debug_rollout_data: str | None = option(
        None, "File for every rollout's samples, and every evaluation's; {rollout_id} is filled in: 7, eval_7."
    )
    load_debug_rollout_data: str | None = option(
        None, "Train on files of --save-debug-rollout-data instead of generating; {rollout_id} is filled in."
    )
    load_debug_rollout_data_subsample: float | None = option(
        None, "Train on this share of the loaded groups, evenly spaced, with smaller steps.", above=0, at_most=1
    )
    save_debug_train_data: str | None = option(
        None,
        "File for each training rank's data of a rollout before it trains: columns, log-probs, advantages and "
        "micro-batches; {rollout_id} and {rank} are filled in.",
    )
    dump_details: str | None = option(
        None,
        "Directory for both: --save-debug-rollout-data DIR/rollout_data/{rollout_id}.pt and "
        "--save-debug-train-data DIR/train_data/{rollout_id}_{rank}.pt.",
    )
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] | None = option(
        None,
        "Record these parts of training by torch's profiler, into traces in the run directory: the whole call, the "
        "actor's optimizer steps, or passes for log-probs.",
    )
    profile_step_start: int = option(1, "The first rollout that is recorded, counted from 0.", at_least=0)
    profile_step_end: int = option(2, "The rollout after the last recorded one.", at_least=1)
    record_memory_history: bool = option(
        False,
        "Record, on every training rank from its start on, which code allocates memory: a snapshot is written of a "
        "phase that does not fit into the GPU, and after --memory-snapshot-num-steps.",
    )
    memory_recorder: Literal["torch", "memray"] = option(
        "torch", "Which memory: torch, that of GPUs, or by memray (pip install memray) the host's."
    )
    memory_snapshot_dir: str | None = option(None, "Directory of snapshots; default memory in the run directory.")
    memory_snapshot_num_steps: int | None = option(
        None, "Rollouts trained on after which each rank writes its snapshot, and records no more.", at_least=1
    )
    ci_test: bool = option(False, "Stop the run when something that must hold in every run does not.")
    ci_disable_kl_checker: bool = option(False, "Skip the checks of the KL divergence on the first rollout.")
    ci_train_rollout_logprob_abs_diff_threshold: float = option(
        0.1, "For --ci-test: largest mean difference of the trainer's and the engine's log-probs.", above=0
    )
    random_weights: bool = option(
        False,
        "Start trainers from random weights and engines from none (--sglang-load-format dummy), to try or measure a "
        "model by its config.json alone; the first push makes them equal.",
    )
    allow_config_mismatch: bool = option(False, "Warn, instead of stopping, where flags contradict config.json.")


_TRACKERS = {
    "use_mlflow": "mlflow_experiment_name mlflow_run_name",
    "use_swanlab": "swanlab_mode swanlab_project swanlab_workspace swanlab_experiment_name",
    "use_trackio": "trackio_project trackio_run_name trackio_space_id",
}
RULES = (
    *(Rule(options, "needs", switch) for switch, options in _TRACKERS.items()),
    Rule("debug_rollout_only", "and", "load_debug_rollout_data debug_train_only", " exclude each other"),
    Rule("load_debug_rollout_data", "needs", "num_rollout!=None", ": there are no epochs of recorded rollouts"),
    Rule("load_debug_rollout_data_subsample", "needs", "load_debug_rollout_data"),
    Rule("profile_step_start", "is not before", "profile_step_end", when="profile_target"),
    Rule(
        "memory_recorder=memray memory_snapshot_dir!=None memory_snapshot_num_steps!=None",
        "needs",
        "record_memory_history",
    ),
    Rule("record_memory_history", "has no effect with", "placement=rollout_only", ": nothing is trained"),
    Rule(
        "memory_recorder=memray",
        "needs",
        "memory_snapshot_num_steps!=None",
        ": a host without memory ends a process before it could write anything",
    ),
)


def derive_subsample(args: Namespace) -> None:
    """Of recorded rollouts, fewer groups in as many steps."""
    share = args.load_debug_rollout_data_subsample
    if share is None:
        return
    flag = f"--load-debug-rollout-data-subsample {share}"
    groups, steps = len(kept_groups(args.rollout_batch_size, share)), args.num_steps_per_rollout
    kept = groups * args.n_samples_per_prompt
    if kept % steps:
        raise OptionError(
            f"{flag} keeps {groups} of --rollout-batch-size {args.rollout_batch_size} groups, whose {kept} samples are "
            f"not a multiple of the {steps} steps of a rollout (--num-steps-per-rollout, --global-batch-size)"
        )
    args.global_batch_size = kept // steps


def check_profile(args: Namespace) -> None:
    """Refuse, by an OptionError, to record parts within each other at once, or by a package that is not there."""
    targets = args.profile_target or []
    if "train_overall" in targets and len(targets) > 1:
        raise OptionError(f"--profile-target {' '.join(targets)}: train_overall has all of them")
    if args.memory_recorder == "memray" and importlib.util.find_spec("memray") is None:
        raise OptionError("--memory-recorder memray: not installed here: pip install memray")


def check_trackers(args: Namespace) -> None:
    """Refuse, by an OptionError, a tracker whose package is not there."""
    missing = [name for name in _PACKAGES if getattr(args, f"use_{name}") and importlib.util.find_spec(name) is None]
    if missing:
        flags = ", ".join(f"--use-{name}" for name in missing)
        raise OptionError(f"{flags}: not installed here: pip install {' '.join(missing)}")


def derive_templates(args: Namespace) -> None:
    """Absolute paths with the places that they need, those of ``--dump-details`` too."""
    if args.dump_details is not None:
        directory = args.dump_details.replace("{", "{{").replace("}", "}}")
        args.save_debug_rollout_data = args.save_debug_rollout_data or f"{directory}/rollout_data/{{rollout_id}}.pt"
        args.save_debug_train_data = args.save_debug_train_data or f"{directory}/train_data/{{rollout_id}}_{{rank}}.pt"
    for name, needed in _TEMPLATES.items():
        template = getattr(args, name)
        if template is None:
            continue
        there = _places(f"{flag_named(name)} {template}", template, tuple(dict.fromkeys(("rollout_id", *needed))))
        missing = [place for place in needed if place not in there]
        if missing:  # every file is kept: upstream's forms without these are taken, and get them at the end
            stem, suffix = os.path.splitext(template)
            template = stem + "".join(f"_{{{place}}}" for place in missing) + suffix
        setattr(args, name, os.path.abspath(os.path.expanduser(template)))
        _check_dumps(args, name)
    if args.load_debug_rollout_data is not None and args.save_debug_rollout_data == args.load_debug_rollout_data:
        raise OptionError(
            "--save-debug-rollout-data and --load-debug-rollout-data are the same files: "
            + args.load_debug_rollout_data
        )


def _places(where: str, template: str, known: tuple[str, ...]) -> set[str]:
    """The places of a template that are filled in; OptionError: other braces, or a number that no file name can
    hold."""
    names = " and ".join(f"{{{place}}}" for place in known)
    verb = "is" if len(known) == 1 else "are"
    only = f"{where}: only {names} {verb} filled in, and braces of its own are doubled"
    with naming(f"{only}:"):
        places = [(name, spec, how) for _, name, spec, how in Formatter().parse(template) if name is not None]
    for name, spec, how in places:
        if name not in known:
            raise OptionError(f"{only}: {{{name}}}")
        if how or not _WIDTH.fullmatch(spec or ""):
            written = f"{{{name}{f'!{how}' if how else ''}{f':{spec}' if spec else ''}}}"
            raise OptionError(f"{where}: {written}: write {{{name}}}, or {{{name}:06d}} for six digits, at most 99")
    return {name for name, _, _ in places}


def _check_dumps(args: Namespace, name: str) -> None:
    """Refuse to write over dumps of another run; one that is resumed goes on with its own.

    One that saves where it loads from, and ended before it had saved anything, begins anew by the same command.
    """
    if name not in _DUMPS or _goes_on(args):
        return
    template, first = getattr(args, name), args.start_rollout_id or 0
    pieces = [(glob.escape(text), re.escape(text), field) for text, field, _, _ in Formatter().parse(template)]
    taken = re.compile("".join(text + _NUMBERS.get(field or "", "") for _, text, field in pieces))
    files = glob.glob("".join(text + ("*" if field else "") for text, _, field in pieces))
    # The same number in every place, each in the form that it has there.
    numbers = {file: set(map(int, found.groups())) for file in files if (found := taken.fullmatch(file))}
    earlier = sorted(file for file, several in numbers.items() if len(several) == 1 and min(several) >= first)
    if earlier:
        given = "--dump-details" if args.dump_details and template.startswith(args.dump_details) else flag_named(name)
        raise OptionError(
            f"{given}: {earlier[0]} is there, {len(earlier)} of an earlier run that would be overwritten: name another "
            "place, move them away, or resume that run by --load"
        )


def _goes_on(args: Namespace) -> bool:
    """Whether a run is resumed, or is begun again where it was to be resumed from."""
    if args.load is None:
        return False
    with naming(where_loaded(args), FileNotFoundError):
        found = find_checkpoint(args.load, args.ckpt_step)
    return found is not None or (os.path.isdir(os.path.expanduser(args.load)) and same_place(args.load, args.save))
