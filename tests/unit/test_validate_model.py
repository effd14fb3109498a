"""tools/validate_model.py without its runs: what it plans, and how it judges."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from slime.models import hf_config, shape_from_hf
from slime.models.shape import rule_shape
from tools import validate_model
from tools.validation import architecture, climb, layouts, learning, resume, smoke
from tools.validation.dummy import shrunk, write_model
from tools.validation.launches import Launcher, Run
from tools.validation.report import Status
from tools.validation.setting import LORA, Setting

NUM_GPUS = 0

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"
PASS, FAIL, SKIPPED, BLOCKED = Status


def supported(directory: Path) -> bool:
    try:
        shape_from_hf(hf_config(directory))
    except ValueError:
        return False
    return True


# ---- the dummy model


@pytest.mark.parametrize("directory", [p for p in sorted(CONFIGS.iterdir()) if supported(p)], ids=lambda p: p.name)
def test_a_tiny_model_keeps_the_architecture(directory: Path, tmp_path: Path) -> None:
    values = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shrunk(values)))
    full, small = (shape_from_hf(hf_config(path)) for path in (directory, tmp_path))
    assert rule_shape(small).given >= rule_shape(full).given - {"mtp_num_layers"}
    assert small["group_query_attention"] == full["group_query_attention"]
    for name in ("rotary_base", "rotary_percent", "normalization", "norm_epsilon", "use_rope_scaling"):
        assert small[name] == full[name]
    assert small["hidden_size"] == 128


def test_the_dummy_is_complete_and_of_the_seed(tmp_path: Path) -> None:
    counts = [
        write_model(CONFIGS / "moonlight", tmp_path / str(i), "float32", tiny=True, seed=i // 2) for i in range(3)
    ]
    assert len(set(counts)) == 1
    weights = [(tmp_path / str(i) / "model.safetensors").read_bytes() for i in range(3)]
    assert weights[0] == weights[1] != weights[2]
    config = json.loads((tmp_path / "0" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (tmp_path / "0" / "tokenizer.json").is_file()


# ---- the ladder, with runs that only say how they ended


class FakeLauncher(Launcher):
    """Runs that begin with a word of ``failing`` end with status 1; the others write what ``write`` has of them."""

    def __init__(
        self, output: Path, failing: Sequence[str] = (), write: Callable[[Run, list[str]], None] | None = None
    ):
        super().__init__(output, 1.0)
        self.failing, self.write = tuple(failing), write
        self.words: dict[str, list[str]] = {}

    def run(self, name: str, script: str, words: Sequence[str]) -> Run:
        directory = self.directory(name)
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "log"
        fails = name.startswith(self.failing) if self.failing else False
        log.write_text(f"$ {script}\n" + (f"train.py: error: {name} has no kernel\n" if fails else ""))
        run = Run(name, directory, log, int(fails), 1.0)
        self.words[name] = list(words)
        self.runs.append(run)
        if self.write is not None and not fails:
            self.write(run, self.words[name])
        return run


def write_steps(run: Run, words: list[str], **changes: float) -> None:
    """What a good run leaves: metrics of every rollout, its configuration, and adapters."""
    ranks = int(words[words.index("--actor-num-gpus-per-node") + 1]) if "--actor-num-gpus-per-node" in words else 1
    rank = 4 if "--lora-rank" in words else None
    (run.directory / "config.yaml").write_text(yaml.safe_dump({"a": {"data_parallel_size": ranks, "lora_rank": rank}}))
    steps = int(words[words.index("--num-rollout") + 1])
    values = {"train/loss": 2.0, "train/grad_norm": 0.5, "train/train_rollout_logprob_abs_diff": 1e-6} | changes
    if "--use-kl-loss" in words:
        values.setdefault("train/kl_loss", 0.0)
    lines = [{"train/step": step, **values} for step in range(steps)]
    pushes = [{"perf/update_weights_time": 1.0}] * (steps + 1)
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *pushes]))
    if "--save-lora" in words:
        directory = Path(words[words.index("--save-lora") + 1])
        directory.mkdir(parents=True)
        names = [f"base_model.model.model.layers.0.mlp.{kind}.lora_B.weight" for kind in ("up_proj", "down_proj")]
        save_file(
            dict.fromkeys(names[:1], torch.ones(2)) | {names[1]: torch.ones(3)}, directory / "adapter_model.safetensors"
        )


def write_weights(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")


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


def test_an_engine_that_alone_fails_too_blocks_and_training_runs_without_it(
    models: dict[str, Path], tmp_path: Path
) -> None:
    launcher = FakeLauncher(tmp_path, ["level_0_loop", "engine"], write_steps)
    loop, training = smoke.check(setting(models, launcher))
    assert (loop.status, training.status) == (BLOCKED, PASS)
    assert "train.py: error: engine has no kernel" in loop.text
    assert loop.log == tmp_path / "engine" / "log"
    words = launcher.words["engine"]
    assert "--debug-rollout-only" in words
    assert not {"--colocate", "--actor-num-gpus-per-node"} & set(words)
    assert "--debug-train-only" in launcher.words["level_0_training"]


def test_an_engine_that_alone_works_makes_the_loops_end_a_failure(models: dict[str, Path], tmp_path: Path) -> None:
    (item,) = smoke.check(setting(models, FakeLauncher(tmp_path, ["level_0_loop"], write_steps)))
    assert (item.status, item.text) == (FAIL, "status 1: train.py: error: level_0_loop has no kernel")


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
            assert "no experts" in items[layout.name].text or f"there are {slots}" in items[layout.name].text


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


def test_level_4_finds_a_tensor_that_was_not_trained(models: dict[str, Path], tmp_path: Path) -> None:
    ladder = setting(models, FakeLauncher(tmp_path), "qwen3-30B-A3B")
    weights = load_file(ladder.model / "model.safetensors")
    frozen = {"model.norm.weight", "model.layers.0.mlp.experts.3.up_proj.weight"}
    run = Run("level_4_step", tmp_path, tmp_path / "log", 0, 1.0)
    for expected, kept in ((PASS, frozen - {"model.norm.weight"}), (FAIL, frozen)):
        moved = {name: tensor + (0.0 if name in kept else 0.01) for name, tensor in weights.items()}
        write_weights(tmp_path / "hf", moved)
        item = architecture._all_trained(ladder, run, "x")
        assert item.status is expected
    assert "(not: model.norm.weight)" in item.text


# ---- programs


def test_a_level_whose_files_are_missing_fails_and_the_next_is_climbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(climb, "Launcher", lambda output, limit_s: FakeLauncher(output))
    words = [
        "--config",
        str(CONFIGS / "qwen3-4B"),
        "--tiny",
        "--levels",
        "0",
        "3",
        "--output-dir",
        str(tmp_path / "out"),
    ]
    assert validate_model.main(words) == 1
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "out" / "report.txt").read_text()
    assert "  - what the runs wrote: Fail - FileNotFoundError: " in printed
    assert "- Level 3, FSDP variant: Skipped" in printed
    assert "- command: python3 tools/validate_model.py --config" in printed


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["ValueError: no kernel"], "ValueError: no kernel"),
        (["ValueError: no kernel", "going down"], "ValueError: no kernel"),
        (
            ["    assert scaling is not None", "    ^^^^", "AssertionError"],
            "AssertionError of `assert scaling is not None`",
        ),
        (["going down"], None),
    ],
)
def test_the_cause_is_the_error_and_the_exception_behind_it(tmp_path: Path, lines: list[str], why: str | None) -> None:
    error = "train.py: error: engine 0 ended with status 1"
    (tmp_path / "log").write_text("\n".join(["$ x", error, "last lines of engine_0.log:", *lines, ""]))
    found = Run("x", tmp_path, tmp_path / "log", 1, 1.0).why()
    assert found == ": ".join(["status 1", error, *filter(None, [why])])


def test_a_run_at_its_deadline_is_ended_and_names_the_flag(tmp_path: Path) -> None:
    run = Launcher(tmp_path, 0.5).run("slow", "-c", ["import time; print('going', flush=True); time.sleep(60)"])
    assert run.status is None
    assert run.seconds < 30
    assert "--launch-timeout" in run.why()
    assert run.log.read_text().startswith("$ ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nowhere"], "there is no"),
        (["--config", str(CONFIGS / "qwen3-4B"), "--tiny", "--output-dir", "OUTPUT"], "is not empty"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert validate_model.main([str(tmp_path) if word == "OUTPUT" else word for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
