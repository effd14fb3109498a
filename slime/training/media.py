"""The media of a micro-batch, from references to what the model's forward call gets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from slime.data import Column, TrainBatch
from slime.data.media import MediaError
from slime.utils.errors import BadInputError
from slime.utils.misc import refusing


def load_media(column: Column, batch: TrainBatch, rows: Sequence[int], args: Namespace) -> dict[str, np.ndarray]:
    """By keyword of the forward call, what the column's ``load`` makes of the rows' media, in the rows' order.

    Raises:
        BadInputError: bytes are missing or have changed, or the function raised; it names the sample.
    """
    assert column.load is not None
    parts: dict[str, list[np.ndarray]] = {}
    for row in rows:
        where = f"{batch.name_of(row)}: column {column.name}"
        try:
            data = [reference.load() for reference in batch.columns[column.name][row]]
        except MediaError as error:
            raise BadInputError(f"{where}: {error}") from error
        if not data:
            continue
        with refusing(f"{where}: its load raised"):
            for keyword, values in column.load(args, data).items():
                parts.setdefault(keyword, []).append(np.asarray(values))
    return {keyword: np.concatenate(arrays) for keyword, arrays in parts.items()}
