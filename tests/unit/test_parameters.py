"""As many parameters as the models have that were published; see `tests/unit/test_parameter_counts.py`."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from dataclasses import fields

import pytest

from slime.batching.flops import DecoderShape, LatentShape
from slime.batching.parameters import Matrices, matrices
from slime.models import shape_from_hf
from slime.rollout.batches.train_data import decoder_shape
from tests import shipped
from tests.unit.test_parameter_counts import PUBLISHED

NUM_GPUS = 0


def matrices_of(name: str) -> list[Matrices]:
    sizes = shape_from_hf(shipped.config(name))
    options: dict[str, object] = dict.fromkeys(f.name for cls in (DecoderShape, LatentShape) for f in fields(cls))
    args = Namespace(**{**options, "multi_latent_attention": False, "moe_layer_freq": 1, **sizes})
    return matrices(decoder_shape(args), tied=not args.untie_embeddings_and_output_weights)


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_as_published(name: str) -> None:
    """To 0.2 %, or what was rounded off: vectors are left out."""
    count = sum(matrix.elements for matrix in matrices_of(name)) / 1e9
    rounding = 0.5 * 10 ** -len(PUBLISHED[name].partition(".")[2])
    assert count == pytest.approx(float(PUBLISHED[name]), rel=2e-3, abs=rounding)


def test_what_cuts_them() -> None:
    """In each of DeepSeek-V3's 58 layers with experts are 256, of three matrices from 7168 to 2048 or back."""
    parts: defaultdict[str, int] = defaultdict(int)
    for matrix in matrices_of("deepseek-v3"):
        parts[matrix.part] += matrix.elements
    assert parts["experts"] == 58 * 256 * 3 * 7168 * 2048
    assert parts["vocabulary"] == 2 * 129280 * 7168
