"""Engines that run already, as members of a fleet: what they say of themselves decides how they are pushed to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from slime.backends.sglang.client import EngineError
from slime.backends.sglang.external import KEY_VARIABLES, ExternalEngineInfo, discover_external_engines
from slime.fleet.spec import EngineSpec, Fleet, ModelSpec
from slime.observability.progress import say
from slime.options.serving.external import FLAG
from slime.options.serving.sglang_config import PREFILL, REGULAR
from slime.ray.supervision import InputError
from slime.utils.http_utils import is_own_address

Keys = tuple[str, str] | None
"""(generate, admin) of servers; None for open ones, on loopback."""
_SHORTEST = 16


def given_keys(args: argparse.Namespace) -> Keys:
    """Those that the operator gives by environment to servers of a run and outside of it; None where there are none, or
    the run is to have none. InputError where one is missing, or would not do."""
    if args.no_api_keys:
        return None
    found = [os.environ.get(name) or "" for name in KEY_VARIABLES]
    if not any(found):
        return None
    for name, key in zip(KEY_VARIABLES, found, strict=True):
        if len(key) < _SHORTEST or key.startswith("-") or not key.isascii() or not key.isprintable() or " " in key:
            raise InputError(
                f"{name}: must be at least {_SHORTEST} printable ASCII characters without blanks, not beginning with a "
                f"dash; {KEY_VARIABLES[0]} and {KEY_VARIABLES[1]} go together"
            )
    return found[0], found[1]


def with_external_engines(fleet: Fleet, keys: Keys) -> Fleet:
    """The fleet, its external engines as they describe themselves, which is printed; ``keys`` are of `given_keys`.
    InputError where one does not answer, or does not fit the others."""
    if not fleet.external:
        return fleet
    try:
        infos = discover_external_engines([url for spec in fleet.external for url in spec.urls], keys)
    except EngineError as error:
        raise InputError(f"{FLAG}: {error}") from None
    for info in infos:
        release = info.server_info.get("version", "of an unknown release")
        say(f"external engine at {info.url}: SGLang {release}, {info.worker_type}, ranks: {info.num_gpus}")
    described = {info.url: info for info in infos}
    entries = [_described(spec, described[spec.urls[0]]) if spec.urls else spec for spec in fleet.engines]
    _check_types(entries)
    apart = {spec.model.name for spec in entries if spec.worker_type == PREFILL}
    engines = [replace(spec, model=_as_split(spec.model, apart)) for spec in entries]
    return replace(fleet, engines=tuple(engines))


def described(spec: EngineSpec, keys: Keys, timeout: float) -> EngineSpec:
    """The entry of one external engine, as it describes itself; EngineError where it does not answer in ``timeout``
    seconds."""
    (info,) = discover_external_engines(spec.urls, keys, timeout)
    return _described(spec, info)


def _described(spec: EngineSpec, info: ExternalEngineInfo) -> EngineSpec:
    return replace(spec, width=info.num_gpus, worker_type=info.worker_type, keyed=info.keyed)


def _as_split(model: ModelSpec, apart: set[str]) -> ModelSpec:
    return replace(model, prefills_apart=True) if model.name in apart else model


def _check_types(entries: Sequence[EngineSpec]) -> None:
    for model in {spec.model.name for spec in entries}:
        types = {spec.worker_type for spec in entries if spec.model.name == model}
        if len(types) > 1 and REGULAR in types:
            named = ", ".join(f"{spec.worker_type} {' '.join(spec.urls) or 'of the run'}" for spec in entries)
            raise InputError(
                f"{FLAG}: regular engines cannot serve a model beside prefill and decode: there are {named}"
            )
        if len(types) == 1 and REGULAR not in types:
            raise InputError(f"{FLAG}: all engines of the model {model} {types.pop()}: prefill and decode go together")


def is_elsewhere(spec: EngineSpec) -> bool:
    """Whether an entry's engines are external ones on other hosts than this one."""
    return any(not is_own_address(urlsplit(url).hostname or "") for url in spec.urls)
