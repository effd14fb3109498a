"""One rollout: every sample generated through the router and rewarded, under one deadline."""

from __future__ import annotations

import pickle
import time
import uuid
from argparse import Namespace
from typing import Any

from slime.backends.sglang.client import RequestError
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, flatten_samples
from slime.rollout.gate import may_request
from slime.rollout.hooks import HookError, accepts, call_hook
from slime.rollout.loop import background_loop, run_all
from slime.rollout.metrics import engine_metrics, speed_metrics
from slime.rollout.rm_hub import async_rm
from slime.rollout.sampling import request_seed, train_sampling_params
from slime.rollout.state import RolloutState, rollout_state
from slime.rollout.tokenizer import load_tokenizer
from slime.utils.errors import BadInputError
from slime.utils.misc import load_function
from slime.utils.types import Group, Sample, Status

_MAX_ABORTS = 16
_CONTEXT = 5
"""Tokens before a response that decide how its first one is written: SGLang looks at as many."""
_FINISHED = (Status.COMPLETED, Status.TRUNCATED)


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One rollout of ``--rollout-batch-size`` groups, in the order of the data source, or an evaluation.

    Args:
        rollout_id: of an evaluation, the version of the weights that it scores.

    Raises:
        TimeoutError: ``--rollout-timeout`` passed; the message says how many samples were done and what was waited for.
        RequestError: a request failed for good.
        HookError: a user's function failed.
    """
    if evaluation:
        from slime.rollout.evaluation import eval_rollout  # it generates by the functions below

        what = f"the evaluation of weight version {rollout_id} (--rollout-timeout)"
        return background_loop().run(eval_rollout(args, rollout_id), timeout=args.rollout_timeout, what=what)
    return generate_groups(args, rollout_id, draw_groups(args, data_source))


def draw_groups(args: Namespace, data_source: Any) -> list[Group]:
    """The ``--rollout-batch-size`` groups of the next rollout.

    Raises:
        BadInputError: the data source gave another number of them.
    """
    groups: list[Group] = data_source.get_samples(args.rollout_batch_size)
    if len(groups) != args.rollout_batch_size:
        raise BadInputError(f"the data source gave {len(groups)} groups, asked for {args.rollout_batch_size}")
    return groups


def generate_groups(args: Namespace, rollout_id: int, groups: list[Group]) -> RolloutFnTrainOutput:
    """Generate and reward ``groups``; raises as `generate_rollout` does."""
    rollout = generate_rollout_async(args, rollout_id, groups)
    what = f"rollout {rollout_id} (--rollout-timeout)"
    return background_loop().run(rollout, timeout=args.rollout_timeout, what=what)


async def generate_rollout_async(args: Namespace, rollout_id: int, groups: list[Group]) -> RolloutFnTrainOutput:
    """Generate and reward ``groups``; a failure or the deadline cancels what is still running."""
    started = time.monotonic()
    params = train_sampling_params(args)
    async with rollout_state(args, rank=rollout_id) as state:
        state.num_samples = sum(len(group) for group in groups)
        jobs = [
            generate_and_rm(args, group, seeded(args, params, "rollout", rollout_id, group[0].group_index))
            for group in groups
        ]
        limit = f"within {args.rollout_timeout:g} s (--rollout-timeout)"
        done = await run_all(
            jobs, timeout=args.rollout_timeout, late=lambda: f"rollout {rollout_id}: {state.progress()} {limit}"
        )
    samples = flatten_samples(done)
    for sample in samples:
        if sample.reward is None:
            raise HookError(
                f"rollout {rollout_id}: sample {sample.index} has no reward (status {sample.status.value}); "
                "the reward function and a custom generate function must leave one"
            )
    metrics = speed_metrics(args, samples, time.monotonic() - started) | engine_metrics(samples)
    return RolloutFnTrainOutput(samples=done, metrics=metrics)


def seeded(args: Namespace, params: dict[str, Any], *parts: int | str | None) -> dict[str, Any]:
    """``params`` with a ``sampling_seed`` of run and ``parts`` where the engine is deterministic, else unchanged."""
    if not getattr(args, "sglang_enable_deterministic_inference", False):
        return params
    return params | {"sampling_seed": request_seed(args.rollout_seed, *(str(part) for part in parts))}


async def generate_and_rm(
    args: Namespace, sample_or_group: Sample | Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Generate and reward a sample or a group.

    Args:
        sample_or_group: a sample that is already complete is only rewarded.
        sampling_params: a ``sampling_seed`` in them is a group's: each of its samples gets one derived from it, because
            requests with equal seeds and prompts give equal responses.
        evaluation: passed on to a custom generate function that takes it.

    Returns:
        The sample, or the list of samples that a custom generate function cut it into; for a group a list of these.
    """
    async with rollout_state(args) as state:
        if isinstance(sample_or_group, Sample):
            return await _generate_and_rm(args, state, sample_or_group, sampling_params, evaluation)
        jobs = [
            _generate_and_rm(args, state, sample, _params_of_member(sampling_params, position), evaluation)
            for position, sample in enumerate(sample_or_group)
        ]
        return await run_all(jobs)


