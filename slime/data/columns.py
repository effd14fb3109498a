"""The training columns: the one table of what is known of a rollout's samples, for each token or each sample.

A column is declared here, or in the ``COLUMNS`` of a module that a flag names (`hook_paths`). What builds, schedules,
ships, packs, cuts for context parallelism, dumps and shows columns goes by the declaration, and names none.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from slime.data.media import are_references
from slime.data.ragged import Ragged

Span = Literal["row", "response", "sequence", "media"]
Maker = Literal["sample", "rollout", "trainer"]
Values = Ragged | np.ndarray

TOKENS = "tokens"
LOSS_MASK = "loss_mask"
METADATA = "metadata"
TEACHER_LOG_PROBS = "teacher_log_probs"
TEACHER_TOP_IDS = "teacher_top_ids"
TEACHER_TOP_LOG_PROBS = "teacher_top_log_probs"
ROUTES = "routed_experts"
SAMPLE_INDICES = "sample_indices"
ROLLOUT_MASK_SUMS = "rollout_mask_sums"
_TAKEN = ("total_lengths", "response_lengths", "log_probs_and_entropy")
"""What users' functions know beside columns."""
_OF_FORWARD = ("input_ids", "position_ids", "attention_mask", "packed_seq_params")
"""Keywords of the model's forward call that are taken."""
_ON_DEVICES = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
_METADATA_READERS = (
    *("custom_advantage_function_path", "custom_loss_function_path", "rollout_data_postprocess_path"),
    "save_debug_train_data",
)
"""Options by which somebody in the trainer reads `Sample.train_metadata`."""


class ColumnError(ValueError):
    """A sample's values are not those that a column is declared with; one line."""


@dataclass(frozen=True)
class Column:
    """What one quantity is, and where it comes from and goes to.

    Entries of a "response" column belong to response tokens and, in a packed stream, lie where a token is predicted
    *from*; those of a "sequence" column belong to prompt and response tokens, and lie where the tokens do. Entries of a
    "media" column are references (`slime.data.media`), any number a sample; the model gets what ``load`` makes of their
    bytes.
    """

    name: str
    dtype: Any
    """numpy's, between processes and in files."""
    span: Span
    """Of what there is an entry: the sample as a whole, each of its response tokens, or each of all its tokens; or its
    entries are media."""
    trailing: tuple[int, ...] = ()
    """The shape of an entry."""
    made_by: Maker = "sample"
    """sample: each one carries its own, in `Sample.columns` or the attribute; rollout: it follows from all samples of a
    rollout (`slime.rollout.batches.train_data`); trainer: it comes of a pass through a model."""
    attribute: str | None = None
    """Of a sample's own: the attribute of `Sample` that holds it, where `Sample.columns` does not."""
    wanted: Callable[[Namespace], bool] = lambda args: True
    """Whether a run with these options has it."""
    needed: bool = True
    """Whether a sample without it is an error; a column that no sample has is left out otherwise."""
    padding: float = 0
    """What stands in a packed stream where it has no entry."""
    packed_as: Any = None
    """numpy's type in a micro-batch, where it is another than ``dtype``."""
    model_input: str | None = None
    """The keyword under which the model's forward call gets it: [1, T, *trailing]."""
    load: Callable[[Namespace, Sequence[bytes]], Mapping[str, np.ndarray]] | None = None
    """Of media: makes of those of one sample, in host memory and in a thread of its own, what the model's forward call
    gets of them, by keyword. Arrays of one keyword are joined along their first dimension, sample after sample."""
    upstream: str | None = None
    """What users' functions and conversions know it as, where that is not its name."""
    shown: bool = True
    """Whether users' functions in the trainer see it."""
    changeable: bool = False
    """Whether ``--rollout-data-postprocess-path`` may change it."""

    @property
    def name_for_users(self) -> str:
        """What users' functions and messages call it."""
        return self.upstream or self.name


