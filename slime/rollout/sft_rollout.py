"""The rollout function of supervised training: conversations become training samples, and no engine is asked."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.conversation import ConversationEncoder, Messages, conversation_encoder
from slime.rollout.dataset import RowError
from slime.utils.types import Sample, Status


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The next ``--rollout-batch-size`` conversations, with a loss mask over the assistant's turns.

    ``--input-key`` holds chat messages with the assistant's turns in them; a turn with ``step_loss_mask: 0`` is not
    trained. Where there is no assistant turn, the label (``--label-key``) is the assistant's answer, and a plain string
    is the user's message.

    Raises:
        ValueError: a conversation that nothing can be learnt from, with its row; or ``evaluation``: it takes engines.
    """
    if evaluation:
        raise ValueError("supervised training has no evaluation: name an --eval-function-path, or drop --eval-interval")
    started = time.monotonic()
    kwargs = json.dumps(args.apply_chat_template_kwargs or {})
    encoder = conversation_encoder(args.hf_checkpoint, kwargs, args.loss_mask_type == "distill_qwen")
    groups = data_source.get_samples(args.rollout_batch_size)
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        _fill(sample, encoder)
    metrics = {"perf/rollout_time": time.monotonic() - started}
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


def conversation(sample: Sample) -> Messages:
    """The sample's conversation, with its label as the answer where the assistant says nothing."""
    messages: Messages = (
        [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
    )
    if sample.label is not None and not any(message.get("role") == "assistant" for message in messages):
        return [*messages, {"role": "assistant", "content": str(sample.label)}]
    return messages


def _fill(sample: Sample, encoder: ConversationEncoder) -> None:
    try:
        encoded = encoder.encode(conversation(sample), sample.metadata.get("tools"))
    except RowError as error:
        where = getattr(sample, "source_row", f"sample {sample.index}")
        raise ValueError(f"--prompt-data {where}: {error}") from error
    sample.tokens = encoded.tokens.tolist()
    sample.response = encoded.response
    sample.response_length = encoded.response_length
    sample.loss_mask = encoded.mask[-encoded.response_length :].tolist()
    sample.reward = 0.0
    sample.status = Status.COMPLETED
