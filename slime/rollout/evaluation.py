"""Evaluation: several named data sets, all generated at once, and what is reported of them."""

from __future__ import annotations

import copy
import functools
import json
import logging
import time
from argparse import Namespace
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

import numpy as np

from slime.data import Group, Sample, Status
from slime.data.rows.dataset import PromptDataset, PromptSpec, load_prompts
from slime.options.checks.reward_rules import unmet_rewards
from slime.options.eval_datasets import CONFIG, PAIRS, EvalDataset
from slime.options.learning.distillation import REWARD_PATH, TASK_REWARD_PATH
from slime.options.rollout import generates_itself
from slime.rollout.base_types import RolloutFnEvalOutput, flatten_samples
from slime.rollout.batches.metrics import (
    by_response,
    counted_by_reward,
    length_stats,
    pass_rates,
    repetition,
    reward_or_none,
)
from slime.rollout.engine.gate import FIRST
from slime.rollout.engine.loop import run_all
from slime.rollout.engine.state import rollout_state
from slime.rollout.groups.group import generate_and_rm
from slime.rollout.sampling import eval_sampling_params, seeded
from slime.utils.errors import BadInputError

logger = logging.getLogger(__name__)

_load_cached = functools.lru_cache(maxsize=64)(load_prompts)
"""Evaluation reads the same files again and again; the key is everything that decides what they become."""


def eval_prompt_spec(args: Namespace, dataset: EvalDataset) -> PromptSpec:
    """Where an evaluation dataset's prompts are."""
    own_function = dataset.custom_generate_function_path or args.custom_generate_function_path
    own_code = own_function is not None or not generates_itself(args.eval_function_path)
    hook = dataset.custom_rm_path or (args.custom_rm_path if dataset.rm_type is None else None)
    named = dataset.rm_type or (dataset.metadata_overrides or {}).get("rm_type")
    return PromptSpec(
        path=dataset.path,
        hf_checkpoint=args.hf_checkpoint,
        flag=str(dataset),
        named_by=dataset.named_by,
        input_key=dataset.input_key,
        label_key=dataset.label_key,
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        apply_chat_template=dataset.apply_chat_template,
        chat_template_kwargs=json.dumps(dataset.apply_chat_template_kwargs or {}),
        max_prompt_len=args.eval_max_prompt_len or args.rollout_max_prompt_len,
        skip_bad_rows=args.skip_bad_rows,
        messages_allowed=own_code,
        built_in_reward=not own_code and not args.rollout_sample_hook_path and hook is None,
        rm_type=named or args.rm_type,
        rm_type_in_rows=named is None,
        unmet_rewards=unmet_rewards(args, dataset),
    )


def load_eval_prompts(args: Namespace) -> dict[str, PromptDataset]:
    """Read the evaluation datasets that the run will need; the prompts of each, by its name. An
    ``--eval-function-path`` that is not ours reads its files itself. Raises as `load_prompts` does."""
    if args.eval_interval is None or not generates_itself(args.eval_function_path):
        return {}
    return {dataset.name: _load_cached(eval_prompt_spec(args, dataset)) for dataset in args.eval_datasets}


def eval_groups(args: Namespace, dataset: EvalDataset) -> list[Group]:
    """One group of ``n_samples_per_eval_prompt`` samples for each prompt of an evaluation dataset."""
    prompts = _load_cached(eval_prompt_spec(args, dataset))
    n = dataset.n_samples_per_eval_prompt
    groups = []
    for row in range(len(prompts)):
        group = [prompts[row] for _ in range(n)]
        for position, sample in enumerate(group):
            sample.group_index = row
            sample.index = sample.rollout_id = row * n + position
            sample.custom_rm_path = dataset.custom_rm_path
            sample.generate_function_path = dataset.custom_generate_function_path
            sample.metadata |= copy.deepcopy(dataset.metadata_overrides or {})
            if dataset.rm_type is not None:
                sample.metadata["rm_type"] = dataset.rm_type
        groups.append(group)
    return groups


def eval_args(args: Namespace, dataset: EvalDataset) -> Namespace:
    """The options for generating and judging the samples of a dataset: they see its settings as the run's own."""
    changes: dict[str, Any] = {
        "use_rollout_routing_replay": False,  # nobody is trained on them
        "rollout_skip_special_tokens": dataset.skip_special_tokens,
        "rollout_stop_token_ids": dataset.stop_token_ids,
        "apply_chat_template": dataset.apply_chat_template,
        "apply_chat_template_kwargs": dataset.apply_chat_template_kwargs,
    }
    if args.eval_max_context_len is not None:
        changes["rollout_max_context_len"] = args.eval_max_context_len
    if dataset.rm_type is not None:
        # `--custom-rm-path` is training's, and would come before the samples' metadata["rm_type"].
        changes |= {"custom_rm_path": None, "rm_type": dataset.rm_type}
    elif args.custom_rm_path == REWARD_PATH:
        changes["custom_rm_path"] = TASK_REWARD_PATH
    return Namespace(**vars(args) | changes)


