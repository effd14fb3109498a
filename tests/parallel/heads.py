"""MTP heads in plain PyTorch, one sequence at a time, on hidden states of transformers' models."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from slime.data import TrainBatch
from tests.parallel import tiny

MIMO = "model.mtp_layers."
PREFIXES = {"mimo": MIMO, "mimo_tied": MIMO, "glm4_moe": "model.layers.4.", "deepseek_v3": "model.layers.4."}
"""Of the names of heads."""
COPIES = ("embed_tokens", "shared_head.head")
"""Of the embedding and the output layer, in heads that are named as a layer; no one reads them."""


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class Attention(nn.Module):
    """Causal, with rotary embeddings and several query heads to a key head."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        width, self.heads, self.groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.channels, self.base = width // self.heads, config.rope_parameters["rope_theta"]
        self.q_proj = nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(width, self.groups * self.channels) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (own(x).unflatten(-1, (-1, self.channels)) for own in (self.q_proj, self.k_proj, self.v_proj))
        out = torch.empty_like(q)
        for head in range(self.heads):
            group = head // (self.heads // self.groups)
            scores = self.rotated(q[:, head]) @ self.rotated(k[:, group]).T / self.channels**0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            out[:, head] = scores.softmax(-1) @ v[:, group]
        return self.o_proj(out.flatten(1))

    def rotated(self, x: Tensor) -> Tensor:
        pairs = self.channels // 2
        angles = torch.arange(len(x))[:, None] * self.base ** (-torch.arange(pairs) / pairs)
        turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(x[:, :pairs], x[:, pairs:])
        return torch.cat([turned.real, turned.imag], -1)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * gate.sigmoid() * self.up_proj(x))


class Head(nn.Module):
    """MiMo's; parameters by their names in a checkpoint."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm = Norm(width, eps), Norm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        self.self_attn, self.mlp = Attention(config), Mlp(width, config.intermediate_size)
        self.final_layernorm = Norm(width, eps)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Of one sequence; the embedding is of the token after (in the second head: of the one after that)."""
        embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        x = self.input_proj(torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], -1))
        x = x + self.self_attn(self.input_layernorm(x))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.final_layernorm(x)


class LayerHead(nn.Module):
    """DeepSeek-V3's kind: norms, a projection, and a layer of transformers', which is the model's last."""

    def __init__(self, config: PreTrainedConfig, trunk: Any, layer: nn.Module) -> None:
        super().__init__()
        width = config.hidden_size
        self.enorm, self.hnorm = (Norm(width, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.ModuleDict({"norm": Norm(width, config.rms_norm_eps)})
        self.__dict__.update(layer=layer, rotary=trunk.model.rotary_emb)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))[None]
        angles = self.rotary(x, torch.arange(x.size(1))[None])
        x = self.layer(x, attention_mask=None, position_embeddings=angles)
        return self.shared_head["norm"](x[0])


def randomize(module: nn.Module) -> None:
    """Norms and biases too."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(0.0, 0.2 if parameter.dim() == 1 else 0.1)
            if "norm" in name:
                parameter.add_(1.0)


def write_model(kind: str, directory: Path) -> None:
    """A tiny model with random heads, as its family's checkpoints have them."""
    if PREFIXES[kind] == MIMO:
        made = tiny.model(kind)
        made.save_pretrained(directory)
        more = {PREFIXES[kind] + name: tensor for name, tensor in mimo_heads(made.config).state_dict().items()}
    else:
        config = tiny.config(kind)
        config.num_hidden_layers += 1  # the head's
        made = tiny.random_model(kind, config)
        made.save_pretrained(directory)
        values = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 4}))
        head = LayerHead(config, made, made.model.layers[-1])
        randomize(head)
        more = {PREFIXES[kind] + name: tensor for name, tensor in head.state_dict().items()}
        more |= {f"{PREFIXES[kind]}{name}.weight": torch.randn(131, 64) for name in COPIES}
    path = directory / "model.safetensors"
    save_file(load_file(path) | more, path, metadata={"format": "pt"})


def mimo_heads(config: PreTrainedConfig) -> nn.ModuleList:
    """Random ones."""
    heads = nn.ModuleList(Head(config) for _ in range(config.num_nextn_predict_layers))
    randomize(heads)
    return heads


class Plain:
    """What the heads of a directory make of a batch, in float32."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.directory, self.prefix = directory, PREFIXES[kind]
        config = AutoConfig.from_pretrained(directory)
        config.num_hidden_layers += self.prefix != MIMO
        self.trunk: Any = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
        if self.prefix == MIMO:
            self.heads: nn.Module = mimo_heads(config)
        else:
            self.heads = LayerHead(config, self.trunk, self.trunk.model.layers[-1])
            self.trunk.config.num_hidden_layers -= 1
        stored = load_file(directory / "model.safetensors")
        self.heads.load_state_dict({name: stored[self.prefix + name] for name in self.heads.state_dict()})

    def logits(self, tokens: Tensor) -> list[Tensor]:
        """Of every head, those that predict a token of the sequence."""
        trunk, logits = self.trunk, []
        with torch.no_grad():
            hidden = trunk.model(tokens[None]).last_hidden_state[0]
            embedded, output = trunk.model.embed_tokens(tokens), trunk.lm_head.weight.detach()
        heads = self.heads if isinstance(self.heads, nn.ModuleList) else [self.heads]
        for number, head in enumerate(heads, 1):
            if len(tokens) <= number + 1:
                break
            hidden = head(hidden[: len(tokens) - number], embedded[number:])
            logits.append(hidden[:-1] @ output.T)
        return logits

    def train(self, args: Namespace, rows: TrainBatch) -> tuple[dict[str, Tensor], list[float]]:
        """Logits of all rows and the heads' losses; gradients of the loss that they add are in the parameters."""
        found: dict[str, Tensor] = {}
        losses = [torch.zeros(()) for _ in range(args.mtp_num_layers)]
        rollouts = len({id for id, count in zip(rows.rollout_ids, rows.rollout_mask_sums, strict=True) if count})
        for i in range(len(rows)):
            tokens, mask = torch.from_numpy(rows.tokens[i]).long(), torch.from_numpy(rows.loss_mask[i]).float()
            trained = torch.cat([torch.zeros(len(tokens) - len(mask)), mask])
            for k, logits in enumerate(self.logits(tokens)):
                found[f"row{i}.head{k}"] = logits.detach()
                targets = slice(k + 2, None)
                chosen = logits.log_softmax(-1).gather(1, tokens[targets, None])[:, 0]
                share = trained[targets] / max(1, int(rows.rollout_mask_sums[i]))
                losses[k] = losses[k] - (chosen * share).sum() / rollouts
        (torch.stack(losses).mean() * args.mtp_loss_scaling_factor).backward()
        return found, [loss.item() for loss in losses]

    def gradients(self) -> dict[str, Tensor]:
        """Of the heads, by the names in a checkpoint; the parameters become their gradients."""
        for parameter in [*self.heads.parameters(), *self.trunk.parameters()]:
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = {self.prefix + name: parameter.data for name, parameter in self.heads.named_parameters()}
        if isinstance(self.heads, LayerHead):
            self.trunk.config.num_hidden_layers += 1
            self.trunk.save_pretrained(self.directory / "gradients")
            layer = load_file(self.directory / "gradients" / "model.safetensors")
            found |= {name: tensor for name, tensor in layer.items() if name.startswith(self.prefix)}
        return found
