"""Peak memory and time of log-probs and entropy, forward and backward, by the number of tokens in a chunk.

Every case runs in a process of its own. On a GPU the peak is the allocator's, on a CPU that of the resident set; both
are given over what hidden states, weight and labels take. Prints a table; with ``--json`` one JSON object a line.

    python tools/measure_log_prob_memory.py --tokens 4096 --chunks 1024 2048 all plain
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from slime.training.loss.log_probs import token_terms  # noqa: E402
from slime.utils import device  # noqa: E402

GIB = 2**30
ALL, PLAIN = "all", "plain"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936, help="columns of this tensor-parallel rank")
    parser.add_argument("--tokens", type=int, default=16_384, help="packed tokens of the micro-batch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of hidden and weight")
    parser.add_argument(
        "--chunks",
        nargs="+",
        default=["1024", "2048", "4096"],
        help=f"tokens a chunk; {ALL!r}: one chunk; {PLAIN!r}: float32 logits and torch's log_softmax",
    )
    parser.add_argument("--entropy", action="store_true", help="with a gradient of the entropy")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    wrong = [chunk for chunk in args.chunks if chunk not in (ALL, PLAIN) and not (chunk.isdecimal() and int(chunk))]
    if wrong:
        parser.error(f"--chunks: {wrong[0]!r} is neither a number of tokens nor {ALL!r} or {PLAIN!r}")
    return args


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What a few lines of PyTorch do: several tensors of tokens x vocabulary, kept for the backward pass."""
    log_p = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


class PeakMemory:
    """Bytes over what is in use when it is made."""

    def __init__(self) -> None:
        self.gpu: Any = torch.get_device_module(device.current_device()) if device.is_cuda() else None
        if self.gpu is not None:
            self.gpu.reset_peak_memory_stats()
        self.before = self.gpu.memory_allocated() if self.gpu is not None else self._resident()

    def read(self) -> int:
        return (self.gpu.max_memory_allocated() if self.gpu is not None else self._resident()) - self.before

    @staticmethod
    def _resident() -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One case, in this process."""
    where, dtype = device.current_device(), getattr(torch, args.dtype)
    # Filled in place: what is made here leaves no peak behind that would hide a part of the one to be measured.
    hidden = torch.empty(args.tokens, args.hidden, dtype=dtype, device=where).normal_().requires_grad_()
    weight = torch.empty(args.vocab, args.hidden, dtype=dtype, device=where).normal_(0, 0.02).requires_grad_()
    labels = torch.randint(args.vocab, (args.tokens,), device=where)
    device.synchronize()
    memory, started = PeakMemory(), time.perf_counter()
    if args.case == PLAIN:
        log_probs, entropy = plain(hidden, weight, labels)
    else:
        log_probs, entropy = token_terms(
            hidden,
            weight,
            labels,
            vocab_size=args.vocab,
            chunk_size=None if args.case == ALL else int(args.case),
            wants_entropy_gradient=args.entropy,
        )
    loss = log_probs.sum()
    if args.entropy:
        loss = loss + entropy.sum()
    device.synchronize()
    forward, forward_seconds = memory.read(), time.perf_counter() - started
    loss.backward()
    device.synchronize()
    return {
        "chunk": args.case,
        "tokens": args.tokens,
        "vocab": args.vocab,
        "hidden": args.hidden,
        "dtype": args.dtype,
        "device": str(where),
        "forward_bytes": forward,
        "peak_bytes": memory.read(),
        "forward_seconds": round(forward_seconds, 3),
        "seconds": round(time.perf_counter() - started, 3),
    }


def in_own_process(case: str, argv: list[str]) -> dict[str, Any]:
    """What `measure` finds in a fresh process; ``{"error": ...}`` where that ends without a result."""
    command = [sys.executable, __file__, *argv, "--case", case]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"chunk": case, "error": lines[-1] if lines else f"ended with status {done.returncode}"}
    return json.loads(done.stdout)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.case:
        print(json.dumps(measure(args)))
        return 0
    failed = False
    if not args.json:
        print(f"{args.tokens} tokens, vocabulary {args.vocab}, hidden {args.hidden}, {args.dtype}")
        print(f"{'chunk':>8} {'forward GiB':>12} {'peak GiB':>12} {'forward s':>10} {'total s':>10}")
    for case in args.chunks:
        found = in_own_process(case, argv)
        failed |= "error" in found
        if args.json:
            print(json.dumps(found), flush=True)
        elif "error" in found:
            print(f"{case:>8} {found['error']}", flush=True)
        else:
            sizes = f"{found['forward_bytes'] / GIB:12.2f} {found['peak_bytes'] / GIB:12.2f}"
            print(f"{case:>8} {sizes} {found['forward_seconds']:10.1f} {found['seconds']:10.1f}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
