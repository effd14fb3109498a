"""Whether a run can load the weights that it starts from: by headers and metadata, before anything starts."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.convert.stored import METADATA, StoredTensors
from slime.convert.torch_dist_to_hf import locate_all, plan, specs_of, unused
from slime.files.block_scaled import SCALE_END, block_sizes, num_blocks
from slime.files.checkpoints import (
    COMMON,
    LATEST,
    SavedModel,
    find_checkpoint,
    has_checkpoint,
    is_torch_dist,
    same_place,
)
from slime.files.hf_reader import Header, read_engine_headers, read_headers
from slime.files.model_directory import NO_WEIGHTS, has_weights
from slime.models import Family, family_of, hf_config, shape_from_hf, weight_shape
from slime.models.adapters import adapter_family, targeted_sources
from slime.models.family import ADAPTER_MARK, MODEL_PREFIXES, VALUE_HEAD_KEY, Row, check_names, holds_heads
from slime.options.errors import OptionError
from slime.options.learning.distillation import TEACHER_FLAG
from slime.utils.errors import BadInputError, abbreviate

Headers = Mapping[str, Header]

_SIZES = (
    *("vocab_size", "untie_embeddings_and_output_weights", "num_layers", "hidden_size", "ffn_hidden_size"),
    *("num_attention_heads", "num_query_groups", "kv_channels"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
)
"""What of a model's shape decides the shapes of its weights."""
_EMBEDDING = "model.embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_OF_THE_VOCABULARY = (_EMBEDDING, _OUTPUT)
_CRITIC = "--critic-load"
_ANOTHER = "is it another model's?"
_SERVE_IT = (
    ": in the trainers a teacher takes turns in the student's model; serve one of another shape (--opd-type sglang)"
)


def check_weight_files(args: Namespace, resumed: SavedModel | None, *, downloaded: bool) -> None:
    """Refuse weights that engines or trainers would fail to load, or that are not of the run's model, by an OptionError
    that names the flag, and the file or the tensor.

    Args:
        args: complete, with the model's shape.
        resumed: the checkpoint that ``--load`` goes on from.
        downloaded: whether the files of ``--hf-checkpoint`` are here: a dry run downloads none.
    """
    trains, own, ref = args.placement != "rollout_only", Path(args.hf_checkpoint), args.ref_load
    # Those of a run that is resumed are read for the reference, and for what adapters are added to.
    reads = trains and not args.random_weights
    starts = reads and (resumed is None or args.needs_reference or args.lora_rank is not None)
    serves = args.num_engines > 0 and not args.random_weights
    serves = serves and getattr(args, "sglang_load_format", "auto") in ("auto", "safetensors")
    if reads and ref is not None and not (has_weights(ref) or has_checkpoint(ref) or is_torch_dist(ref)):
        raise OptionError(f"--ref-load {ref}: there are neither *.safetensors nor a checkpoint in it")
    if downloaded and ((starts and ref is None) or serves) and not has_weights(own):
        raise OptionError(f"--hf-checkpoint {own}: {NO_WEIGHTS}")
    # What --load named is a checkpoint, even in the model's own directory.
    from_own = ref is None or (args.ref_load_flag != "--load" and same_place(ref, own))
    headers: Headers = {}
    if downloaded and has_weights(own):
        if starts and from_own:
            headers = _hf_weights("--hf-checkpoint", own, args, with_heads=args.enable_mtp_training)
        elif serves:
            with _named("--hf-checkpoint", own):
                headers = read_engine_headers(own)
    if not trains:
        return
    config = hf_config(own)
    model = _Model(config, family_of(config), headers)
    if starts and not from_own:
        _check_source(args.ref_load_flag, ref, args, model, with_heads=args.enable_mtp_training)
    if args.use_opd and args.opd_teacher_load is not None:
        _check_source(TEACHER_FLAG, args.opd_teacher_load, args, model, with_heads=False)
    if resumed is not None:
        _check_stored("--load", resumed.directory, args, model, resumes=True)
    if args.use_critic:
        _check_critic(args, resumed, model)


@dataclass(frozen=True)
class _Model:
    config: Any
    family: Family
    headers: Headers
    """Of ``--hf-checkpoint``, as far as they were read."""


