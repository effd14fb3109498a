"""The optimizer's state in host memory, ``--optimizer-cpu-offload``: main parameters and moments come to the device for
their own step only, some at a time.

megatron-core has a `HybridDeviceOptimizer` for this, which computes the step on the CPU. It takes its parameters apart
by Transformer Engine's optimizer, rounds as another kernel does, and on hosts with several GPUs all of them share the
cores. Here the arithmetic stays where it was, and so do its bits: what a step reads and writes goes through the device
in chunks, by the same fused kernel as without the flag, while links to the host carry other chunks in both directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from slime.utils import device

MAIN = "main"
"""What a main parameter is called among the moments."""
_CHUNK = 16 * 2**20
"""Elements that are on the device together, of each of main parameters and moments: 64 MiB each."""
_WHOLE = 64
"""Parameters are cut at multiples of it: a CPU's kernel may round what is left of a vector otherwise."""
_SLOTS = 3
"""Chunks on the device where copies overlap: one comes, one is stepped on, one goes."""


@dataclass(frozen=True)
class _Stretch:
    """Elements ``begin`` to ``end`` of a parameter, which are at ``at`` in their chunk."""

    parameter: Tensor
    begin: int
    end: int
    at: int


@dataclass
class _Chunk:
    """What is on the device together: elements from ``begin`` on of a run's host arrays."""

    begin: int
    size: int = 0
    stretches: list[_Stretch] = field(default_factory=list)

    @property
    def bounds(self) -> slice:
        return slice(self.begin, self.begin + self.size)


@dataclass
class _Run:
    """Parameters that keep the same kinds of state, one after the other in one host array of each kind."""

    kinds: tuple[str, ...]
    host: dict[str, Tensor] = field(default_factory=dict)
    chunks: list[_Chunk] = field(default_factory=list)
    places: dict[Tensor, tuple[int, int]] = field(default_factory=dict)
    size: int = 0

    @property
    def moments(self) -> list[str]:
        return [kind for kind in self.kinds if kind != MAIN]

    def add(self, parameter: Tensor) -> None:
        """Give a parameter its place, and as many chunks as it needs."""
        begin, count = 0, parameter.numel()
        self.places[parameter] = self.size, self.size + count
        while begin < count:
            room = _CHUNK - self.chunks[-1].size if self.chunks else 0
            end = count if count - begin <= room else begin + room // _WHOLE * _WHOLE
            if end == begin:
                self.chunks.append(_Chunk(self.size))
                continue
            chunk = self.chunks[-1]
            chunk.stretches.append(_Stretch(parameter, begin, end, chunk.size))
            chunk.size += end - begin
            self.size += end - begin
            begin = end

    def host_view(self, kind: str, parameter: Tensor) -> Tensor:
        begin, end = self.places[parameter]
        return self.host[kind][begin:end].view(parameter.shape)