COLUMNS: tuple[Column, ...] = (
    Column(TOKENS, np.int32, "sequence", attribute="tokens", packed_as=np.int64),
    Column(
        LOSS_MASK, np.uint8, "response", made_by="rollout", packed_as=np.float32, upstream="loss_masks", changeable=True
    ),
    # After group normalisation or the user's post-processing: what the advantage estimator takes; and before it.
    Column("rewards", np.float32, "row", made_by="rollout"),
    Column("raw_rewards", np.float32, "row", made_by="rollout", upstream="raw_reward"),
    Column("truncated", np.bool_, "row", made_by="rollout"),
    Column(SAMPLE_INDICES, np.int64, "row", made_by="rollout"),
    # Rows with one of these are parts of one rollout and share a denominator.
    Column("rollout_ids", np.int64, "row", made_by="rollout"),
    Column("group_indices", np.int64, "row", made_by="rollout"),
    # Loss tokens of the row's whole rollout, including its rows on other ranks.
    Column(ROLLOUT_MASK_SUMS, np.int64, "row", made_by="rollout"),
    # The engine's; there are none of data that no engine made.
    Column(
        "rollout_log_probs",
        np.float32,
        "response",
        made_by="rollout",
        wanted=lambda args: args.loss_type != "sft_loss",
        changeable=True,
    ),
    # Which weights made each token, -1 for tokens of no engine.
    Column(
        "weight_versions",
        np.int32,
        "response",
        made_by="rollout",
        wanted=lambda args: bool(args.keep_old_actor),
        padding=-1,
        packed_as=np.int64,
        shown=False,
    ),
    Column(
        METADATA,
        np.object_,
        "row",
        made_by="rollout",
        wanted=lambda args: any(getattr(args, name) is not None for name in _METADATA_READERS),
    ),
    # Under the behaviour policy, and under the reference model.
    Column("old_log_probs", np.float32, "response", made_by="trainer", upstream="log_probs", changeable=True),
    Column("ref_log_probs", np.float32, "response", made_by="trainer", changeable=True),
    # Under the teacher, by a server or a pass of the trainer, and how much less that is than the student's.
    Column(
        TEACHER_LOG_PROBS,
        np.float32,
        "response",
        attribute=TEACHER_LOG_PROBS,
        wanted=lambda args: args.opd_type == "sglang" and not args.opd_top_k,
    ),
    Column("opd_reverse_kl", np.float32, "response", made_by="trainer"),
    # The critic's before the rollout's first optimizer step, and what it is trained on.
    Column("values", np.float32, "response", made_by="trainer", changeable=True),
    Column("returns", np.float32, "response", made_by="trainer", changeable=True),
    Column("advantages", np.float32, "response", made_by="trainer", changeable=True),
)
"""slime's own."""


def with_declared(declared: Iterable[Column], by_options: Iterable[Column] = ()) -> tuple[Column, ...]:
    """slime's own columns, those whose shape depends on the options, and ones that are declared elsewhere; ColumnError
    where two have one name or one keyword of the model, or one of the last says what cannot be."""
    own = (*COLUMNS, *by_options)
    columns = (*own, *declared)
    taken = dict.fromkeys(_TAKEN, "something else of that name")
    keywords: set[str | None] = set()
    for column in columns:
        names = {column.name, column.name_for_users}
        if other := next((taken[name] for name in names if name in taken), None):
            raise ColumnError(f"column {column.name}: there is {other} already")
        taken |= dict.fromkeys(names, f"a column {column.name}")
        if column not in own and (wrong := _contradiction(column)):
            raise ColumnError(f"column {column.name}: {wrong}")
        if column.model_input in keywords:
            raise ColumnError(f"column {column.name}: another one is the model's {column.model_input} already")
        keywords |= {column.model_input} - {None}
    return columns


def teacher_columns(args: Namespace) -> tuple[Column, ...]:
    """What a served teacher says of the sampled tokens, or of those that it finds likeliest."""
    return top_columns(args) or tuple(column for column in COLUMNS if column.name == TEACHER_LOG_PROBS)


