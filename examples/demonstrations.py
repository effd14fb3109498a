"""Supervised warm-up on demonstrations with tools: the model's words are trained, the environment's are masked.

A row of ``--prompt-data`` has chat messages in ``--input-key``, and in its metadata the assistant's turn, cut where
model and environment take turns::

    {"prompt": [...], "metadata": {"demonstration": [["<search>x</search>", true], ["<information>...", false], ...]}}

Use it as ``--loss-type sft_loss --rollout-function-path examples.demonstrations.generate_rollout``.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput, flatten_samples
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.types import Sample


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The next ``--rollout-batch-size`` demonstrations as finished samples."""
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in flatten_samples(groups):
        fill(args, sample)
    return RolloutFnTrainOutput(samples=groups)


def fill(args: Namespace, sample: Sample) -> None:
    """Write the demonstration of ``sample`` as its response; it ends with the end-of-turn token."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    prompt = tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True, tokenize=False)
    sample.tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    for text, trained in sample.metadata["demonstration"]:
        # Part by part, as they will be during the rollout: a token never spans both speakers.
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=tokens, log_probs=[0.0] * len(tokens), trainable=trained, text=text)
    sample.append_response_tokens(args, tokens=[tokenizer.eos_token_id], log_probs=[0.0])
    sample.reward, sample.status = 0.0, Sample.Status.COMPLETED
