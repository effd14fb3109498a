"""The levels of tools/validate_model.py without their runs: what each plans, and how it judges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.utils import device
from tests.fake_launcher import ENGINE_ENDED, FakeLauncher, write_steps, write_weights
from tests.shipped import CONFIGS
from tools.validation import architecture, layouts, learning, resume, smoke
from tools.validation.dummy import write_model
from tools.validation.launches import Launcher, Run
from tools.validation.report import Status
from tools.validation.setting import LORA, Setting
from tools.validation.weights import differences, not_finite

NUM_GPUS = 0

PASS, FAIL, SKIPPED, BLOCKED = Status


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in ("qwen3-4B", "qwen3-30B-A3B"):
        write_model(CONFIGS / name, root / name, "float32", tiny=True, seed=0)
    return {name: root / name for name in ("qwen3-4B", "qwen3-30B-A3B")}


def setting(
    models: dict[str, Path], launcher: Launcher, name: str = "qwen3-4B", *, slots: int = 2, on_gpus: bool = False
) -> Setting:
    return Setting(models[name], True, "float32", on_gpus, slots, 0, [], launcher)


def test_level_0_passes_on_what_the_run_wrote(models: dict[str, Path], tmp_path: Path) -> None:
    launcher = FakeLauncher(tmp_path, write=write_steps)
    (item,) = smoke.check(setting(models, launcher))
    assert item.status is PASS, item.text
    assert "Megatron DDP over 2 rank(s)" in item.text
    assert "2 of 2 adapters moved (down_proj, up_proj)" in item.text
    assert "5 trainable parameters" in item.text
    words = launcher.words["level_0_loop"]
    assert words[words.index("--lora-rank") + 1] == LORA[1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"train/grad_norm": 0.0}, "gradient norm 0"),
        ({"train/grad_norm": float("nan")}, "not finite: train/grad_norm"),
        ({"train/loss": float("nan"), "train/clip": float("-inf")}, "not finite: train/clip, train/loss"),
        ({"train/train_rollout_logprob_abs_diff": 0.01}, "differ by 1.0e-02"),
        ({"train/kl_loss": 0.3}, "KL to the model without adapters 0.3"),
    ],
)
def test_level_0_fails_on_a_wrong_figure(
    models: dict[str, Path], tmp_path: Path, changes: dict[str, float], text: str
) -> None:
    launcher = FakeLauncher(tmp_path, write=lambda run, words: write_steps(run, words, **changes))
    (item,) = smoke.check(setting(models, launcher))
    assert item.status is FAIL
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(item.text)


@pytest.mark.parametrize(
    ("dtype", "kl", "status"),
    [("bfloat16", 4e-7, PASS), ("bfloat16", -4e-7, PASS), ("bfloat16", 8e-6, FAIL), ("float32", 4e-7, FAIL)],
)
def test_level_0_passes_what_gpus_round_in_16_bits(
    models: dict[str, Path], tmp_path: Path, dtype: str, kl: float, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    launcher = FakeLauncher(tmp_path, write=lambda run, words: write_steps(run, words, **{"train/kl_loss": kl}))
    (item,) = smoke.check(replace(setting(models, launcher, on_gpus=True), dtype=dtype))
    assert item.status is status, item.text


def test_an_engine_that_alone_fails_too_blocks_and_training_runs_without_it(
    models: dict[str, Path], tmp_path: Path
) -> None:
    launcher = FakeLauncher(tmp_path, ["level_0_loop", "engine"], write_steps)
    loop, training = smoke.check(setting(models, launcher))
    assert (loop.status, training.status) == (BLOCKED, PASS)
    assert f"train.py: error: {ENGINE_ENDED}" in loop.text
    assert loop.log == tmp_path / "engine" / "log"
    words = launcher.words["engine"]
    assert "--debug-rollout-only" in words
    assert not {"--colocate", "--actor-num-gpus-per-node"} & set(words)
    assert "--debug-train-only" in launcher.words["level_0_training"]


def test_an_engine_that_alone_works_makes_the_loops_end_a_failure(models: dict[str, Path], tmp_path: Path) -> None:
    (item,) = smoke.check(setting(models, FakeLauncher(tmp_path, ["level_0_loop"], write_steps)))
    assert (item.status, item.text) == (FAIL, "status 1: train.py: error: level_0_loop has no kernel")


@pytest.mark.parametrize(
    ("status", "error", "blocks"),
    [
        (1, "rollout 0: engine 0 failed (weight version 0): engine 0 at http://a:1 ended with status 137", True),
        (1, "rollout 0: the rollout manager failed (weight version 0): POST http://a:1/generate: status 500: x", True),
        (2, "--lora-sync adapter needs --lora-rank", False),
        (
            1,
            ENGINE_ENDED.replace("ended with status 1", "had not answered after 900 s (--engine-start-timeout)"),
            False,
        ),
        (1, "start router: the rollout manager failed (weight version none yet): the router ended", False),
        (None, ENGINE_ENDED, False),
    ],
)
def test_only_an_engine_that_itself_fails_blocks(
    models: dict[str, Path], tmp_path: Path, status: int | None, error: str, blocks: bool
) -> None:
    launcher = FakeLauncher(tmp_path, ["level_0_loop", "engine"], write_steps)
    launcher.ends = {"engine": (status, error)}
    ladder = setting(models, launcher)
    items = smoke.check(ladder)
    assert [item.status for item in items] == ([BLOCKED, PASS] if blocks else [FAIL])
    assert ladder.unserved() == blocks
    if not blocks:
        assert items[0].text.startswith("status 1: train.py: error: level_0_loop has no kernel; whether SGLang alone")


def test_the_engine_is_asked_without_adapters(models: dict[str, Path], tmp_path: Path) -> None:
    launcher = FakeLauncher(tmp_path)
    ladder = setting(models, launcher)
    ladder.flags = ["--lora-sync", "adapter", "--lora-target-modules", "q_proj", "v_proj", "--sglang-x", "1"]
    assert ladder.ask_engine().works
    left = ("--lora-", "--save-lora", "q_proj", "v_proj", "adapter")
    assert not [word for word in launcher.words["engine"] if word.startswith(left)]
    assert launcher.words["engine"][-4:-2] == ["--sglang-x", "1"]


def test_the_engine_is_asked_once(models: dict[str, Path], tmp_path: Path) -> None:
    launcher = FakeLauncher(tmp_path, ["level_0_loop", "level_2_loop", "engine"], write_steps)
    ladder = setting(models, launcher)
    smoke.check(ladder)
    assert layouts.check(ladder)[-1].status is BLOCKED
    assert learning.check(ladder)[-1].status is BLOCKED
    assert [run.name for run in launcher.runs].count("engine") == 1
    assert "level_2_loop" not in launcher.words


def test_an_engine_that_serves_but_not_the_same_tokens_blocks_level_1_alone(
    models: dict[str, Path], tmp_path: Path
) -> None:
    launcher = FakeLauncher(tmp_path, ["level_1_loop", "engine-"], write_steps)
    ladder = setting(models, launcher)
    loop, training = resume.check(ladder)
    assert loop.status is BLOCKED
    assert "on this host with --sglang-enable-deterministic-inference: status 1" in loop.text
    assert (training.part, training.status) == ("training part alone", FAIL)  # no checkpoint: the run was none
    assert smoke.check(ladder)[0].status is PASS
    assert ladder.unserved("--sglang-enable-deterministic-inference")
    assert not ladder.unserved()


def test_level_1_without_a_checkpoint_or_with_another_step_fails(models: dict[str, Path], tmp_path: Path) -> None:
    (item,) = resume.check(setting(models, FakeLauncher(tmp_path / "none", write=write_steps)))
    assert (item.status, item.text) == (FAIL, "the first rollout's checkpoint iter_0000000 is not there")

    def write(run: Run, words: list[str]) -> None:
        loss, steps = (2.1, 1) if "--load" in words else (2.0, 2)
        write_steps(run, [*words, "--num-rollout", str(steps)], **{"train/loss": loss})
        lines = [{"train/step": step, "train/loss": loss, "train/grad_norm": 0.5} for step in range(steps)]
        (run.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run.directory / "iter_0000000").mkdir(exist_ok=True)
        torch.save({"samples": [{"tokens": [1, 2]}]}, run.directory / "samples_1.pt")
        write_weights(run.directory / "hf_1", {"a": torch.ones(2)})

    (item,) = resume.check(setting(models, FakeLauncher(tmp_path / "other", write=write)))
    assert item.status is FAIL
    assert item.text == "not so: loss of the step after the resume 2.1, uninterrupted 2 (to 0.0001)"


@pytest.mark.parametrize(
    ("name", "slots", "planned"),
    [
        ("qwen3-4B", 1, []),
        ("qwen3-4B", 2, ["data 2", "tensor 2, sequence", "pipeline 2", "context 2"]),
        ("qwen3-30B-A3B", 2, ["data 2", "tensor 2, sequence", "pipeline 2", "context 2", "expert 2"]),
        ("qwen3-30B-A3B", 4, [layout.name for layout in layouts.LAYOUTS]),
    ],
)
def test_level_2_plans_what_model_and_host_allow(
    models: dict[str, Path], tmp_path: Path, name: str, slots: int, planned: list[str]
) -> None:
    ladder = setting(models, FakeLauncher(tmp_path, write=write_steps), name, slots=slots, on_gpus=True)
    items = {item.part: item for item in layouts.check(ladder)}
    assert [layout.name for layout in layouts.LAYOUTS if items[layout.name].status is PASS] == planned
    for layout in layouts.LAYOUTS:
        if layout.name not in planned:
            assert items[layout.name].status is SKIPPED
            fits = "no experts" in items[layout.name].text
            assert items[layout.name].left_out == (not fits)
            assert fits or f"there are {slots}" in items[layout.name].text


NO_MULTIPLE = "--num-layers 47 is not a multiple of --pipeline-model-parallel-size 2; see --x"


@pytest.mark.parametrize(
    ("end", "status", "left_out"),
    [
        ((2, NO_MULTIPLE), SKIPPED, False),
        ((2, "unrecognized arguments: --sequence-paralel"), FAIL, False),
        ((1, NO_MULTIPLE), FAIL, False),
        (
            (1, "train on rollout 0: trainer 0 failed (weight version 0): train: CUDA out of memory. Tried"),
            SKIPPED,
            True,
        ),
    ],
)
def test_only_a_layout_that_cannot_divide_the_model_does_not_apply(
    models: dict[str, Path], tmp_path: Path, end: tuple[int, str], status: Status, left_out: bool
) -> None:
    launcher = FakeLauncher(tmp_path, ["level_2_pipeline2"], write_steps)
    launcher.ends = {"level_2": end}
    items = {item.part: item for item in layouts.check(setting(models, launcher))}
    assert (items["pipeline 2"].status, items["pipeline 2"].left_out) == (status, left_out)
    assert items["one rank"].status is PASS


def test_level_2_does_not_pass_by_its_reference_alone(models: dict[str, Path], tmp_path: Path) -> None:
    names = ["level_2_data", "level_2_tensor", "level_2_pipeline", "level_2_context"]
    launcher = FakeLauncher(tmp_path, names, write_steps)
    launcher.ends = {"level_2": (2, NO_MULTIPLE)}
    items = layouts.check(setting(models, launcher))
    assert {item.status for item in items} == {SKIPPED}
    assert items[0].text.startswith("no layout was run that it could be compared with; 2 of 2 optimizer steps")
    assert "level_2_loop" not in launcher.words


def test_level_2_fails_where_a_layout_has_another_loss(models: dict[str, Path], tmp_path: Path) -> None:
    def write(run: Run, words: list[str]) -> None:
        write_steps(run, words, **{"train/loss": 2.01 if run.name == "level_2_context2" else 2.0})

    items = {item.part: item for item in layouts.check(setting(models, FakeLauncher(tmp_path, write=write)))}
    assert [part for part, item in items.items() if item.status is FAIL] == ["context 2"]
    assert "step 1 loss 2.01, on one rank 2" in items["context 2"].text


@pytest.mark.parametrize(("last", "status"), [(1.3, PASS), (1.5, FAIL)])
def test_level_5_states_the_margin(models: dict[str, Path], tmp_path: Path, last: float, status: Status) -> None:
    def write(run: Run, words: list[str]) -> None:
        steps = int(words[words.index("--num-rollout") + 1])
        losses = [2.0 if step < steps // 2 else last for step in range(steps)]
        lines: list[dict[str, Any]] = [
            {"train/step": i, "train/loss": loss, "train/grad_norm": 1.0} for i, loss in enumerate(losses)
        ]
        (run.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    item = learning.check(setting(models, FakeLauncher(tmp_path, ["level_5_grpo", "engine"], write)))[0]
    assert item.status is status
    assert "(at most 0.7 of it)" in item.text


@pytest.mark.parametrize(("idle", "status"), [(range(16, 20), PASS), (range(3, 5), FAIL)])
def test_level_5_needs_no_gradient_where_every_reward_is_the_best(
    idle: range, status: Status, models: dict[str, Path], tmp_path: Path
) -> None:
    rewards = [min(1.0, 0.5 + step / 32) for step in range(20)]
    lines: list[dict[str, Any]] = [
        {"train/step": i, "rollout/raw_reward": reward, "train/grad_norm": float(i not in idle)}
        | {"rollout/log_probs": -1.0 - i, "train/train_rollout_logprob_abs_diff": 0.0}
        for i, reward in enumerate(rewards)
    ]
    run = Run("level_5_grpo", tmp_path, tmp_path / "log", 0, 1.0)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    item = learning._judge(setting(models, FakeLauncher(tmp_path)), "reward", run, "rollout/raw_reward")
    assert item.status is status, item.text


def test_level_4_finds_a_tensor_that_was_not_trained(models: dict[str, Path], tmp_path: Path) -> None:
    ladder = setting(models, FakeLauncher(tmp_path), "qwen3-30B-A3B")
    weights = load_file(ladder.model / "model.safetensors")
    frozen = {"model.norm.weight", "model.layers.0.mlp.experts.3.up_proj.weight"}
    run = Run("level_4_step", tmp_path, tmp_path / "log", 0, 1.0)
    write_steps(run, ["--num-rollout", "1"])
    for expected, kept in ((PASS, frozen - {"model.norm.weight"}), (FAIL, frozen)):
        moved = {name: tensor + (0.0 if name in kept else 0.01) for name, tensor in weights.items()}
        write_weights(tmp_path / "hf", moved)
        item = architecture._all_trained(ladder, run, "x")
        assert item.status is expected
    assert "(not: model.norm.weight)" in item.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_level_4_fails_by_what_is_not_finite(models: dict[str, Path], tmp_path: Path, value: float) -> None:
    ladder = setting(models, FakeLauncher(tmp_path), "qwen3-30B-A3B")
    moved = {name: tensor + 0.01 for name, tensor in load_file(ladder.model / "model.safetensors").items()}
    moved["model.norm.weight"][3] = value
    run = Run("level_4_step", tmp_path, tmp_path / "log", 0, 1.0)
    write_steps(run, ["--num-rollout", "1"], **{"train/loss": value})
    write_weights(tmp_path / "hf", moved)
    item = architecture._all_trained(ladder, run, "x")
    assert item.status is FAIL
    assert "every tensor of the export is finite (not: model.norm.weight)" in item.text
    assert "not finite: train/loss" in item.text


def test_what_is_not_finite_differs(tmp_path: Path) -> None:
    strange = {"nan": torch.tensor([1.0, float("nan")]), "inf": torch.tensor([float("inf")])}
    for name in ("a", "b"):
        write_weights(tmp_path / name, {"one": torch.ones(2), **strange})
    assert differences(tmp_path / "a", tmp_path / "b") == {"one": 0.0, "nan": float("inf"), "inf": float("inf")}
    assert not_finite(tmp_path / "a") == ["inf", "nan"]
    assert not resume.close("x", 1.0, "y", float("inf"), 0.1).ok
