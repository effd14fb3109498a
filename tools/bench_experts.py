"""Time of a mixture-of-experts layer's experts: grouped, against megatron-core's one expert after another.

Forward, and forward with backward, of one rank's experts on random tokens. On a GPU in bfloat16 by default the shape of
Qwen3-30B-A3B; pass smaller sizes on a CPU. Prints a table; with ``--json`` one JSON object a line.

    python -m tools.bench_experts
    python -m tools.bench_experts --experts 16 --tokens 4096 --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.entry.installation import check_installation

check_installation()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from slime.backends.megatron import patches  # noqa: E402

patches.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402

from slime.backends.megatron.layers.experts import Experts  # noqa: E402
from slime.utils import device  # noqa: E402


def add_shape(parser: argparse.ArgumentParser, whose: str) -> None:
    """Options for the tokens and experts of ``whose``, and for the form of what is printed."""
    parser.add_argument("--experts", type=int, default=128, help=f"experts of {whose}")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--topk", type=int, default=8, help="experts of a token")
    parser.add_argument("--tokens", type=int, default=16_384, help="of each rank")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--runs", type=int, default=10, help="timed runs, after three that are not; the median counts")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of the table")


def parse_shape(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options, once they make sense; else the parser's error."""
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if name in ("experts", "hidden", "ffn", "topk", "tokens", "runs") and value < 1:
            parser.error(f"--{name}: must be at least 1, not {value}")
    if args.topk > args.experts:
        parser.error(f"--topk {args.topk} is more than --experts {args.experts}")
    return args


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser, "this rank")
    parser.add_argument("--ffn", type=int, default=768, help="width of one expert")
    return parse_shape(parser, argv)


def both(args: argparse.Namespace) -> dict[str, torch.nn.Module]:
    """The two modules, with random weights."""
    dtype = getattr(torch, args.dtype)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=1,
        ffn_hidden_size=args.ffn,
        moe_ffn_hidden_size=args.ffn,
        num_moe_experts=args.experts,
        moe_router_topk=args.topk,
        moe_grouped_gemm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return {
        "grouped": Experts(args.experts, config, groups),
        "sequential": SequentialMLP(args.experts, config, parts, groups),
    }


def case(args: argparse.Namespace, module: torch.nn.Module) -> dict[str, float]:
    """Milliseconds of both passes, and TFLOP/s."""
    where, dtype = device.current_device(), getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(args.tokens, args.experts, generator=generator).topk(args.topk).indices
    counts = torch.bincount(chosen.flatten(), minlength=args.experts)
    rows = args.tokens * args.topk
    hidden = torch.randn(rows, args.hidden, generator=generator).to(where, dtype).requires_grad_()
    probs = torch.rand(rows, generator=generator).to(where).requires_grad_()
    upstream = torch.randn(rows, args.hidden, generator=generator).to(where, dtype)

    def forward() -> Tensor:
        return module(hidden, counts, probs)[0]

    def forward_and_backward() -> None:
        forward().backward(upstream)
        for tensor in (hidden, probs, *module.parameters()):
            tensor.grad = None

    def only_forward() -> None:
        with torch.no_grad():
            forward()

    times = {"forward": median_ms(only_forward, args.runs), "both": median_ms(forward_and_backward, args.runs)}
    flops = 2 * rows * 3 * args.hidden * args.ffn
    return times | {"tflops_forward": flops / times["forward"] / 1e9, "tflops_both": 3 * flops / times["both"] / 1e9}


def median_ms(call: Callable[[], Any], runs: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(runs):
        device.synchronize()
        started = time.perf_counter()
        call()
        device.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return sorted(times)[len(times) // 2]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    device.bind_local_device(0)
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{os.path.join(directory, 'store')}"
        dist.init_process_group(device.collective_backend(), init_method=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        results = {name: case(args, module) for name, module in both(args).items()}
        dist.destroy_process_group()
    if args.json:
        for name, result in results.items():
            print(json.dumps({"case": name, **vars(args), **result}))
        return
    print(f"{args.experts} experts {args.hidden} x {args.ffn}, {args.tokens} tokens x {args.topk}, {args.dtype}")
    print(f"{'':12}{'forward ms':>12}{'TFLOP/s':>10}{'both ms':>12}{'TFLOP/s':>10}")
    for name, result in results.items():
        numbers = (result["forward"], result["tflops_forward"], result["both"], result["tflops_both"])
        print(f"{name:12}" + "".join(f"{n:{w}.2f}" for n, w in zip(numbers, (12, 10, 12, 10), strict=True)))
    ratios = {key: results["sequential"][key] / results["grouped"][key] for key in ("forward", "both")}
    print(f"grouped is {ratios['forward']:.2f} times as fast forward, {ratios['both']:.2f} times in both passes")


if __name__ == "__main__":
    main()
