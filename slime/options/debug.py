"""Looking closer: parts of the loop alone, and what was configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.options.rules import Rule
from slime.options.schema import option


def kept_groups(groups: int, share: float | None) -> list[int]:
    """Which of so many groups ``--load-debug-rollout-data-subsample`` keeps: at least one, evenly spaced."""
    if share is None:
        return list(range(groups))
    count = max(1, round(groups * share))
    return [kept * groups // count for kept in range(count)] if groups else []


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


RULES = (
    Rule("debug_rollout_only", "and", "load_debug_rollout_data debug_train_only", " exclude each other"),
    Rule("load_debug_rollout_data", "needs", "num_rollout!=None", ": there are no epochs of recorded rollouts"),
    Rule("load_debug_rollout_data_subsample", "needs", "load_debug_rollout_data"),
    Rule("profile_step_start", "is not before", "profile_step_end", when="profile_target"),
)
