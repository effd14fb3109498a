"""From the samples of one rollout to one training batch per data-parallel rank, and the rollout's metrics."""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from slime.algorithms.rewards import LARGEST_REWARD, normalize_rewards, overlong_penalty
from slime.batching.flops import DecoderShape, LatentShape, forward_flops
from slime.batching.schedule import build_schedule, train_batches
from slime.data import ColumnError, Ragged, Sample, Status, TrainBatch
from slime.data.columns import LOSS_MASK, ROUTES, TOKENS, Values, from_samples
from slime.data.routes import RouteError, RouteShape
from slime.data.sample_values import as_log_probs, check_mask, no_log_prob, outside_vocabulary
from slime.data.source.numbers import numbers_kept
from slime.options.checks.hook_paths import columns_of
from slime.options.flags.schema import flag_named
from slime.options.training import micro_batch_multiple
from slime.rollout.batches.conversion import FLAG as CONVERSION
from slime.rollout.batches.conversion import Converted, convert
from slime.rollout.batches.metrics import reward_metrics, rollout_metrics
from slime.rollout.engine.versions import OLDER_THAN_ANY, as_number
from slime.utils.errors import BadInputError
from slime.utils.user_functions import call_user_function, is_first

logger = logging.getLogger(__name__)

_NEEDS_ENGINE = ("use_tis", "use_rs", "use_rollout_logprobs", "true_on_policy_mode")
"""Options without a meaning for samples that have no log-probs of an engine."""
_ROUTED_AT_LEAST = 0.9
"""Share of tokens with the engine's routes under ``--ci-test``: of those that no engine has computed there are few."""


class SampleError(BadInputError):
    """A sample cannot be trained on, whoever made it."""


def to_train_batches(args: Namespace, samples: list[Sample], dp_size: int) -> tuple[list[TrainBatch], dict[str, float]]:
    """Check, normalise, schedule and deal out the samples of one rollout, flat, in any order: a batch for each of
    ``dp_size`` data-parallel ranks, and the metrics of `rollout_metrics` and `reward_metrics`. Samples that one rollout
    was cut into share ``rollout_id``. SampleError for a sample that cannot be trained on (named by its index),
    ValueError for counts that do not divide into steps."""
    samples, columns = _rows(args, samples)
    lengths = _padded_lengths(args, columns.lengths)
    dynamic = args.use_dynamic_batch_size
    balances = args.balance_data or args.balance_by_flops
    schedule = build_schedule(
        lengths,
        columns.rollout_ids,
        _row_sums(columns.loss_mask),
        dp_size=dp_size,
        global_batch_size=args.global_batch_size,
        micro_batch_size=None if dynamic else args.micro_batch_size,
        max_tokens=args.max_tokens_per_gpu * args.context_parallel_size if dynamic else None,
        micro_batch_multiple=micro_batch_multiple(args),
        row_costs=forward_flops(lengths, decoder_shape(args)) if balances else None,
        balance_micro_batches=args.balance_by_flops,
    )
    metrics = rollout_metrics(samples, columns)
    if args.loss_type != "sft_loss":
        metrics |= reward_metrics(columns)
    if ROUTES in columns.columns:
        metrics["rollout/routed_ratio"] = ratio = _routed_ratio(args, columns)
        if args.ci_test and ratio < _ROUTED_AT_LEAST:
            raise BadInputError(f"--ci-test: rollout/routed_ratio is {ratio:.4g}, not at least {_ROUTED_AT_LEAST}")
    if args.overlong_buffer_len is not None:
        metrics["rollout/overlong_penalty"] = float(_overlong_penalties(args, samples).mean())
    return train_batches(columns, schedule), metrics


def _rows(args: Namespace, samples: list[Sample]) -> tuple[list[Sample], TrainBatch]:
    if args.custom_convert_samples_to_train_data_path is None:
        return samples, to_columns(args, samples)
    converted = convert(args, samples)
    try:
        return converted.samples, to_columns(args, converted.samples, converted)
    except SampleError as error:
        raise BadInputError(f"{CONVERSION} {args.custom_convert_samples_to_train_data_path}: {error}") from error


