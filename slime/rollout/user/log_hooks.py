"""Users' own logging of rollouts and evaluations: it takes the place of ours where it says so."""

from __future__ import annotations

import threading
from argparse import Namespace
from typing import Any

import numpy as np

from slime.data import Sample
from slime.data.source.numbers import numbers_kept
from slime.rollout.engine.loop import background_loop
from slime.rollout.user.hooks import HookError, Limit, call_hook
from slime.utils.misc import load_function

_one_at_a_time = threading.Lock()
"""Rollouts under way end in threads of their own."""


def logs_rollout(
    args: Namespace, rollout_id: int, samples: list[Sample], extra_metrics: dict[str, Any], seconds: float
) -> bool:
    """Whether ``--custom-rollout-log-function-path`` has logged a rollout; False where there is none.

    Raises:
        HookError: it failed; the message names flag and path.
        DeadlineError: it took longer than ``--rollout-timeout``.
    """
    flag = "--custom-rollout-log-function-path"
    with numbers_kept(samples, f"{flag} {args.custom_rollout_log_function_path}"):
        return _log(args, flag, rollout_id, args, samples, extra_metrics, seconds)


def logs_evaluation(args: Namespace, rollout_id: int, data: dict[str, Any], extra_metrics: dict[str, Any]) -> bool:
    """As `logs_rollout`, for an evaluation of ``--custom-eval-rollout-log-function-path``."""
    return _log(args, "--custom-eval-rollout-log-function-path", rollout_id, args, data, extra_metrics)


def _log(args: Namespace, flag: str, *values: Any) -> bool:
    path = getattr(args, flag.removeprefix("--").replace("-", "_"))
    if path is None:
        return False
    function, where = load_function(path, flag=flag), f"{flag} {path}"
    call = call_hook(function, where, *values, limit=Limit(args.rollout_timeout, "--rollout-timeout", where))
    with _one_at_a_time:
        result = background_loop().run(call, timeout=args.rollout_timeout, what=where)
    if result is not None and not isinstance(result, (bool, np.bool_)):
        raise HookError(f"{where} must return True (it has logged all it wants to) or False, not {result!r:.80}")
    return bool(result)