async def eval_rollout(args: Namespace, version: int) -> RolloutFnEvalOutput:
    """Generate and reward every dataset of ``args.eval_datasets`` by weights of ``version``. Where the engine is
    deterministic, a prompt has the same seeds in every evaluation, so that two of them differ by the weights alone.
    BadInputError where there is no dataset, or one does not read; DeadlineError past ``--rollout-timeout``."""
    if not args.eval_datasets:
        raise BadInputError(f"there is nothing to evaluate on: give {PAIRS} or {CONFIG}")
    started = time.monotonic()
    sets = [(dataset, eval_groups(args, dataset)) for dataset in args.eval_datasets]
    async with rollout_state(args, FIRST) as state:
        state.num_samples = sum(len(group) for _, groups in sets for group in groups)
        jobs = [job for dataset, groups in sets for job in _jobs(args, dataset, groups)]
        limit = f"within {args.rollout_timeout:g} s (--rollout-timeout)"
        what = f"evaluation of weight version {version}"
        async with state.runtime.here().line.waiting(FIRST, seconds=None):
            done = iter(
                await run_all(jobs, timeout=args.rollout_timeout, late=lambda: f"{what}: {state.progress()} {limit}")
            )
    data = {dataset.name: _result(args, [next(done) for _ in groups]) for dataset, groups in sets}
    return RolloutFnEvalOutput(data=data, metrics={"perf/eval_time": time.monotonic() - started})


def _jobs(args: Namespace, dataset: EvalDataset, groups: list[Group]) -> Iterator[Coroutine[Any, Any, Any]]:
    params, args = eval_sampling_params(dataset), eval_args(args, dataset)
    for group in groups:
        seeds = seeded(args, params, "eval", dataset.name, group[0].group_index)
        yield generate_and_rm(args, group, seeds, evaluation=True)


def _result(args: Namespace, groups: list[Any]) -> dict[str, Any]:
    samples, key = flatten_samples(groups), Namespace(reward_key=args.eval_reward_key)
    return {
        "rewards": [reward_or_none(key, sample) for sample in samples],
        "truncated": [sample.status is Status.TRUNCATED for sample in samples],
        "samples": samples,
    }


def evaluation_output(returned: Any) -> RolloutFnEvalOutput:
    """What an evaluation function returned, in its form; its data alone may stand for it. TypeError where it is
    something else, ValueError where a dataset has not as many samples as rewards."""
    output = returned if isinstance(returned, RolloutFnEvalOutput) else RolloutFnEvalOutput(data=returned)
    if not isinstance(output.data, Mapping):
        form = 'RolloutFnEvalOutput(data={name: {"rewards": [...], "samples": [...]}})'
        raise TypeError(f"an evaluation must return {form}, not {output.data!r:.80}")
    for name, result in output.data.items():
        if not isinstance(result, Mapping) or "rewards" not in result:
            raise TypeError(f'an evaluation must give {name} {{"rewards": [...]}}, not {result!r:.80}')
        samples, rewards = result.get("samples") or [], result["rewards"]
        if samples and len(samples) != len(rewards):
            raise ValueError(f"the evaluation of {name} has {len(samples)} samples and {len(rewards)} rewards")
    return output


def eval_metrics(output: RolloutFnEvalOutput) -> dict[str, float]:
    """``eval/`` metrics of an evaluation function's output.

    ``eval/<name>`` is the mean reward; ``-avg@n`` the same where each prompt has n > 1 responses, ``-pass@k`` the
    chance that one of k is right (reward 1), ``-truncated_ratio``, ``-no_reward`` samples left out of these.
    Where two prompts or more have a reward, there are ``/prompts``, ``/standard_error`` and ``/max_reward`` as well,
    which say how far the mean may be off.
    """
    metrics = dict(output.metrics or {})
    for name, result in output.data.items():
        metrics |= _dataset_metrics(f"eval/{name}", result)
    return metrics


def warn_of_unscored(version: int, output: RolloutFnEvalOutput) -> None:
    """Of a dataset none of whose responses has a reward: its score is then absent, which is easily overlooked."""
    for name, result in output.data.items():
        rewards = list(result["rewards"])
        if not rewards or any(reward is not None for reward in rewards):
            continue
        failures = (sample.failure for sample in result.get("samples") or [] if sample.failure)
        logger.warning(
            "evaluation of weight version %d: none of the %d responses to %s has a reward, so it has no score: %s",
            *(version, len(rewards), name, next(failures, "the reward function gave None")),
        )


def _dataset_metrics(key: str, result: dict[str, Any]) -> dict[str, float]:
    samples: list[Sample] = result.get("samples") or []
    by_prompt = by_response(samples, result["rewards"])
    rewards = [reward for responses in by_prompt for reward in responses]
    rewarded = [reward for reward in rewards if reward is not None]
    metrics = {f"{key}-no_reward": float(len(rewards) - len(rewarded))}
    if rewarded:
        metrics[key] = float(np.mean(rewarded))
        metrics |= _spread(key, by_prompt)
    if result.get("truncated"):
        metrics[f"{key}-truncated_ratio"] = float(np.mean(result["truncated"]))
    metrics |= length_stats(samples, f"{key}/response_len")
    if samples:
        metrics[f"{key}/repetition_frac"] = repetition(samples)
    equal = [responses[0] for responses in by_prompt if len(responses) > 1 and len(set(responses)) == 1]
    metrics |= counted_by_reward(f"{key}/zero_std", (reward for reward in equal if reward is not None))
    n = max((len(responses) for responses in by_prompt), default=0)
    if n > 1 and rewarded:
        metrics[f"{key}-avg@{n}"] = metrics[key]
        metrics |= {f"{key}-pass@{k}": rate for k, rate in pass_rates(by_prompt).items()}
    return metrics


def _spread(key: str, by_prompt: list[list[float | None]]) -> dict[str, float]:
    """How many prompts a score is of, its standard error by the prompts' means, and the highest reward."""
    known = [[reward for reward in responses if reward is not None] for responses in by_prompt]
    means = np.array([np.mean(rewards) for rewards in known if rewards])
    if len(means) < 2:
        return {}
    return {
        f"{key}/prompts": float(len(means)),
        f"{key}/standard_error": float(means.std(ddof=1) / np.sqrt(len(means))),
        f"{key}/max_reward": float(max(max(rewards) for rewards in known if rewards)),
    }
