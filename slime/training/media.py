"""The media of a micro-batch, from references to what the model's forward call gets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from slime.data import Column, TrainBatch
from slime.data.media import MediaError, MediaRef
from slime.utils.errors import BadInputError
from slime.utils.misc import refusing


def load_media(column: Column, batch: TrainBatch, rows: Sequence[int], args: Namespace) -> dict[str, np.ndarray]:
    """By keyword of the forward call, what the column's ``load`` makes of the rows' media, in the rows' order.

    Raises:
        BadInputError: bytes are missing or have changed, or the function raised; it names the sample.
    """
    assert column.load is not None
    parts: dict[str, list[np.ndarray]] = {}
    known: dict[MediaRef, bytes] = {}  # members of a group share them
    for row in rows:
        where = f"{batch.name_of(row)}: column {column.name}"
        references = batch.columns[column.name][row]
        try:
            known |= {reference: reference.load() for reference in references if reference not in known}
        except MediaError as error:
            raise BadInputError(f"{where}: {error}") from error
        if not references:
            continue
        with refusing(f"{where}: its load raised"):
            for keyword, values in column.load(args, [known[reference] for reference in references]).items():
                parts.setdefault(keyword, []).append(np.asarray(values))
    with refusing(f"column {column.name}: what its load gave of {len(rows)} samples does not fit together:"):
        return {keyword: np.concatenate(arrays) for keyword, arrays in parts.items()}
