"""Whether a run can load the weights that it starts from: by headers, before anything starts."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.models import family_of, hf_config, shape_from_hf, weight_shape
from slime.models.names import check_names
from slime.options.checkpoint import SavedModel, find_checkpoint, is_torch_dist
from slime.options.errors import OptionError
from slime.options.model import engines_read_weights, has_weights
from slime.utils.block_scaled import SCALE_END, block_sizes, num_blocks
from slime.utils.errors import BadInputError
from slime.utils.hf_headers import Header, read_headers
from slime.utils.hf_writer import INDEX_NAME

Headers = Mapping[str, Header]

_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
)
"""What of a model's shape decides the shapes of its weights; those of the vocabulary's rows may differ."""
_EMBEDDING = "model.embed_tokens.weight"
_ANOTHER = "is it another model's?"


def check_weight_files(args: Namespace, resumed: SavedModel | None, *, downloaded: bool) -> None:
    """Refuse weights that engines or trainers would fail to load, or that are not of the run's model.

    Args:
        args: complete, with the model's shape.
        resumed: the checkpoint that ``--load`` goes on from.
        downloaded: whether the files of ``--hf-checkpoint`` are here: a dry run downloads none.

    Raises:
        OptionError: naming the flag, and the file or the tensor.
    """
    trains = args.placement != "rollout_only"
    starts = trains and (resumed is None or args.needs_reference or args.lora_rank is not None)
    starts = starts and not args.random_weights
    own, ref = Path(args.hf_checkpoint), args.ref_load
    from_own = ref is None or os.path.realpath(ref) == os.path.realpath(own)
    if downloaded and has_weights(args.hf_checkpoint):
        if starts and from_own:
            _hf_weights("--hf-checkpoint", own, args)
        elif engines_read_weights(args):
            with _named("--hf-checkpoint", own):
                read_headers(own)
    if starts and not from_own:
        found = find_checkpoint(ref)
        directory = found[0] if found else Path(ref)
        if not is_torch_dist(directory):
            _hf_weights("--ref-load", directory, args)
            _check_same_model(directory, args)


@contextmanager
def _named(flag: str, directory: Path) -> Iterator[None]:
    """Within: errors of what is read from the directory become one line that names the flag."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).removeprefix(f"{directory}: ").removeprefix(f"{directory}/")
        raise OptionError(f"{flag} {directory}: {reason}") from error


# ---- Hugging Face directories


def _hf_weights(flag: str, directory: Path, args: Namespace) -> Headers:
    """The headers of a directory that trainers load, after checking that they can."""
    with _named(flag, directory):
        if not (directory / INDEX_NAME).is_file() and not (directory / "model.safetensors").is_file():
            raise BadInputError(f"there is no {INDEX_NAME} and no model.safetensors in it: copy or download them too")
        headers = read_headers(directory)
        config = hf_config(directory)
        family, shape = family_of(config), weight_shape(config, with_heads=args.enable_mtp_training)
        names = _without_scales(headers, block_sizes(directory))
        try:
            check_names(family, shape, names, directory, family.untrained(config, shape))
        except ValueError as error:
            raise BadInputError(f"{error}: {_ANOTHER} or was a file left out?") from error
        size, rows = shape_from_hf(config)["hidden_size"], headers[_EMBEDDING].shape
        if len(rows) != 2 or rows[0] < shape.vocab_size or rows[1] != size:
            raise BadInputError(
                f"{_EMBEDDING} is {list(rows)}, and config.json means {[shape.vocab_size, size]}: {_ANOTHER}"
            )
    return headers


def _without_scales(headers: Headers, block: tuple[int, ...] | None) -> list[str]:
    """The names of tensors, of which those in float8 are read together with their scales."""
    for name, header in headers.items():
        if not header.dtype.startswith("F8_"):
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


def _check_same_model(directory: Path, args: Namespace) -> None:
    """Compare the model that a Hugging Face directory's config.json means with the run's."""
    if args.allow_config_mismatch:
        return
    config, own = hf_config(directory), hf_config(args.hf_checkpoint)
    shapes = shape_from_hf(config), shape_from_hf(own)
    for name in _SIZES:
        theirs, ours = (shape.get(name) or 0 for shape in shapes)
        if theirs != ours:
            raise OptionError(
                f"--ref-load {directory} is another model's: {name} is {theirs} by its config.json, and {ours} by that "
                f"of --hf-checkpoint {args.hf_checkpoint}"
            )
    wanted, found = (set(family_of(c).parameters(weight_shape(c))) for c in (own, config))
    if wanted - found:
        raise OptionError(
            f"--ref-load {directory} is another model's ({config.model_type}): it has nothing for "
            f"{_some(wanted - found)} of --hf-checkpoint {args.hf_checkpoint} ({own.model_type})"
        )


def _some(names: Any) -> str:
    several = sorted(names)
    return ", ".join(several[:3]) + (f" and {len(several) - 3} more" if len(several) > 3 else "")
