"""SGLang's forward passes, prefill and decode, in a process of its own: its model runner without its scheduler."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.sglang import patches, same_kernels
from slime.utils import device, patching
from tools.forwards.places import LOG_PROBS, LOGITS, SAMPLED, Recorder, by_token, places, sequences

_CPU_FLAGS = ["--device", "cpu", "--attention-backend", "torch_native"]
_FLAGS = ["--grammar-backend", "none", "--max-running-requests", "64", "--max-total-tokens", "65536"]
_FLAGS += ["--disable-radix-cache"]
_GPU_FLAGS = ["--sampling-backend", "pytorch", "--disable-prefill-cuda-graph", "--mem-fraction-static", "0.85"]
_NO_GRAPHS = ["--cuda-graph-backend-decode", "disabled"]
"""Hooks are called by Python, which replayed graphs are not."""


def forward(
    model: str, dtype: str, tokens: list[list[int]], prompt: int, flags: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of every place, [tokens, channels] in host memory: of one prefill of all sequences, and of a prefill of their
    first ``prompt`` tokens with a step of all of them for each further token, which is how they are generated."""
    runner, deterministic = _runner(model, dtype, flags)
    bare = runner.torch_runner.model
    recorder = Recorder(bare, {p.name: p.engine for p in places(bare.config.num_hidden_layers)})
    lengths = [len(sequence) for sequence in tokens]
    _prefill(runner, tokens)
    whole = {name: by_token(calls[0], sum(lengths)) for name, calls in recorder.taken.items()}
    recorder.taken.clear()
    runner.clear()
    _generate(runner, tokens, prompt)
    stepwise = {name: _in_order(calls, lengths, prompt) for name, calls in recorder.taken.items()}
    following = torch.tensor([token for sequence in tokens for token in [*sequence[1:], sequence[0]]])
    for taken, calls in ((whole, [lengths]), (stepwise, _steps(lengths, prompt))):
        taken |= _ends(bare, taken["final norm"], calls, lengths, following, deterministic)
    return tuple({name: tensor.cpu() for name, tensor in taken.items()} for taken in (whole, stepwise))  # type: ignore[return-value]


def _runner(model: str, dtype: str, flags: list[str]) -> tuple[Any, bool]:
    words = ["--model-path", model, "--dtype", dtype, *_FLAGS]
    words += [*(_GPU_FLAGS + _NO_GRAPHS if device.is_cuda() else _CPU_FLAGS), *flags]
    facts = patches.ServerFacts.of_command(words)
    patching.apply(patches.CPU_STAND_INS, facts)
    if facts.cuda and facts.same_kernels:
        same_kernels.round_as_trainers()
    from sglang.benchmark import one_batch
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server = prepare_server_args(words)
    _set_envs_and_config(server)
    runner, _ = one_batch.load_model(server, PortArgs.init_new(server), 0, 0)
    return runner, bool(server.enable_deterministic_inference)


def _prefill(runner: Any, tokens: list[list[int]]) -> Any:
    from sglang.benchmark import one_batch

    requests = one_batch.prepare_synthetic_inputs_for_latency_test(len(tokens), 0, tokens)
    return runner.extend(requests)[2]


def _generate(runner: Any, tokens: list[list[int]], prompt: int) -> None:
    """Steps take the given tokens, not those that the engine would choose; sequences must be of one length."""
    batch = _prefill(runner, [sequence[:prompt] for sequence in tokens])
    for place in range(prompt, len(tokens[0])):
        step = torch.tensor([sequence[place] for sequence in tokens], device=runner.torch_runner.device)
        runner.decode(step, batch)


def _steps(lengths: list[int], prompt: int) -> list[list[int]]:
    """How many tokens of each sequence every call handles."""
    return [[prompt] * len(lengths), *([1] * len(lengths) for _ in range(prompt, lengths[0]))]


def _in_order(calls: list[Tensor], lengths: list[int], prompt: int) -> Tensor:
    """Calls that each handle some tokens of all sequences -> the sequences one after another."""
    steps = _steps(lengths, prompt)
    parts = [list(sequences(by_token(c, sum(n)), n)) for c, n in zip(calls, steps, strict=True)]
    return torch.cat([torch.cat(own) for own in zip(*parts, strict=True)])


def _ends(
    bare: Any, hidden: Tensor, calls: list[list[int]], lengths: list[int], following: Tensor, deterministic: bool
) -> dict[str, Tensor]:
    """What follows the final norm, with the shapes of every call."""
    rows = torch.arange(sum(lengths), device=hidden.device).split(lengths)
    logits = hidden.new_empty(len(hidden), bare.config.vocab_size, dtype=torch.float32)
    done = 0
    for counts in calls:
        of_call = torch.cat([own[done : done + n] for own, n in zip(rows, counts, strict=True)])
        made = bare.logits_processor._compute_lm_head(hidden[of_call], bare.lm_head)
        logits[of_call] = made[:, : bare.config.vocab_size].float()
        done += counts[0]
    log_probs = torch.log_softmax(logits, -1) if deterministic else torch.softmax(logits, -1).log()
    at_token = log_probs.gather(1, following.to(hidden.device)[:, None])
    return {LOGITS: logits, LOG_PROBS: log_probs, SAMPLED: at_token}


if __name__ == "__main__":
    torch.save(forward(**json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
