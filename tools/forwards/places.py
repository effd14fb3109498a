"""Where in a dense decoder the trainer's and the engine's forward passes are compared, in the order of computation.

A place is a tensor [tokens, channels] that both sides compute. On each side it is something that goes into or comes out
of one module; a side that does not call a place's module (a fused kernel may take its turn) is without that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOGITS, LOG_PROBS, SAMPLED = "logits", "log-probs", "log-prob of the token"
"""Places without a module: float32 [tokens, vocabulary] twice, and [tokens, 1], what training takes."""


@dataclass(frozen=True)
class Source:
    """One argument of a module (``argument``, counted from 0), or one of its outputs (``output``)."""

    module: str
    output: int = 0
    argument: int | None = None


@dataclass(frozen=True)
class Place:
    name: str
    trainer: Source
    engine: Source


def _within(layer: int) -> list[Place]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention, engines = f"{ours}self_attention.", f"{theirs}self_attn."
    kernel, engines_kernel = f"{attention}core_attention.kernel", f"{engines}attn"
    second, engines_second = f"{ours}pre_mlp_layernorm", f"{theirs}post_attention_layernorm"
    rows = [
        # An engine's norm adds what comes to it to the residual first, and gives both; not where there is no residual.
        ("residual", Source(f"{ours}input_layernorm", argument=0), Source(f"{theirs}input_layernorm", output=1)),
        ("input norm", Source(f"{ours}input_layernorm"), Source(f"{theirs}input_layernorm")),
        ("values", Source(f"{attention}core_attention", argument=2), Source(engines_kernel, argument=2)),
        ("norm of queries", Source(f"{attention}q_layernorm"), Source(f"{engines}q_norm")),
        ("norm of keys", Source(f"{attention}k_layernorm"), Source(f"{engines}k_norm")),
        ("rotated queries", Source(kernel, argument=0), Source(engines_kernel, argument=0)),
        ("rotated keys", Source(kernel, argument=1), Source(engines_kernel, argument=1)),
        ("attention", Source(f"{attention}core_attention"), Source(engines_kernel)),
        ("output projection", Source(f"{attention}linear_proj"), Source(f"{engines}o_proj")),
        ("residual in between", Source(second, argument=0), Source(engines_second, output=1)),
        ("norm before MLP", Source(second), Source(engines_second)),
        ("gate and up projection", Source(f"{ours}mlp.linear_fc1"), Source(f"{theirs}mlp.gate_up_proj")),
        ("SiLU times up", Source(f"{ours}mlp.linear_fc2", argument=0), Source(f"{theirs}mlp.act_fn")),
        ("down projection", Source(f"{ours}mlp.linear_fc2"), Source(f"{theirs}mlp.down_proj")),
    ]
    return [Place(f"layer {layer}: {name}", trainer, engine) for name, trainer, engine in rows]


def places(num_layers: int) -> list[Place]:
    """All that modules give, first the embedding, last the final norm."""
    return [
        Place("embedding", Source("embedding"), Source("model.embed_tokens")),
        *(place for layer in range(num_layers) for place in _within(layer)),
        Place("last residual", Source("decoder.final_layernorm", argument=0), Source("model.norm", output=1)),
        Place("final norm", Source("decoder.final_layernorm"), Source("model.norm")),
    ]


class Recorder:
    """Keeps what the sources named give, call after call, while it is attached to a model.

    A copy is taken at once: engines' kernels write over their inputs.
    """

    def __init__(self, model: torch.nn.Module, sources: Mapping[str, Source]) -> None:
        self.taken: dict[str, list[Tensor]] = {}
        modules = dict(model.named_modules())
        for name, source in sources.items():
            if (module := modules.get(source.module)) is not None:
                module.register_forward_hook(self._hook(name, source))

    def _hook(self, name: str, source: Source) -> Callable[[Any, tuple[Any, ...], Any], None]:
        def hook(module: Any, arguments: tuple[Any, ...], outputs: Any) -> None:
            given = arguments if source.argument is not None else outputs
            given = given if isinstance(given, (tuple, list)) else (given,)
            index = source.output if source.argument is None else source.argument
            if index < len(given) and isinstance(given[index], Tensor):
                self.add(name, given[index])

        return hook

    def add(self, name: str, tensor: Tensor) -> None:
        self.taken.setdefault(name, []).append(tensor.detach().clone())


def by_token(tensor: Tensor, tokens: int) -> Tensor:
    """Any tensor of one call that handles ``tokens`` tokens, as [tokens, channels]: heads, and rows of tokens of
    several heads, are channels; an extent of 1 (Megatron's batch) goes."""
    return tensor.reshape(tokens, -1)


def sequences(flat: Tensor, lengths: list[int]) -> Iterator[Tensor]:
    """The packed sequences of [tokens, channels]."""
    return iter(flat.split(lengths))
