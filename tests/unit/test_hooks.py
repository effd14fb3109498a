"""Users' functions in the loss: written anew, the built-in ones give the same; mistakes are named."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.data import TrainBatch
from slime.training.loss import hooks
from slime.training.loss.token_loss import policy_loss, reduce_tokens
from slime.training.micro_batch import MicroBatch
from slime.utils import user_functions
from slime.utils.errors import HookError
from tests.algorithm_options import algorithm_options
from tests.micro_batches import Rows, engine_rows, fresh_rows, near, numbers, packed, put, same, take

NUM_GPUS = 0
HOOKS = Path(__file__).parents[1] / "user_hooks.py"
VOCAB = 11
REDUCTIONS = pytest.mark.parametrize(
    "reduction", [{}, {"calculate_per_token_loss": True}], ids=["per rollout", "per token"]
)
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.05, "eps_clip_high": 0.3}


def hook(name: str) -> str:
    return f"{HOOKS}:{name}"


def make(args: Namespace, *, cut: bool = True) -> tuple[TrainBatch, list[MicroBatch], Rows]:
    """A batch, micro-batches with all columns, and log-probs near the old ones."""
    batch = fresh_rows(cut=cut)
    old = near(engine_rows(batch), 0.5)
    columns = {"old_log_probs": old, "ref_log_probs": near(old, 1.0), "advantages": numbers(batch, -2, 2)}
    micro_batches = packed(
        batch, per_token_loss=args.calculate_per_token_loss, constant_length=args.loss_constant_length
    )
    for micro_batch in micro_batches:
        for name, rows in columns.items():
            setattr(micro_batch, name, put(batch, micro_batch, rows))
    return batch, micro_batches, near(old, 0.5)


def run(args: Namespace, batch: TrainBatch, micro_batches: list[MicroBatch], present: Rows) -> tuple[Any, Rows]:
    """Metrics of the policy loss added up, and the gradient of the log-probs."""
    reports, leaves = [], []
    for micro_batch in micro_batches:
        leaves.append(put(batch, micro_batch, present).requires_grad_())
        total, report = reduce_tokens(policy_loss(args, micro_batch, leaves[-1], leaves[-1].exp()), micro_batch)
        total.backward()
        reports.append(report)
    return added(reports), take(batch, micro_batches, [leaf.grad for leaf in leaves])


def added(reports: list[dict[str, Tensor]]) -> dict[str, float]:
    return {name: float(sum(report[name].double() for report in reports)) for name in reports[0]}


def assert_same(got: tuple[dict[str, float], Rows], want: tuple[dict[str, float], Rows]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-6)
    same(got[1], want[1])


# ---- --custom-loss-function-path


@pytest.mark.parametrize(
    "reduction",
    [{}, {"calculate_per_token_loss": True}, {"loss_constant_length": 6}],
    ids=["per rollout", "per token", "constant length"],
)
def test_a_loss_that_is_grpo_again(reduction: dict[str, Any]) -> None:
    """Rows of one rollout lie in several micro-batches; loss, metrics and the gradient of the logits."""
    plain = algorithm_options(**TERMS, **reduction)
    custom = algorithm_options(**TERMS, **reduction, loss_type="custom_loss", custom_loss_function_path=hook("grpo"))
    _, micro_batches, _ = make(plain)
    reports: tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]] = ([], [])
    for micro_batch in micro_batches:
        values = torch.randn(1, len(micro_batch.mask), VOCAB)
        labels = torch.randint(VOCAB, micro_batch.mask.shape)
        leaves = [values.clone().requires_grad_() for _ in range(2)]

        def terms(logits: Tensor, labels: Tensor = labels) -> tuple[Tensor, Tensor]:
            every = logits[0].log_softmax(-1)
            return every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)

        micro_batch.old_log_probs = terms(values + 0.1 * torch.randn_like(values))[0]
        total, report = reduce_tokens(policy_loss(plain, micro_batch, *terms(leaves[0])), micro_batch)
        total.backward()
        reports[0].append(report)
        total, report = hooks.custom_loss(
            custom,
            micro_batch,
            lambda: pytest.fail("it has needs_logits = False"),
            lambda leaf=leaves[1], t=terms: t(leaf),  # type: ignore[misc]
            (),
        )
        total.backward()
        assert torch.equal(report["train/loss"], total.detach())
        reports[1].append(report)
        assert leaves[0].grad is not None
        assert leaves[1].grad is not None
        torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-4, atol=1e-7)
    want, got = added(reports[0]), added(reports[1])
    assert set(got) == {"train/loss", "train/pg_loss", "train/kl_loss", "train/entropy_loss"}
    if not plain.calculate_per_token_loss:  # the entropy is logged as a mean, of rollouts that have a trained token
        del got["train/entropy_loss"]
    assert got == pytest.approx({name: want[name] for name in got}, rel=1e-5, abs=1e-6)


def test_what_a_loss_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    args = algorithm_options(loss_type="custom_loss", custom_loss_function_path=hook("grpo"))
    batch, micro_batches, present = make(args)
    micro_batch = micro_batches[-1]
    micro_batch.values = put(batch, micro_batch, present)
    seen: dict[str, Any] = {}

    def keep(args: Namespace, data: dict[str, Any], logits: Tensor, reduce: Any) -> tuple[Tensor, dict[str, Any]]:
        seen.update(data)
        return logits.sum(), {}

    for module in (hooks, user_functions):
        monkeypatch.setattr(module, "load_function", lambda path, flag: keep)
    logits = torch.zeros(1, len(micro_batch.mask), 2)
    hooks.custom_loss(args, micro_batch, lambda: logits, lambda: (micro_batch.mask,) * 2, ())
    rows = micro_batch.rows.tolist()
    lists = {"loss_masks", "advantages", "log_probs", "ref_log_probs", "rollout_log_probs", "values"}
    of_rows = {"rewards", "raw_reward", "truncated", "sample_indices", "rollout_ids", "group_indices"}
    more = {"rollout_mask_sums", "total_lengths", "response_lengths", "tokens", "log_probs_and_entropy"}
    assert set(seen) == {*lists, *of_rows, *more}
    assert seen["rewards"] == batch.rewards[rows].tolist()
    assert seen["total_lengths"] == [len(batch.tokens[row]) for row in rows]
    assert seen["response_lengths"] == [len(batch.loss_mask[row]) for row in rows]
    assert all([len(row) for row in seen[name]] == seen["response_lengths"] for name in lists)
    same([row.double().numpy() for row in seen["values"]], [present[row] for row in rows])
    same([row.double().numpy() for row in seen["rollout_log_probs"]], [engine_rows(batch)[row] for row in rows])


def test_a_loss_that_leaves_the_model_out_has_a_gradient_of_zeros() -> None:
    """Where no sample is better than expected: other ranks' backward passes wait for this one's all the same."""
    args = algorithm_options(loss_type="custom_loss", custom_loss_function_path=hook("imitates_the_better"))
    _, micro_batches, _ = make(args)
    micro_batch = micro_batches[0]
    micro_batch.advantages = -torch.rand(micro_batch.mask.shape)
    logits = torch.zeros(1, len(micro_batch.mask), VOCAB)
    reached = [
        torch.full(shape, torch.nan, requires_grad=True) for shape in ((1, len(micro_batch.mask), 5), (VOCAB, 5))
    ]
    total, report = hooks.custom_loss(
        args, micro_batch, lambda: logits, lambda: pytest.fail("needs no log-probs"), reached
    )
    total.backward()
    assert report == {"train/pg_loss": 0.0, "train/loss": 0.0}
    for tensor in reached:
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("left_out", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_logits_that_a_loss_leaves_out_may_be_anything(left_out: float, monkeypatch: pytest.MonkeyPatch) -> None:
    args = algorithm_options(loss_type="custom_loss", custom_loss_function_path=hook("grpo"))
    _, micro_batches, _ = make(args)
    values = torch.full((1, len(micro_batches[0].mask), VOCAB), left_out)
    values[0, 2, 3] = 0.5
    logits = values.requires_grad_()
    for module in (hooks, user_functions):
        monkeypatch.setattr(module, "load_function", lambda path, flag: lambda *of: (of[2][0, 2, 3] * 3, {}))
    total, _ = hooks.custom_loss(
        args, micro_batches[0], lambda: logits, lambda: pytest.fail("needs no log-probs"), [logits]
    )
    total.backward()
    rollouts = micro_batches[0].step.num_rollouts
    assert float(total.detach()) == pytest.approx(1.5 / rollouts)
    assert logits.grad is not None
    assert logits.grad.nonzero().tolist() == [[0, 2, 3]]
    assert float(logits.grad[0, 2, 3]) == pytest.approx(3 / rollouts)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("not_a_scalar", ": the loss must be a scalar, not of shape (2,)"),
        ("wrong_metric", ": pair must be a scalar, not of shape (2,)"),
        ("reduces_too_few", "sum_of_sample_mean takes "),
        ("grop", "--custom-loss-function-path"),
        ("shy", "asking it for 'needs_logits' raised RuntimeError: needs_logits"),
    ],
)
def test_mistakes_of_a_loss(name: str, expected: str) -> None:
    args = algorithm_options(loss_type="custom_loss", custom_loss_function_path=hook(name))
    _, micro_batches, _ = make(args)
    logits = torch.zeros(1, len(micro_batches[0].mask), VOCAB, requires_grad=True)
    kind = HookError if name == "reduces_too_few" else ValueError
    with pytest.raises(kind, match=re.escape(expected)) as error:
        hooks.custom_loss(args, micro_batches[0], lambda: logits, lambda: (logits[0, :, 0], logits[0, :, 1]), [logits])
    assert f"--custom-loss-function-path {hook(name)}" in str(error.value)


# ---- --custom-pg-loss-reducer-function-path


@REDUCTIONS
def test_a_reducer_that_is_the_default_again(reduction: dict[str, Any]) -> None:
    """It knows of samples only: rollouts in several samples, whose denominators are shared, are the default's."""
    plain = algorithm_options(**TERMS, **reduction)
    custom = algorithm_options(**TERMS, **reduction, custom_pg_loss_reducer_function_path=hook("default_reducer"))
    made = make(plain, cut=False)
    assert_same(run(custom, *made), run(plain, *made))


