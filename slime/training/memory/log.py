"""What the phases of a training rank took of its GPU, and an out-of-memory error that tells it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slime.observability.trace import span
from slime.training.memory.recorder import MemoryRecorder
from slime.utils import device
from slime.utils.errors import SlimeError

logger = logging.getLogger(__name__)

_ADVICE = (
    "lower --max-tokens-per-gpu or --log-probs-chunk-size, cut the model over more GPUs, recompute activations "
    "(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1), keep the optimizer's state in "
    "host memory (--optimizer-cpu-offload), or give engines less (--sglang-mem-fraction-static)"
)
_SAVE_ADVICE = "cut the model over more GPUs, or give engines less (--sglang-mem-fraction-static)"
_PUSH_ADVICE = f"lower --update-weight-buffer-size, {_SAVE_ADVICE}"


class DeviceMemoryError(SlimeError):
    """A phase does not fit into the GPU; the message has a table of the phases before it."""


class MemoryLog:
    """The latest figures of each phase, in the order in which phases first came."""

    def __init__(self, recorder: MemoryRecorder) -> None:
        """``recorder`` has a snapshot to write of a phase that does not fit."""
        self._phases: dict[str, device.Memory] = {}
        self._recorder = recorder

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[span]:
        """Note what the block takes, in memory and, with ``fields``, time; DeviceMemoryError in place of an error
        of memory that is used up, torch's or a library's."""
        device.reset_peak()
        try:
            with span(f"train/{name}", **fields) as timed:
                yield timed
                timed.fields["memory_gib"] = device.memory_gib()
        except RuntimeError as error:
            if not (reason := device.out_of_memory(error)):
                raise
            self._phases[f"{name} (did not fit)"] = device.memory()
            advice = {"push": _PUSH_ADVICE, "save": _SAVE_ADVICE}.get(name, _ADVICE)
            lines = [f"{name}: {reason}", self.table(), f"what helps: {advice}", self._recorder.after_failure(name)]
            raise DeviceMemoryError("\n".join(filter(None, lines))) from error
        self._phases[name] = device.memory()

    def peaks(self) -> dict[str, float]:
        """The largest peak of this process's tensors and what the device has in use now, in GiB; nothing on a CPU."""
        if not any(memory.total for memory in self._phases.values()):
            return {}
        peak = max(memory.peak for memory in self._phases.values())
        return {"perf/memory_peak_gib": peak / 2**30, "perf/memory_used_gib": device.memory().used / 2**30}

    def table(self) -> str:
        """One line a phase, in GiB."""
        lines = [f"{'phase':<32} {'at its end':>10} {'peak':>8} {'reserved':>9} {'on the device':>14}  (GiB)"]
        for name, m in self._phases.items():
            figures = [bytes_ / 2**30 for bytes_ in (m.allocated, m.peak, m.reserved, m.used)]
            lines.append(f"{name:<32} {figures[0]:>10.2f} {figures[1]:>8.2f} {figures[2]:>9.2f} {figures[3]:>14.2f}")
        return "\n".join(lines)