def top_columns(args: Namespace) -> tuple[Column, ...]:
    """Of ``--opd-top-k``: the ids that the teacher finds likeliest in a token's place, and its log-probs of them."""
    if not args.opd_top_k:
        return ()
    shared: dict[str, Any] = {
        "span": "response",
        "trailing": (args.opd_top_k,),
        "wanted": lambda args: args.opd_type == "sglang",
        "shown": False,
    }
    return (
        Column(TEACHER_TOP_IDS, np.int32, packed_as=np.int64, **shared),
        Column(TEACHER_TOP_LOG_PROBS, np.float32, **shared),
    )


def _contradiction(column: Column) -> str | None:
    """What is wrong with a declaration from outside slime."""
    per_token = column.span in ("response", "sequence")
    if not column.name.isidentifier():
        return "a name is of letters, digits and _"
    if column.made_by != "sample" or column.changeable:
        return "one that is declared outside slime is made_by 'sample', and not changeable"
    if column.model_input is not None and (not per_token or column.model_input in _OF_FORWARD):
        return f"a model input has an entry a token, and a keyword that is not one of {', '.join(_OF_FORWARD)}"
    if (column.load is not None) != (column.span == "media"):
        return "media, and no others, have a function to load them"
    try:
        kinds = [np.dtype(column.dtype), np.dtype(column.packed_as or column.dtype)]
        if per_token:
            np.full((), column.padding, kinds[1])
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    if per_token and not {kind.name for kind in kinds} <= _ON_DEVICES:
        return f"its entries may be of {', '.join(sorted(_ON_DEVICES))}"
    return None


def held(column: Column, sample: Any) -> Any:
    """What a sample (of class `Sample`) carries of a column, unchecked; None where it carries nothing."""
    own = sample.columns.get(column.name)
    return getattr(sample, column.attribute) if own is None and column.attribute is not None else own


def from_samples(column: Column, samples: Sequence[Any], called: Callable[[int], str]) -> Values | None:
    """What the samples (of class `Sample`) carry of a column; None where none does and none must. ColumnError where one
    has none though others do, or values of another shape or kind than declared; it is ``called`` so, by position."""
    given = [held(column, sample) for sample in samples]
    missing = [position for position, value in enumerate(given) if value is None]
    if len(missing) == len(samples) and not column.needed:
        return None
    if missing:
        raise ColumnError(
            f"{called(missing[0])}: no {column.name_for_users}, which every sample must have "
            f"({len(missing)} of {len(samples)} lack it)"
        )
    rows: list[Any] = []
    with np.errstate(all="ignore"):  # what a cast makes of other values is looked at
        for position, (value, sample) in enumerate(zip(given, samples, strict=True)):
            try:
                rows.append(_checked(column, value, sample))
            except ColumnError as error:
                raise ColumnError(f"{called(position)}: {column.name_for_users} {error}") from error
    if column.span == "row":
        return np.stack(rows)
    if column.span == "media":
        references = np.empty(len(rows), dtype=object)
        references[:] = rows
        return references
    return Ragged.from_rows(rows, column.dtype, column.trailing)


def _checked(column: Column, value: Any, sample: Any) -> Any:
    if column.span == "media":
        if not are_references(value):
            raise ColumnError("must be a list of slime.data.media.MediaRef")
        return tuple(value)
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"it has entries of type {array.dtype}")
        cast = array.astype(column.dtype, copy=False)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ColumnError(f"is not made of numbers: {error}") from error
    entries = {"row": (), "response": (sample.response_length,), "sequence": (len(sample.tokens),)}[column.span]
    if cast.shape != (*entries, *column.trailing):
        raise ColumnError(f"has shape {cast.shape}, and must have {(*entries, *column.trailing)}")
    if cast is not array and np.issubdtype(column.dtype, np.integer) and not (cast == array).all():
        raise ColumnError(f"has values that {np.dtype(column.dtype)} does not hold")
    return cast
