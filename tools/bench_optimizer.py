"""The optimizer in host memory (--optimizer-cpu-offload) against the resident one: device memory, time, and equality.

Weights of a published shape in bfloat16 get random gradients on one GPU, or CPU. Every case is built anew from the same
weights and takes the same steps. Prints a table: bytes a parameter on the device between steps (weights, gradients and
what the optimizer keeps there) and at the step's peak, milliseconds a step, and the largest difference of main
parameters and moments from the resident optimizer's, also where each went on from a checkpoint of the resident's.

    python -m tools.bench_optimizer --model qwen3-0.6b
    python -m tools.bench_optimizer --hf-checkpoint outputs/tiny    # on a CPU
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from slime.backends.megatron import patches  # noqa: E402

patches.install()

from megatron.core import parallel_state  # noqa: E402

from slime.backends.megatron import model, optimizer, parallel  # noqa: E402
from slime.backends.megatron.weights import checkpoint  # noqa: E402
from slime.entry.arguments import parse_args  # noqa: E402
from slime.training import checkpoint_dirs  # noqa: E402
from slime.utils import device  # noqa: E402
from tools.benchmarks.report import make_model  # noqa: E402
from tools.make_tiny_model import PUBLISHED  # noqa: E402

OFFLOAD = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
CASES = {
    "resident": [],
    "offload": OFFLOAD,
    "offload, overlap": [*OFFLOAD, "--overlap-cpu-optimizer-d2h-h2d"],
    "offload of nine tenths": [*OFFLOAD, "--optimizer-offload-fraction", "0.9"],
}
UNTIMED = 2
"""Steps before those whose times count."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(PUBLISHED), default="qwen3-0.6b", help="shape; default: %(default)s")
    parser.add_argument("--num-layers", type=int, help="another number of layers than the published")
    parser.add_argument("--hf-checkpoint", type=Path, help="a model's directory in place of --model")
    parser.add_argument("--steps", type=int, default=20, help="of each case; default: %(default)s")
    parser.add_argument("--no-resume", action="store_true", help="write no checkpoint: 14 bytes a parameter on disk")
    parser.add_argument("--json", action="store_true", help="one JSON object a line in place of the table")
    options = parser.parse_args(argv)
    if options.steps <= UNTIMED:
        parser.error(f"--steps must be above {UNTIMED}, not {options.steps}")
    return options


class Case:
    """A model without a forward pass: weights, gradients, an optimizer and its schedule."""

    def __init__(self, directory: Path, flags: list[str], steps: int) -> None:
        every = f"--hf-checkpoint {directory} --random-weights --load-debug-rollout-data unused_{{rollout_id}} --bf16"
        every += f" --num-rollout {steps} --rollout-batch-size 1 --n-samples-per-prompt 1 --lr 1e-4 --weight-decay 0.1"
        every += " --disable-rewards-normalization --actor-num-gpus-per-node 1"
        args = parse_args([*every.split(), *flags])
        parallel.set_seeds(args.seed)
        self.model_chunks = model.build_model(args)
        self.chunks = optimizer.wrap_data_parallel(args, model.wrap(self.model_chunks))
        self.optimizer = optimizer.make_optimizer(args, self.chunks)
        self.scheduler = optimizer.make_scheduler(args, self.optimizer)
        self.parameters = sum(parameter.numel() for parameter in self.chunks[0].parameters())

    def step(self, number: int) -> float:
        """Milliseconds of the optimizer's step on gradients that are the same in every case."""
        generator = torch.Generator(device.current_device()).manual_seed(number)
        self.optimizer.zero_grad()
        for buffer in optimizer.gradient_buffers(self.chunks):
            buffer.normal_(std=1e-3, generator=generator)
        device.synchronize()
        started = time.perf_counter()
        assert self.optimizer.step()[0]
        device.synchronize()
        self.scheduler.step(1)
        return 1e3 * (time.perf_counter() - started)

    def state(self) -> Iterator[Tensor]:
        """Main parameters, moments and weights."""
        for part in optimizer.parts_of(self.optimizer):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter.data
                    yield from (value for value in part.optimizer.state[parameter].values() if value.dim())
        yield from (parameter.data for parameter in self.model_chunks[0].parameters())


def difference(case: Case, wanted: list[Tensor]) -> float:
    """The largest of all elements."""
    pairs = zip(case.state(), wanted, strict=True)
    return max(float((mine.cpu().float() - theirs.float()).abs().max()) for mine, theirs in pairs)


def measure(directory: Path, flags: list[str], options: argparse.Namespace) -> tuple[Case, dict[str, float]]:
    """A case after all of its steps, with its memory and time."""
    before = device.memory().allocated
    case = Case(directory, flags, options.steps)
    times = [case.step(number) for number in range(UNTIMED)]
    device.reset_peak()
    times = [case.step(number) for number in range(UNTIMED, options.steps)]
    case.optimizer.zero_grad()
    rest, peak = device.memory().allocated - before, device.memory().peak - before
    return case, {
        "parameters": case.parameters,
        "bytes_at_rest": rest / case.parameters,
        "bytes_at_peak": peak / case.parameters,
        "step_ms": sorted(times)[len(times) // 2],
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of every case, one after the other."""
    directory = make_model(options)
    saved = str(checkpoint_dirs.staging_directory(options.scratch / "checkpoint"))
    wanted: list[Tensor] = []
    if not options.no_resume:
        half = Case(directory, [], options.steps)
        for number in range(options.steps // 2):
            half.step(number)
        checkpoint.save_state(saved, half.model_chunks, half.optimizer, half.scheduler)
        del half
    for name, flags in CASES.items():
        _release()
        case, figures = measure(directory, flags, options)
        if not wanted:
            wanted = [tensor.cpu().clone() for tensor in case.state()]
        figures["difference"] = difference(case, wanted)
        del case
        _release()
        if not options.no_resume:
            again = Case(directory, flags, options.steps)
            checkpoint.load_state(Path(saved), again.model_chunks, again.optimizer, again.scheduler)
            for number in range(options.steps // 2, options.steps):
                again.step(number)
            figures["difference_resumed"] = difference(again, wanted)
            del again
        yield {"case": name, **figures}


def _release() -> None:
    gc.collect()
    device.release_unused()


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    device.bind_local_device(0)
    with tempfile.TemporaryDirectory() as scratch:
        options.scratch = Path(scratch)
        store = f"file://{os.path.join(scratch, 'store')}"
        dist.init_process_group(device.collective_backend(), init_method=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        print_table(options, list(run(options)))
        dist.destroy_process_group()


def print_table(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    if options.json:
        for result in results:
            print(json.dumps({"model": options.model, "hardware": device.hardware(), **result}))
        return
    print(f"{results[0]['parameters'] / 1e9:.2f}e9 parameters, {options.steps} steps, {device.hardware()}")
    print(f"{'':18}{'bytes at rest':>15}{'at peak':>10}{'step ms':>10}{'difference':>12}{'resumed':>10}")
    for result in results:
        resumed = result.get("difference_resumed", float("nan"))
        print(
            f"{result['case']:18}{result['bytes_at_rest']:15.2f}{result['bytes_at_peak']:10.2f}{result['step_ms']:10.1f}"
            f"{result['difference']:12.1e}{resumed:10.1e}"
        )


if __name__ == "__main__":
    main()