@contextmanager
def _named(flag: str, directory: Path) -> Iterator[None]:
    """Within: errors of what is read from the directory become one line that names the flag."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).removeprefix(f"{directory}: ").removeprefix(f"{directory}/")
        raise OptionError(f"{flag} {directory}: {reason}") from error


def _check_source(flag: str, place: str, args: Namespace, model: _Model, *, with_heads: bool) -> None:
    """Weights to start from other than those of ``--hf-checkpoint``."""
    with _named(flag, Path(place)):
        found = find_checkpoint(place)
    directory = found[0] if found else Path(place)
    if found and has_weights(place):
        raise OptionError(
            f"{flag} {place}: it holds safetensors, and checkpoints too: for the checkpoint name its own directory, "
            f"{directory}; for the model a directory without checkpoints"
        )
    if is_torch_dist(directory) and not has_weights(place):
        _check_stored(flag, directory, args, model)
    elif found:
        raise OptionError(f"{flag} {directory}: this checkpoint is not in the torch_dist format")
    elif not (directory / "config.json").is_file():
        raise OptionError(f"{flag} {place}: there is no checkpoint (no {LATEST}) and no model (no config.json) in it")
    else:
        _hf_weights(flag, directory, args, with_heads=with_heads)
        _check_same_model(flag, directory, args)


def _check_critic(args: Namespace, resumed: SavedModel | None, model: _Model) -> None:
    """The checkpoint of the critic that goes on with the actor's, or what a given ``--critic-load`` starts it from."""
    if resumed is None:
        if args.critic_source is not None and not args.random_weights:
            _check_source(_CRITIC, args.critic_source, args, model, with_heads=False)
        return
    directory = Path(args.critic_load, resumed.directory.name)
    if not is_torch_dist(directory):
        raise OptionError(
            f"--load goes on from {resumed.directory}, and {_CRITIC} {args.critic_load} has no whole {directory.name}: "
            "name the directory with the critic's checkpoints of that run"
        )
    _check_stored(_CRITIC, directory, args, model, resumes=True)


# ---- Hugging Face directories


def _hf_weights(flag: str, directory: Path, args: Namespace, *, with_heads: bool) -> Headers:
    """The headers of a directory that trainers load, after checking that they can."""
    with _named(flag, directory):
        headers = read_headers(directory)
        config = hf_config(directory)
        family, shape = family_of(config), weight_shape(config, with_heads=with_heads)
        names = _without_scales(headers, block_sizes(directory))
        try:
            check_names(family, shape, names, directory, family.untrained(config, shape))
        except ValueError as error:
            raise BadInputError(f"{error}: {_ANOTHER} or was a file left out?") from error
        size, rows = shape_from_hf(config)["hidden_size"], headers[_EMBEDDING].shape
        if len(rows) != 2 or rows[0] != shape.vocab_size or rows[1] != size:
            raise BadInputError(
                f"{_EMBEDDING} is {list(rows)}, and config.json means {[shape.vocab_size, size]}: {_ANOTHER}"
            )
    return headers


def _without_scales(headers: Headers, block: tuple[int, ...] | None) -> list[str]:
    for name, header in headers.items():
        if not header.dtype.startswith("F8_") or name.endswith(SCALE_END):
            continue
        scales = headers.get(name + SCALE_END)
        if block is None or scales is None:
            what = "config.json no quantization_config" if block is None else f"there is no {name + SCALE_END}"
            raise BadInputError(f"{name} is in float8, and {what}: copy or download the directory again")
        wanted = num_blocks(header.shape, block)
        if scales.shape != wanted:
            raise BadInputError(
                f"{name + SCALE_END} is {list(scales.shape)}, and blocks of {list(block)} make {list(wanted)}"
            )
    return [name for name in headers if block is None or not name.endswith(SCALE_END)]


def _check_same_model(flag: str, directory: Path, args: Namespace) -> None:
    if args.allow_config_mismatch:
        return
    config, own = hf_config(directory), hf_config(args.hf_checkpoint)
    shapes = shape_from_hf(config), shape_from_hf(own)
    advice = _SERVE_IT if flag == TEACHER_FLAG else ""
    no_dense_layer = all(all(shape.get("moe_layer_freq") or [0]) for shape in shapes)
    for name in _SIZES:
        theirs, ours = (shape.get(name) or 0 for shape in shapes)
        if theirs != ours and not (name == "ffn_hidden_size" and no_dense_layer):
            raise OptionError(
                f"{flag} {directory} is another model's: {name} is {theirs} by its config.json, and {ours} by that "
                f"of --hf-checkpoint {args.hf_checkpoint}{advice}"
            )
    wanted, found = (set(family_of(c).parameters(weight_shape(c))) for c in (own, config))
    for what, names in (("it has nothing for", wanted - found), ("there is no place for its", found - wanted)):
        if names:
            raise OptionError(
                f"{flag} {directory} is another model's ({config.model_type}): {what} {abbreviate(names)} of "
                f"--hf-checkpoint {args.hf_checkpoint} ({own.model_type}){advice}"
            )


# ---- torch_dist checkpoints


