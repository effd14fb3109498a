"""On-policy distillation from a server: a teacher's log-probs of what the student has sampled (docs/algorithms.md).

`reward_func` is the ``--custom-rm-path`` of ``--use-opd`` by default; both functions have upstream's names.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from slime.data import Sample
from slime.data.columns import TEACHER_LOG_PROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS, held, teacher_columns
from slime.options.learning.distillation import REMOTE_NAMES, REWARD_PATH, TEACHER
from slime.rollout.batches.train_data import rollout_ids, usual_rewards
from slime.rollout.model_urls import REWARD, get_model_url
from slime.rollout.rm_hub import Reward, built_in_reward
from slime.utils.errors import BadInputError
from slime.utils.http_utils import RequestError, post
from slime.utils.redaction import redacted_line

_TRIES = 5
"""After the first, of a request that failed on its way."""


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> Reward:
    """Have the teacher of ``--opd-type sglang`` score the sample, and give the reward of ``metadata["rm_type"]``, else
    of ``--rm-type``, else 0: distillation alone. One that has a reward keeps it.

    The teacher is the model that ``metadata["opd_teacher"]`` names, else the server at ``--rm-url``, where that is not
    the one of ``rm_type`` remote_rm, else the run's own model ``teacher``, else that of ``--rm-model-path``.

    Raises:
        BadInputError: there is no such teacher, or it does not answer with a log-prob for every token.
        RequestError: the request failed for good.
    """
    if args.opd_type == "sglang" and sample.response_length:
        scores = await _scores(teacher_url(args, sample), sample, args)
        sample.columns |= scores
        sample.teacher_log_probs = scores.get(TEACHER_LOG_PROBS)
    return await task_reward(args, sample) if sample.reward is None else sample.reward


def lacks_teacher(args: Namespace, sample: Sample) -> bool:
    """Whether `reward_func`, whose part it is, has still to ask a teacher for a sample."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path != REWARD_PATH or args.opd_type != "sglang" or not sample.response_length:
        return False
    return any(held(column, sample) is None for column in teacher_columns(args))


async def task_reward(args: Namespace, sample: Sample, **kwargs: Any) -> Reward:
    """The reward that `reward_func` gives, without a teacher: that of evaluations."""
    return await built_in_reward(args, sample) if _rm_type(args, sample) else 0.0


def _rm_type(args: Namespace, sample: Sample) -> str | None:
    return sample.metadata.get("rm_type") or args.rm_type


def teacher_url(args: Namespace, sample: Sample) -> str:
    """Who scores a sample; BadInputError where nobody of that name is served."""
    name = sample.metadata.get("opd_teacher")
    if name is None and args.rm_url and _rm_type(args, sample) not in REMOTE_NAMES:
        url = urlsplit(args.rm_url)
        return args.rm_url if url.path.strip("/") else url._replace(path="/generate").geturl()
    if name is None:
        name = TEACHER if TEACHER in args.sglang_model_routers else REWARD
    try:
        return get_model_url(args, name)
    except ValueError as error:
        raise BadInputError(f"sample {sample.index}: the teacher of on-policy distillation: {error}") from error


async def _scores(url: str, sample: Sample, args: Namespace) -> dict[str, np.ndarray]:
    """The sample's columns: its response's log-probs, float32 [response_length], or with ``--opd-top-k`` the ids that
    are likeliest in each place and their log-probs, [response_length, top_k]; at temperature 1: SGLang divides no
    logits of a prompt by any."""
    top_k: int = args.opd_top_k
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": len(sample.tokens) - sample.response_length - 1,
        **({"top_logprobs_num": top_k} if top_k else {}),
    }
    try:
        reply = await post(url, payload, max_retries=_TRIES)
    except RequestError as error:
        raise RequestError(f"the teacher of on-policy distillation: {error}", error.status) from error
    try:
        scored = reply["meta_info"]["input_token_logprobs"][-sample.response_length :]
        values = np.array([value for value, *_ in scored], dtype=np.float32)
        ids = [int(token) for _, token, *_ in scored]
        top = reply["meta_info"]["input_top_logprobs"][-sample.response_length :] if top_k else []
        top_values = np.array([[value for value, *_ in place] for place in top], dtype=np.float32)
        top_ids = np.array([[int(token) for _, token, *_ in place] for place in top], dtype=np.int32)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"{redacted_line(url)} is no SGLang server that scores prompts: {reply!r:.120}") from error
    wanted = sample.tokens[-sample.response_length :]
    # SGLang 0.5.17 calls the last id of the vocabulary 0 here, as it does ids that stand for images.
    if len(ids) != len(wanted) or any(got not in (token, 0) for got, token in zip(ids, wanted, strict=True)):
        raise BadInputError(
            f"{redacted_line(url)} did not score the response tokens of sample {sample.index}, {wanted[:8]}, but "
            f"{ids[:8]}: a teacher must have the student's tokenizer, and a context as long"
        )
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise BadInputError(
            f"{redacted_line(url)} gives response token {at} of sample {sample.index}, id {wanted[at]}, the log-prob "
            f"{values[at]}"
        )
    if not top_k:
        return {TEACHER_LOG_PROBS: values}
    if top_ids.shape != (sample.response_length, top_k) or not np.isfinite(top_values).all():
        raise BadInputError(
            f"{redacted_line(url)} did not give the {top_k} likeliest ids of every response token of sample "
            f"{sample.index}, but numbers of shape {list(top_ids.shape)}"
        )
    if top_ids.min() < 0 or top_ids.max() >= args.vocab_size:
        raise BadInputError(
            f"{redacted_line(url)} finds id {top_ids.max()} likely in sample {sample.index}, and the student has "
            f"{args.vocab_size} ids: the teacher's vocabulary is larger; take a smaller --opd-top-k, or 0"
        )
    return {TEACHER_TOP_IDS: top_ids, TEACHER_TOP_LOG_PROBS: top_values}


def post_process_rewards(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Upstream's ``--custom-reward-post-process-path``: raw rewards, and what becomes of them within groups, as without
    the flag. Upstream gives 0 for all: here ``--rm-type`` counts, where it is given."""
    raw, rewards = usual_rewards(args, samples, rollout_ids(samples))
    return raw.tolist(), rewards.tolist()
