"""Every layout of the trainer against plain PyTorch on a Hugging Face model, and its checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.convert import torch_dist_to_hf
from slime.data import Sample
from slime.rollout.batches.metrics import engine_metrics, reward_metrics, rollout_metrics, speed_metrics
from slime.weights.hf_directory import stored_tensors
from tests.parallel import plain, rollouts, tiny
from tests.parallel.cases import CASES
from tests.parallel.conftest import run_worker
from tests.parallel.outcome import CRITIC, Outcome, metric_error

NUM_GPUS = 0
RTOL = 1e-5
ROUNDING = 2.5e-7
"""Of a float32 weight near 1, which is added to and rounded once a step."""
CUT_BY_TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
"""What tensor parallelism cuts, beside experts that are not."""
BIAS_STEP = 0.01
"""By which an optimizer step moves the biases of a router that has them."""
SAME = {"cut_in_three": "grpo", "static": "grpo"}
"""Cases that plain PyTorch trains as another one, since they must not differ from it."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "distopt": (2, {"use_distributed_optimizer": True}),
    "one": (1, {}),
    "dp2": (2, {}),
    "overlap": (2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}
EVERYWHERE = ("grpo", "sft")
FAST = ("distopt", "one")
EXTRA = {
    "one": (
        "cut_in_three",
        "static",
        "resume",
        "reload_other",
        "reference",
        "nan",
        "mismatch",
        "hooks",
        "profile",
        "unstepped",
        "rates",
        "sgd",
    ),
    "distopt": ("resume", "bad_steps", "other_base", "offload", "frozen", "moving_reference"),
    "overlap": ("resume", "nan", "unstepped", "rates"),
    "dp2": ("resume", "offload"),
    "tp2": ("resume", "other_base", "offload"),
    "vpp2": ("resume", "hooks"),
    "cp2": ("resume", "hooks"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "qwen3"
    tiny.model("qwen3").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, Outcome]:
    """What plain PyTorch makes of the cases."""
    results = {}
    for name in EVERYWHERE:
        case = CASES[name]
        args = rollouts.arguments(model_dir, **case.options)
        rates = [args.lr_warmup_init, (args.lr_warmup_init + args.lr) / 2]
        results[name] = plain.train(args, model_dir, [(case.rows(0), case.steps)], rates)
    return results


def run(layout: str, model_dir: Path, work: Path) -> Path:
    """Let a layout train its cases, once a session; its results."""
    results = work / layout
    if (results / "done").exists():
        return results
    assert not results.exists(), f"{layout} has failed before: see the first of its tests"
    results.mkdir()
    ranks, options = LAYOUTS[layout]
    cases = (*EVERYWHERE, *EXTRA.get(layout, ("resume",)))
    if "reload_other" in cases:
        run("distopt", model_dir, work)
    arguments: list[str | Path] = [model_dir, results, work / "distopt", json.dumps(options), *cases]
    run_worker(ranks, "trainer_worker.py", *arguments, log=results / "log")
    (results / "done").touch()
    return results


def metrics_of(results: Path, case: str) -> list[dict[str, float]]:
    """Of rank 0, after checking that every rank has the same."""
    ranks = [json.loads(file.read_text()) for file in sorted(results.glob(f"{case}.rank*.json"))]
    for other in ranks[1:]:
        for mine, theirs in zip(ranks[0], other, strict=True):
            assert {k: v for k, v in mine.items() if not k.startswith("perf/")} == {
                k: v for k, v in theirs.items() if not k.startswith("perf/")
            }
    return ranks[0]


def check(results: Path, case: str, expected: Outcome, model_dir: Path) -> None:
    """Metrics and weights of a case."""
    wanted_metrics, wanted_weights = expected.metrics, expected.weights
    metrics = metrics_of(results, case)
    assert len(metrics) == len(wanted_metrics)
    for got, wanted in zip(metrics, wanted_metrics, strict=True):
        assert {name for name in got if not name.startswith("perf/")} == set(wanted)
        for name, value in wanted.items():
            assert metric_error(name, got[name], value) < RTOL, f"{case} {name}: {got[name]} != {value}"
    before = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
    moved = max(float((wanted_weights[name] - before[name]).abs().max()) for name in wanted_weights)
    weights = load_file(results / f"{case}.safetensors")
    assert set(weights) == set(wanted_weights)
    worst = float(torch.stack([(weights[name] - wanted_weights[name]).abs().max() for name in weights]).max())
    assert worst < RTOL * moved + ROUNDING, f"{case}: weights differ by {worst}, and moved by {moved}"


def check_same(results: Path, one: str, other: str) -> None:
    """Metrics and weights, exactly."""
    for mine, theirs in zip(metrics_of(results, one), metrics_of(results, other), strict=True):
        names = {name for name in mine if not name.startswith("perf/")}
        assert {name: mine[name] for name in names} == {name: theirs[name] for name in names}
    weights, others = (load_file(results / f"{case}.safetensors") for case in (one, other))
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def check_resume(results: Path, resumed: str, *, exactly: bool) -> None:
    """The second half from a checkpoint is the second half."""
    whole, again = load_file(results / "uninterrupted.safetensors"), load_file(results / f"{resumed}.safetensors")
    for one, two in zip(metrics_of(results, "uninterrupted"), metrics_of(results, resumed), strict=True):
        for name in (n for n in one if not n.startswith("perf/")):
            assert one[name] == two[name] if exactly else math.isclose(one[name], two[name], rel_tol=1e-4, abs_tol=1e-4)
    for name, tensor in whole.items():
        assert torch.equal(tensor, again[name]) if exactly else torch.allclose(tensor, again[name], atol=1e-5), name


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in LAYOUTS]
)
def test_layout(layout: str, model_dir: Path, work: Path, expected: Any) -> None:
    results = run(layout, model_dir, work)
    for case in (*EVERYWHERE, *SAME):
        if case in EVERYWHERE or case in EXTRA.get(layout, ()):
            check(results, case, expected[SAME.get(case, case)], model_dir)
    check_scores(results, model_dir)
    check_resume(results, "resumed", exactly=True)
    if "hooks" in EXTRA.get(layout, ()):
        check_same(results, "grpo", "hooks")
        check_same(results, "twice_by_rewards", "twice_by_hook")
    if layout == "one":
        check_reload(results, work / "distopt")


