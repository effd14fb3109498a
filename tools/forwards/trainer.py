"""The trainer's forward pass over packed sequences, in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron import patches

patches.install()  # before anything imports megatron.core

from slime.backends.megatron import model as models  # noqa: E402
from slime.backends.megatron import parallel  # noqa: E402
from slime.backends.megatron.layers import attention  # noqa: E402
from slime.backends.megatron.weights import weights_io  # noqa: E402
from slime.entry.arguments import parse_args  # noqa: E402
from slime.training.loss import log_probs  # noqa: E402
from slime.utils import device  # noqa: E402
from tools.forwards.places import LOG_PROBS, LOGITS, SAMPLED, Recorder, by_token, places  # noqa: E402

_PRECISIONS = {"float32": ["--fp32"], "bfloat16": ["--bf16"], "float16": ["--fp16"]}


def forward(model: str, dtype: str, tokens: list[list[int]], same_kernels: bool) -> dict[str, Tensor]:
    """Of every place of `places`, [tokens, channels] in host memory: the sequences one after another."""
    with tempfile.TemporaryDirectory() as scratch:
        args = _arguments(model, dtype, Path(scratch), ["--true-on-policy-mode"] if same_kernels else [])
    _join_alone()
    parallel.initialize_distributed(args)
    chunks = models.build_model(args)
    weights_io.load_hf(chunks, model)
    wrapped = models.wrap(chunks)[0]
    bare = models.unwrap(wrapped)
    recorder = Recorder(bare, {place.name: place.trainer for place in places(args.num_layers)})
    _record_kernels(bare, recorder)
    lengths = [len(sequence) for sequence in tokens]
    where = device.current_device()
    flat = torch.tensor([token for sequence in tokens for token in sequence], device=where)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(where)
    with torch.no_grad():
        hidden = wrapped(flat[None], positions[None], None, packed_seq_params=attention.packed_params(lengths))[0]
        taken = {name: by_token(calls[0], len(flat)) for name, calls in recorder.taken.items()}
        taken |= _ends(hidden, models.head_weight(wrapped), _next_tokens(tokens).to(where), args)
    return {name: tensor.cpu() for name, tensor in taken.items()}


def _arguments(model: str, dtype: str, scratch: Path, more: list[str]) -> Namespace:
    """Those of a run that trains this model, alone and on this host."""
    prompts = scratch / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "label": "a"}\n')
    words = ["--hf-checkpoint", model, "--run-dir", str(scratch / "run"), "--prompt-data", str(prompts)]
    words += ["--input-key", "prompt", "--label-key", "label", "--rm-type", "math", "--num-rollout", "1"]
    words += ["--rollout-batch-size", "1", "--n-samples-per-prompt", "2", "--rollout-num-gpus", "1"]
    words += ["--rollout-max-response-len", "8", "--actor-num-gpus-per-node", "1", *_PRECISIONS[dtype]]
    return parse_args([*words, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", *more])


def _join_alone() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _record_kernels(bare: torch.nn.Module, recorder: Recorder) -> None:
    """Rotated queries and keys are what goes into the attention kernel, which is a function and no module."""
    for layer, block in enumerate(bare.decoder.layers):  # type: ignore[arg-type,union-attr]
        core = block.self_attention.core_attention

        def kernel(query: Tensor, key: Tensor, *rest: Any, layer: int = layer, inner: Any = core.kernel) -> Tensor:
            recorder.add(f"layer {layer}: rotated queries", query)
            recorder.add(f"layer {layer}: rotated keys", key)
            result: Tensor = inner(query, key, *rest)
            return result

        core.kernel = kernel


def _next_tokens(tokens: list[list[int]]) -> Tensor:
    """The token after each; a sequence's first after its last, so that every position has one."""
    return torch.tensor([following for sequence in tokens for following in [*sequence[1:], sequence[0]]])


def _ends(hidden: Tensor, weight: Tensor, labels: Tensor, args: Namespace) -> dict[str, Tensor]:
    as_engines = args.true_on_policy_mode
    sampled, _ = log_probs.token_terms(hidden, weight, labels, vocab_size=args.vocab_size, as_engines=as_engines)
    logits = log_probs.logits(hidden, weight[: args.vocab_size])
    if as_engines:
        return {LOGITS: logits, LOG_PROBS: torch.log_softmax(logits, -1), SAMPLED: sampled[:, None]}
    x = logits - logits.amax(-1, keepdim=True)  # as `token_terms` has it, for all tokens of the vocabulary
    return {LOGITS: logits, LOG_PROBS: x - x.exp().sum(-1, keepdim=True).log(), SAMPLED: sampled[:, None]}


if __name__ == "__main__":
    torch.save(forward(**json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
