"""A user's own conversion of samples: upstream's dict becomes the columns that slime's own makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.data import Ragged, Sample, Status, TrainBatch
from slime.options.flags.schema import flag_named
from slime.rollout.batches.train_data import to_columns, to_train_batches
from slime.utils.errors import BadInputError, HookError
from tests.unit.test_train_data import make_args, make_samples, uneven_groups

NUM_GPUS = 0
FLAG = "--custom-convert-samples-to-train-data-path"
UPSTREAM = (
    "import numpy as np\nimport torch\n"
    "def upstream(args, samples):\n"
    "    masks = [[0] * s.response_length if s.remove_sample else s.loss_mask or [1] * s.response_length\n"
    "             for s in samples]\n"
    "    raw = [s.get_reward_value(args) for s in samples]\n"
    "    return {\n"
    "        'tokens': [s.tokens for s in samples],\n"
    "        'response_lengths': [s.response_length for s in samples],\n"
    "        'rewards': [2 * r for r in raw], 'raw_reward': raw,\n"
    "        'truncated': [1 if s.status == s.Status.TRUNCATED else 0 for s in samples],\n"
    "        'sample_indices': [s.index for s in samples],\n"
    "        'loss_masks': masks,\n"
    "        'rollout_log_probs': [s.rollout_log_probs for s in samples],\n"
    "    }\n"
)


@pytest.fixture
def hook(tmp_path: Path) -> Callable[[str], str]:
    """Writes a conversion that changes ``d``, what upstream's is, and returns its path."""

    def write(body: str) -> str:
        path = tmp_path / "hook.py"
        indented = "".join(f"    {line}\n" for line in body.splitlines())
        path.write_text(
            f"{UPSTREAM}def convert(args, samples):\n    d = upstream(args, samples)\n{indented}    return d\n"
        )
        return f"{path}:convert"

    return write


def same(one: TrainBatch, other: TrainBatch, *, but: tuple[str, ...] = ()) -> None:
    assert one.columns.keys() == other.columns.keys()
    for name, a in one.columns.items():
        b = other.columns[name]
        if name in but:
            continue
        if isinstance(a, Ragged):
            assert isinstance(b, Ragged)
            np.testing.assert_array_equal(a.offsets, b.offsets)
            a, b = a.values, b.values
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def converted(args: Any, samples: list[Sample]) -> TrainBatch:
    """All rows, in the order in which they are trained, of one rank."""
    ((batch,), _) = to_train_batches(args, samples, 1)
    return batch


@pytest.mark.parametrize(
    "body",
    [
        "",
        "d = {k: np.array(v) if k not in ('tokens', 'loss_masks', 'rollout_log_probs') else v for k, v in d.items()}",
        "d = {k: torch.tensor(v) if k not in ('tokens', 'loss_masks', 'rollout_log_probs') else\n"
        "     [torch.tensor(row, dtype=torch.float64 if 'log' in k else None) for row in v] for k, v in d.items()}",
        "d = {k: [np.int64(x) for x in v] if k == 'response_lengths' else v for k, v in d.items()}",
        "d |= {'rollout_ids': [s.rollout_id for s in samples], 'metadata': None}",
    ],
    ids=["lists", "arrays", "tensors", "numpy numbers", "given ids"],
)
def test_upstreams_own_conversion_gives_our_own_columns(body: str, hook: Callable[[str], str]) -> None:
    samples = uneven_groups()
    samples[2].loss_mask = [0] * samples[2].response_length
    samples[3].remove_sample = True
    args = make_args(global_batch_size=11, disable_rewards_normalization=True)
    own = converted(args, samples)
    args.custom_convert_samples_to_train_data_path = hook(body)
    theirs = converted(args, samples)
    same(theirs, own, but=("rewards",))
    np.testing.assert_array_equal(theirs.rewards, (2 * own.raw_rewards.astype(np.float64)).astype(np.float32))
    assert theirs.steps[0].num_tokens == own.steps[0].num_tokens
    assert theirs.steps[0].num_rollouts == 11


