"""One response of an engine: token ids in, token ids out, in as many requests as weight updates cut it into."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import uuid
from argparse import Namespace
from typing import Any

from slime.backends.sglang.client import OnTokens, RequestError
from slime.data import Sample, Status, routes
from slime.data.rows.conversation import RowError, check_messages, render
from slime.data.rows.tokenizer import load_tokenizer
from slime.observability.logs import should_log
from slime.observability.trace import note
from slime.observability.trace_utils import build_sglang_meta_trace_attrs
from slime.options.flags.sglang import KEYED_POLICIES
from slime.rollout.engine.state import REPLY_TIMES, RolloutState, is_ending, state_of_call
from slime.rollout.sampling import train_sampling_params
from slime.utils.errors import SettingError

logger = logging.getLogger(__name__)

_MAX_ABORTS = 16
_WARM_UP_SHARE = 0.05
"""Of ``--request-timeout``, for the request of `warm_up`."""
_CONTEXT = 5
"""Tokens before a response that decide how its first one is written: SGLang looks at as many."""


class GenerateState:
    """What upstream's generate functions ask for by ``GenerateState(args)``."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.sampling_params = copy.deepcopy(train_sampling_params(args))

    @property
    def aborted(self) -> bool:
        """Whether the rollout under way has enough samples."""
        return is_ending()


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], *, on_tokens: OnTokens | None = None
) -> Sample:
    """Generate one response, or go on with a partial one.

    Tokens and log-probs are the engine's; text is never tokenised again. A sample whose ``tokens`` are set and whose
    response is empty has its prompt in them. A request that a weight update aborts goes on with what it has, under the
    new weights, so callers see no aborts; each part is a segment with a version of its own in ``weight_versions``. Only
    where the rollout itself ends what is still under way is the sample returned as it is then, with status ABORTED.
    ``on_tokens`` is given new tokens as they are made; an engine that dies then is as one that aborts.
    BadInputError where the prompt has no tokens (`prompt_tokens`), RequestError where the request failed for good, or
    was aborted again and again without a token or a new version.
    """
    if not sample.tokens:
        sample.tokens = prompt_tokens(args, sample)
    async with state_of_call(args) as state:
        return await _generate(args, state, sample, sampling_params, on_tokens)


async def _generate(
    args: Namespace,
    state: RolloutState,
    sample: Sample,
    sampling_params: dict[str, Any],
    on_tokens: OnTokens | None,
) -> Sample:
    goes_on = sample.status is Status.ABORTED
    start = len(sample.tokens) - (sample.response_length if goes_on else 0)
    text, segments = "" if goes_on else sample.response, int(goes_on)
    fruitless, version = 0, None  # aborts in a row without a token, under one version
    while fruitless < _MAX_ABORTS:
        params = _params_of_rest(args, sample, sampling_params, done=len(sample.tokens) - start)
        if params is None:
            sample.status = Status.TRUNCATED
            break
        before = len(sample.tokens)
        async with state.request() as rid:
            if rid is None:
                sample.status = Status.ABORTED
                break
            headers = _routing_headers(args, sample)
            fields: dict[str, Any] = routes.asked_for(args, sample.rollout_routed_experts, before)
            if on_tokens is not None:
                fields["on_tokens"] = on_tokens
            reply = await state.client.generate(sample.tokens, params, headers=headers, rid=rid, **fields)
            meta = reply["meta_info"]
            note(**build_sglang_meta_trace_attrs(meta), version=meta.get("weight_version"))
            state.replies.append({name: meta[name] for name in REPLY_TIMES if meta.get(name) is not None})
        if meta.get("num_retractions") and getattr(args, "deterministic_mode", False):
            _warn_of_retraction(state, sample)
        if routes.START in fields:
            meta[routes.START] = fields[routes.START]
        # [[log-prob, token id, ...], ...]: taken together, so that no log-prob can belong to another token.
        pairs = meta.get("output_token_logprobs") or []
        tokens, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, meta_info=meta, text=reply.get("text"))
        segments += 1
        if sample.status is not Status.ABORTED or state.ending:
            break
        before_this, version = version, meta.get("weight_version")
        fruitless = 0 if len(sample.tokens) > before else fruitless + 1 if version == before_this else 1
    else:
        raise RequestError(f"sample {sample.index}: the engine aborted its request {_MAX_ABORTS} times")
    if segments > 1 or on_tokens is not None:
        # Not the parts' texts: an interruption may have cut a character.
        sample.response = text + _text_of(args, sample.tokens, start)
    return sample


