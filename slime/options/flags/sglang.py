"""SGLang's and its router's flags, passed through under ``--sglang-`` and ``--router-``."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.options.flags.installed import PendingFlags
from slime.options.flags.values import json_value, problem_of
from slime.utils.patching import Patch, due, version_of

ENGINE_PACKAGE = "sglang"
_ROUTERS = {"sglang-router": "sglang_router", "smg": "smg"}
"""Distributions of routers, and what they are imported as; the latter succeeds the former, and has its parser."""
ROUTER_PACKAGE = next((name for name in _ROUTERS if version_of(name)), "sglang-router")
"""That of runs: the first one that is installed."""
ROUTER_READER = "import sys; from slime.options.flags.sglang import write_router_flags; write_router_flags(sys.argv[1])"

SET_BY_SLIME = frozenset(
    (
        *("model_path", "config", "trust_remote_code", "random_seed", "enable_memory_saver", "tp_size", "port", "host"),
        *("nnodes", "node_rank", "dist_init_addr", "gpu_id_step", "base_gpu_id", "nccl_port", "skip_server_warmup"),
        *("enable_return_routed_experts", "help", "api_key", "admin_api_key", "disaggregation_mode"),
        *("disaggregation_bootstrap_port", "encoder_only", "encoder_urls", "language_only"),
    )
)
"""Attributes of SGLang's own parser that slime decides."""

ROUTER_SET_BY_SLIME = frozenset(("help", "worker_urls", "api_key", "prefill", "decode", "pd_disaggregation", "mini_lb"))
"""Attributes of the router's own parser that slime decides; the last one is another router, in Python."""

CONSISTENT_HASHING = "consistent_hashing"
KEYED_POLICIES = (CONSISTENT_HASHING, "manual")
"""Policies of the router that send requests of one X-SMG-Routing-Key to one engine."""


def _offer_consistent_hashing(parser: argparse.ArgumentParser) -> None:
    """Lets one choose the policy `consistent_hashing`, which the router has and its parser does not offer."""
    for action in parser._actions:
        if action.dest == "policy" and action.choices and CONSISTENT_HASHING not in action.choices:
            action.choices = [*action.choices, CONSISTENT_HASHING]


ROUTER_POLICY: Patch[None] = Patch(
    "router_policy", "sglang-router", "==0.3.2", "routers, and what reads a router's flags",
    "sglang-router's parser offers it.", _offer_consistent_hashing, lambda _: ROUTER_PACKAGE == "sglang-router",
)  # fmt: skip
"""One of the patches that `slime.backends.sglang.patches` lists: here, as that imports torch, and a router does not."""


def write_engine_flags(path: str) -> None:
    """Write a record of every server flag; imports SGLang, so it runs in a process of its own."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    _write(parser, SET_BY_SLIME, path)


def write_router_flags(path: str) -> None:
    """Write a record of every router flag; imports the router, so it runs in a process of its own."""
    _write(router_parser(with_address=False), ROUTER_SET_BY_SLIME, path)


def router_parser(*, with_address: bool) -> argparse.ArgumentParser:
    """The router's own parser, for `RouterArgs.from_cli_args`, with ``--host`` and ``--port`` or not; imports
    the router."""
    parser = argparse.ArgumentParser()
    router_module("router_args").RouterArgs.add_cli_args(
        parser, use_router_prefix=False, exclude_host_port=not with_address
    )
    for patch in due([ROUTER_POLICY], None):
        patch.apply(parser)
    return parser


def router_module(name: str) -> Any:
    """A module of the installed router."""
    return importlib.import_module(f"{_ROUTERS[ROUTER_PACKAGE]}.{name}")


def _write(parser: argparse.ArgumentParser, left_out: frozenset[str], path: str) -> None:
    Path(path).write_text(json.dumps([_record(a) for a in parser._actions if a.dest not in left_out]))


def _record(action: argparse.Action) -> dict[str, Any]:
    plain = isinstance(action.default, (str, int, float, bool, list, dict, type(None)))
    return {
        "flags": list(action.option_strings),
        "dest": action.dest,
        "nargs": action.nargs,
        "const": action.const if isinstance(action.const, (str, int, float, bool)) else None,
        "type": getattr(action.type, "__name__", "str"),
        "choices": list(action.choices) if action.choices else None,
        "default": action.default if plain and action.default != argparse.SUPPRESS else None,
        "help": action.help if action.help and action.help != argparse.SUPPRESS else "",
    }


_WIDEST_CHOICES = 80
"""Characters of a list of choices that stands beside its flag in the help; a longer one goes into the text."""


class PassThrough(argparse.Action):
    """Keeps a flag both as an attribute and, word by word, for another program's command line.

    The words gather in the attribute named by ``words``: attribute -> the flag as that program knows it, with its
    values. A switch sets ``value``.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        words: str,
        own_flag: str,
        value: Any = None,
        convert: Callable[[str], Any] = str,
        **kwargs: Any,
    ) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self.words, self.own_flag, self.const, self.convert = words, own_flag, value, convert

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Record one occurrence; a later one replaces it."""
        texts = values if isinstance(values, list) else [] if values is None else [values]
        setattr(namespace, self.words, {**getattr(namespace, self.words, {}), self.dest: [self.own_flag, *texts]})
        try:
            converted = [self.convert(text) for text in texts]
        except (ValueError, OverflowError) as error:
            raise argparse.ArgumentError(self, f"invalid value: {' '.join(texts)!r}") from error
        if problem := problem_of(converted):
            raise argparse.ArgumentError(self, problem)
        single = self.const if not converted else converted[0]
        setattr(namespace, self.dest, converted if self.nargs in ("+", "*") else single)


def _human_int(text: str) -> int:
    """``8192`` or ``8k``, ``1.5M``: SGLang's way to write large integers (powers of 1000, of 1024 with an i)."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
    number = text.strip().lower().rstrip("kmgi")
    unit = text.strip().lower()[len(number) :]
    return int(text) if not unit else int(float(number) * units[unit])


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "loads": json_value,
    "json_list_type": json_value,
    "human_readable_int": _human_int,
}


def add_flags(parser: argparse.ArgumentParser, program: str, title: str, pending: PendingFlags) -> None:
    """Add ``--<program>-<flag>`` for every flag of an installed program that slime neither sets nor has of its own."""
    group = parser.add_argument_group(f"{title}, with --{program}- in front")
    for record in pending.result():
        _add(parser, group, record, program)


def _add(parser: argparse.ArgumentParser, group: Any, record: dict[str, Any], program: str) -> None:
    choices = record["choices"] if record["type"] == "str" else None
    help = record["help"].replace("%(default)s", str(record["default"])).replace("%", "%%")
    metavar = None if choices or record["nargs"] == 0 else record["type"].upper()
    if choices and len(",".join(choices)) > _WIDEST_CHOICES:
        help, metavar = f"{help} One of {', '.join(choices)}.", "NAME"
    for own in record["flags"]:
        name = f"--{program}-{own[2:]}"
        if name not in parser._option_string_actions:
            on = not own.startswith("--no-") or record["dest"].startswith("no_")
            group.add_argument(
                name,
                action=PassThrough,
                dest=f"{program}_{record['dest']}",
                words=f"{program}_words",
                own_flag=own,
                value=on if record["const"] is None else record["const"],
                nargs=record["nargs"],
                choices=choices,
                metavar=metavar,
                convert=_CONVERTERS.get(record["type"], str),
                default=record["default"],
                help=help,
            )


def command_line(words: dict[str, list[str]]) -> list[str]:
    """The gathered words as one argument list."""
    return [word for passed in words.values() for word in passed]
