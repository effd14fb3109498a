"""What a run serves, as a table for ``--dry-run``."""

from __future__ import annotations

import argparse

from slime.fleet.spec import EngineSpec, Fleet, ModelSpec, fleet_of
from slime.utils.http_utils import host_port

_HEAD = ("model", "workers", "engines", "slots", "router", "weights")


def describe_models(args: argparse.Namespace) -> str:
    """A row for the engines of each kind: model, kind, names, slots, router, and where their weights come from."""
    fleet = fleet_of(args)
    if not fleet.engines:
        return "models served: none"
    rows = [
        (
            spec.model.name,
            f"external at {spec.urls[0].removeprefix('http://')}" if spec.urls else _kind(spec),
            _numbered(spec.model.called("engine"), first, spec),
            "none" if spec.urls else _span(spec.first_slot, spec.place.stop),
            _router(args, spec.model),
            _weights(args, fleet, spec),
        )
        for spec, first in zip(fleet.engines, fleet.first_numbers(), strict=True)
    ]
    widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (_HEAD, *rows)]
    return "\n".join(["models served:", *(f"  {line.rstrip()}" for line in lines)])


def _kind(spec: EngineSpec) -> str:
    return spec.worker_type + (", beside trainers" if spec.beside_trainers else "")


def _numbered(name: str, first: int, spec: EngineSpec) -> str:
    of = f" of {spec.width} slots" if spec.width > 1 else ""
    return f"{name} {_span(first, first + spec.count)}{of}"


def _span(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _router(args: argparse.Namespace, model: ModelSpec) -> str:
    if model.generates and args.sglang_router_ip is not None:
        return f"{host_port(args.sglang_router_ip, args.sglang_router_port)}, which runs already"
    return model.called("router")


def _weights(args: argparse.Namespace, fleet: Fleet, spec: EngineSpec) -> str:
    if not (spec.model.trained and fleet.trainers):
        return f"as in {spec.model.checkpoint}"
    if args.lora_sync == "adapter":
        return "pushed (adapters)"
    transport = args.update_weight_transport
    return f"pushed ({'distributed' if transport == 'tensor' and not spec.beside_trainers else transport})"
