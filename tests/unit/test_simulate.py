"""Steps on paper: what they are made of, and how far they are from what was measured."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.models import family_of, rule_shape, shape_from_hf
from tests import shipped
from tests.unit.test_parameter_counts import PUBLISHED
from tools import simulate as program
from tools.benchmarks import attention
from tools.simulating import generation, handing, training
from tools.simulating.cases import Case, all_cases, alone, line_of
from tools.simulating.constants import ATTENTION, COSTS
from tools.simulating.hardware import GPUS
from tools.simulating.memory import memory
from tools.simulating.model import Model, read_model
from tools.simulating.plan import Layout, Plan, long_tailed
from tools.simulating.step import simulate

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
_TAIL = long_tailed(64, 100, 0.9, 1000, seed=3)


def plan(model: str = "qwen3-4B", **values: Any) -> Plan:
    sizes: dict[str, Any] = {"trainers": 1, "engines": 1, "responses": _TAIL} | values
    return Plan(read_model(model), GPUS["h200"], **sizes)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {f"{case.name} ({case.line})": case for case in all_cases()}


def test_steps_that_no_cost_of_their_passes_was_fitted_to_are_within_a_tenth(cases: dict[str, Case]) -> None:
    """Whatever explains a deviation: of whole steps and of training there is no excuse."""
    whole = {name: case for name, case in cases.items() if name.startswith(("step:", "training alone:"))}
    assert sum(not case.fitted for case in whole.values()) >= 12
    assert {name: case.deviation for name, case in whole.items() if abs(case.deviation) > 0.1} == {}


def test_what_costs_were_fitted_to_is_met(cases: dict[str, Case]) -> None:
    fitted = {name: case.deviation for name, case in cases.items() if case.fitted}
    assert {name: deviation for name, deviation in fitted.items() if abs(deviation) > 0.1} == {}
    assert float(np.median(np.abs(list(fitted.values())))) < 0.02


def test_what_is_far_off_says_why(cases: dict[str, Case]) -> None:
    far = {name: case.why for name, case in cases.items() if abs(case.deviation) > 0.1}
    assert all(far.values()), far
    assert len(far) < len(cases) / 6


def test_every_cost_has_a_source_and_is_read() -> None:
    read = {
        name
        for path in (ROOT / "tools" / "simulating").glob("*.py")
        for name in re.findall(r'cost\(\s*"([^"]+)"', path.read_text())
    }
    assert read == set(COSTS)
    assert all(cost.source and cost.value > 0 for cost in COSTS.values())


@pytest.mark.parametrize("kernel", sorted(ATTENTION))
def test_attention_is_as_fast_as_its_lines_say(kernel: str) -> None:
    of_case = {str(case): case for case in attention.CASES}
    for speed in ATTENTION[kernel]:
        row = line_of("h100", speed.line)
        named, _, case = row["case"].removeprefix("attention, ").partition(", ")
        assert (named, row["model"]) == (kernel, "qwen3-1.7b")
        lengths = np.array(attention.lengths_of(of_case[case]), dtype=np.float64)
        flops = 4 * (lengths * (lengths + 1) / 2).sum() * 16 * 128 / 989e12
        assert speed.length == pytest.approx((lengths**2).sum() / lengths.sum(), rel=0.02)
        assert speed.forward == pytest.approx(flops / row["gpu_forward_ms"] * 1e3, abs=6e-4)
        assert speed.backward == pytest.approx(2 * flops / row["gpu_backward_ms"] * 1e3, abs=6e-4)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_models_have_the_parameters_and_tensors_that_they_have(name: str) -> None:
    model = read_model(name.upper())
    assert model.parameters == pytest.approx(float(PUBLISHED[name]) * 1e9, rel=0.01)
    config = shipped.config(name)
    family, shape = family_of(config), rule_shape(shape_from_hf(config))
    targets = {hf for each in family.parameters(shape) for hf in _targets(family, shape, each)}
    assert model.tensors() == pytest.approx(len(targets), rel=0.01 if not name.startswith("glm4-") else 0.15)


def _targets(family: Any, shape: Any, name: str) -> list[str]:
    row, index = family.row(name)
    return list(row.targets(shape, index))


def test_products_are_those_of_the_matrices() -> None:
    dense, experts = plan("qwen3-8B"), plan("qwen3-30B-A3B")
    matrices = dense.model.parameters - 2 * dense.model.head_parameters
    assert training.layer_flops(dense) == pytest.approx(2 * matrices, rel=1e-3)
    taken = (
        experts.model.dense_parameters - 2 * experts.model.head_parameters + experts.model.expert_parameters * 8 / 128
    )
    assert training.layer_flops(experts) == pytest.approx(2 * taken, rel=1e-3)


def test_an_engine_makes_the_steps_that_one_makes_by_hand() -> None:
    """With fewer places than requests, and with prompts that come between two steps."""
    own = plan(prompt=20, concurrency=24, responses=_TAIL)
    costs = generation.TokenCosts(own)
    engine = generation.Engine(costs)
    engine.begin(0, _TAIL, 0.0)
    waiting, running, seconds = [int(length) for length in _TAIL], list[list[int]](), 0.0
    while waiting or running:
        came = 0
        while waiting and len(running) < 24:
            running.append([20, waiting.pop(0)])
            came += 20
        seconds += costs.prefill(came)
        seconds += sum(costs.parts(len(running), sum(has for has, _ in running)).values())
        running = [[has + 1, left - 1] for has, left in running if left > 1]
    assert engine.finish(0) == pytest.approx(seconds, rel=1e-9)
    assert sum(engine.spent.values()) == pytest.approx(seconds, rel=1e-9)


def test_engines_stop_where_they_are_told_to_and_begin_no_rollout_twice() -> None:
    costs = generation.TokenCosts(plan())
    engine, other = generation.Engine(costs), generation.Engine(costs)
    for each in (engine, other):
        each.begin(0, _TAIL, 0.0)
    whole = other.finish(0)
    for at in np.linspace(0.0, 0.9 * whole, 7):
        engine.go_until(float(at))
        assert at <= engine.now <= at + 0.1
    assert engine.finish(0) == pytest.approx(whole, rel=1e-6)
    engine.interrupt(1.0)
    assert engine.now == pytest.approx(whole + 1.0), "nothing runs whose cache would be computed anew"


def test_a_token_goes_to_as_many_ranks_as_experts_are_on() -> None:
    model = read_model("qwen3-30B-A3B")
    for ep in (2, 8, 64):
        own = Plan(model, GPUS["h200"], ep, ep, layout=Layout(ep=ep), responses=np.full(ep, 8), group=1)
        rng = random.Random(ep)
        drawn = [len({e // (128 // ep) for e in rng.sample(range(128), 8)} - {0}) for _ in range(4000)]
        assert training.other_ranks(own) == pytest.approx(float(np.mean(drawn)), rel=0.03)


def test_every_rank_holds_its_share() -> None:
    """All shares together are the model: once of what is cut, as often as there are copies of the rest."""
    model = read_model("qwen3-235B-A22B")
    own = Plan(model, GPUS["h200"], 128, 16, 8, layout=Layout(tp=4, pp=2, ep=16), responses=np.full(128, 100))
    assert training.parameters_stepped(own) * 128 == pytest.approx(model.parameters)
    copies = training.parameters_held(own) * 128
    assert copies == pytest.approx(model.dense_parameters * 16 + model.expert_parameters * 4)


def test_more_of_anything_costs_no_less() -> None:
    base = simulate(plan(responses=np.full(64, 512)))
    longer = simulate(plan(responses=np.full(64, 1024)))
    assert longer.seconds > 1.7 * base.seconds
    two = simulate(plan(responses=np.full(64, 512), trainers=2, engines=2))
    assert base.seconds / 2 < two.seconds < base.seconds
    referenced = simulate(plan(responses=np.full(64, 512), reference=True))
    extra = next(phase for phase in referenced.phases if phase.name.startswith("reference"))
    assert referenced.seconds == pytest.approx(base.seconds + extra.seconds)
    assert training.score(base.plan, "").seconds < training.train(base.plan).seconds / 2
    piped = training.train(plan(trainers=2, engines=2, layout=Layout(pp=2)))
    assert piped.parts["pipeline bubble"] > 0
    assert piped.seconds == pytest.approx(sum(piped.parts.values()))


@pytest.mark.parametrize(("number", "model"), [(1, "qwen3-1.7b"), (5, "qwen3-4b")])
def test_the_mfu_is_that_of_the_benchmark(number: int, model: str) -> None:
    """Of its own lengths, in the seconds that it took."""
    line = line_of("h200", number)
    step = simulate(alone(model))
    assert step.plan.lengths.sum() == line["tokens"]
    assert step.mfu(line["step_s"], line["gpus"]) == pytest.approx(line["value"], rel=1e-12)


def test_a_push_costs_by_the_engine_and_not_more() -> None:
    calls = [_push_seconds(engines) for engines in (8, 16, 32, 64)]
    rises = np.diff(calls) / np.array([8, 16, 32])
    assert rises == pytest.approx([rises[0]] * 3)
    assert rises[0] > 0


def _push_seconds(engines: int) -> float:
    own = plan("qwen3-30B-A3B", trainers=8, engines=engines, colocate=False, responses=np.full(512, 100))
    return handing.push(replace(own, layout=Layout(ep=8))).seconds


def test_memory_says_what_does_not_fit() -> None:
    assert memory(plan("qwen3-4B")).fits
    assert not memory(plan("qwen3-32B")).fits
    with pytest.raises(ValueError, match="has no room for qwen3-235B-A22B: 438 GiB of weights a GPU, of 98 GiB"):
        simulate(plan("qwen3-235B-A22B"))
    less = memory(plan("qwen3-4B", layout=Layout(recomputed=0.5)))
    assert less.activations < memory(plan("qwen3-4B")).activations


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "0 GPUs for engines are not a multiple of --rollout-num-gpus-per-engine 1: give --rollout-num-gpus"),
        ("--colocate --asynchronous", "asynchronous training needs GPUs apart for engines and trainers"),
        ("--colocate --tensor-model-parallel-size 16", "8 GPUs that train are not a multiple of 16"),
        ("--colocate --response-median 9 --response-spread -1", "--response-spread -1.0 is below 0"),
        ("--colocate --recomputed 2", "--recomputed 2.0 is not within 0 and 1"),
        ("--colocate --expert-model-parallel-size 8", "qwen3-8B has no experts to be parallel over 8 ranks"),
        ("--colocate --rollout-batch-size 1 --n-samples-per-prompt 3", "3 samples of an optimizer step are too few"),
        ("--colocate --sglang-mem-fraction-static 0.1", "14 GiB: raise --rollout-num-gpus-per-engine"),
    ],
)
def test_a_plan_that_does_not_work_is_told_in_a_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["step", "--model", "qwen3-8B", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("simulate.py: error: ")
    assert message in line


def test_a_step_is_told_to_people_and_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["step", "--model", "qwen3-4B", "--asynchronous", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus"]
    words += ["1", "--prompt-len", "14", "--rollout-max-response-len", "2048", "--response-median", "200"]
    assert program.main(words) == 0
    assert "a step, overlapping" in capsys.readouterr().out
    assert program.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["loop"] == "asynchronous, staleness 1"
    assert told["step_s"] < sum(phase["seconds"] for phase in told["phases"])
    assert told["tokens_per_s_per_gpu"] * 2 == pytest.approx(told["tokens_per_s"])


def test_the_check_is_what_the_page_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["check"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    page = (ROOT / "docs" / "scale.md").read_text()
    assert "FAR OFF" not in "".join(rows)
    assert [row for row in rows if row not in page] == []


def test_a_model_with_fewer_layers_is_the_first_ones() -> None:
    whole, part = read_model("deepseek-v3"), read_model("deepseek-v3", 4)
    assert isinstance(part, Model)
    assert (part.shape.num_moe_layers, part.dense_layers) == (1, 3)
    assert part.cached_bytes * 61 == whole.cached_bytes * 4
