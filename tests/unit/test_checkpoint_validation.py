"""Flags that make the model smaller or larger than the weights: these are refused, and never cut."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.utils.errors import BadInputError
from tests.parallel import tiny
from tests.ranks import run_ranks

NUM_GPUS = 0

ADVICE = "drop the flags that contradict config.json, or train from random weights (--random-weights of train.py)"
PROJ, K, GATE = (f"model.layers.0.{name}.weight" for name in ("self_attn.o_proj", "self_attn.k_proj", "mlp.gate_proj"))
EXPERT = "model.layers.0.mlp.experts.0.gate_proj.weight"
FUSED = "model.layers.0.mlp.gate_up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
SHAPES: list[tuple[str, str, str, list[int], list[int]]] = [
    ("qwen3", "--ffn-hidden-size 80", GATE, [96, 64], [80, 64]),
    ("qwen3", "--ffn-hidden-size 112", GATE, [96, 64], [112, 64]),
    ("qwen3", "--num-attention-heads 2", PROJ, [64, 96], [64, 48]),
    ("qwen3", "--num-query-groups 1", K, [48, 64], [24, 64]),
    ("qwen3", "--kv-channels 8", PROJ, [64, 96], [64, 32]),
    ("qwen3", "--vocab-size 100", EMBEDDING, [131, 64], [100, 64]),
    ("qwen3_tied", "--vocab-size 200", EMBEDDING, [131, 64], [200, 64]),
    ("qwen3_tied", "--ffn-hidden-size 80", GATE, [96, 64], [80, 64]),
    ("qwen3_moe", "--moe-ffn-hidden-size 24", EXPERT, [40, 64], [24, 64]),
    ("glm4", "--ffn-hidden-size 80", FUSED, [192, 64], [160, 64]),
    ("glm4_tied", "--ffn-hidden-size 112", FUSED, [192, 64], [224, 64]),
    ("deepseek_v3", "--kv-lora-rank 16", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", [32, 64], [24, 64]),
]
PATTERN = "and --moe-layer-freq, which .*/config.json gives where no flag does, is of 4 layers: drop the flags"
OTHERS = [
    ("qwen3", "--num-layers 3", r"it has 3 layers, config\.json 4; it lacks model\.layers\.3\..* and 8 more; "),
    ("qwen3", "--num-layers 6", r"it has 6 layers, config\.json 4; it has also decoder\.layers\.4\..* and \d+ more; "),
    ("qwen3_moe", "--num-experts 2", r"it has 2 experts, config\.json 4; it lacks model\.layers\.\d\.mlp\.experts\.2"),
    (
        "qwen3_moe",
        "--num-experts 8",
        r"it has 8 experts, config\.json 4; it has also decoder\.layers\.\d\.mlp\.experts",
    ),
    ("qwen3", "--add-qkv-bias", r"it has also decoder\.layers\.0\.self_attention\.linear_qkv\.bias, .* and 1 more; "),
    (
        "qwen3_tied",
        "--untie-embeddings-and-output-weights",
        "has its own output layer, config.json means the embedding",
    ),
    ("deepseek_v3", "--num-layers 2", f"--num-layers is 2, {PATTERN}"),
    ("deepseek_v3", "--num-layers 5", f"--num-layers is 5, {PATTERN}"),
    ("deepseek_v3", "--num-layers 5 --moe-layer-freq [0,1,1,1,1]", r"it has 5 layers, config\.json 4; it has also"),
]
TAKEN = [
    *((kind, "--rotary-base 5000 --norm-epsilon 0.01") for kind in ("qwen3_tied", "glm4", "deepseek_v3")),
    ("wrong_ffn", "--ffn-hidden-size 96"),
    ("wrong_fused_ffn", "--ffn-hidden-size 96"),
    ("wrong_heads", "--num-attention-heads 4 --num-query-groups 2 --kv-channels 16"),
]
WRONG = {
    "wrong_ffn": ("qwen3", {"intermediate_size": 48}),
    "wrong_fused_ffn": ("glm4", {"intermediate_size": 40}),
    "wrong_heads": ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}),
}
"""A right model's weights, and what its config.json gets wrong."""
TORCH_DIST: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"num_layers": 3}, r"decoder\.layers\..* is \[4, .*\], and \[3, .*\] in the model of"),
    ("qwen3", {"num_layers": 6}, r"decoder\.layers\..* is \[4, .*\], and \[6, .*\] in the model of"),
    ("qwen3", {"ffn_hidden_size": 80}, r"linear_fc1\.weight is \[4, 192, 64\], and \[4, 160, 64\] in"),
    ("qwen3", {"num_attention_heads": 2}, r"linear_proj\.weight is \[4, 64, 96\], and \[4, 64, 48\] in"),
    ("qwen3", {"vocab_size": 300}, r"embedding\.word_embeddings\.weight is \[256, 64\], and \[300, 64\] in"),
    (
        "qwen3_moe",
        {"num_layers": 3, "moe_layer_freq": [1, 0, 1]},
        r" has decoder\.layers\.3\..* and \d+ more, which the model of the flags lacks; ",
    ),
    ("qwen3_moe", {"num_layers": 5, "moe_layer_freq": [1, 0, 1, 1, 1]}, r" has no decoder\.layers\.4\."),
    ("qwen3_moe", {"num_experts": 2}, r"router\.weight is \[4, 64\], and \[2, 64\] in the model"),
    ("qwen3_moe", {"moe_ffn_hidden_size": 24}, r"linear_fc1\.weight is \[4, 80, 64\], and \[4, 48, 64\] in"),
]


