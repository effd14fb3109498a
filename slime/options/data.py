"""Prompts, and how many of them make a rollout and an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slime.options.flags.schema import function_path, option
from slime.options.rules import Rule
from slime.utils.calls import Call

DEFAULT_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"


@dataclass
class DataOptions:
    """Data: where prompts come from."""

    prompt_data: str | None = option(None, "JSONL or parquet file; path@[a:b] takes a slice of its rows.")
    data_source_path: str = option(
        DEFAULT_SOURCE,
        "Class (args) with get_samples, add_samples, save, load.",
        hook=("RolloutDataSourceWithBuffer", "RolloutDataSource", "DataSource"),
        call=(Call("args", "DataSource"), Call("dataset, args", "DataSource", "dataset")),
    )
    buffer_filter_path: str | None = function_path(
        "(args, rollout_id, buffer, num_samples) -> list[list[Sample]]",
        ": the groups that it takes out of the buffer; default: first in, first out.",
        ("buffer_filter", "pop_first"),
    )
    disable_rollout_global_dataset: bool = option(
        False, "No --prompt-data: the rollout function is given empty samples, and fills them in."
    )
    input_key: str = option(
        "input",
        "Column of the prompt: a string, a number, or a list of chat messages, also as JSON text. Dots lead into "
        "objects: a.b is b of a.",
    )
    label_key: str | None = option(
        None, "Column of the expected answer; dots lead into objects, as in reward_model.ground_truth."
    )
    metadata_key: str = option(
        "metadata", "Column of further fields: an object, or JSON of one; dots lead into objects."
    )
    tool_key: str = option("tools", "Column of tool definitions for the chat template; dots lead into objects.")
    apply_chat_template: bool = option(False, "Render chat messages with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] | None = option(None, "Arguments of the chat template, as JSON.")
    skip_bad_rows: bool = option(False, "Count and skip rows that cannot be used, instead of stopping.")
    restart_epoch: bool = option(
        False, "On a resume over other --prompt-data than the checkpoint's, begin the epoch anew; else without effect."
    )


@dataclass
class BatchOptions:
    """Batches: rollout-batch-size x n-samples-per-prompt = global-batch-size x num-steps-per-rollout."""

    num_rollout: int | None = option(None, "Rollouts to train; 0 only evaluates, with --eval-interval.", at_least=0)
    num_epoch: int | None = option(None, "Passes over the prompts, where --num-rollout is not given.", at_least=1)
    start_rollout_id: int | None = option(
        None, "First rollout; default after the loaded checkpoint, else 0.", at_least=0
    )
    rollout_batch_size: int | None = option(None, "Prompts of one rollout. Required.", at_least=1)
    n_samples_per_prompt: int = option(1, "Responses for each prompt.", at_least=1)
    global_batch_size: int | None = option(None, "Responses of one optimizer step; derived when not given.", at_least=1)
    num_steps_per_rollout: int | None = option(
        None, "Optimizer steps on one rollout; 1 where neither this nor --global-batch-size is given.", at_least=1
    )
    on_bad_step: Literal["stop", "skip", "restore"] = option(
        "stop",
        "What to do about an optimizer step of which loss or gradients are not finite (see --bad-step-factor): end the "
        "run; leave the step out; or leave out the rest of the rollout too, and go back to the weights of the newest "
        "snapshot or checkpoint.",
    )
    bad_step_factor: float | None = option(
        None, "A step is also bad when its gradient norm is above so many times the median of the last 32.", above=1
    )
    micro_batch_size: int = option(1, "Samples of one forward pass; ignored by --use-dynamic-batch-size.", at_least=1)
    use_dynamic_batch_size: bool = option(False, "Pack samples into micro-batches of at most --max-tokens-per-gpu.")
    max_tokens_per_gpu: int | None = option(
        None, "Tokens of one micro-batch and slot; a longer sample is alone. Multiplied by the context-parallel size.",
        at_least=1,
    )  # fmt: skip
    balance_data: bool = option(False, "Give every data-parallel rank about the same amount of work.")
    balance_by_flops: bool = option(
        False, "Make micro-batches of about the same amount of work, within --max-tokens-per-gpu."
    )


RULES = (
    Rule("on_bad_step=restore", "needs", "trainer_snapshot_interval save", ": somewhere to go back to"),
    Rule(
        "on_bad_step=skip|restore",
        "does not go with",
        "!check_for_nan_in_loss_and_grad",
        ", by which loss and gradients are not looked at",
    ),
    Rule(
        "on_bad_step=skip|restore bad_step_factor",
        "does not go with",
        "precision=float16",
        ": its loss scale leaves such steps out by itself",
    ),
    Rule("use_dynamic_batch_size", "needs", "max_tokens_per_gpu"),
    Rule("balance_by_flops", "needs", "use_dynamic_batch_size", ": other micro-batches are of a fixed size"),
    Rule("disable_rollout_global_dataset", "and", "prompt_data", " contradict each other: drop one"),
    Rule(
        "num_epoch",
        "counts the prompts of --prompt-data: give --num-rollout instead",
        when="disable_rollout_global_dataset num_rollout=None",
    ),
)
