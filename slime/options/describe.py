"""The resolved configuration as text."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import yaml

from slime.options.installed import version_of

PACKAGES = ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers")
PASSED_ON = ("sglang_cli", "router_cli", "rm_sglang_cli")
DERIVED = (
    *("placement", "actor_num_gpus", "num_engines", "world_size", "data_parallel_size", "train_iters"),
    *("params_dtype", "use_critic", "needs_reference", "reward_baseline", "reward_std", "eval_datasets", "launch_dir"),
    *("model_context", "pushes_float8", "ref_load_flag", "option_warnings", "given_options"),
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
    sections["sglang"] = {name: values.pop(name) for name in PASSED_ON}
    sections["megatron and others"] = {
        name: value for name, value in values.items() if not name.startswith(("sglang_", "router_"))
    }
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=120)


def describe_changed(args: Namespace, groups: tuple[type, ...]) -> str:
    """YAML: of each group what is not its default, given or worked out; of Megatron and others what was given."""
    values = {name: _plain(value) for name, value in vars(args).items()}
    sections: dict[str, dict[str, Any]] = {}
    for group in groups:
        fields = dataclasses.fields(group)
        names = {field.name for field in fields}
        changed = {f.name: values[f.name] for f in fields if values.get(f.name) != _plain(f.default)}
        sections[_title(group)] = changed
        values = {name: value for name, value in values.items() if name not in names}
    sections["sglang"] = {name: values[name] for name in PASSED_ON if values[name]}
    sections["megatron and others"] = {
        name: values[name]
        for name in args.given_options
        if name in values and not name.startswith(("sglang_", "router_"))
    }
    kept = {title: section for title, section in sections.items() if section}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=120)


def _title(group: type) -> str:
    return (group.__doc__ or "").split(":")[0].strip().rstrip(".").lower()


def _plain(value: Any) -> Any:
    """A value that YAML can hold."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