def test_a_reducer_of_its_own() -> None:
    """Entropy and KL keep the default reduction."""
    args = algorithm_options(**TERMS, custom_pg_loss_reducer_function_path=hook("squared_means"))
    plain = algorithm_options(**TERMS)
    batch, micro_batches, present = make(args)
    got, _ = run(args, batch, micro_batches, present)
    want = run(plain, batch, micro_batches, present)[0]
    policy = 0.0
    for micro_batch in micro_batches:
        column = put(batch, micro_batch, present)
        losses = policy_loss(plain, micro_batch, column, column).terms["train/pg_loss"]
        rows = take(batch, [micro_batch], [losses])
        means = [
            (
                rows[row] @ batch.loss_mask[row] / max(batch.loss_mask[row].sum(), 1),
                rows[row] ** 2 @ batch.loss_mask[row],
            )
            for row in micro_batch.rows.tolist()
        ]
        squares = sum(
            s / max(batch.loss_mask[r].sum(), 1) for r, (_, s) in zip(micro_batch.rows.tolist(), means, strict=True)
        )
        policy += float(sum(mean for mean, _ in means) ** 2 + squares)
    rollouts = len(np.unique(batch.rollout_ids))
    wanted = want["train/loss"] - want["train/pg_loss"] + policy / rollouts
    assert got["train/loss"] == pytest.approx(wanted, rel=1e-5)
    assert got["train/pg_loss"] == pytest.approx(policy / rollouts, rel=1e-5)


