"""What the trainers computed of a rollout's samples, from the files of ``--save-debug-train-data``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.data import Sample
from slime.utils.errors import BadInputError
from tools.samples.safe_files import load_safe

_KNOWN = ("tokens", "loss_masks", "rollout_log_probs")
"""Columns that the rollout's own file has."""


def read_train_data(
    files: Iterable[Path], rollout_id: Any, samples: list[Sample]
) -> dict[int, dict[str, torch.Tensor]]:
    """By the sample's place, every column with one number a response token: log-probs, advantages, returns, ...

    Ranks of one data-parallel rank have the same samples; the last of them that has a column counts. Files of other
    rollouts are left out, by the numbers in their names before they are read; so are samples of none of the files.

    Raises:
        BadInputError: a file is none of a training rank's.
    """
    named = [file for file in files if rollout_id in map(int, re.findall(r"\d+", file.name))]
    if not named:
        return {}
    places = {_key(s.index if s.index is not None else place, s.tokens): place for place, s in enumerate(samples)}
    found: dict[int, dict[str, torch.Tensor]] = {}
    for file in named:
        content = load_safe(file)
        try:
            if content["rollout_id"] != rollout_id:
                continue
            data = content["samples"]
            columns = {key: rows for key, rows in data.items() if key not in _KNOWN and _is_column(rows)}
            for row, length in enumerate(data["response_lengths"]):
                place = places.get(_key(data["sample_indices"][row], data["tokens"][row]))
                if place is not None:
                    of_row = {key: rows[row] for key, rows in columns.items() if len(rows[row]) == length}
                    found.setdefault(place, {}).update(of_row)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise BadInputError(f"{file}: not a training rank's file: {type(error).__name__}: {error}") from error
    return found


def _key(index: int, tokens: Any) -> tuple[int, bytes]:
    """Parts of one rollout may have one index, so that tokens tell them apart."""
    return index, np.asarray(tokens, dtype=np.int64).tobytes()


def _is_column(rows: Any) -> bool:
    return isinstance(rows, list) and all(isinstance(row, torch.Tensor) and row.dim() == 1 for row in rows)


def mean_gap(sample: Sample, trained: list[Any] | None, log_probs: torch.Tensor | None) -> float | None:
    """Mean |trainer's - engine's log-prob| over the tokens that count in the loss; None where either is unknown."""
    engines = sample.rollout_log_probs
    if log_probs is None or engines is None or len(engines) != len(log_probs):
        return None
    gaps = (log_probs.double() - torch.tensor(engines, dtype=torch.float64)).abs()
    counted = gaps if trained is None else gaps[torch.tensor(trained, dtype=torch.bool)]
    gap = float(counted.mean())
    return gap if math.isfinite(gap) else None