def _params_of_member(params: dict[str, Any], position: int) -> dict[str, Any]:
    seed = params.get("sampling_seed")
    return dict(params) if seed is None else params | {"sampling_seed": request_seed(seed, position)}


async def _generate_and_rm(
    args: Namespace, state: RolloutState, sample: Sample, params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    result: Sample | list[Sample] = sample
    if sample.status not in _FINISHED:
        async with state.place():
            with state.doing(sample, "generating"):
                result = await _generate(args, sample, params, evaluation)
    with state.doing(sample, "rewarding"):
        await run_all([_reward(args, part) for part in flatten_samples(result)])
    state.num_samples_done += 1
    return result


async def _reward(args: Namespace, sample: Sample) -> None:
    if sample.reward is None and sample.status is not Status.ABORTED:
        sample.reward = await async_rm(args, sample)


async def _generate(args: Namespace, sample: Sample, params: dict[str, Any], evaluation: bool) -> Sample | list[Sample]:
    """Call the generate function that the sample, else the flag, names; else `generate`.

    A function that reports an aborted request, by the status of a sample, is called again with a new copy of the
    sample: only it knows how it could go on.
    """
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return await generate(args, sample, params)
    flag = "Sample.generate_function_path" if sample.generate_function_path else "--custom-generate-function-path"
    function = load_function(path, flag=flag, default_names=("generate", "custom_generate"))
    extra = {"evaluation": evaluation} if accepts(function, "evaluation") else {}
    untouched = pickle.dumps(sample)
    for attempt in range(_MAX_ABORTS):
        given = pickle.loads(untouched) if attempt else sample
        result = await call_hook(function, f"{flag} {path}", args, given, params, **extra)
        result = _checked(result, given, f"{flag} {path}")
        if all(part.status is not Status.ABORTED for part in flatten_samples(result)):
            return result
    raise HookError(
        f"{flag} {path} returned sample {sample.index} as aborted {_MAX_ABORTS} times; slime's `generate` goes on with "
        "a request that a weight update has interrupted"
    )


def _checked(result: Any, sample: Sample, where: str) -> Sample | list[Sample]:
    """The result of a custom generate function; the samples of a list get the ``rollout_id`` they share."""
    parts = result if isinstance(result, list) else [result]
    if not parts or not all(isinstance(part, Sample) for part in parts):
        raise HookError(f"{where} must return a Sample or a non-empty list of Sample, not {result!r:.120}")
    for part in parts:
        if part.rollout_id is None:
            part.rollout_id = sample.rollout_id
        if part.group_index is None:
            part.group_index = sample.group_index
        try:
            part.check()
        except ValueError as error:
            raise HookError(f"{where} returned an inconsistent sample: {error}") from error
    if len({part.rollout_id for part in parts}) != 1:
        raise HookError(
            f"{where} cut one rollout into samples of different rollout_id {[part.rollout_id for part in parts]}"
        )
    return result


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate one response, or go on with a partial one.

    Tokens and log-probs are the engine's; text is never tokenised again. A sample whose ``tokens`` are set and whose
    response is empty has its prompt in them. A request that a weight update aborts goes on with what it has, under the
    new weights, so callers see no aborts; each part is a segment with a version of its own in ``weight_versions``.

    Raises:
        ValueError: the prompt is chat messages that no template was applied to.
        RequestError: the request failed for good, or was aborted again and again without a token or a new version.
    """
    if not sample.tokens:
        sample.tokens = prompt_tokens(args, sample)
    start, text, segments = len(sample.tokens), sample.response, 0
    fruitless, version = 0, None  # aborts in a row without a token, under one version
    async with rollout_state(args) as state:
        while fruitless < _MAX_ABORTS:
            params = _params_of_rest(args, sample, sampling_params, done=len(sample.tokens) - start)
            if params is None:
                sample.status = Status.TRUNCATED
                break
            before = len(sample.tokens)
            await may_request()
            reply = await state.client.generate(sample.tokens, params, headers=_routing_headers(args, sample))
            _append(args, sample, reply)
            segments += 1
            if sample.status is not Status.ABORTED:
                break
            before_this, version = version, reply["meta_info"].get("weight_version")
            fruitless = 0 if len(sample.tokens) > before else fruitless + 1 if version == before_this else 1
        else:
            raise RequestError(f"sample {sample.index}: the engine aborted its request {_MAX_ABORTS} times")
    if segments > 1:
        # Not the parts' texts: an interruption may have cut a character.
        sample.response = text + _text_of(args, sample.tokens, start)
    return sample


def _params_of_rest(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], done: int
) -> dict[str, Any] | None:
    """The sampling parameters of a request of which ``done`` tokens are there already; None where no room is left."""
    room = _room(args, sample, sampling_params["max_new_tokens"])
    if room is not None and room <= 0:
        return None
    params = sampling_params | {"max_new_tokens": room}
    if least := params.get("min_new_tokens"):
        params["min_new_tokens"] = min(max(least - done, 0), least if room is None else room)
    return params


def _text_of(args: Namespace, tokens: list[int], start: int) -> str:
    """The text of ``tokens`` from ``start`` on, as it follows those before it."""
    decode = load_tokenizer(args.hf_checkpoint).decode
    how = {"skip_special_tokens": args.rollout_skip_special_tokens, "spaces_between_special_tokens": False}
    context = tokens[max(0, start - _CONTEXT) : start]
    return decode(context + tokens[start:], **how)[len(decode(context, **how)) :]


def prompt_tokens(args: Namespace, sample: Sample) -> list[int]:
    """The prompt's token ids.

    Raises:
        ValueError: the prompt is chat messages, or empty.
    """
    if not isinstance(sample.prompt, str):
        raise BadInputError(f"sample {sample.index}: its prompt is chat messages; add --apply-chat-template")
    tokens: list[int] = load_tokenizer(args.hf_checkpoint)(sample.prompt, add_special_tokens=False)["input_ids"]
    if not tokens:
        raise BadInputError(f"sample {sample.index} has an empty prompt and no tokens")
    return tokens


def _room(args: Namespace, sample: Sample, max_new_tokens: int | None) -> int | None:
    """Tokens that the response may still grow by; None for as many as the engine allows."""
    limits = []
    if max_new_tokens is not None:
        limits.append(max_new_tokens - sample.response_length)
    if args.rollout_max_context_len is not None:
        limits.append(args.rollout_max_context_len - len(sample.tokens))
    return min(limits, default=None)


def _routing_headers(args: Namespace, sample: Sample) -> dict[str, str] | None:
    """With consistent hashing, the key that keeps the requests of one sample on one engine."""
    if getattr(args, "router_policy", None) != "consistent_hashing":
        return None
    sample.session_id = sample.session_id or uuid.uuid4().hex
    return {"X-SMG-Routing-Key": sample.session_id}


def _append(args: Namespace, sample: Sample, reply: dict[str, Any]) -> None:
    meta = reply["meta_info"]
    # [[log-prob, token id, ...], ...]: taken together, so that no log-prob can belong to another token.
    pairs = meta.get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=meta,
        text=reply.get("text"),
    )
    spec, cache = sample.spec_info, sample.prefix_cache_info
    spec.spec_accept_token_num += meta.get("spec_accept_token_num") or 0
    spec.spec_draft_token_num += meta.get("spec_draft_token_num") or 0
    spec.spec_verify_ct += meta.get("spec_verify_ct") or 0
    spec.completion_token_num += meta.get("completion_tokens") or 0
    cache.cached_tokens += meta.get("cached_tokens") or 0
    cache.total_prompt_tokens += meta.get("prompt_tokens") or 0
