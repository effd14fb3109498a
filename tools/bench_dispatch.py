"""Time of bringing tokens to their experts' ranks and back: each once a rank, against megatron-core's dispatcher.

Routing is random and balanced, and experts return the rows that they get: what is timed is dispatch, combine and their
backward passes. On GPUs in bfloat16 by default the shape of Qwen3-30B-A3B; pass smaller sizes on a CPU. Also counts
what is sent to other ranks. Prints a table; with ``--json`` one JSON object a line.

    torchrun --standalone --nproc-per-node 2 -m tools.bench_dispatch
    torchrun --standalone --nproc-per-node 8 -m tools.bench_dispatch --tokens 256 --runs 1 --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher  # noqa: E402

from slime.backends.megatron.layers.dispatch import DedupDispatcher  # noqa: E402
from slime.utils import device  # noqa: E402
from tools.bench_experts import add_shape, parse_shape  # noqa: E402

PARTS = ("dispatch", "combine", "backward", "all")
WARM_UP = 3
"""Passes that are not timed."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser, "all ranks")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also list where most time goes, N lines")
    args = parse_shape(parser, argv)
    if "RANK" not in os.environ:
        parser.error("start it by torchrun, with a process for each rank")
    if args.experts % (ranks := int(os.environ["WORLD_SIZE"])):
        parser.error(f"--experts {args.experts} cannot be divided among {ranks} ranks")
    return args


def both(args: argparse.Namespace) -> dict[str, Any]:
    """The two dispatchers."""
    dtype = getattr(torch, args.dtype)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=1,
        num_moe_experts=args.experts,
        moe_router_topk=args.topk,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        expert_model_parallel_size=dist.get_world_size(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "tp_ep"])
    local = args.experts // dist.get_world_size()
    own = [dist.get_rank() * local + i for i in range(local)]
    return {
        "megatron-core": MoEAlltoAllTokenDispatcher(local, own, config, groups),
        "once a rank": DedupDispatcher(config, groups),
    }


class Case:
    """A dispatcher and its tokens, other ones on every rank and the same for both."""

    def __init__(self, args: argparse.Namespace, dispatcher: Any) -> None:
        where, dtype = device.current_device(), getattr(torch, args.dtype)
        generator = torch.Generator().manual_seed(dist.get_rank())
        scores = torch.rand(args.tokens, args.experts, generator=generator).to(where)
        self.routing_map = torch.zeros_like(scores, dtype=torch.bool)
        self.routing_map.scatter_(1, scores.topk(args.topk).indices, True)
        self.probs = (scores * self.routing_map).requires_grad_()
        hidden, upstream = torch.randn(2, args.tokens, 1, args.hidden, generator=generator).to(where, dtype)
        self.hidden, self.upstream = hidden.requires_grad_(), upstream
        self.dispatcher = dispatcher

    def dispatch(self) -> tuple[Tensor, Tensor]:
        sent = self.dispatcher.dispatch_preprocess(self.hidden, self.routing_map, self.probs)
        rows, _, probs = self.dispatcher.dispatch_postprocess(*self.dispatcher.token_dispatch(*sent))
        return rows, probs

    def combine(self, rows: Tensor) -> Tensor:
        output = self.dispatcher.token_combine(self.dispatcher.combine_preprocess(rows))
        return self.dispatcher.combine_postprocess(output)

    def backward(self, output: Tensor, probs: Tensor) -> None:
        self.hidden.grad = self.probs.grad = None
        torch.autograd.backward([output, probs], [self.upstream, torch.ones_like(probs)])

    def all(self) -> None:
        rows, probs = self.dispatch()
        self.backward(self.combine(rows), probs)

    @torch.no_grad()
    def weighted(self) -> Tensor:
        """Of experts that return their rows times the probabilities, as real ones would."""
        rows, probs = self.dispatch()
        return self.combine((rows * probs[:, None]).to(rows.dtype)).float()


