"""Write a model's flags as a script to source, or compare such a script with the model's config.json.

    python tools/model_args.py /root/Qwen3-4B > scripts/models/qwen3-4B.sh
    python tools/model_args.py /root/Qwen3-4B --check scripts/models/qwen3-4B.sh

A script defines ``MODEL_ARGS`` and, where the caller has not set it, ``CKPT_ARGS``. train.py takes the shape from
config.json with or without it, and refuses flags that say something else; the same comparison is made by ``--check``.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

from slime.files.model_directory import model_directory  # noqa: E402
from slime.options.checks.model_shape import contradictions, take_rotary_factor  # noqa: E402
from slime.options.flags import megatron  # noqa: E402
from slime.options.flags.installed import PendingFlags  # noqa: E402
from slime.options.flags.parser import StrictParser  # noqa: E402
from slime.options.flags.patterns import written_pattern  # noqa: E402

GROUPS = {
    "size": ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"),
    "attention": (
        *("num_attention", "group_query", "num_query", "kv_channels", "add_qkv", "qk_layernorm"),
        *("multi_latent", "q_lora", "kv_lora", "qk_", "v_head"),
    ),
    "positions": ("position_", "rotary_", "use_rope", "rope_", "mscale", "beta_", "original_max"),
    "norms, activation, embeddings": ("normal", "norm_", "post_", "swiglu", "add_bias", "untie"),
    "experts": ("num_experts", "moe_"),
    "other": ("",),
}
"""Sections of a script, and the beginnings of the names in them, in order."""
LEFT_OUT = ("max_position_embeddings", "beta_fast", "beta_slow", "mtp_num_layers")
"""What versions of one model differ in that have the same weights otherwise: base and instruct models, for example, or
YaRN's ramp, which is 1 or 32 in configs of Kimi K2; and its MTP heads, which are a part of it only where
--enable-mtp-training asks for them."""
SCRIPT = """\
# {name}. Source this, and pass "${{MODEL_ARGS[@]}}" and "${{CKPT_ARGS[@]}}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
{flags}
)

if [ -z "${{CKPT_ARGS+x}}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${{HF_CHECKPOINT:-{name}}}")
fi
"""


def main(argv: list[str] | None = None) -> int:
    """Print the script, or compare one with the config."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face directory, its config.json, or a hub id")
    parser.add_argument("--name", help="default of HF_CHECKPOINT in the script (default: the model as given)")
    parser.add_argument(
        "--check", metavar="FILE", help="compare this script; status 1 where it contradicts config.json"
    )
    options = parser.parse_args(argv)
    try:
        shape = read_shape(options.model)
        if options.check is None:
            print(script(shape, options.name or options.model.removesuffix("/config.json")), end="")
            return 0
        found = contradictions(flags_of(Path(options.check)), shape)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    for sentence in found.values():
        print(f"{options.check}: {sentence}")
    return 1 if found else 0


def read_shape(model: str) -> dict[str, Any]:
    """The shape that a config means, under Megatron-LM's argument names.

    Raises:
        ValueError: no such model, or one that slime does not support.
    """
    from slime.models import hf_config, shape_from_hf

    file = Path(model).expanduser()
    return shape_from_hf(
        hf_config(file if file.is_file() else model_directory(model, with_weights=False, flag="model"))
    )


def script(shape: dict[str, Any], name: str) -> str:
    """The text of a model script.

    Raises:
        ValueError: a name that bash would not take as it is.
    """
    if not re.fullmatch(r"[\w./+~-]+", name):
        raise ValueError(f"--name {name}: only letters, digits and ._+~/- may be in it")
    parser, defaults = _megatron_flags()
    actions = parser.actions_by_dest()
    sections: dict[str, list[tuple[int, str]]] = {}
    for attribute, value in shape.items():
        same = value == defaults.get(attribute)
        if attribute in LEFT_OUT or value is None or (not value and (same or attribute not in actions)):
            continue
        if isinstance(value, bool) and same:
            continue
        section, place = _place(attribute)
        sections.setdefault(section, []).append((place, _written(actions[attribute], value)))
    lines = []
    for section in GROUPS:
        if section in sections:
            lines.append(f"   # {section}")
            lines += [f"   {flag}" for _, flag in sorted(sections[section], key=lambda entry: entry[0])]
    return SCRIPT.format(name=name, flags="\n".join(lines))


def _place(attribute: str) -> tuple[str, int]:
    for section, beginnings in GROUPS.items():
        for place, beginning in enumerate(beginnings):
            if attribute.startswith(beginning):
                return section, place
    raise AssertionError("every name begins with nothing")


def _written(actions: list[argparse.Action], value: Any) -> str:
    """A value as a flag."""
    if isinstance(value, bool):
        return next(a for a in actions if a.nargs == 0 and a.const is value).option_strings[0]
    flag = next(action for action in actions if action.nargs != 0).option_strings[0]
    if not isinstance(value, list):
        return f"{flag} {value}"
    if set(value) == {1}:  # every layer
        return f"{flag} 1"
    return f"'{flag}={written_pattern(value)}'"  # one word, and quoted: brackets and stars are a pattern of file names


def flags_of(file: Path) -> dict[str, Any]:
    """What the ``MODEL_ARGS`` of a script set, by attribute.

    Raises:
        ValueError: bash does not run it, or it defines none.
    """
    if not file.is_file():
        raise ValueError(f"--check {file}: there is no such file")
    expand = 'source "$1" && printf "%s\\0" "${MODEL_ARGS[@]}"'
    ran = subprocess.run(["bash", "-uc", expand, "bash", file.absolute()], capture_output=True, text=True, timeout=60)
    words = ran.stdout.split("\0")[:-1]
    if ran.returncode or not any(words):
        raise ValueError(f"--check {file}: it does not define MODEL_ARGS. {ran.stderr.strip()}")
    parser, defaults = _megatron_flags()
    given = parser.parse_set(words)
    values = argparse.Namespace(**(defaults | given))
    named = set(given)
    take_rotary_factor(values, named)
    return {name: getattr(values, name) for name in named}


@functools.cache
def _megatron_flags() -> tuple[StrictParser, dict[str, Any]]:
    """The parser of the flags that a model script may have, and their defaults."""
    parser = StrictParser(prog=Path(sys.argv[0]).name)
    with PendingFlags(megatron.PACKAGE, megatron.READER) as fields:
        megatron.add_megatron_flags(parser, fields, set())
    return parser, parser.split_defaults()


if __name__ == "__main__":
    sys.exit(main())
