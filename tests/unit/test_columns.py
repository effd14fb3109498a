"""The table of columns, what samples must carry, and where a column's entries lie in a packed micro-batch."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.data import Column, ColumnError, OptimizerStep, Ragged, Sample, TrainBatch
from slime.data.columns import COLUMNS, from_samples, top_columns, with_declared
from slime.options.checks.hook_paths import columns_of
from slime.options.errors import OptionError
from slime.rollout.batches.train_data import to_columns
from slime.training.micro_batch import MicroBatch, Pass
from slime.training.rollout_data import known_columns
from slime.utils.errors import BadInputError
from tests import column_hooks
from tests.micro_batches import fresh_rows, pack_layout, part_of_rank, step_of, whole_stream
from tests.unit.test_train_data import make_args, make_samples

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
HOOKS = str(ROOT / "tests" / "column_hooks.py")
GENERIC = (
    *(
        "slime/batching",
        "slime/training/packing.py",
        "slime/rollout/batches/debug_data.py",
    ),
    *("slime/data/ragged.py", "slime/data/batch.py", "slime/driver/rollout_manager.py", "slime/ray/train_actor.py"),
)
"""What schedules, packs, cuts for context parallelism, dumps, and puts into and takes out of the object store."""
NAMED = {"slime/data/batch.py": "TrainBatch"}
"""A class whose body may give columns names that its readers are spared writing as text."""
WORDS_OF_OTHERS = {"values", "metadata"}
"""Names of columns that are attributes of other things, too: `Ragged.values`, `Sample.metadata`."""


def with_columns(batch: TrainBatch) -> TrainBatch:
    numbered = batch.changed(sample_indices=np.arange(len(batch)))
    pairs = list(zip(numbered.lengths.tolist(), numbered.response_lengths.tolist(), strict=True))
    return numbered.changed(
        route=Ragged.from_rows(
            [column_hooks.route_of(i, n, r) for i, (n, r) in enumerate(pairs)], np.int16, column_hooks.SHAPE
        ),
        place=Ragged.from_rows([column_hooks.place_of(i, n) for i, (n, _) in enumerate(pairs)], np.int64),
    )


@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_entries_lie_where_their_tokens_do(cp_size: int, cp_rank: int) -> None:
    batch = with_columns(fresh_rows())
    rows = np.random.default_rng().permutation(len(batch))[:7]
    layout = pack_layout(cp_size, cp_rank, columns=with_declared(column_hooks.COLUMNS))
    micro_batch = MicroBatch(batch, rows, step_of(batch), layout)
    stream = part_of_rank(whole_stream(batch, rows, cp_size, layout.parallel.tp.size), cp_size, cp_rank)
    inputs = micro_batch.model_inputs
    assert inputs["route"].shape == (1, len(stream), *column_hooks.SHAPE)
    assert inputs["route"].dtype == torch.int16
    for t, token in enumerate(stream):
        row, position = int(token["row"]), int(token["position"])
        inside = row >= 0 and position < batch.lengths[row]
        assert inputs["place"][0, t] == (batch.columns["place"][row][position] if inside else -1)
        route = batch.columns["route"][row][int(token["target"])] if "target" in token else np.full((2, 3), -1)
        assert np.array_equal(inputs["route"][0, t].numpy(), route)


def test_users_see_whole_samples_under_their_names() -> None:
    batch = with_columns(fresh_rows())
    layout = pack_layout(columns=with_declared(column_hooks.COLUMNS))
    rows = np.array([3, 0, 5])
    data = known_columns([MicroBatch(batch, rows, step_of(batch), layout)])
    for row, route, place in zip(rows.tolist(), data["route"], data["places"], strict=True):
        assert np.array_equal(route.numpy(), batch.columns["route"][row])
        assert np.array_equal(place.numpy(), batch.columns["place"][row])


def test_a_pass_has_one_micro_batch_on_the_device_and_what_passes_made_stays() -> None:
    batch = with_columns(fresh_rows())
    layout = pack_layout(columns=with_declared(column_hooks.COLUMNS))
    parts = np.array_split(np.arange(len(batch)), 4)
    micro_batches = [MicroBatch(batch, rows, step_of(batch), layout) for rows in parts]
    with Pass(micro_batches) as taken:
        for number, micro_batch in enumerate(taken):
            assert micro_batch is micro_batches[number]
            made = torch.arange(micro_batch.num_tokens).float()
            assert micro_batch.model_inputs
            micro_batch.put("old_log_probs", made)
            assert [bool(m._loaded) for m in micro_batches] == [i == number for i in range(4)]
    assert not any(m._loaded or {"route", "place"} & set(m._host) for m in micro_batches)
    assert all(torch.equal(m.old_log_probs, torch.arange(m.num_tokens).float()) for m in micro_batches)  # type: ignore[arg-type]


def test_a_mistake_in_what_is_prepared_beside_is_not_lost() -> None:
    batch = fresh_rows()
    micro_batches = [MicroBatch(batch, np.arange(2), step_of(batch), pack_layout()) for _ in range(2)]
    micro_batches[1].prepare = lambda _: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with Pass(micro_batches) as taken, pytest.raises(ZeroDivisionError):
        list(taken)


def test_takers_share_what_is_prepared() -> None:
    """As interleaved chunks, one ahead of the other: each is prepared once, and stays until both have had it."""
    batch = with_columns(fresh_rows())
    layout = pack_layout(columns=with_declared(column_hooks.COLUMNS))
    parts = np.array_split(np.arange(len(batch)), 6)
    micro_batches = [MicroBatch(batch, rows, step_of(batch), layout) for rows in parts]
    prepared: list[int] = []
    for number, micro_batch in enumerate(micro_batches):
        prepare = micro_batch.prepare
        micro_batch.prepare = lambda unread, n=number, p=prepare: (prepared.append(n), p(unread))  # type: ignore[method-assign,assignment,misc]
    for _ in range(20):
        prepared.clear()
        with Pass(micro_batches, takers=2) as taken:
            first, second = iter(taken), iter(taken)
            for start in (0, 2, 4):
                ahead = [next(first), next(first)]
                assert all(m.model_inputs["place"] is not None for m in ahead)
                assert all("place" in m._loaded for m in ahead)
                assert [next(second), next(second)] == ahead == micro_batches[start : start + 2]
                assert ["place" in m._loaded for m in ahead] == [False, True]
        assert sorted(prepared) == list(range(6))
        assert not any(m._loaded for m in micro_batches)


@pytest.mark.parametrize("unread", [(), ("route",)])
def test_what_a_pass_does_not_read_is_not_laid_out(unread: tuple[str, ...]) -> None:
    """Unless somebody asks for it nevertheless."""
    batch = with_columns(fresh_rows())
    layout = pack_layout(columns=with_declared(column_hooks.COLUMNS))
    micro_batch = MicroBatch(batch, np.arange(4), step_of(batch), layout)
    with Pass([micro_batch], unread=unread) as taken:
        assert next(iter(taken)) is micro_batch
        assert {"route", "place"} & set(micro_batch._host) == {"route", "place"} - set(unread)
        assert micro_batch.get("route") is not None


def test_a_pass_that_is_left_early_lets_go() -> None:
    batch = fresh_rows()
    micro_batches = [MicroBatch(batch, np.arange(2), step_of(batch), pack_layout()) for _ in range(3)]
    with Pass(micro_batches) as taken:
        assert next(iter(taken)).tokens is not None
    assert not any(m._loaded for m in micro_batches)


# ---- what samples carry


@pytest.fixture
def carried(tmp_path: Path) -> Callable[..., list[Sample]]:
    """Samples that carry the declared columns, the third one others where they are given."""
    return lambda **columns: _carried(tmp_path / "media", columns)


def _carried(directory: Path, columns: dict[str, Any]) -> list[Sample]:
    samples = make_samples(groups=2, per_group=2)
    for sample in samples:
        column_hooks.fill(sample, directory)
    samples[2].columns |= columns
    return samples


def args_with_columns(**options: Any) -> Namespace:
    args = make_args(**options)
    args.column_modules = [HOOKS]
    return args


def test_declared_columns_are_built_from_samples(carried: Callable[..., list[Sample]]) -> None:
    batch = to_columns(args_with_columns(), samples := carried())
    for row, sample in enumerate(samples):
        assert np.array_equal(batch.columns["place"][row], sample.columns["place"])
        assert np.array_equal(batch.columns["route"][row], sample.columns["route"])
    taken = batch.take(np.array([3, 1]), [])
    assert np.array_equal(taken.columns["route"][0], samples[3].columns["route"])
    assert batch.columns["pictures"][2] == tuple(samples[2].columns["pictures"]) != ()
    assert taken.rewards.tolist() == batch.rewards[[3, 1]].tolist()


WRONG = {
    "no route, which every sample must have (1 of 4 lack it)": {"route": None},
    "route has shape (8, 2, 3), and must have (": {"route": np.zeros((8, 2, 3), np.int16)},  # responses are shorter
    "route has values that int16 does not hold": {"route": "large"},
    "places is not made of numbers: it has entries of type <U4": {"place": "text"},
    "route is not made of numbers: it has entries of type object": {"route": [None]},
    "pictures must be a list of slime.data.media.MediaRef": {"pictures": ["a.png"]},
}


@pytest.mark.parametrize("expected", WRONG)
def test_what_samples_must_not_carry(expected: str, carried: Callable[..., list[Sample]]) -> None:
    samples = carried(**WRONG[expected])
    if WRONG[expected].get("route") is not None and isinstance(samples[2].columns["route"], str):
        samples[2].columns["route"] = np.full((samples[2].response_length, 2, 3), 40_000)
    with pytest.raises(BadInputError, match=r"^sample 2 ") as error:
        to_columns(args_with_columns(), samples)
    assert expected in str(error.value)


def test_an_optional_column_that_nobody_has_is_left_out() -> None:
    column = Column("extra", np.float32, "row", needed=False)
    samples = make_samples(groups=1, per_group=2)
    assert from_samples(column, samples, str) is None
    samples[0].columns["extra"] = 2.5
    with pytest.raises(ColumnError, match=r"1: no extra, which every sample must have \(1 of 2 lack it\)"):
        from_samples(column, samples, str)
    samples[1].columns["extra"] = 3
    assert from_samples(column, samples, str).tolist() == [2.5, 3.0]  # type: ignore[union-attr]


def test_columns_come_and_go_with_a_sample(carried: Callable[..., list[Sample]]) -> None:
    """Through files of debug data and checkpoints, and away with the response."""
    sample = carried()[0]
    again = Sample.from_dict(sample.to_dict())
    assert np.array_equal(again.columns["route"], sample.columns["route"])
    assert again.columns["pictures"] == sample.columns["pictures"]
    sample.reset_response()
    assert list(sample.columns) == ["pictures"]
    assert Sample(columns=sample.columns).columns is not sample.columns


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (Column("rewards", np.float32, "row"), "there is a column rewards already"),
        (Column("mine", np.float32, "response", upstream="log_probs"), "there is a column old_log_probs already"),
        (Column("mine", np.float32, "response", made_by="trainer"), "is made_by 'sample'"),
        (Column("mine", np.float32, "response", changeable=True), "and not changeable"),
        (Column("mine", np.float32, "row", model_input="mine"), "a model input has an entry a token"),
        (Column("mine", np.int64, "sequence", model_input="position_ids"), "a keyword that is not one of input_ids"),
        (Column("mine", np.int64, "row", upstream="response_lengths"), "there is something else of that name already"),
        (Column("my column", np.int64, "row"), "a name is of letters"),
        (Column("mine", "nonsense", "row"), "data type 'nonsense' not understood"),
        (Column("mine", np.object_, "response"), "its entries may be of bool, float16"),
        (Column("mine", np.uint8, "response", padding=-1), "out of bounds for uint8"),
        (Column("mine", np.object_, "media"), "media, and no others, have a function to load them"),
    ],
)
def test_declarations_that_cannot_be(column: Column, expected: str) -> None:
    with pytest.raises(ColumnError, match=expected):
        with_declared([column])


def test_the_module_of_a_function_declares_columns(tmp_path: Path) -> None:
    from slime.options.checks.hook_paths import load_hooks
    from slime.options.hooks import HookOptions

    path = f"{HOOKS}:model_provider"
    args = make_args(custom_model_provider_path=path)
    load_hooks(args, {"custom_model_provider_path"}, (HookOptions,))
    assert [column.name for column in columns_of(args)] == [
        *(column.name for column in COLUMNS),
        "route",
        "place",
        "pictures",
    ]
    mixed = "from slime.data import Column\nCOLUMNS = ['route', Column('x', 'f4', 'row')]\n"
    others = {"own": "COLUMNS = ['route']\n", "table": "from slime.data.columns import COLUMNS\n", "mixed": mixed}
    for name, text in others.items():
        (tmp_path / f"{name}.py").write_text(text + "def model_provider(pre_process, post_process): pass\n")
        args.custom_model_provider_path = f"{tmp_path}/{name}.py:model_provider"
        if name == "mixed":
            with pytest.raises(
                OptionError, match=r"--custom-model-provider-path \S+: COLUMNS of its module has Columns"
            ):
                load_hooks(args, {"custom_model_provider_path"}, (HookOptions,))
        else:
            load_hooks(args, {"custom_model_provider_path"}, (HookOptions,))
            assert columns_of(args) == COLUMNS


def test_a_column_for_the_model_needs_a_model_that_takes_it() -> None:
    from slime.options.checks.hook_paths import load_hooks
    from slime.options.hooks import HookOptions

    args = make_args(custom_megatron_init_path=f"{HOOKS}:megatron_init", custom_model_provider_path=None)
    with pytest.raises(OptionError, match="column route is for the model's forward call: add --custom-model-provider"):
        load_hooks(args, {"custom_megatron_init_path"}, (HookOptions,))


# ---- who may name a column


def names_in(file: Path) -> set[str]:
    """Columns that a file names, as text or as an attribute; but for the classes of `NAMED` and documentation."""
    tree = ast.parse(file.read_text())
    named = NAMED.get(str(file.relative_to(ROOT)))
    known = {name for column in COLUMNS for name in (column.name, column.name_for_users)}
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == named:
            node.body = [part for part in node.body if not isinstance(part, ast.Assign)]
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                found |= {part.value} & (known - WORDS_OF_OTHERS)
            elif isinstance(part, ast.Attribute):
                found |= {part.attr} & (known - WORDS_OF_OTHERS)
    return found


def test_nobody_in_between_names_a_column() -> None:
    files = [
        file for part in GENERIC for file in ([ROOT / part] if part.endswith(".py") else (ROOT / part).glob("*.py"))
    ]
    assert len(files) > 8
    assert {str(file.relative_to(ROOT)): found for file in files if (found := names_in(file))} == {}


def test_every_column_of_a_rollout_is_made() -> None:
    """By their names, in what `to_columns` builds for a run that wants all of them."""
    wanted = {"keep_old_actor": True, "save_debug_train_data": "x", "loss_type": "policy_loss", "opd_type": "sglang"}
    args, of_top = (make_args(**wanted, opd_top_k=count) for count in (0, 2))
    top = top_columns(of_top)
    samples = make_samples(groups=1, per_group=2)
    for sample in samples:
        sample.rollout_log_probs = [-1.0] * sample.response_length
        sample.columns["teacher_log_probs"] = [-2.0] * sample.response_length
        sample.columns |= {column.name: [[1, 2]] * sample.response_length for column in top}
        sample.weight_versions, sample.segment_starts = ["3"], [0]
        sample.segment_lengths = [sample.response_length]
    columns = to_columns(args, samples).columns
    likeliest = to_columns(of_top, samples).columns
    assert likeliest.keys() - columns.keys() == {column.name for column in top}
    assert set(columns) == {column.name for column in COLUMNS if column.made_by != "trainer"}
    assert all(likeliest[column.name].values.shape[1:] == column.trailing == (2,) for column in top)
    for column in COLUMNS:
        if column.made_by != "trainer":
            values = columns[column.name]
            assert (values.values if isinstance(values, Ragged) else values).dtype == column.dtype, column.name
            assert isinstance(values, Ragged) == (column.span != "row")


def test_a_teachers_log_probs_may_be_in_upstreams_attribute() -> None:
    """Beside `Sample.columns`, which comes first; a sample with neither is refused."""
    samples = make_samples(groups=1, per_group=3)
    for sample in samples:
        sample.teacher_log_probs = np.full(sample.response_length, -2.0)
    samples[1].columns["teacher_log_probs"] = [-3.0] * samples[1].response_length
    column = to_columns(make_args(opd_type="sglang"), samples).columns["teacher_log_probs"]
    assert isinstance(column, Ragged)
    assert [set(column[row].tolist()) for row in range(3)] == [{-2.0}, {-3.0}, {-2.0}]
    samples[2].teacher_log_probs = None
    with pytest.raises(BadInputError, match=r"sample 2 .*: no teacher_log_probs, which every sample must have"):
        to_columns(make_args(opd_type="sglang"), samples)


def test_a_step_is_part_of_what_is_taken() -> None:
    step = OptimizerStep([np.arange(1)], 1, 1, 1)
    assert fresh_rows().take(np.array([2]), [step]).steps == [step]
