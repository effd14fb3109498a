"""The rollout function of supervised training: conversations become training samples, and no engine is asked."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from typing import Any

from slime.data import Sample, Status
from slime.data.rows.conversation import ConversationEncoder, RowError, with_answer
from slime.data.rows.messages import as_text, messages_of_json
from slime.data.source.prompts import draw_groups
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.errors import BadInputError


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The next ``--rollout-batch-size`` conversations, with a loss mask over the assistant's turns. BadInputError for
    one that nothing can be learnt from, or ``evaluation``, which takes engines.

    ``--input-key`` holds chat messages with the assistant's turns in them; a turn with ``step_loss_mask: 0`` is not
    trained. Where there is no assistant turn, the label (``--label-key``) is the assistant's answer, and a plain string
    is the user's message. Rows of ``--prompt-data`` were encoded when they were read; what a user's own data source
    gives is encoded here.
    """
    if evaluation:
        raise BadInputError(
            "supervised training has no evaluation: name an --eval-function-path, or drop --eval-interval"
        )
    started = time.monotonic()
    groups = draw_groups(args, data_source, args.rollout_batch_size)
    unfinished = [sample for group in groups for sample in group if sample.status is Status.PENDING]
    if unfinished:
        _encode(args, unfinished)
    metrics = {"perf/rollout_time": time.monotonic() - started}
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


def _encode(args: Namespace, samples: list[Sample]) -> None:
    kwargs = json.dumps(args.apply_chat_template_kwargs or {})
    encoder = ConversationEncoder(args.hf_checkpoint, kwargs, args.loss_mask_type == "distill_qwen")
    for sample in samples:
        try:
            prompt = messages_of_json(as_text(sample.prompt), "its prompt")
            encoder.encode(with_answer(prompt, sample.label), sample.metadata.get("tools")).fill(sample)
        except RowError as error:
            raise BadInputError(f"sample {sample.index}: {error}") from error
