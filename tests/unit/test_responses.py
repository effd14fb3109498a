"""Between packed streams and whole responses: against loops, and two context-parallel ranks against one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples.train_infer_mismatch_helper import mis
from slime.data import TrainBatch
from slime.training.loss import hooks
from slime.training.loss.advantages import set_advantages
from slime.training.loss.token_loss import MAXIMUM, policy_loss, reduce_tokens
from slime.training.micro_batch import MicroBatch
from tests.algorithm_options import algorithm_options
from tests.micro_batches import Rows, engine_rows, fresh_rows, near, numbers, packed, put, same, take, targets
from tests.ranks import run_ranks

NUM_GPUS = 0
RANKS = 2
HOOKS = Path(__file__).parents[1] / "user_hooks.py"
Tokens = dict[tuple[int, int], float]
"""Of (row, response token)."""

TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.05, "eps_clip": 0.1}
LOSSES: dict[str, dict[str, Any]] = {
    "gspo": {**TERMS, "advantage_estimator": "gspo", "use_opsm": True},
    "sequence correction": {
        "use_tis": True, "tis_level": "sequence", "tis_mode": "truncate",
        "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.1,
        "rs_veto_threshold": 0.62,
    },
    "reducer": {**TERMS, "custom_pg_loss_reducer_function_path": f"{HOOKS}:squared_means"},
    "importance": {**TERMS, "use_tis": True, "custom_tis_function_path": f"{HOOKS}:drops_and_mixes"},
    "importance as upstream's": {
        **TERMS, "use_tis": True, "custom_tis_function_path": f"{mis.__name__}:compute_mis_weights_with_cp",
        "tis_level": "geometric", "tis_upper_bound": 1.1, "tis_lower_bound": None, "tis_batch_normalize": True,
        "use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.3, "rs_trust_region": "avg", "rs_tr_threshold": 0.1,
    },
    "grpo as a custom loss": {**TERMS, "loss_type": "custom_loss", "custom_loss_function_path": f"{HOOKS}:grpo"},
    "pairwise custom loss": {"loss_type": "custom_loss", "custom_loss_function_path": f"{HOOKS}:pairwise"},
    "per token": {"loss_type": "custom_loss", "custom_loss_function_path": f"{HOOKS}:grpo", **TERMS,
                  "calculate_per_token_loss": True},
}  # fmt: skip


# ---- one process


def test_gather_and_scatter_are_inverse() -> None:
    batch = fresh_rows()
    values = numbers(batch, -3, 3)
    for micro_batch in packed(batch):
        rows = [torch.from_numpy(values[row]) for row in micro_batch.rows.tolist()]
        responses = micro_batch.responses
        column = put(batch, micro_batch, values)
        same([row.double().numpy() for row in responses.rows(column)], rows)
        flat = torch.cat(rows).float()
        assert torch.equal(responses.gather(column), flat)
        assert torch.equal(responses.gather(responses.scatter(flat)), flat)
        at = torch.zeros(len(column), dtype=torch.bool)
        at[[t for t, _, _ in targets(batch, micro_batch)]] = True
        assert torch.equal(responses.scatter(responses.gather(column)), column * at)


@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_scatter_takes_the_ranks_own_part(cp_size: int, cp_rank: int) -> None:
    batch = fresh_rows()
    values = numbers(batch, -3, 3)
    for micro_batch in packed(batch, cp_size=cp_size, cp_rank=cp_rank):
        flat = torch.from_numpy(np.concatenate([values[row] for row in micro_batch.rows])).requires_grad_()
        column = micro_batch.responses.scatter(flat)
        want = torch.zeros_like(column)
        for t, row, j in targets(batch, micro_batch, cp_size, cp_rank):
            want[t] = values[row][j]
        assert torch.equal(column, want)
        (column * torch.arange(len(column))).sum().backward()
        upstream = {
            (row, j): float(t) for t, row, j in targets(batch, micro_batch, cp_size, cp_rank)
        }  # entry t has the gradient t
        order = [(row, j) for row in micro_batch.rows.tolist() for j in range(len(values[row]))]
        assert flat.grad is not None
        assert flat.grad.tolist() == [upstream.get(place, 0.0) for place in order]


def test_reductions_over_rows() -> None:
    batch = fresh_rows()
    values, weights = numbers(batch, -3, 3), numbers(batch, -1, 1)
    micro_batches = packed(batch)
    reductions: dict[str, list[Tensor]] = {"sum": [], "mean": [], "min": []}
    gradients: dict[str, list[Tensor | None]] = {"sum": [], "mean": []}
    for micro_batch in micro_batches:
        leaf = put(batch, micro_batch, values).requires_grad_()
        for name, function in (("sum", micro_batch.row_sum), ("mean", micro_batch.row_mean)):
            column = function(leaf)
            reductions[name].append(column.detach())
            (column * put(batch, micro_batch, weights) * micro_batch.mask).sum().backward()
            gradients[name].append(leaf.grad)
            leaf.grad = None
        reductions["min"].append(micro_batch.row_min(leaf))
        assert not reductions["min"][-1].requires_grad
    want: dict[str, Rows] = {name: [] for name in (*reductions, "sum gradient", "mean gradient")}
    for row, of_row in enumerate(values):
        counted = np.flatnonzero(batch.loss_mask[row])
        total = sum(float(of_row[t]) for t in counted)
        upstream = sum(float(weights[row][t]) for t in counted)
        ones, count = np.ones(len(of_row)), max(len(counted), 1)
        want["sum"].append(total * ones)
        want["mean"].append(total / count * ones)
        want["min"].append(min((float(of_row[t]) for t in counted), default=np.inf) * ones)
        want["sum gradient"].append(upstream * batch.loss_mask[row])
        want["mean gradient"].append(upstream / count * batch.loss_mask[row])
    for name, columns in reductions.items():
        same(take(batch, micro_batches, columns), want[name])
    for name, columns_of in gradients.items():
        same(take(batch, micro_batches, columns_of), want[f"{name} gradient"])


# ---- two processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two context-parallel ranks make of the checks."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, (str(directory),), RANKS)
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_of_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    """Loss and metrics add up to those of one process, and every token's gradient is the same."""
    metrics, gradients = run_loss(name)
    for metric, value in metrics.items():
        of_ranks = [rank[name][0][metric] for rank in ranks]
        got = max(of_ranks) if metric.startswith(MAXIMUM) else sum(of_ranks)
        assert got == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    assert_same_tokens([rank[name][1] for rank in ranks], gradients)
    assert any(gradients.values())


