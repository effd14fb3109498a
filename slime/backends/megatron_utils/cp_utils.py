"""Upstream's names for joining and cutting a response under context parallelism.

A function for ``--custom-tis-function-path`` is given whole responses here, and the values that it returns are cut for
it: there is nothing to join or to cut, and both functions return what they are given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int, *_: Any, **__: Any) -> Tensor:
    """The values of a whole response, [response_length], which ``tensor`` has already.

    Raises:
        ValueError: it has another length.
    """
    return _whole(tensor, response_length, "all_gather_with_cp")


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int, *_: Any, **__: Any) -> Tensor:
    """What a hook hands back of a response, [response_length]: all of it; raises as `all_gather_with_cp`."""
    return _whole(log_prob, response_length, "slice_log_prob_with_cp")


def _whole(values: Tensor, response_length: int, name: str) -> Tensor:
    if len(values) != response_length:
        raise ValueError(f"{name}: {len(values)} values for a response of {response_length} tokens")
    return values
