"""Where metrics go besides metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.options.calls import Call
from slime.options.schema import option


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
    custom_rollout_log_function_path: str | None = option(
        None,
        "Function (rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool that logs a "
        "rollout. If it returns True, slime logs only times, the training batch and the counts of prompts.",
        hook=("log_rollout_data",),
        call=(Call("rollout_id, args, samples, rollout_extra_metrics, rollout_time", "bool", may_be_async=True),),
    )
    log_passrate: bool = option(False, "Log passrate/pass@k of the training groups, where a reward of 1 is a pass.")
    log_multi_turn: bool = option(False, "Log multi_turn/: turns, and response lengths with and without tools' tokens.")
    log_reward_category: str | None = option(
        None, "Entry of a dict reward; rollout/error_cat/<value> is the share of samples that have this value there."
    )
    log_correct_samples: bool = option(False, "Log lengths and log-probs of the samples with reward 1.")