@torch.no_grad()
def check_scores(results: Path, model_dir: Path) -> None:
    """Those of a text before any training, whatever temperature rollouts have."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    logits = model(torch.tensor([rollouts.TEXT])).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(rollouts.TEXT)[1:, None])[:, 0]
    ranks = [json.loads(file.read_text()) for file in results.glob("scores.rank*.json")]
    told = [torch.tensor(scores) for scores in ranks if scores is not None]
    assert told
    assert all(torch.allclose(scores, wanted, atol=1e-5) for scores in told)


def check_reload(results: Path, saved_by: Path) -> None:
    """What another layout saved goes on here as it would have there, to rounding."""
    for file in ("reloaded.safetensors", "reloaded.rank0.json"):
        shutil.copyfile(results / file, saved_by / file)
    check_resume(saved_by, "reloaded", exactly=False)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "cut"), [("glm4_moe", {}), ("deepseek_v3", CUT_BY_TENSOR)])
def test_experts_go_on_in_another_layout(kind: str, cut: dict[str, Any], tmp_path: Path) -> None:
    """Exactly in the same one, and in one process from what two expert-parallel ranks saved."""
    model, saved, other = (tmp_path / name for name in ("model", "ep2", "one"))
    tiny.model(kind).save_pretrained(model)
    for results, ranks, case in ((saved, 2, "resume"), (other, 1, "reload_other")):
        results.mkdir()
        layout = {"expert_model_parallel_size": ranks, "use_distributed_optimizer": True, **(cut if ranks == 2 else {})}
        options = json.dumps(layout | {"moe_router_bias_update_rate": BIAS_STEP})
        run_worker(ranks, "trainer_worker.py", model, results, saved, options, case, log=results / "log")
    check_resume(saved, "resumed", exactly=True)
    check_reload(other, saved)
    before, after = load_file(model / "model.safetensors"), load_file(saved / "resumed.safetensors")
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for name in biases:
        steps = (after[name] - before[name]) / BIAS_STEP
        assert torch.allclose(steps, steps.round(), atol=1e-3)
        assert 0 < steps.abs().max() < 4.5


def check_converted(results: Path, model: Path, output: Path) -> None:
    """The checkpoint's weights as the tool gives them are those of the trainer that saved it, bit for bit."""
    checkpoint = results / "checkpoint" / "iter_0000001"
    torch_dist_to_hf.convert(checkpoint, output, model, shard_bytes=100_000, workers=2, force=False)
    saved = load_file(results / "saved.safetensors")
    wanted = {name: tensor for name, tensor in saved.items() if not name.startswith(CRITIC)}
    converted = dict(stored_tensors(output))
    assert converted.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in converted.items())
    assert AutoModelForCausalLM.from_pretrained(output).config.vocab_size == tiny.VOCAB


