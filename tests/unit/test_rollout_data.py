"""What users see of a rollout in the trainer, and what becomes of their changes."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.data import Ragged, TrainBatch
from slime.files.safe_dump import load_safe
from slime.training import rollout_data as module
from slime.training.micro_batch import MicroBatch
from slime.training.rollout_data import postprocess, rollout_data, save_train_data, weigh
from slime.utils.errors import BadInputError, HookError
from tests.algorithm_options import algorithm_options
from tests.micro_batches import fresh_rows, near, numbers, packed, put, same, take

NUM_GPUS = 0
FLAG = "--rollout-data-postprocess-path"
COLUMNS = {
    "advantages": "advantages",
    "returns": "returns",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "values": "values",
}


def make(seed: int | None = None, **options: Any) -> tuple[TrainBatch, list[MicroBatch]]:
    batch = fresh_rows(seed)
    metadata = np.empty(len(batch), dtype=object)
    metadata[:] = [{"row": row} if row % 2 else None for row in range(len(batch))]
    batch = batch.changed(metadata=metadata)
    micro_batches = packed(batch, seed, **options)
    old = numbers(batch, -4, 0)
    for micro_batch in micro_batches:
        for name in COLUMNS.values():
            setattr(micro_batch, name, put(batch, micro_batch, near(old, 2.0)))
    return batch, micro_batches


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Namespace]:
    """Calls a function with this body on a batch."""

    def call(body: str, batch: TrainBatch, micro_batches: list[MicroBatch]) -> Namespace:
        path = tmp_path / "hook.py"
        path.write_text(
            "import torch\ndef f(args, rollout_id, d):\n" + "".join(f"    {x}\n" for x in body.splitlines())
        )
        args = algorithm_options(rollout_data_postprocess_path=f"{path}:f")
        postprocess(args, 7, batch, micro_batches, None)
        return args

    return call


def snapshot(micro_batches: list[MicroBatch]) -> list[dict[str, Any]]:
    names = (*COLUMNS.values(), "mask", "row_counts", "weights", "mean_weights", "labels", "rollout_log_probs")
    return [{name: getattr(m, name).clone() for name in names} for m in micro_batches]


def test_a_function_that_only_looks_changes_nothing(run: Callable[..., Namespace]) -> None:
    for options in ({}, {"per_token_loss": True}, {"constant_length": 100}):
        batch, micro_batches = make(**options)
        before = snapshot(micro_batches)
        args = run("args.seen, args.rollout = dict(d), rollout_id", batch, micro_batches)
        for mine, theirs in zip(snapshot(micro_batches), before, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert args.rollout == 7
        order = np.concatenate([m.rows for m in micro_batches]).tolist()
        assert args.seen["metadata"] == [{"row": row} if row % 2 else None for row in order]
        assert {*COLUMNS, "tokens", "rewards", "loss_masks", "rollout_log_probs"} < set(args.seen)


def test_changes_take_effect_in_place_and_anew(run: Callable[..., Namespace]) -> None:
    batch, micro_batches = make()
    before = {key: take(batch, micro_batches, [getattr(m, n) for m in micro_batches]) for key, n in COLUMNS.items()}
    run(
        "for row in d['advantages']: row.mul_(2)\n"
        "d['returns'] = [row.tolist() for row in d['values']]\n"
        "d['log_probs'][0] = d['log_probs'][0] - 1\n",
        batch,
        micro_batches,
    )
    after = {key: take(batch, micro_batches, [getattr(m, n) for m in micro_batches]) for key, n in COLUMNS.items()}
    first = int(micro_batches[0].rows[0])
    same(after["advantages"], [2 * row for row in before["advantages"]])
    same(after["returns"], before["values"])
    same(after["log_probs"], [row - (i == first) for i, row in enumerate(before["log_probs"])])
    same(after["ref_log_probs"], before["ref_log_probs"])


@pytest.mark.parametrize("options", [{}, {"per_token_loss": True}, {"constant_length": 100}])
def test_masked_tokens_lose_their_weight_and_the_losses_denominators_stay(
    options: dict[str, Any], run: Callable[..., Namespace]
) -> None:
    """Means are over what is left: over rollouts that still have a trained token, of which each one counts the same."""
    batch, micro_batches = make(**options)
    run("for m in d['loss_masks']: m[::2] = 0", batch, micro_batches)
    masks = [row * (np.arange(len(row)) % 2) for row in (batch.loss_mask[i] for i in range(len(batch)))]
    same(take(batch, micro_batches, [m.mask for m in micro_batches]), masks)
    left = Counter(dict.fromkeys(batch.rollout_ids.tolist(), 0))
    for rollout, mask in zip(batch.rollout_ids.tolist(), masks, strict=True):
        left[rollout] += int(mask.sum())
    assert np.count_nonzero(list(left.values())) < micro_batches[0].step.num_trained_rollouts
    assert sum(float(m.mean_weights.sum()) for m in micro_batches) == pytest.approx(1.0, rel=1e-6)
    step = micro_batches[0].step
    for name in ("weights", "mean_weights"):
        got = take(batch, micro_batches, [getattr(m, name) for m in micro_batches])
        for row, weights in enumerate(got):
            denominator = max(int(batch.rollout_mask_sums[row]), 1) * step.num_rollouts
            if name == "mean_weights":
                denominator = max(left[int(batch.rollout_ids[row])], 1) * np.count_nonzero(list(left.values()))
            if options.get("per_token_loss"):
                denominator = sum(left.values()) if name == "mean_weights" else step.num_tokens
            elif name == "weights" and "constant_length" in options:
                denominator = options["constant_length"] * step.num_rollouts
            np.testing.assert_allclose(weights, masks[row] / denominator, rtol=1e-6)
    for m in micro_batches:
        assert m.row_counts.tolist() == [masks[row].sum() for row in m.rows.tolist()]
        assert (m.weights[m.mask == 0] == 0).all()


def test_denominators_of_a_conversion_are_the_losss_alone() -> None:
    """Its function may give any ``rollout_mask_sums``; means stay means."""
    batch, micro_batches = make(3)
    before = snapshot(micro_batches)
    given = batch.changed(rollout_mask_sums=np.full(len(batch), 99))
    for m in micro_batches:
        m.set_weights(np.full(len(m.rows), 7), np.full(len(m.rows), 7), m.step)
    weigh(given, micro_batches, None)
    for m, kept in zip(micro_batches, before, strict=True):
        assert torch.equal(m.mean_weights, kept["mean_weights"])
        torch.testing.assert_close(m.weights, m.mask / 99 / m.step.num_rollouts)


def test_supervised_rows_have_a_mask_to_change(run: Callable[..., Namespace]) -> None:
    batch = fresh_rows(with_engine=False)
    micro_batches = packed(batch)
    args = run("args.keys = set(d)\nfor m in d['loss_masks']: m.zero_()", batch, micro_batches)
    assert not args.keys & {"advantages", "log_probs", "rollout_log_probs", "metadata"}
    assert not any(m.weights.any() or m.mean_weights.any() for m in micro_batches)


MISTAKES = [
    (
        "d['advantages'][2] = d['advantages'][2][1:]",
        "rollout_data['advantages'] must be a list with one tensor a sample",
    ),
    ("d['advantages'] = d['advantages'][1:]", "rollout_data['advantages'] must be a list with one tensor a sample"),
    ("d['returns'] = [0.0 for _ in d['returns']]", "rollout_data['returns'] must be a list with one tensor a sample"),
    ("d['values'] = None", "rollout_data['values'] must be a list with one tensor a sample, of the lengths of its"),
    ("d['advantages'][0] = 'x'", "rollout_data['advantages'] is not made of numbers"),
    ("d['loss_masks'][3] = d['loss_masks'][3][:-1]", "rollout_data['loss_masks'] must be a list with one tensor"),
    ("del d['loss_masks']", "it has nothing"),
    ("d['loss_masks'][3][-1] = 0.5", "rollout_data['loss_masks'] must be of 0 and 1"),
    ("d['rewards'][1] += 1", "it changed rollout_data['rewards'], which is not used again: change loss_masks, "),
    ("d['tokens'][1][0] += 1", "it changed rollout_data['tokens'], which is not used again"),
    ("d['response_lengths'].pop()", "it changed rollout_data['response_lengths'], which is not used again"),
    ("del d['rollout_ids']", "it changed rollout_data['rollout_ids'], which is not used again"),
]


@pytest.mark.parametrize(("body", "expected"), MISTAKES)
def test_mistakes_are_named(body: str, expected: str, run: Callable[..., Namespace], tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=re.escape(expected)) as error:
        run(body, *make())
    assert str(error.value).startswith(f"{FLAG} {tmp_path}/hook.py:f: ")


def test_a_function_that_raises(run: Callable[..., Namespace]) -> None:
    with pytest.raises(HookError, match=rf"{FLAG} \S+/hook.py:f raised KeyError: 'nothing'\n[\s\S]*d\['nothing'\]"):
        run("d['nothing']", *make())


def test_a_dump_is_what_a_rank_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.dist, "get_rank", lambda: 3)
    batch, micro_batches = make()
    args = algorithm_options(save_debug_train_data=f"{tmp_path}/d/{{rollout_id}}-{{rank}}.pt")
    save_train_data(args, 5, [micro_batches[:3], micro_batches[3:]], {"rank": 3})
    dump = load_safe(tmp_path / "d" / "5-3.pt", "--flag")
    assert (dump["rollout_id"], dump["rank"]) == (5, 3)
    samples, want = dump["samples"], rollout_data(micro_batches)
    order = np.concatenate([m.rows for m in micro_batches])
    assert samples["rollout_mask_sums"] == batch.rollout_mask_sums[order].tolist()
    assert samples.keys() == want.keys()
    for key, column in want.items():
        for mine, theirs in zip(samples[key], column, strict=True):
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    steps, positions = dump["steps"], iter(range(len(order)))
    assert [len(step["micro_batches"]) for step in steps] == [3, 1]
    flat = [rows for step in steps for rows in step["micro_batches"]]
    for rows, micro_batch in zip(flat, micro_batches, strict=True):
        assert rows == [next(positions) for _ in micro_batch.rows]
        assert [samples["sample_indices"][i] for i in rows] == batch.sample_indices[micro_batch.rows].tolist()
    assert {step["num_tokens"] for step in steps} == {micro_batches[0].step.num_tokens}


def test_metadata_reaches_custom_losses(tmp_path: Path) -> None:
    from slime.training.loss.hooks import custom_loss

    (tmp_path / "loss.py").write_text(
        "def loss(args, batch, logits, reduce):\n    args.seen = batch['metadata']\n    return logits.sum(), {}\n"
    )
    _, micro_batches = make()
    args = algorithm_options(loss_type="custom_loss", custom_loss_function_path=f"{tmp_path}/loss.py:loss")
    logits = torch.zeros(1, len(micro_batches[0].mask), 2)
    custom_loss(args, micro_batches[0], lambda: logits, lambda: (logits[0, :, 0],) * 2, ())
    assert args.seen == [{"row": row} if row % 2 else None for row in micro_batches[0].rows.tolist()]


def test_columns_of_the_batch_are_left_alone(run: Callable[..., Namespace]) -> None:
    """They lie in shared memory, which other ranks read too."""
    batch, micro_batches = make()
    before = {name: column.values.copy() for name, column in batch.columns.items() if isinstance(column, Ragged)}
    run("for key in ('advantages', 'rollout_log_probs'):\n    for row in d[key]: row.add_(1)", batch, micro_batches)
    assert all(np.array_equal(getattr(batch, name).values, values) for name, values in before.items())
