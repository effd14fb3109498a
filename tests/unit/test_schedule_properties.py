"""What holds for every schedule, whatever its rows and options."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from slime.batching.packing import pack_by_cost, pack_by_tokens
from slime.batching.schedule import ScheduledStep, build_schedule, deal_by_cost, deal_in_turn

NUM_GPUS = 0


@dataclass(frozen=True)
class Case:
    """Shuffled rows of cut rollouts, and the options of a schedule."""

    lengths: np.ndarray
    rollout_ids: np.ndarray
    mask_sums: np.ndarray
    costs: np.ndarray
    dp_size: int
    multiple: int
    """Of a rank's micro-batches."""
    per_step: int
    micro_batch_size: int | None
    max_tokens: int | None

    def schedule(self, *, balance_ranks: bool = False, balance_micro_batches: bool = False) -> list[ScheduledStep]:
        return build_schedule(
            self.lengths,
            self.rollout_ids,
            self.mask_sums,
            dp_size=self.dp_size,
            global_batch_size=self.per_step,
            micro_batch_size=self.micro_batch_size,
            max_tokens=self.max_tokens,
            micro_batch_multiple=self.multiple,
            row_costs=self.costs if balance_ranks or balance_micro_batches else None,
            balance_micro_batches=balance_micro_batches,
        )

    def rows_of_steps(self) -> list[list[int]]:
        """Rows of each step, told from the rollouts in the order of their first row."""
        order = list(dict.fromkeys(self.rollout_ids.tolist()))
        steps = [set(order[i : i + self.per_step]) for i in range(0, len(order), self.per_step)]
        return [[row for row, rollout in enumerate(self.rollout_ids) if rollout in step] for step in steps]

    def plain_counts(self) -> list[int]:
        """Micro-batches of each step over all ranks, before it is known whether there are rows enough for them."""
        counts = []
        for rows in self.rows_of_steps():
            if self.max_tokens is None:
                assert self.micro_batch_size is not None
                count = -(-len(rows) // self.micro_batch_size)
            else:
                count = best_fit_decreasing([int(self.lengths[row]) for row in rows], self.max_tokens)
            counts.append(rounded_up(count, self.dp_size * self.multiple))
        return counts


@st.composite
def cases(draw: st.DrawFn, dynamic: bool | None = None) -> Case:
    steps, per_step = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    parts = draw(st.lists(st.integers(1, 3), min_size=steps * per_step, max_size=steps * per_step))
    ids = np.repeat(draw(st.permutations(range(100, 100 + len(parts)))), parts)
    ids = ids[np.array(draw(st.permutations(range(len(ids)))))]
    lengths = np.array(draw(st.lists(st.integers(1, 50), min_size=len(ids), max_size=len(ids))))
    by_tokens = draw(st.booleans()) if dynamic is None else dynamic
    return Case(
        lengths=lengths,
        rollout_ids=ids,
        mask_sums=np.array([draw(st.integers(0, int(n))) for n in lengths]),
        costs=lengths * (lengths + draw(st.floats(0.0, 1e4))),
        dp_size=draw(st.integers(1, 4)),
        multiple=draw(st.integers(1, 2)),
        per_step=per_step,
        micro_batch_size=None if by_tokens else draw(st.integers(1, 5)),
        max_tokens=draw(st.integers(1, 120)) if by_tokens else None,
    )


def rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def best_fit_decreasing(lengths: list[int], max_tokens: int) -> int:
    """Bins that it takes, looking through all of them for each row."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, left in enumerate(room) if left >= length]
        if fitting:
            room[min(fitting, key=lambda i: room[i])] -= length
        else:
            room.append(max_tokens - length)
    return len(room)


def flat(step: ScheduledStep) -> list[np.ndarray]:
    return [rows for rank in step.micro_batches for rows in rank]


def largest_load(step: ScheduledStep, costs: np.ndarray) -> float:
    return max(sum(float(costs[rows].sum()) for rows in rank) for rank in step.micro_batches)


def scheduled(case: Case, **mode: bool) -> list[ScheduledStep] | None:
    """The schedule, or None where there are too few rows, which has to be where and only where it is refused."""
    enough = all(len(rows) >= count for rows, count in zip(case.rows_of_steps(), case.plain_counts(), strict=True))
    if enough:
        return case.schedule(**mode)
    event("refused")
    with pytest.raises(ValueError, match="too few for the"):
        case.schedule(**mode)
    return None


@settings(max_examples=300, deadline=None)
@given(cases(), st.booleans(), st.booleans())
def test_every_schedule_keeps_its_promises(case: Case, balance_ranks: bool, balance_micro_batches: bool) -> None:
    balance_micro_batches &= case.max_tokens is not None
    schedule = scheduled(case, balance_ranks=balance_ranks, balance_micro_batches=balance_micro_batches)
    if schedule is None:
        return
    expected = case.rows_of_steps()
    assert len(schedule) == len(expected)
    for step, rows_of_step in zip(schedule, expected, strict=True):
        assert sorted(np.concatenate(flat(step)).tolist()) == rows_of_step
        assert step.num_rollouts == case.per_step
        assert step.num_tokens == sum(int(case.mask_sums[row]) for row in rows_of_step)
        trained = {int(case.rollout_ids[row]) for row in rows_of_step if case.mask_sums[row]}
        assert step.num_trained_rollouts == len(trained)
        assert len(step.micro_batches) == case.dp_size
        counts = {len(rank) for rank in step.micro_batches}
        assert len(counts) == 1
        assert counts.pop() % case.multiple == 0
        for rows in flat(step):
            assert rows.dtype == np.int64
            assert rows.tolist() == sorted(set(rows.tolist()))
            assert len(rows) > 0
            if case.max_tokens is not None:
                assert len(rows) == 1 or case.lengths[rows].sum() <= case.max_tokens
            else:
                assert len(rows) <= (case.micro_batch_size or 0)


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans())
def test_there_are_no_more_micro_batches_than_needed(case: Case, balance_ranks: bool) -> None:
    schedule = scheduled(case, balance_ranks=balance_ranks)
    if schedule is not None:
        assert [len(flat(step)) for step in schedule] == case.plain_counts()


@settings(max_examples=200, deadline=None)
@given(cases(dynamic=True))
def test_balanced_micro_batches_are_at_most_a_few_more(case: Case) -> None:
    schedule = scheduled(case, balance_micro_batches=True)
    if schedule is None:
        return
    for step, plain in zip(schedule, case.plain_counts(), strict=True):
        more = len(flat(step)) - plain
        assert 0 <= more <= max(case.dp_size * case.multiple, 0.02 * plain)
        event("more" if more else "as many")


@settings(max_examples=200, deadline=None)
@given(cases())
def test_balanced_ranks_are_never_worse_than_dealing_in_turn(case: Case) -> None:
    balanced = scheduled(case, balance_ranks=True)
    if balanced is not None:
        for step, in_turn in zip(balanced, case.schedule(), strict=True):
            assert largest_load(step, case.costs) <= largest_load(in_turn, case.costs) * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 11))
def test_rollouts_left_over_are_refused_not_dropped(case: Case, left_over: int) -> None:
    rollouts = len(set(case.rollout_ids.tolist()))
    size = rollouts + left_over if left_over % 2 else rollouts - left_over
    if size < 1 or rollouts % size == 0:
        return
    ones = np.ones(len(case.lengths), dtype=np.int64)
    message = rf"{rollouts} rollouts cannot be cut .* steps of {size} \({rollouts % size} would be left over\)"
    with pytest.raises(ValueError, match=message):
        build_schedule(ones, case.rollout_ids, ones, dp_size=1, global_batch_size=size, micro_batch_size=1)


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([np.uint8, np.uint64, np.int32, np.float64]))
def test_the_type_of_the_columns_changes_nothing(case: Case, dtype: type) -> None:
    def listed(case: Case) -> list[list[list[list[int]]]]:
        return [[[rows.tolist() for rows in rank] for rank in step.micro_batches] for step in scheduled(case) or []]

    other = {**vars(case), "lengths": case.lengths.astype(dtype), "mask_sums": case.mask_sums.astype(dtype)}
    assert listed(case) == listed(Case(**other))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda dp_size: st.tuples(
            st.just(dp_size),
            st.integers(1, 12).flatmap(
                lambda each: st.lists(st.floats(1e-6, 1e15), min_size=dp_size * each, max_size=dp_size * each)
            ),
        )
    )
)
def test_dealing_by_cost(drawn: tuple[int, list[float]]) -> None:
    dp_size, costs = drawn[0], np.array(drawn[1])
    dealt = deal_by_cost(costs, dp_size)
    assert dealt.shape == (dp_size, len(costs) // dp_size)
    assert sorted(dealt.ravel().tolist()) == list(range(len(costs)))
    assert (np.diff(costs[dealt], axis=1) <= 0).all()
    in_turn = costs[deal_in_turn(len(costs), dp_size)].sum(axis=1).max()
    assert costs[dealt].sum(axis=1).max() <= in_turn * (1 + 1e-12)
    # No exchange of two micro-batches between the busiest rank and another brings their difference down much.
    loads = costs[dealt].sum(axis=1)
    busiest = int(loads.argmax())
    for rank, load in enumerate(loads):
        gap = loads[busiest] - load
        if gap > 1.01e-4 * loads.mean():
            moved = costs[dealt[busiest]][:, None] - costs[dealt[rank]][None]
            assert np.abs(gap - 2 * moved).min() >= 0.98 * gap


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 100), st.integers(1, 4), st.floats(0, 1e3))
def test_packing_by_cost(lengths: list[int], max_tokens: int, multiple: int, per_token: float) -> None:
    tokens = np.array(lengths)
    rows = np.arange(len(tokens))
    count = rounded_up(len(pack_by_tokens(tokens, rows, max_tokens)), multiple)
    if count > len(rows):
        return
    packed = pack_by_cost(tokens, tokens * (tokens + per_token), rows, max_tokens, count, multiple)
    if packed is None:
        event("no room")
        return
    assert sorted(np.concatenate(packed).tolist()) == rows.tolist()
    assert len(packed) % multiple == 0
    assert count <= len(packed) <= count + max(multiple, 0.02 * count)
    assert all(len(each) > 0 for each in packed)
    assert all(len(each) == 1 or tokens[each].sum() <= max_tokens for each in packed)