def _key(kind: str, words: object) -> str:
    return f"{kind} {words}"


def _convert_and_load(rank: int, work: str) -> None:
    """What the converter says of each case, and what loading its checkpoint says, in one process."""
    from tools import convert_hf_to_torch_dist  # isort: skip
    from slime.backends.megatron import hf_to_torch_dist, model
    from slime.backends.megatron.learner import load_weights
    from slime.backends.megatron.weights import weights_io

    directory, report = Path(work), {}
    cases = [case[:2] for case in (*SHAPES, *OTHERS)]
    for kind, words in [*cases, *TAKEN, ("qwen3", ""), ("qwen3_moe", "")]:
        saved, printed = directory / _key(kind, words), io.StringIO()
        argv = ["--hf-checkpoint", directory / "models" / kind, "--save", saved, *words.split()]
        with contextlib.redirect_stderr(printed):
            try:
                status = convert_hf_to_torch_dist.main([*map(str, argv), "--allow-config-mismatch"])
            except SystemExit as error:
                status = error.code
        report[saved.name] = status, printed.getvalue(), saved.exists()
    with hf_to_torch_dist.joined_ranks():
        for kind in ("wrong_fused_ffn", "wrong_heads"):
            right, flags = WRONG[kind][0], dict(TAKEN)[kind]
            saved = directory / _key(kind, flags)
            read, wanted = (
                model.build_model(tiny.arguments(directory / "models" / right, padded_vocab_size=136)) for _ in range(2)
            )
            load_weights(read, str(saved))
            weights_io.load_hf(wanted, directory / "models" / right)
            own = dict(weights_io.global_weights(wanted))
            assert all(torch.equal(tensor, own[name]) for name, tensor in weights_io.global_weights(read))
            weights_io.load_hf(read, directory / "models" / kind)
            assert all(torch.equal(tensor, own[name]) for name, tensor in weights_io.global_weights(read))
        for kind, options, _ in TORCH_DIST:
            chunks = model.build_model(tiny.arguments(directory / "models" / kind, **options))
            report[_key(kind, options)] = _error(load_weights, chunks, str(directory / _key(kind, "")))
    (directory / "report.json").write_text(json.dumps(report))


def _error(load: Callable[..., None], *words: Any) -> str:
    try:
        load(*words)
    except BadInputError as error:  # of which train.py prints the message alone
        return str(error)
    return "loaded"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Path:
    directory = tmp_path_factory.mktemp("fit")
    (directory / "models").mkdir()
    for kind in {case[0] for case in (*SHAPES, *OTHERS, *TAKEN)} - WRONG.keys() | {
        right for right, _ in WRONG.values()
    }:
        (directory / "models" / kind).symlink_to(models(kind))
    for kind, (right, changes) in WRONG.items():
        (directory / "models" / kind).mkdir()
        (directory / "models" / kind / "model.safetensors").symlink_to(models(right) / "model.safetensors")
        config = json.loads((models(right) / "config.json").read_text())
        (directory / "models" / kind / "config.json").write_text(json.dumps(config | changes))
    return directory


@pytest.fixture(scope="module")
def report(work: Path) -> dict[str, Any]:
    run_ranks(_convert_and_load, (str(work),), 1)
    found: dict[str, Any] = json.loads((work / "report.json").read_text())
    return found


