"""Evaluation: several named data sets, all generated at once, and what is reported of them."""

from __future__ import annotations

import functools
import json
import math
import time
from argparse import Namespace
from typing import Any

import numpy as np

from slime.options.rollout import DEFAULT_ROLLOUT
from slime.rollout.base_types import RolloutFnEvalOutput, flatten_samples
from slime.rollout.dataset import PromptSpec, load_prompts
from slime.rollout.gate import FIRST
from slime.rollout.group import generate_and_rm
from slime.rollout.loop import run_all
from slime.rollout.metrics import length_stats
from slime.rollout.sampling import eval_sampling_params, seeded
from slime.rollout.state import rollout_state
from slime.utils.errors import BadInputError
from slime.utils.types import Group, Sample, Status

_load_cached = functools.lru_cache(maxsize=64)(load_prompts)
"""Evaluation reads the same files again and again; the key is everything that decides what they become."""


def eval_prompt_spec(args: Namespace, name: str, path: str) -> PromptSpec:
    """Where an evaluation set's prompts are; what ``--eval-*`` does not set is as for training."""
    own_code = args.custom_generate_function_path is not None or args.eval_function_path not in (None, DEFAULT_ROLLOUT)
    return PromptSpec(
        path=path,
        hf_checkpoint=args.hf_checkpoint,
        flag=f"--eval-prompt-data {name}",
        input_key=args.eval_input_key or args.input_key,
        label_key=args.eval_label_key or args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.eval_tool_key or args.tool_key,
        apply_chat_template=args.apply_chat_template,
        chat_template_kwargs=json.dumps(args.apply_chat_template_kwargs or {}),
        max_prompt_len=args.eval_max_prompt_len or args.rollout_max_prompt_len,
        skip_bad_rows=args.skip_bad_rows,
        messages_allowed=own_code,
    )


def load_eval_prompts(args: Namespace) -> dict[str, int]:
    """Read the evaluation sets that the run will need; how many prompts each has.

    An ``--eval-function-path`` that is not ours reads its files itself.

    Raises:
        BadInputError: a file or row that cannot be read.
    """
    if args.eval_interval is None or args.eval_function_path not in (None, DEFAULT_ROLLOUT):
        return {}
    return {name: len(_load_cached(eval_prompt_spec(args, name, path))) for name, path in args.eval_datasets}


def eval_groups(args: Namespace, name: str, path: str) -> list[Group]:
    """One group of ``--n-samples-per-eval-prompt`` samples for each prompt of an evaluation set."""
    prompts = _load_cached(eval_prompt_spec(args, name, path))
    n = args.n_samples_per_eval_prompt
    groups = []
    for row in range(len(prompts)):
        group = [prompts[row] for _ in range(n)]
        for position, sample in enumerate(group):
            sample.group_index = row
            sample.index = sample.rollout_id = row * n + position
        groups.append(group)
    return groups


async def eval_rollout(args: Namespace, version: int) -> RolloutFnEvalOutput:
    """Generate and reward every evaluation set of ``args.eval_datasets``, pairs of name and path.

    Where the engine is deterministic, a prompt has the same sampling seeds in every evaluation, so that two of them
    differ by the weights alone.

    Args:
        version: of the weights that are scored, for the message of a deadline.

    Raises:
        BadInputError: there is no evaluation set, or one does not read.
        DeadlineError: ``--rollout-timeout`` passed.
    """
    if not args.eval_datasets:
        raise BadInputError("there is nothing to evaluate on: give --eval-prompt-data")
    started = time.monotonic()
    if args.eval_max_context_len is not None:
        args = Namespace(**vars(args) | {"rollout_max_context_len": args.eval_max_context_len})
    params = eval_sampling_params(args)
    sets = {name: eval_groups(args, name, path) for name, path in args.eval_datasets}
    async with rollout_state(args, FIRST) as state:
        state.num_samples = sum(len(group) for groups in sets.values() for group in groups)
        jobs = [
            generate_and_rm(args, group, seeded(args, params, "eval", name, group[0].group_index), evaluation=True)
            for name, groups in sets.items()
            for group in groups
        ]
        limit = f"within {args.rollout_timeout:g} s (--rollout-timeout)"
        what = f"evaluation of weight version {version}"
        done = iter(
            await run_all(jobs, timeout=args.rollout_timeout, late=lambda: f"{what}: {state.progress()} {limit}")
        )
    data = {name: _result(args, [next(done) for _ in groups]) for name, groups in sets.items()}
    return RolloutFnEvalOutput(data=data, metrics={"perf/eval_time": time.monotonic() - started})


def _result(args: Namespace, groups: list[Any]) -> dict[str, Any]:
    samples = flatten_samples(groups)
    return {
        "rewards": [_reward(args, sample) for sample in samples],
        "truncated": [sample.status is Status.TRUNCATED for sample in samples],
        "samples": samples,
    }


def _reward(args: Namespace, sample: Sample) -> float | None:
    if sample.reward is None:
        return None
    return sample.get_reward_value(Namespace(reward_key=args.eval_reward_key))


def eval_metrics(output: RolloutFnEvalOutput) -> dict[str, float]:
    """``eval/`` metrics of an evaluation function's output.

    ``eval/<name>`` is the mean reward; ``-avg@n`` the same where each prompt has n > 1 responses, ``-pass@k`` the
    chance that one of k is right (reward 1), ``-truncated_ratio``, ``-no_reward`` samples left out of these.
    """
    metrics = dict(output.metrics or {})
    for name, result in output.data.items():
        metrics |= _dataset_metrics(f"eval/{name}", result)
    return metrics


def _dataset_metrics(key: str, result: dict[str, Any]) -> dict[str, float]:
    samples: list[Sample] = result.get("samples") or []
    by_prompt = _by_prompt(result["rewards"], samples)
    responses = [reward for rewards in by_prompt.values() for reward in rewards]
    metrics = {f"{key}-no_reward": float(sum(reward is None for reward in result["rewards"]))}
    if responses:
        metrics[key] = float(np.mean(responses))
    if result.get("truncated"):
        metrics[f"{key}-truncated_ratio"] = float(np.mean(result["truncated"]))
    metrics |= length_stats(samples, f"{key}/response_len")
    n = max((len(rewards) for rewards in by_prompt.values()), default=0)
    if n > 1:
        metrics[f"{key}-avg@{n}"] = metrics[key]
        metrics |= {f"{key}-pass@{k}": value for k, value in _pass_rates(by_prompt, n).items()}
    return metrics


def _by_prompt(rewards: list[float | None], samples: list[Sample]) -> dict[Any, list[float]]:
    """Rewards of each prompt's responses; a response that was cut into several samples counts once."""
    if not samples:
        return {position: [reward] for position, reward in enumerate(rewards) if reward is not None}
    responses: dict[Any, dict[Any, float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        if reward is not None:
            responses.setdefault(sample.group_index, {}).setdefault(sample.rollout_id, reward)
    return {prompt: list(of_prompt.values()) for prompt, of_prompt in responses.items()}


def _pass_rates(by_prompt: dict[Any, list[float]], n: int) -> dict[int, float]:
    """pass@k for the powers of two up to n, and n; over the prompts with as many responses."""
    counts = [(len(rewards), sum(reward == 1 for reward in rewards)) for rewards in by_prompt.values()]
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    return {
        k: float(np.mean([pass_at_k(size, correct, k) for size, correct in counts if size >= k])) for k in ks if k <= n
    }


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of ``k`` responses is right, from ``n`` of which ``correct`` are.

    ``1 - C(n - correct, k) / C(n, k)``: Chen et al. 2021, arXiv:2107.03374, section 2.1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
