"""One RL step under every layout: the same loss, metrics, gradients and weights as in one process and in plain PyTorch.

Every case is trained with SGD on a rollout in two steps, the second off policy and beyond the clip ranges, and with
AdamW on it in one step (`tests.parallel.cases`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.training.checks import rounding
from slime.utils import device
from tests.parallel import plain, rollouts, tiny
from tests.parallel.cases import OPTIMIZERS, RL_CASES, RL_OPTIONS, steps_of
from tests.parallel.conftest import run_worker
from tests.parallel.outcome import Difference, Outcome, compare

NUM_GPUS = 0

Job = tuple[str, str, str, str]
"""Kind of model, case, optimizer, variant."""
KINDS = ("qwen3", "llama", "qwen3_moe")
RTOL = 1e-5
ADAM = 0.02
"""Of the learning rate."""
TIE = 3e-6
"""Nearer to a bound than this, rounding could decide whether a token is clipped."""

TP, PP, CP, EP = (f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model"))
VPP, SP = "virtual_pipeline_model_parallel_size", "sequence_parallel"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_sp": (2, {TP: 2, SP: True}),
    "pp2": (2, {PP: 2}),
    "pp2_vpp2": (2, {PP: 2, VPP: 2}),
    "cp2": (2, {CP: 2}),
    "ep2": (2, {EP: 2}),
    "dp2": (2, {"use_distributed_optimizer": True}),
    "tp2_pp2": (4, {TP: 2, SP: True, PP: 2}),
    "tp2_cp2": (4, {TP: 2, SP: True, CP: 2}),
    "cp2_dp2": (4, {CP: 2, "use_distributed_optimizer": True}),
}
IN_CI: dict[str, tuple[str, ...]] = {
    "tp2_sp": ("grpo", "ppo_token"),
    "pp2": ("gspo", "ppo"),
    "pp2_vpp2": ("grpo_token", "ppo"),
    "cp2": ("cispo", "gspo"),
    "ep2": ("gspo", "grpo_token"),
    "dp2": ("grpo", "ppo"),
    "tp2_pp2": ("cispo_token", "ppo_token"),
    "tp2_cp2": ("grpo_token", "ppo"),
    "cp2_dp2": ("gspo_token", "ppo"),
}
IN_FULL = ("tp2_sp", "pp2", "dp2", "tp2_cp2", "cp2_dp2")
"""Without GPUs in the full tier only: what is special to each is in CI in another layout, or by test_trainer."""
ONE_MORE_IN_CI: dict[str, tuple[tuple[str, str], ...]] = {
    "tp2_sp": (("custom", ""), ("grpo", "recompute"), ("distilled", ""), ("distilled_top", "")),
    "pp2": (("ppo", "first_of_1"), ("distilled", ""), ("distilled_top", "")),
    "pp2_vpp2": (("grpo_token", "chunks_of_0_2_1_1"),),
    "cp2": (("custom_token", ""), ("cispo", "selective"), ("distilled", ""), ("distilled_top", "")),
    "ep2": (("custom_token", ""), ("gspo", "selective_moe"), ("distilled", "")),
    "dp2": (("dr_grpo", ""),),
}
"""Besides, with SGD only: case and variant."""
ON_POLICY = ("one", "tp2_sp", "pp2", "cp2")


def kind_in_ci(layout: str) -> str:
    return "qwen3_moe" if layout == "ep2" else "qwen3"


def variants_of(layout: str, kind: str) -> list[str]:
    """Those that the layout and the model have."""
    selective = "selective_moe" if kind == "qwen3_moe" else "selective"
    if layout == "pp2_vpp2":
        return ["recompute", selective, "offload", "chunks_of_0_2_1_1"]
    uneven = ["first_of_1", "last_of_1", "stages_of_1_3"] if PP in LAYOUTS[layout][1] else []
    return ["recompute", selective, "offload", *uneven]


def jobs_of(layout: str, *, in_ci: bool) -> list[Job]:
    """A layout's jobs of CI, or all that are left to the full tier."""
    kind = kind_in_ci(layout)
    chosen = [(kind, case, optimizer, "") for case in IN_CI[layout] for optimizer in OPTIMIZERS]
    chosen += [(kind, case, "sgd", variant) for case, variant in ONE_MORE_IN_CI.get(layout, ())]
    if in_ci:
        return chosen
    kinds = ("qwen3_moe",) if layout == "ep2" else KINDS
    every = [(k, c, o, "") for k in kinds for c in RL_CASES for o in OPTIMIZERS]
    every += [(k, c, "sgd", v) for k in kinds for v in variants_of(layout, k) for c in IN_CI[layout]]
    return [job for job in every if job not in chosen]