def _check_stored(flag: str, directory: Path, args: Namespace, model: _Model, *, resumes: bool = False) -> None:
    """Whether a torch_dist checkpoint is whole and holds the run's model, or the run's adapters of it. One of
    ``--critic-load`` that the run ``resumes`` from must be a critic's."""
    with _named(flag, directory):
        if not (directory / METADATA).is_file():
            if not any(directory.glob("*.distcp")):
                return  # of another format, which loading knows or refuses
            raise BadInputError(f"there is no {METADATA} in it, which a copy may have left out as a hidden file")
        if not (directory / COMMON).is_file():
            raise BadInputError(f"there is no {COMMON} in it: copy the checkpoint again")
        stored = StoredTensors(directory)
        if lacking := stored.lacking_files():
            raise BadInputError(f"files are missing or not whole: {abbreviate(lacking)}: copy the checkpoint again")
        is_critic = VALUE_HEAD_KEY in stored and flag == _CRITIC
        if resumes and flag == _CRITIC and not is_critic:
            raise BadInputError(f"it has no {VALUE_HEAD_KEY}, as a critic's checkpoint has: is it the actor's?")
        if args.allow_config_mismatch:
            return
        if args.enable_mtp_training and flag != _CRITIC and not holds_heads(stored):
            raise BadInputError("it has no MTP heads, which --enable-mtp-training trains: convert the model with it")
        if args.lora_rank is not None and resumes and flag != _CRITIC:
            _check_stored_adapters(stored, args, model)
        else:
            _check_stored_model(stored, args, model, is_critic=is_critic)


def _check_stored_model(stored: StoredTensors, args: Namespace, model: _Model, *, is_critic: bool) -> None:
    family, has_heads = model.family, holds_heads(stored)
    shape = weight_shape(model.config, with_heads=has_heads)
    located, missing = locate_all(stored, family, shape)
    if missing := [name for name in missing if not (is_critic and name == _OUTPUT)]:
        raise BadInputError(f"it lacks {abbreviate(missing)} of --hf-checkpoint {args.hf_checkpoint}: {_ANOTHER}")
    if left := list(unused(stored, located.values())):
        raise BadInputError(
            f"it holds what the model of --hf-checkpoint {args.hf_checkpoint} has no place for: {abbreviate(left)}: "
            f"{_ANOTHER}"
        )
    specs = specs_of(stored, list(plan(stored, located)), family, shape)
    for name, spec in specs.items():
        meant: tuple[int, ...] = model.headers[name].shape if name in model.headers else spec.shape
        if name == _EMBEDDING:
            meant = (spec.shape[0], args.hidden_size)
        if spec.shape[1:] != meant[1:] or (name not in _OF_THE_VOCABULARY and spec.shape[0] != meant[0]):
            raise BadInputError(
                f"its {name} is {list(spec.shape)}, that of --hf-checkpoint {args.hf_checkpoint} {list(meant)}: "
                f"{_ANOTHER}"
            )


def _check_stored_adapters(stored: StoredTensors, args: Namespace, model: _Model) -> None:
    family, shape = model.family, weight_shape(model.config)
    rows: dict[str, tuple[Row, list[str]]] = {}
    for name in adapter_family(family, args.lora_target_modules).parameters(shape):
        base = f"{name.rpartition(ADAPTER_MARK)[0]}.weight"
        rows[re.sub(r"\.experts\.\d+\.", ".experts.", name)] = family.row(base)[0], family.sources(base, shape)
    found = {key for key in stored if ADAPTER_MARK in key and key.startswith(MODEL_PREFIXES)}
    lacking, left = rows.keys() - found, found - rows.keys()
    for what, keys in (("lacks adapters", lacking), ("holds adapters that are not", left)):
        if keys:
            raise BadInputError(
                f"it {what} of the model of --hf-checkpoint {args.hf_checkpoint}: {abbreviate(keys)}: {_ANOTHER}"
            )
    for key, (row, sources) in rows.items():
        if any(source not in model.headers for source in sources):
            continue
        shapes = [model.headers[source].shape for source in sources]
        is_first = key.endswith("a")
        extent = shapes[0][1] if is_first else sum(shape[0] for shape in shapes)
        wanted = [sum(targeted_sources(row, args.lora_target_modules)) * args.lora_rank, extent]
        wanted = wanted if is_first else [extent, args.lora_rank]
        if list(stored.shape(key)[-2:]) != wanted:
            raise BadInputError(
                f"its {key} is {list(stored.shape(key)[-2:])}, and the model of --hf-checkpoint {args.hf_checkpoint} "
                f"has {wanted}: {_ANOTHER}"
            )