def test_a_reducer_that_does_not_reduce() -> None:
    args = algorithm_options(custom_pg_loss_reducer_function_path=hook("keeps_tokens"))
    expected = f"--custom-pg-loss-reducer-function-path {hook('keeps_tokens')}: its reducer must be a scalar, not of"
    with pytest.raises(ValueError, match=re.escape(expected)):
        run(args, *make(args))


# ---- --custom-tis-function-path


@REDUCTIONS
@pytest.mark.parametrize("with_rejection", [True, False])
def test_importance_sampling_again(with_rejection: bool, reduction: dict[str, Any]) -> None:
    options = {"use_tis": True, "tis_clip_low": 0.8, "tis_clip": 1.25, **TERMS, **reduction}
    rejection = {"use_rs": True, "rs_level": "token", "rs_lower_bound": 0.7, "rs_upper_bound": 1.4}
    rejection = rejection if with_rejection else {}
    plain = algorithm_options(**options, **rejection)
    custom = algorithm_options(**options, **rejection, custom_tis_function_path=hook("clipped_ratio"))
    made = make(plain)
    want = run(plain, *made)
    assert_same(run(custom, *made), want)
    assert want[0]["train/tis_clipfrac"] > 0


def test_masks_that_a_function_changes_leave_denominators() -> None:
    args = algorithm_options(use_tis=True, custom_tis_function_path=hook("drops_and_mixes"))
    plain = algorithm_options()
    batch, micro_batches, present = make(args)
    got, _ = run(args, batch, micro_batches, present)
    total, kept = 0.0, 0.0
    for micro_batch in micro_batches:
        assert micro_batch.old_log_probs is not None
        column = put(batch, micro_batch, present)
        losses = take(batch, [micro_batch], [policy_loss(plain, micro_batch, column, column).terms["train/pg_loss"]])
        columns = (micro_batch.old_log_probs, micro_batch.weights, micro_batch.mean_weights)
        trainer, weights, in_means = (take(batch, [micro_batch], [column]) for column in columns)
        for row in micro_batch.rows.tolist():
            mask = batch.loss_mask[row] * (np.exp(trainer[row] - engine_rows(batch)[row]) <= 1.2)
            mean = losses[row] @ batch.loss_mask[row] / len(mask)
            total += float((losses[row] * mean * mask) @ weights[row])
            kept += float(mask @ in_means[row])
    assert got["train/loss"] == pytest.approx(total, rel=1e-4)
    assert got["train/kept"] == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("forgets_a_token", "loss_masks"),
        ("reduces_the_loss", "the loss"),
        ("returns_no_masks", "loss_masks"),
        ("averages_a_metric", "metric mean"),
    ],
)
def test_mistakes_of_an_importance_function(name: str, what: str) -> None:
    args = algorithm_options(use_tis=True, custom_tis_function_path=hook(name))
    made = make(args)
    tokens = len(made[1][0].responses.positions)
    expected = f"--custom-tis-function-path {hook(name)}: {what} must have a value for each of the {tokens} response"
    with pytest.raises(ValueError, match=re.escape(expected)):
        run(args, *made)