def plain_jobs(jobs: Iterable[Job]) -> list[Job]:
    """What one process computes for the jobs to be compared with."""
    return sorted({(kind, case, optimizer, "") for kind, case, optimizer, _ in jobs})


ONE_IN_CI = plain_jobs(job for layout in LAYOUTS if layout not in IN_FULL for job in jobs_of(layout, in_ci=True))
ONE = {True: ONE_IN_CI, False: [(k, c, o, "") for k in KINDS for c in RL_CASES for o in OPTIMIZERS
                                if (k, c, o, "") not in ONE_IN_CI]}  # fmt: skip


class Runs:
    """The runs of this session, each made once."""

    def __init__(self, work: Path) -> None:
        self.work = work
        (work / "models").mkdir()

    def run(self, name: str, ranks: int, layout: dict[str, Any], jobs: Iterable[Job], **spec: Any) -> dict[str, Any]:
        """What `rl_worker` reports of the jobs."""
        report = self.work / f"{name}.json"
        if not report.exists():
            for kind in {kind for kind, *_ in jobs}:
                self._make(kind)
            spec |= {"name": name, "layout": layout, "jobs": list(jobs)}
            started = time.perf_counter()
            run_worker(ranks, "rl_worker.py", self.work, json.dumps(spec), log=self.work / f"{name}.log", timeout=1800)
            print(f"{name}: {time.perf_counter() - started:.0f} s")
        return json.loads(report.read_text())

    def one(self, *, in_ci: bool) -> dict[str, Any]:
        """The one-process run, which writes the outcomes that the others are compared with."""
        on_policy = on_policy_jobs("one", in_ci=in_ci)
        return self.run(f"one.{in_ci}", 1, {}, ONE[in_ci], compare=False, on_policy=on_policy)

    def _make(self, kind: str) -> None:
        """A model, and the rows of its rollouts."""
        directory = self.work / "models" / kind
        if directory.exists():
            return
        tiny.model(kind).save_pretrained(directory)
        tiny.model(kind, seed=100).save_pretrained(f"{directory}_teacher")
        args = rollouts.arguments(directory)
        for rollout_id, count in enumerate((16, 8)):
            rows = rollouts.uneven(rollout_id, count)
            rows = rollouts.from_engine(rows, plain.log_probs(args, directory, rows), seed=rollout_id)
            torch.save(rows, self.work / f"{kind}.rows{rollout_id}.pt")


def on_policy_jobs(layout: str, *, in_ci: bool) -> list[tuple[str, str, int]]:
    """Kind, parameter type, steps per rollout: with two, old log-probs have a pass of their own."""
    if layout not in ON_POLICY:
        return []
    kinds = ["qwen3"] if in_ci else [kind for kind in KINDS if kind != "qwen3"]
    return [(kind, dtype, steps) for kind in kinds for dtype in ("float32", "bfloat16") for steps in (1, 2)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("rl"))


def check(differences: dict[Job, Difference]) -> None:
    """The bounds of jobs' comparisons."""
    wrong = []
    for (kind, case, optimizer, variant), difference in differences.items():
        name = " ".join((kind, case, optimizer, variant))
        bounds = {"metric": RTOL, "gradient": RTOL}
        bounds |= {"weight": RTOL} if optimizer == "sgd" else {"update": ADAM}
        found = {name: getattr(difference, name) for name in bounds}
        left_out = f"; {difference.left_out} of {difference.weights} weights left out" if optimizer == "adam" else ""
        print(f"{name}: " + ", ".join(f"{n} {e:.1e}" for n, (e, _) in found.items()) + left_out)
        wrong += [f"{name}: {n} {found[n]}" for n in bounds if not found[n][0] < bounds[n]]
        if optimizer == "adam" and difference.left_out > difference.weights / 10:
            wrong.append(f"{name}: AdamW's step is compared for too few weights{left_out}")
    assert not wrong, "\n".join(wrong)


