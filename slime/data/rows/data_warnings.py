"""What options make of the prompts that a user may not expect, and that is no error."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.data.rows.dataset import PromptDataset
from slime.options.validate import usable_context
from slime.utils.misc import attribute_of


def dataset_of(source: Any) -> PromptDataset | None:
    """The rows of ``--prompt-data``; None where ``source`` has not read them."""
    dataset = attribute_of(source, "dataset", None, f"{type(source).__name__} (--data-source-path)")
    return dataset if isinstance(dataset, PromptDataset) else None


def data_warnings(args: Namespace, source: Any) -> list[str]:
    """One line each, besides what reading the files has logged; none of a user's own data source, or where no rollout
    is made."""
    dataset = dataset_of(source)
    if dataset is None or not args.num_rollout:
        return []
    return [*_repeated_prompts(args, dataset), *_responses_cut(args, dataset)]


def _repeated_prompts(args: Namespace, dataset: PromptDataset) -> Iterator[str]:
    flag, drawn = "--rollout-batch-size", args.rollout_batch_size
    if args.over_sampling_batch_size:
        flag, drawn = "--over-sampling-batch-size", args.over_sampling_batch_size
    if len(dataset) < drawn:
        yield f"{flag} {drawn} is more than the {len(dataset)} prompts of --prompt-data: a rollout repeats prompts"


def _responses_cut(args: Namespace, dataset: PromptDataset) -> Iterator[str]:
    """Where the engine's context, not a limit that the user gave, ends responses."""
    longest, room = args.rollout_max_response_len, usable_context(args)
    if longest is None or not args.num_engines or args.loss_type == "sft_loss":
        return
    if args.rollout_max_context_len != room:
        return
    cut = sum(longest > room - length for length in dataset.prompt_lengths)
    if cut:
        yield (
            f"--rollout-max-response-len {longest} is more than an engine's context leaves to {cut} of {len(dataset)} "
            f"prompts: prompt and response end at {room} tokens together, which config.json (max_position_embeddings, "
            "rope_scaling) and --sglang-context-length decide"
        )