def timed(case: Case, runs: int) -> dict[str, float]:
    """Median milliseconds of each part, of the slowest rank; "all" is without waiting between parts."""
    times: dict[str, list[float]] = defaultdict(list)

    def timed_part(name: str, call: Callable[..., Any], *inputs: Tensor) -> Any:
        device.synchronize()
        dist.barrier()
        device.synchronize()
        started = time.perf_counter()
        result = call(*inputs)
        device.synchronize()
        times[name].append(1e3 * (time.perf_counter() - started))
        return result

    for _ in range(WARM_UP + runs):
        rows, probs = timed_part("dispatch", case.dispatch)
        output = timed_part("combine", case.combine, rows)
        timed_part("backward", case.backward, output, probs)
        timed_part("all", case.all)
    medians = torch.tensor([sorted(times[name][WARM_UP:])[runs // 2] for name in PARTS]).to(case.hidden.device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(PARTS, medians.tolist(), strict=True))


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Within: counts the bytes that this rank's all-to-alls send to other ranks."""
    inner, counted = dist.all_to_all_single, {"bytes": 0}

    def count(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        splits = kwargs.get("input_split_sizes")
        rows = len(input) // dist.get_world_size() if splits is None else splits[dist.get_rank()]
        counted["bytes"] += (len(input) - int(rows)) * input[:1].nbytes
        return inner(output, input, *args, **kwargs)

    dist.all_to_all_single = count
    try:
        yield counted
    finally:
        dist.all_to_all_single = inner


def sent(case: Case, tokens: int) -> dict[str, float]:
    """Bytes that go to other ranks for each token, the mean of all ranks: there, back, and in the backward pass."""
    with counting() as there:
        rows, probs = case.dispatch()
    with counting() as back:
        output = case.combine(rows)
    with counting() as backward:
        case.backward(output, probs)
    counts = torch.tensor([part["bytes"] for part in (there, back, backward)]).to(case.hidden.device)
    dist.all_reduce(counts)
    names = ("bytes_there", "bytes_back", "bytes_backward")
    return dict(zip(names, (counts / tokens / dist.get_world_size()).tolist(), strict=True))


def kernels(case: Case, count: int) -> str:
    with torch.profiler.profile() as profile:
        case.all()
        device.synchronize()
    key = "self_cuda_time_total" if device.is_cuda() else "self_cpu_time_total"
    return str(profile.key_averages().table(sort_by=key, row_limit=count, max_name_column_width=80))


def report(args: argparse.Namespace, results: dict[str, dict[str, float]], difference: float) -> None:
    setting = {"ranks": dist.get_world_size(), "hardware": device.hardware()}
    if args.json:
        for name, result in results.items():
            print(json.dumps({"case": name, **setting, **vars(args), **result}))
        return
    print(
        f"{setting['ranks']} ranks, {args.tokens} tokens of each, {args.hidden} channels, "
        f"{args.topk} of {args.experts} experts, {args.dtype}, {setting['hardware']}"
    )
    columns = list(next(iter(results.values())))
    print(f"{'ms; bytes a token to others':28}" + "".join(f"{column:>16}" for column in columns))
    for name, result in results.items():
        print(f"{name:28}" + "".join(f"{result[column]:16.3f}" for column in columns))
    first, second = results.values()
    print(f"{'times as long, as many':28}" + "".join(f"{first[column] / second[column]:16.2f}" for column in columns))
    print(f"largest difference of an output, relative to the largest output: {difference:.2g}")


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    device.bind_local_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(device.collective_backend())
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    results, outputs, tables = {}, [], []
    for name, dispatcher in both(args).items():
        case = Case(args, dispatcher)
        results[name] = timed(case, args.runs) | sent(case, args.tokens)
        outputs.append(case.weighted())
        if args.kernels:
            tables.append(f"{name}\n{kernels(case, args.kernels)}")
    if dist.get_rank() == 0:
        want, got = outputs
        report(args, results, float((got - want).abs().max() / want.abs().max()))
        for table in tables:
            print(table, file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
