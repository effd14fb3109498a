"""The heads in Megatron's model on two ranks, against plain PyTorch: under tensor parallelism, and a critic trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel import rollouts, tiny
from tests.ranks import run_ranks

NUM_GPUS = 0
RANKS, TOKENS, HIDDEN, VOCAB, PADDED = 2, 24, 16, 29, 32
KIND = "qwen2"
"""With tied embeddings: a critic's model has no use for them, an actor's head is given them."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks found, after one run of all checks that need both."""
    directory = tmp_path_factory.mktemp("head")
    tiny.config(KIND).save_pretrained(directory / "model")
    run_ranks(run_rank, (str(directory),), RANKS)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("layout", ["tensor parallel", "sequence parallel"])
@pytest.mark.parametrize("what", ["log probs", "logits", "values"])
def test_same_as_plain_torch(report: list[dict[str, Any]], what: str, layout: str) -> None:
    """Results, the gradient of the hidden states that a rank gets back, and that of its weight."""
    for of_rank in report:
        assert max(of_rank[f"{what}, {layout}"]) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_model_and_head_make_logits(report: list[dict[str, Any]], tied: bool) -> None:
    for of_rank in report:
        assert of_rank[f"model, tied={tied}"] < 1e-5


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_critic_in_bfloat16(report: list[dict[str, Any]], optimizer: str) -> None:
    for of_rank in report:
        found = of_rank[f"critic, {optimizer}"]
        assert found["type"] == "torch.bfloat16"
        assert found["initial std"] == pytest.approx(0.02, rel=0.5)
        assert found["loss"][-1] < 0.5 * found["loss"][0]
        assert found["gradient error"] < 1e-2 or optimizer != "plain"
        assert found["in checkpoint"]
        assert found["changed by reload"] == []
        assert found["weight"] == report[0][f"critic, {optimizer}"]["weight"]
        assert found["weight"] == pytest.approx(report[0]["critic, plain"]["weight"], abs=1e-3)


# ---- one rank