def to_columns(args: Namespace, samples: list[Sample], converted: Converted | None = None) -> TrainBatch:
    """Every sample as one row, unscheduled (``steps`` is empty), of what a user's function says of its samples where it
    has ``converted`` them. Raises SampleError as `to_train_batches` does."""
    if not samples:
        raise SampleError("the rollout returned no samples")
    for position, sample in enumerate(samples):
        try:
            sample.check()
            check_mask(sample)
        except (TypeError, ValueError) as error:
            raise SampleError(str(error)) from error
        check_response(sample, _name(position, sample))
    made = _made_of_rollout(args, samples, converted)
    values: dict[str, Values | None] = {}
    for column in columns_of(args):
        if column.made_by == "trainer" or not column.wanted(args):
            continue
        if column.made_by == "rollout":
            values[column.name] = made[column.name]()
        else:
            try:
                values[column.name] = from_samples(column, samples, lambda at: _name(at, samples[at]))
            except ColumnError as error:
                raise BadInputError(str(error)) from error
    _check_vocabulary(args, samples, values[TOKENS])
    return TrainBatch({name: column for name, column in values.items() if column is not None})


def _made_of_rollout(
    args: Namespace, samples: list[Sample], converted: Converted | None
) -> dict[str, Callable[[], Values | None]]:
    of_rollout = rollout_ids(samples)
    loss_mask = Ragged.from_rows((_loss_mask(s) for s in samples), np.uint8)
    _, rollout_of_row = np.unique(of_rollout, return_inverse=True)
    mask_sums = np.bincount(rollout_of_row, _row_sums(loss_mask)).astype(np.int64)[rollout_of_row]
    if converted is None:
        raw_rewards, rewards = _rewards(args, samples, of_rollout)
    else:
        raw_rewards = _reward_column(converted.raw_rewards, samples, "raw_reward")
        rewards = _reward_column(converted.rewards, samples, "reward")
        if converted.rollout_mask_sums is not None:
            mask_sums = np.array(converted.rollout_mask_sums, dtype=np.int64)
    return {
        LOSS_MASK: lambda: loss_mask,
        "rewards": lambda: rewards.astype(np.float32),
        "raw_rewards": lambda: raw_rewards.astype(np.float32),
        "truncated": lambda: np.array([s.status is Status.TRUNCATED for s in samples], dtype=np.bool_),
        "sample_indices": lambda: np.array(
            [i if s.index is None else s.index for i, s in enumerate(samples)], dtype=np.int64
        ),
        "rollout_ids": lambda: of_rollout,
        "group_indices": lambda: np.array(
            [-1 if s.group_index is None else s.group_index for s in samples], dtype=np.int64
        ),
        "rollout_mask_sums": lambda: mask_sums,
        "rollout_log_probs": lambda: _rollout_log_probs(args, samples),
        "weight_versions": lambda: _weight_versions(samples),
        "metadata": lambda: _metadata(samples),
        ROUTES: lambda: _routes(args, samples),
    }


def _padded_lengths(args: Namespace, lengths: np.ndarray) -> np.ndarray:
    """As the rows lie in a stream: context parallelism cuts each into two chunks a rank."""
    cp_size = args.context_parallel_size
    chunks = 2 * cp_size if cp_size > 1 else 1
    return -(-lengths // chunks) * chunks


def decoder_shape(args: Namespace) -> DecoderShape:
    """The sizes that a row's work depends on, of the whole model."""
    moe_layers, every = 0, args.moe_layer_freq
    if args.num_experts:
        moe_layers = sum(every) if isinstance(every, list) else -(-args.num_layers // every)
    own = {"num_moe_layers": moe_layers, "latent": None}
    names = [field.name for field in dataclasses.fields(DecoderShape) if field.name not in own]
    sizes: dict[str, Any] = {name: getattr(args, name) or 0 for name in names} | own
    sizes["moe_ffn_hidden_size"] = sizes["moe_ffn_hidden_size"] or args.ffn_hidden_size
    if args.multi_latent_attention:
        latent = {field.name: getattr(args, field.name) for field in dataclasses.fields(LatentShape)}
        sizes["latent"] = LatentShape(**latent)
    return DecoderShape(**sizes)


def _name(position: int, sample: Sample) -> str:
    return f"sample {sample.index} (position {position}, group {sample.group_index}, status {sample.status.value})"


def check_response(sample: Sample, name: str) -> None:
    """Raise SampleError, which begins with ``name``, where there is no response, or no prompt before it."""
    if sample.response_length < 1:
        raise SampleError(f"{name}: empty response; a rollout must replace or leave out such a sample")
    if sample.response_length >= len(sample.tokens):
        raise SampleError(
            f"{name}: {len(sample.tokens)} tokens, all of them response; the first response token needs at least one "
            "prompt token before it"
        )


def _loss_mask(sample: Sample) -> Sequence[int] | np.ndarray:
    if sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.uint8)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, dtype=np.uint8)
    return sample.loss_mask


