"""slime.batching: every row once, steps of whole rollouts, caps kept, as many micro-batches to every rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.batching.columns import train_batches
from slime.batching.schedule import ScheduledStep, attention_costs, build_schedule, pack_by_tokens
from slime.utils.types import Ragged, TrainBatch

NUM_GPUS = 0


def first_occurrence_order(ids: np.ndarray) -> list[int]:
    return list(dict.fromkeys(ids.tolist()))


def rows_of_step(step: ScheduledStep) -> list[int]:
    return [int(row) for rank in step.micro_batches for rows in rank for row in rows]


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, int | None], bool]:
    """Rows of shuffled cut rollouts, the options of a schedule that has enough rows, and whether to balance."""
    steps, per_step = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    parts = draw(st.lists(st.integers(1, 3), min_size=steps * per_step, max_size=steps * per_step))
    ids = np.repeat(draw(st.permutations(range(100, 100 + len(parts)))), parts)
    ids = ids[np.array(draw(st.permutations(range(len(ids)))))]
    lengths = np.array(draw(st.lists(st.integers(1, 50), min_size=len(ids), max_size=len(ids))))
    mask_sums = np.array([draw(st.integers(0, int(n))) for n in lengths])
    dynamic = draw(st.booleans())
    options = {
        "dp_size": draw(st.integers(1, 4)),
        "micro_batch_multiple": draw(st.integers(1, 2)),
        "global_batch_size": per_step,
        "micro_batch_size": None if dynamic else draw(st.integers(1, 5)),
        "max_tokens": draw(st.integers(1, 80)) if dynamic else None,
    }
    rows = {"lengths": lengths, "rollout_ids": ids, "mask_sums": mask_sums}
    return rows, options, draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(batches())
def test_every_schedule_keeps_its_promises(
    case: tuple[dict[str, np.ndarray], dict[str, int | None], bool],
) -> None:
    rows, options, balanced = case
    lengths, ids = rows["lengths"], rows["rollout_ids"]
    costs = attention_costs(lengths, 64) if balanced else None
    try:
        schedule = build_schedule(**rows, **options, row_costs=costs)  # type: ignore[arg-type]
    except ValueError as error:
        if "too few for the" not in str(error):
            raise
        return
    order = first_occurrence_order(ids)
    per_step, dp_size = options["global_batch_size"], options["dp_size"]
    assert per_step is not None
    assert len(schedule) == len(order) // per_step
    for number, step in enumerate(schedule):
        expected = set(order[number * per_step : (number + 1) * per_step])
        chosen = rows_of_step(step)
        assert sorted(chosen) == [row for row in range(len(ids)) if ids[row] in expected]
        assert step.num_rollouts == per_step
        assert step.num_tokens == sum(int(rows["mask_sums"][row]) for row in chosen)
        assert len(step.micro_batches) == dp_size
        counts = {len(rank) for rank in step.micro_batches}
        assert len(counts) == 1
        assert counts.pop() % (options["micro_batch_multiple"] or 1) == 0
        for micro_batch in (m for rank in step.micro_batches for m in rank):
            assert len(micro_batch) > 0
            assert micro_batch.dtype == np.int64
            if options["max_tokens"] is not None:
                assert len(micro_batch) == 1 or lengths[micro_batch].sum() <= options["max_tokens"]
            else:
                assert len(micro_batch) <= (options["micro_batch_size"] or 0)


def test_static_micro_batches_are_consecutive_rows_dealt_in_turn() -> None:
    schedule = build_schedule(
        np.full(8, 5), np.arange(8), np.full(8, 3), dp_size=2, global_batch_size=8, micro_batch_size=2
    )
    assert [[m.tolist() for m in rank] for rank in schedule[0].micro_batches] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert schedule[0].num_tokens == 24


def test_the_largest_micro_batch_is_split_to_fill_the_ranks() -> None:
    lengths = np.array([1, 1, 9, 3, 6, 1])
    schedule = build_schedule(lengths, np.arange(6), lengths, dp_size=4, global_batch_size=6, micro_batch_size=2)
    assert [[m.tolist() for m in rank] for rank in schedule[0].micro_batches] == [[[0, 1]], [[2]], [[3]], [[4, 5]]]


def test_an_oversize_row_is_alone() -> None:
    packed = pack_by_tokens(np.array([100, 3, 7, 5, 5]), np.arange(5), 10)
    assert [bin_.tolist() for bin_ in packed] == [[0], [1, 2], [3, 4]]


def test_packing_is_within_its_bound_of_the_optimum() -> None:
    rng = np.random.default_rng()
    pieces: list[int] = []
    for _ in range(200):  # 200 full bins cut up: the optimum is known
        cuts = np.unique(rng.integers(1, 1000, size=rng.integers(0, 6)))
        pieces += np.diff(np.concatenate([[0], cuts, [1000]])).tolist()
    lengths = rng.permutation(np.array(pieces))
    assert len(pack_by_tokens(lengths, np.arange(len(lengths)), 1000)) <= 200 * 11 / 9 + 1


def test_balancing_evens_out_the_cost_of_ranks() -> None:
    lengths = np.random.default_rng().integers(10, 4000, size=512)
    costs = attention_costs(lengths, 128)

    def spread(row_costs: np.ndarray | None) -> float:
        schedule = build_schedule(
            lengths, np.arange(512), lengths, dp_size=8, global_batch_size=512, max_tokens=8192, row_costs=row_costs
        )
        loads = [sum(float(costs[m].sum()) for m in rank) for rank in schedule[0].micro_batches]
        return max(loads) / (sum(loads) / len(loads))

    assert spread(costs) < 1.02
    assert spread(costs) <= spread(None)


def test_rollouts_that_do_not_divide_into_steps_are_an_error_not_dropped() -> None:
    with pytest.raises(
        ValueError, match=r"10 rollouts cannot be cut into optimizer steps of 4 \(2 would be left over\)"
    ):
        build_schedule(np.ones(10), np.arange(10), np.ones(10), dp_size=1, global_batch_size=4, micro_batch_size=1)


@pytest.mark.parametrize(("rows", "dp_size", "needed"), [(3, 4, 4), (5, 4, 8)])
def test_too_few_rows_for_the_ranks_says_what_to_change(rows: int, dp_size: int, needed: int) -> None:
    ones = np.ones(rows, dtype=np.int64)
    message = f"step 0 has {rows} rows .* too few for the {needed} micro-batches .* raise --global-batch-size"
    with pytest.raises(ValueError, match=message):
        build_schedule(ones, np.arange(rows), ones, dp_size=dp_size, global_batch_size=rows, micro_batch_size=1)


def test_one_way_of_packing_has_to_be_chosen() -> None:
    ones = np.ones(4, dtype=np.int64)
    with pytest.raises(ValueError, match="micro_batch_size=1 and max_tokens=5"):
        build_schedule(ones, ones, ones, dp_size=1, global_batch_size=1, micro_batch_size=1, max_tokens=5)


@pytest.mark.parametrize("balanced", [False, True])
def test_a_hundred_thousand_rows_take_less_than_two_seconds(balanced: bool) -> None:
    rng = np.random.default_rng()
    lengths = rng.integers(20, 8192, size=100_000)
    costs = attention_costs(lengths, 4096) if balanced else None
    start = time.process_time()
    build_schedule(
        lengths,
        np.arange(100_000) // 2,
        lengths,
        dp_size=64,
        global_batch_size=50_000,
        max_tokens=9000,
        row_costs=costs,
    )
    assert time.process_time() - start < 2.0


def test_each_rank_gets_its_rows_and_indices_into_them() -> None:
    rng = np.random.default_rng()
    rows = 24
    tokens = Ragged.from_rows([np.full(rng.integers(2, 9), i) for i in range(rows)], np.int32)
    number = np.arange(rows)
    columns = TrainBatch(
        tokens=tokens,
        loss_mask=Ragged.from_rows([np.ones(n - 1) for n in tokens.lengths], np.uint8),
        rewards=number.astype(np.float32),
        raw_rewards=number.astype(np.float32),
        rollout_ids=number // 2,
        rollout_mask_sums=number,
        group_indices=number,
        sample_indices=number,
        truncated=number % 2 == 0,
        rollout_log_probs=None,
        steps=[],
    )
    schedule = build_schedule(
        tokens.lengths, columns.rollout_ids, tokens.lengths - 1, dp_size=3, global_batch_size=6, max_tokens=16
    )
    batches = train_batches(columns, schedule)
    assert len(batches) == 3
    for rank, batch in enumerate(batches):
        assert len(batch.steps) == 2
        assert batch.rollout_log_probs is None
        used = [rows for step in batch.steps for rows in step.micro_batches]
        assert np.concatenate(used).tolist() == list(range(len(batch)))
        for step, scheduled in zip(batch.steps, schedule, strict=True):
            assert (step.num_rollouts, step.num_tokens) == (scheduled.num_rollouts, scheduled.num_tokens)
            for own, whole in zip(step.micro_batches, scheduled.micro_batches[rank], strict=True):
                assert batch.sample_indices[own].tolist() == whole.tolist()
                assert [int(batch.tokens[i][0]) for i in own] == whole.tolist()
                assert [len(batch.loss_mask[i]) for i in own] == [len(columns.loss_mask[i]) for i in whole]
                assert batch.truncated[own].tolist() == columns.truncated[whole].tolist()
    assert sorted(np.concatenate([b.sample_indices for b in batches]).tolist()) == list(range(rows))
