"""slime.algorithms.importance against loops over the tokens of each response in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slime.algorithms.importance import MODES, Level, Mode, correction, rejection_keep

NUM_GPUS = 0
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")
ROWS = 40


@dataclass
class Case:
    """Token vectors of 40 responses: one of a single loss token, one of none, one that agrees exactly."""

    row: Tensor
    mask: Tensor
    old: Tensor
    rollout: Tensor

    def reduction(self, kind: str) -> Callable[[Tensor], Tensor]:
        def reduce(x: Tensor) -> Tensor:
            result = torch.full((ROWS,), math.nan, dtype=x.dtype)
            for r in range(ROWS):
                of_row = x[(self.row == r) & self.mask.bool()]
                if len(of_row):
                    result[r] = {"mean": of_row.mean, "sum": of_row.sum, "min": of_row.min}[kind]()
            return result[self.row]

        return reduce

    def log_ratios(self, r: int) -> list[float]:
        """Those of the loss tokens of row r."""
        of_row = (self.row == r) & self.mask.bool()
        return [
            old - rollout for old, rollout in zip(*(x[of_row].tolist() for x in (self.old, self.rollout)), strict=True)
        ]

    def ratio(self, t: int, level: str) -> float:
        of_row = self.log_ratios(int(self.row[t]))
        own = self.old[t].item() - self.rollout[t].item()
        log_ratio = {"token": own, "sequence": math.fsum(of_row), "geometric": math.fsum(of_row) / len(of_row)}[level]
        return math.exp(min(max(log_ratio, -20.0), 20.0))


def make_case(spread: float = 1.0) -> Case:
    lengths = torch.randint(1, 12, (ROWS,))
    row = torch.repeat_interleave(torch.arange(ROWS), lengths)
    mask = torch.randint(0, 2, row.shape, dtype=torch.uint8)
    mask[row == 0] = (torch.arange(int(lengths[0])) == 0).to(torch.uint8)
    mask[row == 1] = 0
    mask[row == 2] = 1
    old = -torch.rand(len(row), dtype=torch.float64)
    rollout = torch.where(row == 2, old, old + spread * torch.randn(len(row), dtype=torch.float64))
    return Case(row, mask, torch.where(mask.bool(), old, -1e4).requires_grad_(), rollout)


def correct(case: Case, level: Level, mode: Mode, low: float, high: float) -> tuple[Tensor, Tensor]:
    mean, total = case.reduction("mean"), case.reduction("sum")
    return correction(case.old, case.rollout, case.mask, mean, total, level=level, mode=mode, low=low, high=high)


def keep_of(case: Case, level: Level, low: float, high: float, veto: float | None = None) -> Tensor:
    mean, total, least = (case.reduction(kind) for kind in ("mean", "sum", "min"))
    return rejection_keep(
        case.old, case.rollout, case.mask, mean, total, least, level=level, low=low, high=high, veto=veto
    )


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_correction(level: Level, mode: Mode, spread: float) -> None:
    case = make_case(spread)
    low, high = 0.8, 1.3
    weight, clipped = correct(case, level, mode, low, high)
    assert not weight.requires_grad
    assert clipped.any()
    for t in range(len(case.row)):
        if not case.mask[t]:
            assert weight[t] == 1
            assert not clipped[t]
            continue
        ratio = case.ratio(t, level)
        want = {
            "truncate": min(ratio, high),
            "clip": min(max(ratio, low), high),
            "mask": ratio if low <= ratio <= high else 0.0,
        }[mode]
        assert weight[t].item() == pytest.approx(want, rel=1e-9)
        assert clipped[t].item() == (ratio > high or (ratio < low and mode != "truncate"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", list(MODES))
def test_equal_log_probs_weigh_exactly_one_and_are_kept(level: Level, mode: Mode) -> None:
    case = make_case()
    weight, clipped = correct(case, level, mode, 0.9, 1.1)
    assert (weight[case.row == 2] == 1).all()
    assert not clipped[case.row == 2].any()
    assert (keep_of(case, level, 1.0, 1.0, veto=1.0)[case.row == 2] == 1).all()


@pytest.mark.parametrize("veto", [None, 0.6])
@pytest.mark.parametrize("level", LEVELS)
def test_rejection(level: Level, veto: float | None) -> None:
    case = make_case()
    low, high = 0.7, 1.4
    keep = keep_of(case, level, low, high, veto)
    assert not keep.requires_grad
    assert keep.dtype is torch.float64
    assert (keep[case.mask.bool()] == 0).any()
    for t in range(len(case.row)):
        want = True
        if case.mask[t]:
            want = low <= case.ratio(t, level) <= high
            if veto is not None and any(math.exp(x) < veto for x in case.log_ratios(int(case.row[t]))):
                want = False
        assert keep[t].item() == want


def test_whole_responses_are_rejected_but_at_token_level() -> None:
    case = make_case()
    for r in range(ROWS):
        of_row = (case.row == r) & case.mask.bool()
        for level in ("sequence", "geometric"):
            assert len(set(keep_of(case, level, 0.7, 1.4)[of_row].tolist())) <= 1
        assert len(set(keep_of(case, "token", 0.0, math.inf, veto=0.6)[of_row].tolist())) <= 1


def test_a_veto_below_the_limit_of_ratios_still_holds() -> None:
    case = make_case(0.01)
    token = int(torch.nonzero(case.row == 2)[0])
    case.rollout = torch.where(torch.arange(len(case.row)) == token, case.old + 30.0, case.rollout).detach()
    keep = keep_of(case, "token", 0.0, math.inf, veto=1e-10)
    assert (keep[case.row == 2] == 0).all()
    assert (keep[case.row != 2] == 1).all()


def test_only_what_the_level_needs_is_reduced() -> None:
    """Reductions are collective: a call more on one rank than on another would hang."""

    def never(x: Tensor) -> Tensor:
        raise AssertionError("reduced without need")

    x, mask = torch.zeros(3), torch.ones(3)
    correction(x, x, mask, never, never, level="token", mode="clip", low=0.5, high=2.0)
    correction(x, x, mask, lambda y: y, never, level="geometric", mode="clip", low=0.5, high=2.0)
    correction(x, x, mask, never, lambda y: y, level="sequence", mode="clip", low=0.5, high=2.0)
    rejection_keep(x, x, mask, never, never, never, level="token", low=0.5, high=2.0)


def test_unknown_names_are_errors() -> None:
    case = make_case()
    with pytest.raises(ValueError, match="mode 'drop' is not one of truncate, clip, mask"):
        correct(case, "token", "drop", 0.5, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="level 'word' is not one of token, sequence, geometric"):
        keep_of(case, "word", 0.5, 2.0)  # type: ignore[arg-type]