def test_rows_may_be_fewer_more_and_in_another_order(hook: Callable[[str], str]) -> None:
    """Each has the group and rollout of the sample that it names."""
    samples = make_samples(groups=2, per_group=4)
    for sample in samples:
        sample.rollout_id = 50 + sample.index
    args = make_args(global_batch_size=7)
    args.custom_convert_samples_to_train_data_path = hook(
        "order = [7, 6, 6, 5, 4, 3, 2, 1]\nd = {k: [v[i] for i in order] for k, v in d.items()}"
    )
    batch = converted(args, samples)
    assert sorted(batch.sample_indices.tolist()) == [1, 2, 3, 4, 5, 6, 6, 7]
    np.testing.assert_array_equal(batch.rollout_ids, batch.sample_indices + 50)
    np.testing.assert_array_equal(batch.group_indices, batch.sample_indices // 4)
    twice = batch.sample_indices == 6
    assert (batch.rollout_mask_sums[twice] == 2 * samples[6].response_length).all()
    assert (batch.rollout_mask_sums[~twice] == batch.loss_mask.lengths[~twice]).all()


def test_rows_have_what_a_teacher_says_of_their_samples(hook: Callable[[str], str]) -> None:
    samples, args = make_samples(groups=1, per_group=4), make_args(global_batch_size=4, opd_type="sglang")
    for sample in samples:
        sample.teacher_log_probs = [-float(sample.index or 0)] * sample.response_length
    args.custom_convert_samples_to_train_data_path = hook("d = {k: v[::-1] for k, v in d.items()}")
    batch = converted(args, samples)
    column = batch.columns["teacher_log_probs"]
    assert isinstance(column, Ragged)
    assert [set(column[row].tolist()) for row in range(4)] == [{-float(i)} for i in batch.sample_indices]


def test_its_own_rollouts_and_denominators(hook: Callable[[str], str]) -> None:
    samples, args = make_samples(groups=1, per_group=4), make_args(global_batch_size=3)
    args.custom_convert_samples_to_train_data_path = hook(
        "d |= {'rollout_ids': [5, 5, 6, None], 'rollout_mask_sums': [99] * 4, 'metadata': [None, {'a': 1}, {}, None]}"
    )
    args.rollout_data_postprocess_path = "somebody reads metadata"
    batch = converted(args, samples)
    assert batch.rollout_mask_sums.tolist() == [99] * 4
    by_index = dict(zip(batch.sample_indices.tolist(), batch.rollout_ids.tolist(), strict=True))
    assert by_index[0] == by_index[1] == 5
    assert len(set(by_index.values())) == 3
    assert batch.metadata is not None
    assert dict(zip(batch.sample_indices.tolist(), batch.metadata, strict=True)) == {
        0: None,
        1: {"a": 1},
        2: {},
        3: None,
    }


ODD = """
class Odd:
    def __getattr__(self, name): 1 / 0
d['tokens'] = Odd()
"""
MISTAKES = [
    (ODD, "tokens raised ZeroDivisionError: division by zero"),
    ("d = None", "it must return a dict of columns, not NoneType"),
    ("del d['tokens'], d['rewards']", "the dict lacks tokens, rewards; it has response_lengths, raw_reward"),
    ("d['teacher_log_probs'] = d['rewards']", "nobody reads teacher_log_probs; there are tokens, response_lengths"),
    ("d['rewards'] = d['rewards'][:3]", "rewards has 3 entries for the 16 rows of tokens"),
    ("d = {k: v[:0] for k, v in d.items()}", "the dict has no rows"),
    ("d['tokens'] = 'abc'", "tokens must be of lists, arrays or tensors, not str"),
    ("d['loss_masks'][5] = 1", "loss_masks must be of lists, arrays or tensors, not int"),
    ("import numpy\nd['rewards'][5] = numpy.ones(2)", "rewards: an entry of it raised ValueError: can only convert"),
    ("d['loss_masks'][5] = [1] * 9", "row 5 (sample 5): loss_masks has 9 entries for "),
    ("d['loss_masks'][5] = None", "row 5 (sample 5): it has no loss_masks"),
    ("d['loss_masks'][5] = [2] * len(d['loss_masks'][5])", "sample 5: loss_mask must be of 0 and 1, got [2]"),
    ("d['rollout_log_probs'][5] = [0.0] * 9", "row 5 (sample 5): rollout_log_probs has 9 entries for "),
    ("d['rollout_log_probs'][5][0] = 'x'", "sample 5: rollout_log_probs are not all numbers: could not convert string"),
    ("d['rollout_log_probs'][5][0] = [1, 2]", "sample 5: rollout_log_probs are not all numbers: setting an array"),
    ("d['rollout_log_probs'][5] = None", "sample 5 (position 5, group 1, status completed): no rollout_log_probs"),
    ("d['response_lengths'][5] = 'x'", "row 5 (sample 5): tokens must be a list and response_lengths an int, not 'x'"),
    ("d['sample_indices'][5] = 77", "sample_indices has 77, which is the index of none of the samples"),
    ("d['tokens'][5][0] = 300", "sample 5 (position 5, group 1, status completed): token id 300 is outside"),
    ("d['rewards'][5] = float('nan')", "sample 5 (position 5, group 1, status completed): the reward is nan"),
    ("d['rewards'][5] = None", "reward: not all values are numbers"),
    ("d['rollout_mask_sums'] = [0] * 16", "row 0 (sample 0): rollout_mask_sums is 0, and must be the number"),
]


@pytest.mark.parametrize(("body", "expected"), MISTAKES)
def test_mistakes_name_flag_path_and_key(body: str, expected: str, hook: Callable[[str], str]) -> None:
    samples = make_samples()
    samples[5].status = Status.COMPLETED
    path = hook(body)
    with pytest.raises(BadInputError, match=re.escape(expected)) as error:
        to_train_batches(make_args(custom_convert_samples_to_train_data_path=path), samples, 1)
    assert str(error.value).startswith(f"{FLAG} {path}: ")


def test_a_function_that_raises(hook: Callable[[str], str]) -> None:
    with pytest.raises(HookError, match=rf"{FLAG} .*:convert raised ZeroDivisionError: [\s\S]*1 / 0"):
        to_train_batches(make_args(custom_convert_samples_to_train_data_path=hook("1 / 0")), make_samples(), 1)


# ---- columns that options ask for


def test_metadata_is_a_column_where_somebody_reads_it() -> None:
    """Whatever the first sample has."""
    samples = make_samples(groups=1)
    samples[1].train_metadata = {"difficulty": 3}
    assert to_columns(make_args(), samples).metadata is None
    for name in ("custom_advantage_function_path", "rollout_data_postprocess_path", "save_debug_train_data"):
        columns = to_columns(make_args(**{name: "x"}), samples)
        assert columns.metadata is not None
        assert columns.metadata.tolist() == [None, {"difficulty": 3}, None, None]
    batches, _ = to_train_batches(make_args(rollout_data_postprocess_path="x", global_batch_size=4), samples, 2)
    dealt = {i: m for b in batches for i, m in zip(b.sample_indices.tolist(), b.metadata, strict=True)}  # type: ignore[arg-type]
    assert dealt == {0: None, 1: {"difficulty": 3}, 2: None, 3: None}


@pytest.mark.parametrize("option", ["use_tis", "use_rs", "use_rollout_logprobs"])
def test_log_probs_that_an_option_needs(option: str) -> None:
    samples = make_samples()
    for sample in samples:
        sample.rollout_log_probs = None
    flag = flag_named(option)
    with pytest.raises(ValueError, match=re.escape(f"no rollout_log_probs, which {flag} needs")):
        to_columns(make_args(**{option: True}), samples)