def run_rank(rank: int, directory: str) -> None:
    from slime.backends.megatron import patches

    patches.install()
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for layout in ("tensor parallel", "sequence parallel"):
        for what, check in (("log probs", language_head), ("logits", language_head), ("values", value_head)):
            found[f"{what}, {layout}"] = check(what, layout == "sequence parallel")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for tied in (True, False):
        found[f"model, tied={tied}"] = model_and_head(Path(directory, "model"), tied)
    overlap = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    for optimizer, options in (("plain", {}), ("distributed", overlap)):
        found[f"critic, {optimizer}"] = critic(Path(directory), optimizer, options)
    Path(directory, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def config(sequence_parallel: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=RANKS,
        sequence_parallel=sequence_parallel,
        perform_initialization=False,
    )


def own_rows(tensor: Tensor) -> Tensor:
    return tensor.chunk(RANKS)[dist.get_rank()]


def through(head: Any, hidden: Tensor, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    """(a leaf with this rank's hidden states, what the head makes of it)."""
    leaf = (own_rows(hidden) if sequence_parallel else hidden).detach().float()[:, None].clone().requires_grad_()
    return leaf, head(leaf)[0][:, 0]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """In units of the largest entry."""
    return [float((a.detach().double() - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)]


def language_head(what: str, sequence_parallel: bool) -> list[float]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from slime.backends.megatron.layers.head import LanguageHead
    from slime.training.loss.log_probs import logits, token_terms

    torch.manual_seed(5)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    group = parallel_state.get_tensor_model_parallel_group()
    options = config(sequence_parallel)
    layer = ColumnParallelLinear(HIDDEN, PADDED, config=options, init_method=options.init_method, bias=False)
    with torch.no_grad():
        layer.weight.copy_(own_rows(weight))
    head = LanguageHead(layer)
    assert head.weight is layer.weight
    assert list(head.state_dict()) == list(layer.state_dict())
    leaf, out = through(head, hidden, sequence_parallel)
    assert torch.equal(out, hidden.float())
    if what == "logits":
        got = [logits(out, head.weight)]
        upstream = [torch.randn(TOKENS, PADDED)]
        want = [hidden @ weight.t()]
        own = [x.chunk(RANKS, 1)[group.rank()] for x in want]
        (got[0] * upstream[0].chunk(RANKS, 1)[group.rank()]).sum().backward()
    else:
        got = list(
            token_terms(
                out, head.weight, labels, vocab_size=VOCAB, group=group, chunk_size=10, wants_entropy_gradient=True
            )
        )
        upstream = [torch.randn(TOKENS), torch.randn(TOKENS)]
        every = (hidden @ weight[:VOCAB].t()).log_softmax(-1)
        own = want = [every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)]
        torch.autograd.backward(got, upstream)
    torch.autograd.backward(want, [u.double() for u in upstream])
    assert leaf.grad is not None
    assert hidden.grad is not None
    assert weight.grad is not None
    hidden_grad = own_rows(hidden.grad) if sequence_parallel else hidden.grad
    return errors([*got, leaf.grad[:, 0], head.weight.grad], [*own, hidden_grad, own_rows(weight.grad)])


def value_head(what: str, sequence_parallel: bool) -> list[float]:
    from megatron.core import parallel_state

    from slime.backends.megatron.layers.head import ValueHead

    torch.manual_seed(6)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(TOKENS)
    head = ValueHead(config(sequence_parallel), parallel_state.get_tensor_model_parallel_group(), seed=11)
    weight = head.weight.detach().double().requires_grad_()
    leaf, out = through(head, hidden, sequence_parallel)
    (out[:, 0] * upstream).sum().backward()
    values = hidden @ weight[0]
    (values * upstream).sum().backward()
    assert leaf.grad is not None
    assert head.weight.grad is not None
    assert hidden.grad is not None
    assert weight.grad is not None
    hidden_grad = own_rows(hidden.grad) if sequence_parallel else hidden.grad
    return errors([out[:, 0], leaf.grad[:, 0], head.weight.grad], [values, hidden_grad, weight.grad])


def tokens_and_positions() -> tuple[Any, ...]:
    from slime.backends.megatron.layers.attention import packed_params

    lengths = [10, 5, 9]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, tiny.VOCAB, positions.shape, generator=generator), positions, packed_params(lengths)


def fill(chunks: list[Any]) -> None:
    """Random weights, the same on every rank, in all but a value head."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in chunks[0].named_parameters():
        if name != "output_layer.weight" or len(parameter) > 1:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1))


def model_and_head(model_dir: Path, tied: bool) -> float:
    """Largest error of logits from hidden states and weight, against Megatron's own layer in the head's place."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from slime.backends.megatron.model import build_model, head_weight
    from slime.training.loss.log_probs import logits

    chunks = build_model(rollouts.arguments(model_dir, untie_embeddings_and_output_weights=not tied))
    model = chunks[0]
    fill(chunks)
    tokens, positions, params = tokens_and_positions()
    hidden = model(tokens, positions, None, packed_seq_params=params)
    weight = head_weight(model)
    assert hidden.shape == (1, tokens.numel(), model.config.hidden_size)
    assert any(weight is p for p in model.parameters())
    layer = ColumnParallelLinear(
        model.config.hidden_size, len(weight), config=model.config, init_method=model.config.init_method, bias=False
    )
    layer.weight = weight
    model.output_layer = layer
    want = model(tokens, positions, None, packed_seq_params=params)[0]
    return errors([logits(hidden[0], weight)], [want.double()])[0]


def critic(directory: Path, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train a value of 1 for every token, save, train one more step; and that step again from the checkpoint."""
    from megatron.core import dist_checkpointing

    from slime.backends.megatron.weights import checkpoint
    from slime.files.checkpoints import find_checkpoint
    from slime.models.family import VALUE_HEAD_KEY
    from slime.training import checkpoint_dirs

    args = rollouts.arguments(
        directory / "model", params_dtype="bfloat16", lr=5e-3, lr_warmup_iters=0, weight_decay=0.0, **options
    )
    made = Critic(args)
    found: dict[str, Any] = {"type": str(made.head.dtype), "initial std": float(made.head.float().std())}
    steps = [made.step() for _ in range(6)]
    made.gather_parameters()
    found["loss"], found["gradient error"] = [loss for loss, _ in steps], max(error for _, error in steps)
    target = checkpoint_dirs.begin_save(directory / name, 0)
    checkpoint.save_state(target, made.chunks, made.optimizer, made.scheduler)
    checkpoint_dirs.commit_save(directory / name, 0)
    saved, _ = find_checkpoint(directory / name) or (None, None)
    found["in checkpoint"] = VALUE_HEAD_KEY in dist_checkpointing.load_tensors_metadata(str(saved))
    again = Critic(args)
    assert saved is not None
    checkpoint.load_state(saved, again.chunks, again.optimizer, again.scheduler)
    for one in (made, again):
        one.step()
        one.gather_parameters()
    pairs = zip(made.chunks[0].named_parameters(), again.chunks[0].parameters(), strict=True)
    found["changed by reload"] = [name for (name, mine), other in pairs if not torch.equal(mine, other)]
    found["weight"] = made.head[0].tolist()
    return found


class Critic:
    """A critic, wrapped and with its optimizer, as the trainer has it."""

    def __init__(self, args: Any) -> None:
        from slime.backends.megatron import optimizer
        from slime.backends.megatron.model import build_model, wrap

        self.chunks = build_model(args, "critic")
        fill(self.chunks)
        self.wrapped = optimizer.wrap_data_parallel(args, wrap(self.chunks))
        self.optimizer = optimizer.make_optimizer(args, self.wrapped)
        self.scheduler = optimizer.make_scheduler(args, self.optimizer)

    @property
    def head(self) -> Tensor:
        return self.chunks[0].output_layer.weight.detach()

    def gather_parameters(self) -> None:
        """What otherwise the next forward pass waits for."""
        if self.wrapped[0].use_forward_hook:
            self.wrapped[0].disable_forward_pre_hook(param_sync=True)
            self.wrapped[0].enable_forward_pre_hook()

    def step(self) -> tuple[float, float]:
        """(mean squared error, error of the value head's gradient; a distributed optimizer has a part of it only)."""
        from megatron.core.distributed import finalize_model_grads

        self.wrapped[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        tokens, positions, params = tokens_and_positions()
        hidden: list[Tensor] = []
        hook = self.chunks[0].decoder.register_forward_hook(lambda *x: hidden.append(x[2].detach()))
        values = self.wrapped[0](tokens, positions, None, packed_seq_params=params)
        hook.remove()
        assert values.dtype == torch.float32
        assert values.shape == (1, tokens.numel(), 1)
        loss = (values - 1).square().mean()
        loss.backward()
        mine = (2 * (values[0] - 1) / values.numel()).detach().t() @ hidden[0][:, 0].float()
        dist.all_reduce(mine)
        finalize_model_grads(self.wrapped, None)
        error = errors([self.chunks[0].output_layer.weight.main_grad], [mine.double()])[0]
        assert self.optimizer.step()[0]
        self.scheduler.step(1)
        dist.all_reduce(loss)
        return float(loss.detach()) / RANKS, error
