"""Users' functions around the model: what builds it, and what is called before its passes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from slime.utils import device
from slime.utils.calls import parameters_of
from slime.utils.errors import BadInputError
from slime.utils.misc import load_function
from slime.utils.user_functions import call_user_function

Model = list[Any]
"""One module a virtual pipeline stage, as the training loop calls them."""
_STORE_PREFIXES = {"ref_log_probs": "ref_", "teacher_log_probs": "teacher_", "old_log_probs": ""}
"""What upstream calls the columns that hold log-probs, by how it begins their names."""


def after_init(args: Namespace) -> None:
    """Call ``--custom-megatron-init-path``, if given."""
    if (path := args.custom_megatron_init_path) is not None:
        call_user_function("--custom-megatron-init-path", path, {"args": args})


def before_column(args: Namespace, column: str, model: Model) -> None:
    """Call ``--custom-megatron-before-log-prob-hook-path``, if given, before a pass that makes log-probs."""
    path = args.custom_megatron_before_log_prob_hook_path
    if path is not None and column in _STORE_PREFIXES:
        values = {"args": args, "model": model, "store_prefix": _STORE_PREFIXES[column]}
        call_user_function("--custom-megatron-before-log-prob-hook-path", path, values)


def before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: Model, optimizer: Any, scheduler: Any
) -> None:
    """Call ``--custom-megatron-before-train-step-hook-path``, if given, when the gradients are zero."""
    if (path := args.custom_megatron_before_train_step_hook_path) is not None:
        device.wait_side_stream()  # what it may read and change of the optimizer's state can be on its way back still
        values = {
            **{"args": args, "rollout_id": rollout_id, "step_id": step_id},
            **{"model": model, "optimizer": optimizer, "opt_param_scheduler": scheduler},
        }
        call_user_function("--custom-megatron-before-train-step-hook-path", path, values)


def provided_stage(
    args: Namespace, config: TransformerConfig, pre_process: bool, post_process: bool, vp_stage: int | None
) -> GPTModel:
    """One pipeline stage of ``--custom-model-provider-path``.

    Its function gets the stage's number where the pipeline is interleaved or it has a parameter of that name, and the
    options and the model's configuration where it has parameters ``args`` and ``config``. HookError where it raises,
    BadInputError where it returns something else, or a stage without its first or last part.
    """
    flag, path = "--custom-model-provider-path", args.custom_model_provider_path
    offered = {"vp_stage": vp_stage, "args": args, "config": config}
    parameters = parameters_of(load_function(path, flag=flag))
    wanted = {name: value for name, value in offered.items() if name in parameters}
    if vp_stage is not None:
        wanted["vp_stage"] = vp_stage
    model = call_user_function(flag, path, {"pre_process": pre_process, "post_process": post_process}, wanted)
    if not isinstance(model, GPTModel):
        raise BadInputError(f"{flag} {path}: it must return a megatron.core GPTModel, not {type(model).__name__}")
    if (model.pre_process, model.post_process) != (pre_process, post_process):
        raise BadInputError(
            f"{flag} {path}: it was asked for a stage with {pre_process=}, {post_process=} and returned one with "
            f"pre_process={model.pre_process}, post_process={model.post_process}"
        )
    return model