DISTOPT, TP, PP, VPP, EP = (
    {"use_distributed_optimizer": True},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {"virtual_pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
)
RELOADS: dict[str, tuple[str, tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "one-tp2": ("qwen3", (1, {}), (2, TP)),
    "tp2-one": ("qwen3", (2, TP), (1, {})),
    "tp2-pp2": ("qwen3", (2, TP), (2, PP)),
    "pp2-tp2": ("qwen3_tied", (2, PP), (2, TP)),
    "vpp2-dp2": ("qwen3_tied", (2, PP | VPP), (2, {})),
    "tp2pp2-vpp2": ("llama", (4, TP | PP), (2, PP | VPP)),
    "distopt-tp2": ("qwen2", (2, DISTOPT), (2, DISTOPT | TP)),
    "tp2-distopt": ("qwen3", (2, DISTOPT | TP), (2, DISTOPT)),
    "pp2-distopt-tp2": ("qwen3", (2, DISTOPT | PP), (2, DISTOPT | TP)),
    "ep2-one": ("qwen3_moe", (2, DISTOPT | EP), (1, DISTOPT)),
    "one-ep2": ("qwen3_moe", (1, DISTOPT), (2, DISTOPT | EP)),
    "ep2-tp2": ("qwen3_moe", (2, EP), (2, TP)),
    "tp2-ep2": ("qwen3_moe", (2, DISTOPT | TP), (2, DISTOPT | EP)),
    "ep2-pp2": ("qwen3_moe", (2, DISTOPT | EP), (2, DISTOPT | PP)),
    "dense-first-pp2-one": ("dense_first", (2, DISTOPT | PP), (1, DISTOPT)),
    "dense-first-one-pp2": ("dense_first", (1, DISTOPT), (2, DISTOPT | PP)),
}
"""Kind of model, ranks and layout that save a checkpoint, and those that go on."""


@pytest.mark.parametrize(
    "reload", [pytest.param(name, marks=() if name == "ep2-one" else pytest.mark.full) for name in RELOADS]
)
def test_another_layout_goes_on(reload: str, tmp_path: Path) -> None:
    """To rounding, optimizer state included (exactly in the same layout); and the tool reads what was saved."""
    kind, saver, reader = RELOADS[reload]
    model, saved, other = (tmp_path / name for name in ("model", "saved", "other"))
    tiny.model(kind).save_pretrained(model)
    for results, (ranks, options), case in ((saved, saver, "resume"), (other, reader, "reload_other")):
        results.mkdir()
        run_worker(ranks, "trainer_worker.py", model, results, saved, json.dumps(options), case, log=results / "log")
    check_resume(saved, "resumed", exactly=True)
    check_reload(other, saved)
    check_converted(saved, model, tmp_path / "hf")


def test_first_step_is_on_policy_exactly(model_dir: Path, work: Path) -> None:
    results = run("one", model_dir, work)
    for case in ("grpo", "static", "cut_in_three"):
        first, second = metrics_of(results, case)
        assert first["train/ppo_kl"] == 0.0
        assert first["train/pg_clipfrac"] == 0.0
        assert first["train/kl_loss"] == 0.0
        assert second["train/ppo_kl"] != 0.0
        assert second["train/kl_loss"] > 0.0


def test_no_metric_is_on_two_axes(model_dir: Path, work: Path) -> None:
    """The trainer's are drawn over optimizer steps, the rollout's over rollouts."""
    results = run("one", model_dir, work)
    trained = {name for case in ("grpo", "sft") for metrics in metrics_of(results, case) for name in metrics}
    samples = [Sample(index=i, tokens=[1, 2, 3], response_length=2) for i in range(4)]
    for sample in samples:
        sample.prefix_cache_info.total_prompt_tokens = sample.prefix_cache_info.cached_tokens = 1
        sample.spec_info.spec_draft_token_num = sample.spec_info.spec_verify_ct = 1
    generated = {
        **rollout_metrics(samples, rollouts.columns(0, rollouts=4)),
        **reward_metrics(rollouts.columns(0, rollouts=4)),
        **speed_metrics(Namespace(rollout_num_gpus=1), samples, 1.0),
        **engine_metrics(samples),
    }
    assert {"rollout/log_probs", "rollout/ref_log_probs", "rollout/rollout_log_probs", "rollout/advantages"} < trained
    assert {"rollout/raw_reward", "rollout/total_lengths", "rollout/spec_accept_rate"} < generated.keys()
    assert not trained & generated.keys()