def _check_vocabulary(args: Namespace, samples: list[Sample], tokens: Values | None) -> None:
    assert isinstance(tokens, Ragged)
    wrong = np.flatnonzero((tokens.values < 0) | (tokens.values >= args.vocab_size))
    if wrong.size:
        position = int(np.searchsorted(tokens.offsets, wrong[0], side="right")) - 1
        raise SampleError(
            f"{_name(position, samples[position])}: {outside_vocabulary(tokens.values[wrong[0]], args.vocab_size)}"
        )


def rollout_ids(samples: list[Sample]) -> np.ndarray:
    """A sample without a ``rollout_id`` is a rollout of its own, under a number that no other has."""
    unused = 1 + max((s.rollout_id for s in samples if s.rollout_id is not None), default=-1)
    return np.array(
        [unused + i if s.rollout_id is None else s.rollout_id for i, s in enumerate(samples)], dtype=np.int64
    )


def _rollout_log_probs(args: Namespace, samples: list[Sample]) -> Ragged | None:
    """The engine's log-probs: of every sample with trained tokens, or of none where nothing needs them."""
    missing = [i for i, s in enumerate(samples) if s.rollout_log_probs is None and np.any(_loss_mask(s))]
    needed_by = [name for name in _NEEDS_ENGINE if getattr(args, name)]
    if missing and needed_by:
        flag = flag_named(needed_by[0])
        raise SampleError(f"{_name(missing[0], samples[missing[0]])}: no rollout_log_probs, which {flag} needs")
    if not needed_by and all(s.rollout_log_probs is None for s in samples):
        return None
    if missing:
        raise SampleError(
            f"{_name(missing[0], samples[missing[0]])}: no rollout_log_probs, but other samples have them "
            f"({len(missing)} of {len(samples)} samples lack them)"
        )
    rows = ([0.0] * s.response_length if s.rollout_log_probs is None else s.rollout_log_probs for s in samples)
    try:
        log_probs = Ragged.from_rows(rows, np.float32)
    except (TypeError, ValueError, RuntimeError):
        _name_odd_log_probs(samples)
        raise
    wrong = np.flatnonzero(~np.isfinite(log_probs.values))
    if wrong.size:
        position = int(np.searchsorted(log_probs.offsets, wrong[0], side="right")) - 1
        token = int(wrong[0] - log_probs.offsets[position])
        problem = no_log_prob(token, log_probs.values[wrong[0]], bool(_loss_mask(samples[position])[token]))
        raise SampleError(f"{_name(position, samples[position])}: {problem}")
    return log_probs


def _name_odd_log_probs(samples: list[Sample]) -> None:
    try:
        for sample in samples:
            as_log_probs(sample, sample.rollout_log_probs or [0.0])
    except ValueError as error:
        raise SampleError(str(error)) from error


def _metadata(samples: list[Sample]) -> np.ndarray:
    column = np.empty(len(samples), dtype=object)
    column[:] = [sample.train_metadata for sample in samples]
    return column


def _routes(args: Namespace, samples: list[Sample]) -> Ragged:
    """Routes of all tokens: those of samples that have none, or not of all tokens, are `RouteShape.absent` there."""
    without = [position for position, sample in enumerate(samples) if sample.rollout_routed_experts is None]
    advice = (
        "a generate function that asks engines by itself asks for return_routed_experts, and passes args and meta_info "
        "to Sample.append_response_tokens"
    )
    if len(without) == len(samples):
        raise BadInputError(f"--use-rollout-routing-replay: none of {len(samples)} samples has routes: {advice}")
    if without and is_first("--use-rollout-routing-replay", "samples without routes"):
        logger.warning(
            f"--use-rollout-routing-replay: {len(without)} of {len(samples)} samples have no routes, first "
            f"{_name(without[0], samples[without[0]])}, and the trainer chooses their experts (rollout/routed_ratio "
            f"has the share of tokens with routes; this is said once): {advice}"
        )
    shape, rows = RouteShape.of(args), []
    for position, sample in enumerate(samples):
        try:
            rows.append(shape.trained(sample.rollout_routed_experts, len(sample.tokens)))
        except RouteError as error:
            raise BadInputError(f"{_name(position, sample)}: {error}") from error
    return Ragged.from_rows(rows, shape.dtype, rows[0].shape[1:])