def check_on_policy(report: dict[str, Any], jobs: list[Job], exact: list[tuple[str, str, int]]) -> None:
    """On the first step all ratios are 1 and the KL divergence to the equal reference is 0, exactly but for what
    `rounding` lets pass on GPUs."""
    # Users' losses report what they like, and the engine's log-probs are not the trainer's.
    others = {case for case, options in RL_CASES.items() if {"use_rollout_logprobs", "loss_type"} & options.keys()}
    first = [report[".".join(job)]["metrics"][0] for job in jobs if job[1] not in others]
    first += [report[".".join(map(str, job))] for job in exact]
    for metrics in first:
        assert abs(metrics["train/ppo_kl"]) <= rounding("float32")
        assert metrics["train/pg_clipfrac"] == 0.0
        assert abs(metrics.get("train/kl_loss", 0.0)) <= rounding("float32", "k3")


def check_layout(runs: Runs, layout: str, *, in_ci: bool) -> None:
    for tier in {True, in_ci and layout not in IN_FULL}:  # what is in CI for one layout is not for another
        runs.one(in_ci=tier)
    ranks, options = LAYOUTS[layout]
    jobs, exact = jobs_of(layout, in_ci=in_ci), on_policy_jobs(layout, in_ci=in_ci)
    report = runs.run(f"{layout}.{in_ci}", ranks, options, jobs, compare=True, on_policy=exact)
    check({job: Difference(**report[".".join(job)]["difference"]) for job in jobs})
    check_on_policy(report, jobs, exact)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.full] * (name in IN_FULL and not device.is_cuda())) for name in LAYOUTS],
)
def test_layout(runs: Runs, layout: str) -> None:
    check_layout(runs, layout, in_ci=True)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_with_all_models_and_algorithms(runs: Runs, layout: str) -> None:
    check_layout(runs, layout, in_ci=False)


def check_plain(runs: Runs, *, in_ci: bool) -> None:
    report, jobs = runs.one(in_ci=in_ci), ONE[in_ci]
    differences = {}
    for kind, case, optimizer, _ in jobs:
        name = f"{kind}.{case}.{optimizer}"
        directory = runs.work / "models" / kind
        args = rollouts.arguments(directory, **RL_OPTIONS, **{**RL_CASES[case], **OPTIMIZERS[optimizer]})
        trained = [
            (torch.load(runs.work / f"{kind}.rows{rollout_id}.pt", weights_only=False), count)
            for rollout_id, count in enumerate(steps_of(case, optimizer))
        ]
        wanted = plain.train(args, directory, trained)
        assert wanted.nearest > TIE, f"{name}: a token is {wanted.nearest} from a bound; take another --lr or seed"
        differences[kind, case, optimizer, ""] = compare(Outcome.load(runs.work / f"{name}.pt"), wanted)
        if optimizer == "sgd":
            check_exercised(case, report[f"{name}."]["metrics"])
    check(differences)
    check_on_policy(report, jobs, on_policy_jobs("one", in_ci=in_ci))


def check_exercised(case: str, metrics: list[dict[str, float]]) -> None:
    """What the case is about does happen, to some tokens and not to all."""
    for name, value in metrics[1].items():
        if name.endswith(("clipfrac", "dropfrac")):
            assert 0.0 < value < 1.0, f"{case}: {name} is {value}"


def test_one_process_equals_plain_pytorch(runs: Runs) -> None:
    check_plain(runs, in_ci=True)


@pytest.mark.full
def test_one_process_equals_plain_pytorch_with_all_models_and_algorithms(runs: Runs) -> None:
    check_plain(runs, in_ci=False)