class HostState:
    """State of one of torch's optimizers in host memory, and the step that it takes from there.

    Between steps a main parameter is its host array, so that checkpoints read and write it there; within `ready` it has
    the device's type and shape, and no memory, so that Megatron can give it a gradient.
    """

    def __init__(self, part: MegatronOptimizer, kinds: tuple[str, ...], *, fraction: float, pin: bool, overlap: bool):
        """
        Args:
            part: whose main parameters and state move, and whose inner optimizer's ``step`` is replaced.
            kinds: names of the moments in the state of a parameter.
            fraction: of all elements, which are in host memory, in whole parameters from the first on.
            pin: tell the device of the host memory, for copies at full speed.
            overlap: let copies run beside the step of other chunks.
        """
        self._inner, self._overlap = part.optimizer, overlap
        self._models = _model_weights(part)
        self._resident: list[Tensor] = []
        self._runs = [_Run((MAIN, *kinds)), _Run(kinds)]
        every = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        limit, taken = fraction * sum(parameter.numel() for parameter in every), 0
        for parameter in every:
            run = self._runs[parameter not in self._models]
            if taken < limit and run.kinds:
                run.add(parameter)
            else:
                self._resident.append(parameter)
            taken += parameter.numel()
        # Megatron's checkpoint writers are forked where slime's patch of them does not apply.
        allocate = partial(device.pinned, in_forks=True) if pin else partial(torch.empty, dtype=torch.uint8)
        for run in self._runs:
            run.host = {kind: allocate(4 * run.size).view(torch.float32) for kind in run.kinds if run.size}
            self._move(run)
        if any(run.places for run in self._runs):
            self._inner.step, self._inner.host_state = self._step, self
            self._inner.register_load_state_dict_post_hook(lambda _: self._adopt())
            part._copy_main_params_to_model_params = lambda: None  # `_step` does, of what is on the device just then

    def _move(self, run: _Run) -> None:
        """Main parameters to their host arrays, moments of 0 to theirs."""
        for kind in run.moments if run.size else ():
            run.host[kind].zero_()
        for parameter in run.places:
            where = parameter.device
            if MAIN in run.kinds:
                host = run.host_view(MAIN, parameter)
                host.copy_(parameter.data)
                parameter.data = host
            state = {kind: run.host_view(kind, parameter) for kind in run.moments}
            steps = {"step": torch.zeros((), dtype=torch.float32, device=where)} if "exp_avg" in state else {}
            self._inner.state[parameter] = steps | state

    def _adopt(self) -> None:
        """Put what a load brought into the host arrays; torch makes the state anew, where the parameters are."""
        where = device.current_device()
        for run in self._runs:
            for parameter in run.places:
                state = self._inner.state[parameter]
                for kind in run.moments:
                    host = run.host_view(kind, parameter)
                    if state[kind].data_ptr() != host.data_ptr():
                        host.copy_(state[kind])
                        state[kind] = host
                if "step" in state:
                    state["step"] = state["step"].to(where)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is of the host arrays, which without GPUs look like the device's."""
        arrays = [array for run in self._runs for array in run.host.values()]
        return any(tensor.untyped_storage()._cdata == array.untyped_storage()._cdata for array in arrays)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Within: main parameters take gradients, and may be stepped on; what they hold is not to be read."""
        mains = [parameter for run in self._runs if MAIN in run.kinds for parameter in run.places]
        nothing = torch.empty((), dtype=torch.float32, device=device.current_device())
        for parameter in mains:
            parameter.data = nothing.expand(parameter.shape)
        try:
            yield
        finally:
            for parameter in mains:
                parameter.grad = None
                parameter.data = self._runs[0].host_view(MAIN, parameter)

    # ---- the step

    @torch.no_grad()
    def _step(self) -> None:
        self._step_on([(parameter, parameter) for parameter in self._resident])
        for parameter in self._resident:
            if parameter in self._models:
                self._models[parameter].detach().view(-1).copy_(parameter.view(-1))
        for run in self._runs:
            self._step_run(run)

    def _step_run(self, run: _Run) -> None:
        slots = min(_SLOTS if self._overlap else 1, len(run.chunks))
        where = device.current_device()
        buffers = [
            {kind: torch.empty(min(_CHUNK, run.size), dtype=torch.float32, device=where) for kind in run.kinds}
            for _ in range(slots)
        ]
        counted: dict[Tensor, dict[str, Any]] = {}

        def load(chunk: int) -> None:
            for kind, own in buffers[chunk % slots].items():
                host = run.host[kind][run.chunks[chunk].bounds]
                own[: len(host)].copy_(host, non_blocking=True)

        def work(chunk: int) -> None:
            self._step_chunk(run.chunks[chunk].stretches, buffers[chunk % slots], counted)

        def store(chunk: int) -> None:
            for kind, own in buffers[chunk % slots].items():
                host = run.host[kind][run.chunks[chunk].bounds]
                host.copy_(own[: len(host)], non_blocking=True)

        device.in_turns(len(run.chunks), slots, load, work, store)
        for parameter, values in counted.items():
            self._inner.state[parameter].update(values)

    def _step_chunk(
        self, stretches: list[_Stretch], buffers: dict[str, Tensor], counted: dict[Tensor, dict[str, Any]]
    ) -> None:
        """Step on the stretches as parameters of their own, and bring main parameters to the weights; the number of
        steps, which is not a moment, goes to ``counted``."""
        stepped = []
        for s in stretches:
            if s.parameter.grad is None:
                continue
            values = {kind: own[s.at : s.at + s.end - s.begin] for kind, own in buffers.items()}
            own = values.pop(MAIN) if MAIN in values else s.parameter.detach().view(-1)[s.begin : s.end]
            own.grad = s.parameter.grad.view(-1)[s.begin : s.end]
            others = {k: v for k, v in self._inner.state[s.parameter].items() if k not in values}
            self._inner.state[own] = {k: v.clone() for k, v in others.items()} | values
            stepped.append((s, own, list(others)))
        self._step_on([(s.parameter, own) for s, own, _ in stepped])
        for s, own, names in stepped:
            state = self._inner.state.pop(own)
            counted[s.parameter] = {name: state[name] for name in names}
            if s.parameter in self._models:
                self._models[s.parameter].detach().view(-1)[s.begin : s.end].copy_(own)

    def _step_on(self, chosen: list[tuple[Tensor, Tensor]]) -> None:
        """torch's step on the second of each pair alone, with the settings of the first's group as they are now."""
        inner, every = self._inner, self._inner.param_groups
        groups = [{**group, "params": []} for group in every]
        number = {parameter: i for i, group in enumerate(every) for parameter in group["params"]}
        for parameter, own in chosen:
            groups[number[parameter]]["params"].append(own)
        inner.param_groups = [group for group in groups if group["params"]]
        try:
            type(inner).step(inner)
        finally:
            inner.param_groups = every


def _model_weights(part: Any) -> dict[Tensor, Tensor]:
    """Main parameter -> the weights that it is the float32 of; what is float32 itself has none."""
    if hasattr(part, "shard_fp32_from_float16_groups"):
        groups = zip(part.shard_fp32_from_float16_groups, part.shard_float16_groups, strict=True)
    elif hasattr(part, "fp32_from_float16_groups"):
        groups = zip(part.fp32_from_float16_groups, part.float16_groups, strict=True)
    else:
        return {}
    return dict(pair for mains, models in groups for pair in zip(mains, models, strict=True))