def test_whole_responses_on_two_ranks(ranks: list[dict[str, Any]]) -> None:
    """Both see all of them, and a part's gradient is the sum over what both make of it."""
    values, gradients = run_gather()
    for rank in ranks:
        assert rank["gather"][0] == values
    ones = {place: gradient * sum(r + 1 for r in range(RANKS)) for place, gradient in gradients.items()}
    assert_same_tokens([rank["gather"][1] for rank in ranks], ones)


@pytest.mark.parametrize("name", ["row_sum", "row_mean", "row_min"])
def test_reductions_over_rows_on_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    assert_same_tokens([rank["reductions"][name] for rank in ranks], run_reductions()[name])


def test_whitening_over_two_data_parallel_ranks(ranks: list[dict[str, Any]]) -> None:
    assert_same_tokens([rank["whitening"] for rank in ranks], run_whitening())


def assert_same_tokens(of_ranks: list[Tokens], want: Tokens) -> None:
    """Every token on exactly one rank."""
    assert sum(len(tokens) for tokens in of_ranks) == len(want)
    got = {place: value for tokens in of_ranks for place, value in tokens.items()}
    places = sorted(want)
    np.testing.assert_allclose([got[p] for p in places], [want[p] for p in places], rtol=2e-5, atol=2e-6)


def run_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    here = {"cp_size": RANKS, "cp_rank": rank, "cp_group": dist.group.WORLD}
    found: dict[str, Any] = {name: run_loss(name, **here) for name in LOSSES}
    found["gather"] = run_gather(**here)
    found["reductions"] = run_reductions(**here)
    found["whitening"] = run_whitening(rank, dist.group.WORLD)
    torch.save(found, Path(directory, f"rank{rank}.pt"))
    dist.destroy_process_group()