def _routed_ratio(args: Namespace, columns: TrainBatch) -> float:
    """Share of tokens, of all but each sample's last one, with a route in every layer."""
    routes = columns.columns[ROUTES]
    assert isinstance(routes, Ragged)
    absent = (routes.values == RouteShape.of(args).absent).reshape(len(routes.values), -1).any(1)
    return 1 - (int(absent.sum()) - len(routes)) / max(len(absent) - len(routes), 1)


def _weight_versions(samples: list[Sample]) -> Ragged:
    """The version of each response token, -1 of those that no engine made: a hook may have filled it by hand."""
    rows = []
    for position, sample in enumerate(samples):
        made = [OLDER_THAN_ANY if v is None else as_number(v) for v in sample.token_versions()]
        versions = np.array(made, dtype=np.int32)
        trained = np.asarray(_loss_mask(sample)) == 1
        if lacking := int((trained & (versions < 0)).sum()):
            raise SampleError(
                f"{_name(position, sample)}: --keep-old-actor needs the weights' version of every trained token, and "
                f"{lacking} of {int(trained.sum())} have none; a generate function notes it by passing meta_info to "
                "Sample.append_response_tokens"
            )
        rows.append(versions)
    return Ragged.from_rows(rows, np.int32)


def _rewards(args: Namespace, samples: list[Sample], rollout_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if args.loss_type == "sft_loss":
        zeros = np.zeros(len(samples))
        return zeros, zeros
    if hook := args.custom_reward_post_process_path:
        flag = "--custom-reward-post-process-path"
        with numbers_kept(samples, f"{flag} {hook}"):
            returned = call_user_function(flag, hook, {"args": args, "samples": samples})
        if not isinstance(returned, Sequence) or len(returned) != 2:
            raise BadInputError(f"{flag} {hook}: it must return (raw rewards, rewards), not {returned!r:.200}")
        raw_rewards, rewards = returned
        return (
            _reward_column(raw_rewards, samples, f"raw reward of {flag}"),
            _reward_column(rewards, samples, f"reward of {flag}"),
        )
    return usual_rewards(args, samples, rollout_ids)


def usual_rewards(args: Namespace, samples: list[Sample], rollout_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Raw rewards, and these relative to their groups as the options have it; float64 [samples]. SampleError of a
    sample without a reward, or without a group where groups are compared."""
    try:
        values = [sample.get_reward_value(args) for sample in samples]
    except ValueError as error:
        raise SampleError(str(error)) from error
    raw = _reward_column(values, samples, "reward")
    shaped = raw + _overlong_penalties(args, samples)
    if args.reward_baseline is None:
        return raw, shaped
    for position, sample in enumerate(samples):
        if sample.group_index is None:
            raise SampleError(
                f"{_name(position, sample)}: rewards are normalised by group, so every sample needs a group_index "
                f"(or pass --disable-rewards-normalization)"
            )
    groups = np.array([s.group_index for s in samples], dtype=np.int64)
    return raw, normalize_rewards(
        shaped, groups, rollout_ids, baseline=args.reward_baseline, divide_by_std=args.reward_std
    )


def _overlong_penalties(args: Namespace, samples: list[Sample]) -> np.ndarray:
    if args.overlong_buffer_len is None:
        return np.zeros(len(samples))
    lengths = np.array([sample.response_length for sample in samples])
    return overlong_penalty(
        lengths, args.rollout_max_response_len, args.overlong_buffer_len, args.overlong_penalty_factor
    )


def _reward_column(rewards: Iterable[float], samples: list[Sample], what: str) -> np.ndarray:
    values = list(rewards)
    if len(values) != len(samples):
        raise SampleError(f"{what}: {len(values)} values for {len(samples)} samples")
    try:
        column = np.array([float(value) for value in values], dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise SampleError(f"{what}: not all values are numbers: {error}") from error
    wrong = np.flatnonzero(~(np.abs(column) <= LARGEST_REWARD))
    if wrong.size:
        position = int(wrong[0])
        found = f"the {what} is {column[position]:g}, and must be within {LARGEST_REWARD:g}"
        raise SampleError(f"{_name(position, samples[position])}: {found}")
    return column


def _row_sums(mask: Ragged) -> np.ndarray:
    totals = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    return np.diff(totals[mask.offsets])
