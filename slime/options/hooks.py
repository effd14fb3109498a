"""Users' functions on the way from samples to the trainer, in the trainer, and behind a weight update."""

from __future__ import annotations

from dataclasses import dataclass

from slime.options.flags.schema import function_path


@dataclass
class HookOptions:
    """Hooks: users' functions from samples to weights; those of rollout, reward and loss are with theirs."""

    custom_convert_samples_to_train_data_path: str | None = function_path(
        "(args, samples) -> dict[str, list]",
        ": columns, one entry a row, instead of slime's own conversion.",
        ("convert_samples_to_train_data", "custom_convert"),
    )
    rollout_data_postprocess_path: str | None = function_path(
        "(args, rollout_id, rollout_data) -> None",
        " that may change its lists advantages, returns, loss_masks and log-probs, on every training rank of the "
        "last pipeline stage, before the rollout is trained on.",
        ("rollout_data_postprocess", "postprocess"),
    )
    custom_model_provider_path: str | None = function_path(
        "(pre_process, post_process, *, vp_stage=None, args=None, config=None) -> GPTModel",
        " that builds a pipeline stage.",
        ("model_provider", "custom_model_provider"),
    )
    custom_megatron_init_path: str | None = function_path(
        "(args) -> None",
        ", called on every training rank once Megatron's process groups exist.",
        ("megatron_init", "custom_megatron_init"),
    )
    custom_megatron_before_log_prob_hook_path: str | None = function_path(
        "(args, model, store_prefix) -> None",
        ', called before every pass for log-probs; the prefix is "" or "ref_".',
        ("before_log_prob", "before_log_prob_hook"),
    )
    custom_megatron_before_train_step_hook_path: str | None = function_path(
        "(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) -> None",
        ", called before every optimizer step of actor and critic, with gradients at zero.",
        ("before_train_step", "before_train_step_hook"),
    )
    custom_update_weight_post_write_path: str | None = function_path(
        "(args, version_dir, rollout_engines) -> None",
        " of --update-weight-transport disk, called when a version is written and before engines read it.",
        ("post_write", "update_weight_post_write"),
    )