def run_loss(
    name: str, cp_size: int = 1, cp_rank: int = 0, cp_group: dist.ProcessGroup | None = None
) -> tuple[dict[str, float], Tokens]:
    """Metrics and gradients of log-probs and entropy added up, of this rank; inputs are the same on all."""
    args = algorithm_options(**LOSSES[name])
    seed = list(LOSSES).index(name)
    rng = np.random.default_rng(seed)
    batch = fresh_rows(seed)
    old = near(engine_rows(batch), 0.25, rng)
    rows = {"old_log_probs": old, "ref_log_probs": near(old, 1.0, rng), "advantages": numbers(batch, -2, 2, rng)}
    present = near(old, 0.25, rng)
    metrics: dict[str, float] = {}
    gradients: Tokens = {}
    options: dict[str, Any] = {"cp_size": cp_size, "cp_rank": cp_rank}
    for micro_batch in packed(batch, seed, cp_group=cp_group, per_token_loss=args.calculate_per_token_loss, **options):
        for column, values in rows.items():
            setattr(micro_batch, column, put(batch, micro_batch, values, **options))
        leaf = put(batch, micro_batch, present, **options).requires_grad_()
        total, report = run_micro_batch(args, micro_batch, leaf, leaf.exp())
        total.backward()
        assert leaf.grad is not None
        for metric, value in report.items():
            larger = max(metrics.get(metric, 0.0), float(value))
            metrics[metric] = larger if metric.startswith(MAXIMUM) else metrics.get(metric, 0.0) + float(value)
        gradients |= {(row, j): float(leaf.grad[t]) for t, row, j in targets(batch, micro_batch, **options)}
    return metrics, gradients


def run_micro_batch(args: Any, micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Any]:
    if args.loss_type == "policy_loss":
        return reduce_tokens(policy_loss(args, micro_batch, log_probs, entropy), micro_batch)
    logits = torch.zeros(1, len(log_probs), 4, requires_grad=True)
    terms: Callable[[], tuple[Tensor, Tensor]] = lambda: (log_probs, entropy)  # noqa: E731
    return hooks.custom_loss(args, micro_batch, lambda: logits, terms, [logits])


def run_gather(
    cp_size: int = 1, cp_rank: int = 0, cp_group: dist.ProcessGroup | None = None
) -> tuple[list[list[float]], Tokens]:
    """Gathered rows, and the gradient of a loss that is the rank's number plus 1 times the weighted sum of them."""
    batch = fresh_rows(3)
    values, weights = numbers(batch, -3, 3, np.random.default_rng(1)), numbers(batch, -1, 1, np.random.default_rng(2))
    rows: list[list[float]] = []
    gradients: Tokens = {}
    options: dict[str, Any] = {"cp_size": cp_size, "cp_rank": cp_rank}
    for micro_batch in packed(batch, 4, cp_group=cp_group, **options):
        leaf = put(batch, micro_batch, values, **options).requires_grad_()
        whole = micro_batch.responses.gather(leaf)
        rows += [row.tolist() for row in micro_batch.responses.rows(leaf.detach())]
        upstream = torch.from_numpy(np.concatenate([weights[row] for row in micro_batch.rows]))
        ((cp_rank + 1) * upstream * whole).sum().backward()
        assert leaf.grad is not None
        gradients |= {(row, j): float(leaf.grad[t]) for t, row, j in targets(batch, micro_batch, **options)}
    return rows, gradients


def run_reductions(cp_size: int = 1, cp_rank: int = 0, cp_group: dist.ProcessGroup | None = None) -> dict[str, Tokens]:
    """At every token of this rank's."""
    batch = fresh_rows(8)
    values = numbers(batch, -3, 3, np.random.default_rng(9))
    found: dict[str, Tokens] = {"row_sum": {}, "row_mean": {}, "row_min": {}}
    options: dict[str, Any] = {"cp_size": cp_size, "cp_rank": cp_rank}
    for micro_batch in packed(batch, 10, cp_group=cp_group, **options):
        column = put(batch, micro_batch, values, **options)
        for name, tokens in found.items():
            reduced = getattr(micro_batch, name)(column)
            tokens |= {(row, j): float(reduced[t]) for t, row, j in targets(batch, micro_batch, **options)}
    return found


def run_whitening(rank: int | None = None, group: dist.ProcessGroup | None = None) -> Tokens:
    """Advantages of all micro-batches, or of every other one."""
    args = algorithm_options(advantage_estimator="ppo", normalize_advantages=True, gamma=0.9, lambd=0.8)
    batch = fresh_rows(5)
    values = numbers(batch, -1, 1, np.random.default_rng(6))
    micro_batches = packed(batch, 7) if rank is None else packed(batch, 7)[rank::RANKS]
    for micro_batch in micro_batches:
        micro_batch.values = put(batch, micro_batch, values)
    set_advantages(args, batch, micro_batches, group)
    return tokens_of(batch, micro_batches)


def tokens_of(batch: TrainBatch, micro_batches: list[MicroBatch]) -> Tokens:
    found: Tokens = {}
    for micro_batch in micro_batches:
        assert micro_batch.advantages is not None
        found |= {(row, j): float(micro_batch.advantages[t]) for t, row, j in targets(batch, micro_batch)}
    return found
