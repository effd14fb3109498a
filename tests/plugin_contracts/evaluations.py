"""The contract of an evaluation, which rollout functions and evaluation functions share."""

from __future__ import annotations

import math
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, flatten_samples
from slime.rollout.evaluation import eval_metrics
from slime.utils.types import Sample
from tests.plugin_contracts.contract import NotMeantError, Subject
from tests.plugin_contracts.setting import make_source

_SHAPE = 'return RolloutFnEvalOutput(data={name: {"rewards": [...], "truncated": [...], "samples": [...]}})'


def check_evaluation(subject: Subject) -> None:
    """With evaluation=True it returns rewards, truncations and samples by dataset"""
    if not subject.takes("evaluation"):
        raise NotMeantError("it has no parameter `evaluation`: give --eval-function-path to a run that evaluates")
    output = subject.function(subject.args, 0, make_source(subject.args), evaluation=True)
    data = output.data if isinstance(output, RolloutFnEvalOutput) else output
    subject.must(isinstance(data, dict) and bool(data), f"it returned {output!r:.120}", _SHAPE)
    for name, result in data.items():
        _check_dataset(subject, name, result)
    for name, value in eval_metrics(RolloutFnEvalOutput(data=data)).items():
        subject.must(math.isfinite(value), f"the metric {name} of it is {value}", "rewards are finite numbers, or None")


def _check_dataset(subject: Subject, name: str, result: Any) -> None:
    subject.must(
        isinstance(result, dict) and "rewards" in result,
        f"data[{name!r}] is {result!r:.120}",
        _SHAPE,
    )
    rewards, samples = result["rewards"], result.get("samples") or []
    subject.must(
        bool(rewards) and all(reward is None or isinstance(reward, (int, float)) for reward in rewards),
        f"data[{name!r}]['rewards'] is {rewards!r:.120}",
        "rewards are numbers, one a sample, or None where there is none",
    )
    subject.must(
        all(isinstance(sample, Sample) for sample in samples),
        f"data[{name!r}]['samples'] is {samples!r:.120}",
        "samples are a flat list of Sample",
    )
    for column in ("truncated", "samples"):
        values = result.get(column)
        subject.must(
            not values or len(values) == len(rewards),
            f"data[{name!r}] has {len(rewards)} rewards and {len(values or ())} of {column}",
            "all lists of a dataset have one entry a sample, in one order",
        )
    if not samples:
        subject.notes.append(f"data[{name!r}] has no samples: avg@n, pass@k and lengths cannot be told")
    elif None in [sample.group_index for sample in flatten_samples(samples)]:
        subject.notes.append(f"data[{name!r}]: samples without group_index count as one prompt's in avg@n and pass@k")
