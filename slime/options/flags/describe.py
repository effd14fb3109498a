"""The resolved configuration as text."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import yaml

from slime.options.flags.sglang import ROUTER_PACKAGE
from slime.utils.patching import version_of

PACKAGES = ("torch", "megatron-core", "sglang", ROUTER_PACKAGE, "ray", "transformers")
PASSED_ON = ("sglang_cli", "router_cli", "rm_sglang_cli")
DERIVED = (
    *("placement", "actor_num_gpus", "num_engines", "world_size", "data_parallel_size", "train_iters"),
    *("params_dtype", "use_critic", "needs_reference", "reward_baseline", "reward_std", "eval_datasets", "launch_dir"),
    *("model_context", "pushes_float8", "ref_load_flag", "option_warnings", "given_options"),
    "sglang_models",
)


def describe_groups(args: Namespace, groups: tuple[type, ...]) -> str:
    """YAML: what was derived, one section a group, then what no group declares (Megatron's, and a user's own keys).

    SGLang's and the router's hundreds of values are given by the flags that were passed, on top of the installed
    version's defaults. The caller has taken secrets out.
    """
    values = {name: _plain(value) for name, value in sorted(vars(args).items())}
    sections: dict[str, dict[str, Any]] = {"versions": {name: version_of(name) for name in PACKAGES}}
    sections["derived"] = {name: values.pop(name) for name in DERIVED if name in values}
    for group in groups:
        sections[_title(group)] = {field.name: values.pop(field.name, None) for field in dataclasses.fields(group)}
    return _text(sections | _others(values, values))


def describe_changed(args: Namespace, groups: tuple[type, ...]) -> str:
    """YAML: of each group what is not its default, given or worked out; of Megatron and others what was given."""
    values = {name: _plain(value) for name, value in vars(args).items()}
    sections = {}
    for group in groups:
        own = {field.name: (values.pop(field.name, None), _plain(field.default)) for field in dataclasses.fields(group)}
        sections[_title(group)] = {name: value for name, (value, default) in own.items() if value != default}
    sections |= _others(values, args.given_options)
    sections["sglang"] = {name: value for name, value in sections["sglang"].items() if value}
    return _text({title: section for title, section in sections.items() if section})


def _others(values: dict[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What was passed on, and of what no group declares the values of these names."""
    passed = {name: values.pop(name) for name in PASSED_ON}
    rest = {name: values[name] for name in names if name in values and not name.startswith(("sglang_", "router_"))}
    return {"sglang": passed, "megatron and others": rest}


def _text(sections: dict[str, dict[str, Any]]) -> str:
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=120)


def _title(group: type) -> str:
    return (group.__doc__ or "").split(":")[0].strip().rstrip(".").lower()


def _plain(value: Any) -> Any:
    """A value that YAML can hold."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
