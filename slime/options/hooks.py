"""Users' functions on the way from samples to the trainer, in the trainer, and behind a weight update."""

from __future__ import annotations

from dataclasses import dataclass

from slime.options.flags.calls import Call
from slime.options.flags.schema import option


@dataclass
class HookOptions:
    """Hooks: users' functions from samples to weights; those of rollout, reward and loss are with theirs."""

    custom_convert_samples_to_train_data_path: str | None = option(
        None,
        "Function (args, samples) -> dict of columns, one entry a row, instead of slime's own conversion.",
        hook=("convert_samples_to_train_data", "custom_convert"),
        call=(Call("args, samples", "dict[str, list]"),),
    )
    rollout_data_postprocess_path: str | None = option(
        None,
        "Function (args, rollout_id, rollout_data) that may change its lists advantages, returns, loss_masks and "
        "log-probs, on every training rank of the last pipeline stage, before the rollout is trained on.",
        hook=("rollout_data_postprocess", "postprocess"),
        call=(Call("args, rollout_id, rollout_data", "None"),),
    )
    custom_model_provider_path: str | None = option(
        None,
        "Function (pre_process, post_process, vp_stage=None) -> GPTModel that builds a pipeline stage; it also gets "
        "args and config where it has parameters of these names.",
        hook=("model_provider", "custom_model_provider"),
        call=(Call("pre_process, post_process, *, vp_stage=None, args=None, config=None", "GPTModel"),),
    )
    custom_megatron_init_path: str | None = option(
        None,
        "Function (args), called on every training rank once Megatron's process groups exist.",
        hook=("megatron_init", "custom_megatron_init"),
        call=(Call("args", "None"),),
    )
    custom_megatron_before_log_prob_hook_path: str | None = option(
        None,
        'Function (args, model, store_prefix), called before every pass for log-probs; the prefix is "" or "ref_".',
        hook=("before_log_prob", "before_log_prob_hook"),
        call=(Call("args, model, store_prefix", "None"),),
    )
    custom_megatron_before_train_step_hook_path: str | None = option(
        None,
        "Function (args, rollout_id, step_id, model, optimizer, opt_param_scheduler), called before every optimizer "
        "step of actor and critic, with gradients at zero.",
        hook=("before_train_step", "before_train_step_hook"),
        call=(Call("args, rollout_id, step_id, model, optimizer, opt_param_scheduler", "None"),),
    )
    custom_update_weight_post_write_path: str | None = option(
        None,
        "Function (args, version_dir, rollout_engines) of --update-weight-transport disk, called when a version is "
        "written and before engines read it.",
        hook=("post_write", "update_weight_post_write"),
        call=(Call("args, version_dir, rollout_engines", "None"),),
    )
