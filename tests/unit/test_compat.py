"""What can be tried of the fixes from outside without megatron-core's own objects."""

from __future__ import annotations

from types import SimpleNamespace

from slime.backends.megatron.compat import offsets_without_padding

NUM_GPUS = 0


def test_offsets_of_padded_buckets_are_those_of_the_data_alone() -> None:
    """Three buckets of 8, of which 5, 8 and 3 are parameters: later ones move by the padding before them."""
    buckets = [SimpleNamespace(offset=8 * i, numel_unpadded=data) for i, data in enumerate((5, 8, 3))]
    padded = {"a": (0, 2, 0), "b": (2, 5, 0), "c": (8, 16, 1), "d": (16, 17, 2), "e": (17, 19, 2)}
    buffer = SimpleNamespace(buckets=buckets, param_index_map=padded)
    found = offsets_without_padding(buffer)
    assert found == {"a": (0, 2, 0), "b": (2, 5, 0), "c": (5, 13, 1), "d": (13, 14, 2), "e": (14, 16, 2)}
    assert buffer.param_index_map is padded


def test_offsets_without_padding_stay() -> None:
    buckets = [SimpleNamespace(offset=0, numel_unpadded=4), SimpleNamespace(offset=4, numel_unpadded=4)]
    offsets = {"a": (0, 4, 0), "b": (4, 8, 1)}
    assert offsets_without_padding(SimpleNamespace(buckets=buckets, param_index_map=offsets)) == offsets