@pytest.mark.parametrize(("kind", "flag", "tensor", "found", "wanted"), SHAPES)
def test_a_tensor_of_another_shape(
    kind: str, flag: str, tensor: str, found: list[int], wanted: list[int], report: dict[str, Any]
) -> None:
    line = _refused(report[_key(kind, flag)])
    shapes = f"{found}, and {wanted} in the model of config.json and the flags"
    assert line.endswith(f"/{kind}: {tensor} is {shapes}; {ADVICE}"), line


@pytest.mark.parametrize(("kind", "flag", "problem"), OTHERS)
def test_other_layers_or_experts(kind: str, flag: str, problem: str, report: dict[str, Any]) -> None:
    line = _refused(report[_key(kind, flag)])
    assert re.search(problem, line), line


def _refused(outcome: tuple[int, str, bool]) -> str:
    """The last line; the others are warnings."""
    status, printed, was_written = outcome
    assert (status, was_written) == (2, False), printed
    *others, line = printed.splitlines()
    assert line.split(": ")[1] == "error", line
    assert all(" warning: " in other or " (kept for next time) " in other for other in others), printed
    return line


@pytest.mark.parametrize(("kind", "flags"), TAKEN)
def test_what_weights_do_not_contradict(kind: str, flags: str, report: dict[str, Any]) -> None:
    """Of those that rows are cut by, the process has compared each weight with the right model's."""
    status, printed, was_written = report[_key(kind, flags)]
    assert (status, was_written) == (0, True), printed
    assert "warning: flags contradict" in printed


@pytest.mark.parametrize(("kind", "options", "problem"), TORCH_DIST)
def test_torch_dist(kind: str, options: dict[str, Any], problem: str, report: dict[str, Any]) -> None:
    line = report[_key(kind, options)]
    assert re.search(problem, line), line
    assert line.endswith(ADVICE)


LAYOUTS: list[dict[str, int]] = [
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
]
UNDER_LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({}, "^loaded$"),
    ({"num_layers": 2, "moe_layer_freq": [1, 0]}, r"it has 2 layers, config\.json 4"),
    ({"num_experts": 2}, r"it has 2 experts, config\.json 4"),
    ({"ffn_hidden_size": 80}, r"\.1\.mlp\.gate_proj\.weight is \[96, 64\], and \[80, 64\] in"),
    ({"moe_ffn_hidden_size": 24}, r"\.gate_proj\.weight is \[40, 64\], and \[24, 64\] in"),
    ({"num_attention_heads": 2}, r"\.o_proj\.weight is \[64, 96\], and \[64, 48\] in"),
]


def _load_under_layouts(rank: int, model_dir: str) -> None:
    from slime.backends.megatron import patches

    patches.install()
    from megatron.core import parallel_state

    from slime.backends.megatron import model, parallel
    from slime.backends.megatron.weights import weights_io

    path = Path(model_dir)
    dist.init_process_group("gloo", init_method=f"file://{path}.rendezvous{len(LAYOUTS)}", rank=rank, world_size=2)
    report = []
    for layout in LAYOUTS:
        parallel_state.initialize_model_parallel(**layout)
        parallel.set_seeds(1)
        outcomes = []
        for options, _ in UNDER_LAYOUTS:
            chunks = model.build_model(tiny.arguments(path, **layout, **options))
            outcomes.append(_error(weights_io.load_hf, chunks, path))
        everybodys: list[Any] = [None, None]
        dist.all_gather_object(everybodys, outcomes)
        report.append(everybodys)
        parallel_state.destroy_model_parallel()
    if rank == 0:
        Path(f"{path}.report").write_text(json.dumps(report))
    dist.destroy_process_group()


def test_under_layouts(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Layers and experts are missed on every rank, a shape on each that holds such a tensor."""
    path = tmp_path / "model"
    path.symlink_to(models("qwen3_moe"))
    run_ranks(_load_under_layouts, (str(path),), 2)
    for layout, outcomes in zip(LAYOUTS, json.loads(Path(f"{path}.report").read_text()), strict=True):
        for number, (options, problem) in enumerate(UNDER_LAYOUTS):
            lines = [outcomes[rank][number] for rank in range(2)]
            alone = "ffn_hidden_size" in options and "pipeline_model_parallel_size" in layout  # the one dense layer
            matched = [re.search(problem, line) is not None for line in lines]
            assert matched == ([True, False] if alone else [True, True]), (layout, options, lines)
