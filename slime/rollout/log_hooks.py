"""Users' own logging of rollouts and evaluations: it takes the place of ours where it says so."""

from __future__ import annotations

import asyncio
import inspect
import threading
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from slime.rollout.hooks import HookError, call_hook
from slime.rollout.loop import background_loop
from slime.utils.errors import DeadlineError
from slime.utils.misc import load_function
from slime.utils.types import Sample

_one_at_a_time = threading.Lock()
"""Rollouts under way end in threads of their own."""


def logs_rollout(
    args: Namespace, rollout_id: int, samples: list[Sample], extra_metrics: dict[str, Any], seconds: float
) -> bool:
    """Whether ``--custom-rollout-log-function-path`` has logged a rollout; False where there is none.

    Raises:
        HookError: it failed; the message names flag, path and signature.
        DeadlineError: it took longer than ``--rollout-timeout``.
    """
    signature = "(rollout_id, args, samples, rollout_extra_metrics, rollout_time)"
    values = (rollout_id, args, samples, extra_metrics, seconds)
    return _log(args, "--custom-rollout-log-function-path", signature, values)


def logs_evaluation(args: Namespace, rollout_id: int, data: dict[str, Any], extra_metrics: dict[str, Any]) -> bool:
    """As `logs_rollout`, for an evaluation of ``--custom-eval-rollout-log-function-path``."""
    signature = "(rollout_id, args, data, extra_metrics)"
    values = (rollout_id, args, data, extra_metrics)
    return _log(args, "--custom-eval-rollout-log-function-path", signature, values)


def _log(args: Namespace, flag: str, signature: str, values: tuple[Any, ...]) -> bool:
    path = getattr(args, flag.removeprefix("--").replace("-", "_"))
    if path is None:
        return False
    function, where = load_function(path, flag=flag), f"{flag} {path}"
    _check_signature(function, where, signature, values)
    call = _call(function, where, values, timeout=args.rollout_timeout)
    with _one_at_a_time:
        result = background_loop().run(call, timeout=args.rollout_timeout, what=where)
    if result is not None and not isinstance(result, (bool, np.bool_)):
        raise HookError(f"{where} {signature} must return True (nothing else logs it) or False, not {result!r:.80}")
    return bool(result)


def _check_signature(function: Callable[..., Any], where: str, signature: str, values: tuple[Any, ...]) -> None:
    try:
        inspect.signature(function).bind(*values)
    except TypeError as error:
        raise HookError(f"{where} must take {signature}: {error}") from error


async def _call(function: Callable[..., Any], where: str, values: tuple[Any, ...], *, timeout: float) -> Any:
    try:
        async with asyncio.timeout(timeout) as deadline:
            return await call_hook(function, where, *values)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineError(f"{where} took longer than {timeout:g} s (--rollout-timeout)") from error