async def warm_up(args: Namespace, state: RolloutState, sample: Sample, sampling_params: dict[str, Any]) -> None:
    """Have an engine compute ``sample``'s prompt, so that it has the keys and values when responses to it begin; again
    where a weight update aborts it. Nothing is sent for a prompt that leaves no room for a response. The one token that
    is drawn is dropped, and drawn as the others of its batch are. Raises as `generate` does, and TimeoutError: nobody
    waits long for an engine that is silent, only for a place among the requests."""
    prompt = Sample(index=sample.index, tokens=sample.tokens or prompt_tokens(args, sample))
    params = _params_of_rest(args, prompt, sampling_params, done=0)
    if params is None:
        return
    params["max_new_tokens"] = 1
    params.pop("min_new_tokens", None)
    for _ in range(_MAX_ABORTS):
        async with state.request() as rid:
            if rid is None:
                return
            async with asyncio.timeout(args.request_timeout * _WARM_UP_SHARE):
                meta = (await state.client.generate(prompt.tokens, params, rid=rid))["meta_info"]
            note(**build_sglang_meta_trace_attrs(meta), version=meta.get("weight_version"))
        if meta["finish_reason"]["type"] != "abort" or state.ending:
            return


def _warn_of_retraction(state: RolloutState, sample: Sample) -> None:
    """Of a request whose place in the cache others have got: what is computed again may have other bits."""
    state.num_retracted += 1
    if should_log(state.num_retracted):
        logger.warning(
            "--deterministic-mode: an engine had no room in its cache for %d requests (now sample %s), and computed "
            "them again: another run's bits may differ; lower --sglang-server-concurrency",
            *(state.num_retracted, sample.index),
        )


def _params_of_rest(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], done: int
) -> dict[str, Any] | None:
    """The sampling parameters of a request of which ``done`` tokens are there already; None where no room is left."""
    room = room_left(args, sample, sampling_params["max_new_tokens"])
    if room is not None and room <= 0:
        return None
    params = sampling_params | {"max_new_tokens": room}
    if least := params.get("min_new_tokens"):
        params["min_new_tokens"] = min(max(least - done, 0), least if room is None else room)
    return params


def _text_of(args: Namespace, tokens: list[int], start: int) -> str:
    decode = load_tokenizer(args.hf_checkpoint).decode
    how = {"skip_special_tokens": args.rollout_skip_special_tokens, "spaces_between_special_tokens": False}
    context = tokens[max(0, start - _CONTEXT) : start]
    return decode(context + tokens[start:], **how)[len(decode(context, **how)) :]


def prompt_tokens(args: Namespace, sample: Sample) -> list[int]:
    """The prompt's token ids; ``--apply-chat-template`` renders chat messages, as a data source of a user's gives them.
    SettingError for messages without that flag, RowError for those that the template refuses, or an empty prompt."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    text = sample.prompt if isinstance(sample.prompt, str) else _rendered(args, sample, tokenizer)
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not tokens:
        raise RowError(f"sample {sample.index} has an empty prompt and no tokens")
    return tokens


def _rendered(args: Namespace, sample: Sample, tokenizer: Any) -> str:
    if not args.apply_chat_template:
        raise SettingError(f"sample {sample.index}: its prompt is chat messages; add --apply-chat-template")
    kwargs = sample.apply_chat_template_kwargs or args.apply_chat_template_kwargs or {}
    assert not isinstance(sample.prompt, str)
    try:
        check_messages(sample.prompt, "its prompt")
        return render(tokenizer, sample.prompt, sample.metadata.get("tools"), json.dumps(kwargs))
    except RowError as error:
        raise RowError(f"sample {sample.index}: {error}") from error


def room_left(args: Namespace, sample: Sample, max_new_tokens: int | None) -> int | None:
    """Tokens that the response may still grow by; None for as many as the engine allows."""
    limits = []
    if max_new_tokens is not None:
        limits.append(max_new_tokens - sample.response_length)
    if args.rollout_max_context_len is not None:
        limits.append(args.rollout_max_context_len - len(sample.tokens))
    return min(limits, default=None)


def _routing_headers(args: Namespace, sample: Sample) -> dict[str, str] | None:
    """With a ``--router-policy`` that heeds it, the key that keeps the requests of one sample on one engine."""
    if getattr(args, "router_policy", None) not in KEYED_POLICIES:
        return None
    sample.session_id = sample.session_id or uuid.uuid4().hex
    return {"X-SMG-Routing-Key": sample.session_id}
