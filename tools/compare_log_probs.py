"""Compare the trainer's forward pass with the engine's, module by module: where the first bit differs, and by how much.

Both compute the same random tokens with the weights of MODEL, a Hugging Face directory of a dense Qwen 2 or Qwen 3: the
trainer in one packed micro-batch, SGLang's model runner once as a prefill of the whole sequences and once as it
generates, a prefill of prompts and then a step a token. Log-probs are compared over the whole vocabulary, and those of
the tokens themselves, which training uses. Status 1 where the latter differ by more than --max or --mean allow.

    python tools/make_tiny_model.py outputs/tiny --seed 1
    python tools/compare_log_probs.py outputs/tiny --max 5e-6 --mean 1e-6

With --same-kernels both compute as with --true-on-policy-mode. What follows -- goes to the engine:

    python tools/compare_log_probs.py outputs/tiny --same-kernels --max 0
    python tools/compare_log_probs.py outputs/tiny -- --enable-deterministic-inference
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.entry.installation import check_installation  # noqa: E402

check_installation()

import torch  # noqa: E402

from slime.models import hf_config  # noqa: E402
from slime.processes.server_process import SAME_KERNELS_VARIABLE  # noqa: E402
from slime.utils.environment import kernels_of_any_shape  # noqa: E402
from tools.forwards import differences  # noqa: E402
from tools.forwards.places import LOG_PROBS, LOGITS, SAMPLED, places  # noqa: E402

MODELS = ("qwen2", "qwen3")
_DEADLINE_S = 600
"""Of one side."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory in Hugging Face's format, with weights")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each sequence that are not generated")
    parser.add_argument("--response", type=int, default=32, help="tokens of each sequence that are")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens")
    parser.add_argument("--max", type=float, help="allowed difference of the log-prob of a token")
    parser.add_argument("--mean", type=float, help="the same of the mean over the tokens")
    parser.add_argument("--same-kernels", action="store_true", help="compute as with --true-on-policy-mode")
    parser.add_argument("--every-place", action="store_true", help="list each layer's places, not kinds of them")
    args = parser.parse_args(words[:cut])
    args.engine_flags = words[cut + 1 :]
    if min(args.sequences, args.prompt, args.response) < 1:
        parser.error("--sequences, --prompt and --response must be at least 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} has no config.json: name a directory in Hugging Face's format")
    if (kind := hf_config(args.model).model_type) not in MODELS:
        parser.error(f"{args.model} is of type {kind}: must be one of {', '.join(MODELS)}")
    return args


def tokens_of(args: argparse.Namespace) -> list[list[int]]:
    """The same on both sides."""
    generator, vocab = random.Random(args.seed), hf_config(args.model).vocab_size
    return [[generator.randrange(vocab) for _ in range(args.prompt + args.response)] for _ in range(args.sequences)]


def side(args: argparse.Namespace, name: str, directory: Path) -> Any:
    """What one side computed, in a process of its own: what an engine needs on a CPU must not reach a trainer.
    SystemExit where it fails, with the end of what it said."""
    spec, into = directory / "spec.json", directory / f"{name}.pt"
    shared = {"model": str(args.model.absolute()), "dtype": args.dtype, "tokens": tokens_of(args)}
    own = {"same_kernels": args.same_kernels} if name == "trainer" else engine_only(args)
    spec.write_text(json.dumps(shared | own))
    command = [sys.executable, "-m", f"tools.forwards.{name}", str(spec), str(into)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if not torch.cuda.is_available():
        environment |= {"TORCH_COMPILE_DISABLE": "1"}
    if args.same_kernels:
        environment |= {SAME_KERNELS_VARIABLE: "1", **kernels_of_any_shape()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, env=environment, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        sys.exit(f"{tail}\ncompare_log_probs.py: error: the {name}'s process ended with status {done.returncode}")
    return torch.load(into, weights_only=True)


def engine_only(args: argparse.Namespace) -> dict[str, Any]:
    return {"prompt": args.prompt, "flags": [*(same_kernels_flags() if args.same_kernels else []), *args.engine_flags]}


def same_kernels_flags() -> list[str]:
    return ["--enable-deterministic-inference", *(["--attention-backend", "fa3"] if torch.cuda.is_available() else [])]


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 where log-probs differ by more than is allowed."""
    args = parse(argv)
    order = [place.name for place in places(hf_config(args.model).num_hidden_layers)] + [LOGITS, LOG_PROBS, SAMPLED]
    with tempfile.TemporaryDirectory() as directory:
        ours = side(args, "trainer", Path(directory))
        prefill, stepwise = side(args, "engine", Path(directory))
    beyond: list[str] = []
    for title, theirs in (("prefill", prefill), ("generation", stepwise)):
        found = differences.differences(order, ours, theirs)
        print(differences.table(title, found))
        if args.every_place:
            print("\n".join(f"{d.place:40}{d.share:10.2%}{d.largest:12.2e}{d.mean:12.2e}" for d in found))
        print()
        beyond += differences.exceeded(title, found, args.max, args.mean)
    print("\n".join(beyond), end="\n" if beyond else "")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
