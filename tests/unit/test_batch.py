"""Packed micro-batches against a loop over every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime.data import Ragged, TrainBatch
from slime.training.micro_batch import MicroBatch
from slime.training.packing import PackLayout, ranges
from tests.micro_batches import fresh_rows, pack_layout, part_of_rank, step_of, whole_stream
from tests.parallel import rollouts

NUM_GPUS = 0


def layout(cp_size: int = 1, cp_rank: int = 0, multiple: int = 1, **options: Any) -> PackLayout:
    return pack_layout(cp_size, cp_rank, multiple=multiple, **options)


@pytest.mark.parametrize("multiple", [1, 3, 8])
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_every_token(cp_size: int, cp_rank: int, multiple: int) -> None:
    batch = rollouts.columns(cp_size * 10 + multiple)
    rows = np.random.default_rng(0).permutation(len(batch))[:7]
    packed = MicroBatch(batch, rows, step_of(batch), layout(cp_size, cp_rank, multiple))
    stream = whole_stream(batch, rows, cp_size, multiple)
    want = part_of_rank(stream, cp_size, cp_rank)
    assert packed.tokens.shape == packed.position_ids.shape == (1, len(want))
    assert packed.tokens[0].tolist() == [token["token"] for token in want]
    assert packed.position_ids[0].tolist() == [token["position"] for token in want]
    assert len(want) % multiple == 0
    assert packed.rollout_log_probs is not None
    for t, token in enumerate(want):
        row = int(token["row"])
        share = token["mask"] / max(int(batch.rollout_mask_sums[row]), 1) if row >= 0 else 0.0
        assert packed.weights[t] == pytest.approx(share / len(batch))
        assert packed.mean_weights[t] == pytest.approx(share / np.count_nonzero(batch.rollout_mask_sums))
        assert packed.mask[t] == token["mask"]
        assert row == -1 or rows[packed.row_of_token[t]] == row
        assert packed.rollout_log_probs[t] == pytest.approx(token["log_prob"])
        if "label" in token:
            assert packed.labels[t] == token["label"]
    assert packed.lengths == [len(batch.tokens[row]) for row in rows.tolist()]
    assert packed.row_counts.tolist() == [batch.loss_mask[row].sum() for row in rows.tolist()]
    assert packed.responses.lengths.tolist() == [len(batch.loss_mask[row]) for row in rows.tolist()]
    boundaries = [i for i, token in enumerate(stream) if token["position"] == 0] + [len(stream)]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == boundaries
    assert packed.packed_seq_params.max_seqlen_q == max(np.diff(boundaries))


def all_of(batch: TrainBatch, **options: Any) -> list[MicroBatch]:
    """The batch in pieces, on two context-parallel ranks."""
    step = step_of(batch)
    pieces = np.array_split(np.arange(len(batch)), 5)
    return [MicroBatch(batch, rows, step, layout(2, rank, **options)) for rows in pieces for rank in range(2)]


def test_weights_add_up_to_one_rollout_each() -> None:
    batch = rollouts.columns(1)
    counted = int((batch.rollout_mask_sums > 0).sum())
    assert counted < len(batch)  # the fully masked one counts in the denominator
    total = sum(float(packed.weights.sum()) for packed in all_of(batch))
    assert total == pytest.approx(counted / len(batch), rel=1e-6)
    assert sum(float(packed.mean_weights.sum()) for packed in all_of(batch)) == pytest.approx(1.0, rel=1e-6)


def test_parts_of_a_rollout_share_its_weight() -> None:
    batch = fresh_rows()
    of_rollout = dict.fromkeys(batch.rollout_ids.tolist(), 0.0)
    for packed in all_of(batch):
        for row, weight in zip(packed.rows[packed.row_of_token], packed.weights.tolist(), strict=True):
            of_rollout[int(batch.rollout_ids[row])] += weight
    counted = {int(i) for i, n in zip(batch.rollout_ids, batch.rollout_mask_sums, strict=True) if n}
    assert of_rollout == pytest.approx({i: (i in counted) / len(of_rollout) for i in of_rollout}, rel=1e-6)


def test_weights_of_a_constant_length_are_all_the_same_and_means_keep_theirs() -> None:
    batch = fresh_rows()
    constant, plain = all_of(batch, constant_length=9), all_of(batch)
    weights = torch.cat([packed.weights for packed in constant])
    assert weights.unique().tolist() == pytest.approx([0.0, 1 / 9 / len(np.unique(batch.rollout_ids))])
    for mine, theirs in zip(constant, plain, strict=True):
        assert torch.equal(mine.mean_weights, theirs.mean_weights)


def test_weights_of_the_per_token_loss_are_all_the_same() -> None:
    batch = rollouts.columns(2)
    weights = torch.cat([packed.weights for packed in all_of(batch, per_token_loss=True)])
    assert float(weights.sum()) == pytest.approx(1.0, rel=1e-6)
    assert weights.unique().tolist() == pytest.approx([0.0, 1 / int(batch.loss_mask.values.sum())])


def test_rows_without_an_engine_have_no_log_probs() -> None:
    batch = rollouts.columns(3, with_engine=False)
    assert MicroBatch(batch, np.arange(4), step_of(batch), layout()).rollout_log_probs is None


def test_response_without_a_prompt_is_refused() -> None:
    batch = rollouts.columns(4)
    masks = [batch.loss_mask[row] for row in range(len(batch))]
    masks[5] = np.ones(len(batch.tokens[5]), dtype=np.uint8)
    broken = batch.changed(loss_mask=Ragged.from_rows(masks, np.uint8))
    with pytest.raises(ValueError, match=r"sample 5: \d+ response tokens of \d+ leave no prompt token"):
        MicroBatch(broken, np.arange(len(batch)), step_of(batch), layout())


def test_ranges() -> None:
    rng = np.random.default_rng(5)
    starts, lengths = rng.integers(0, 100, 20), rng.integers(0, 6, 20)
    want = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    assert np.array_equal(ranges(starts, lengths), want)
    assert len(ranges(np.array([3]), np.array([0]))) == 0
