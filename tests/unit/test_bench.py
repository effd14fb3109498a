"""What a benchmark says of itself."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from slime.entry.arguments import parse_args
from tools import bench, make_tiny_model
from tools.benchmarks import loop, rollout, train, trained
from tools.benchmarks.floor import generation_floor
from tools.benchmarks.report import Report, name_of

NUM_GPUS = 0


@pytest.mark.parametrize(
    "words",
    [
        ["step"],
        ["async", "--gpus", "2", "--budget-s", "300"],
        ["train", "--model", "qwen3-4b", "--profile", "--flags=--recompute-granularity full --seed 3"],
        ["train", "--model", "qwen3-30b-a3b", "--num-layers", "12"],
    ],
)
def test_the_command_of_a_figure_measures_the_same(words: list[str], tmp_path: Path) -> None:
    kept = ["--output", str(tmp_path / "out.jsonl"), "--log-dir", str(tmp_path)]
    command = bench.command_of(bench.parse([*words, *kept]))
    assert str(tmp_path) not in command
    again = shlex.split(command)
    assert again[:2] == ["python3", "tools/bench.py"]
    assert vars(bench.parse(again[2:])) == vars(bench.parse(words))


def test_a_model_of_ones_own_is_measured_with_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model.main(["mine"])
    options = bench.parse(["step", "--hf-checkpoint", "mine"])
    assert bench.command_of(options) == "python3 tools/bench.py step --hf-checkpoint=mine"
    options.scratch = tmp_path
    (tmp_path / "data").mkdir()
    words = loop.arguments(options, tmp_path / "run", [])
    assert words[words.index("--hf-checkpoint") + 1] == str(tmp_path / "mine")
    assert "--random-weights" not in words
    assert name_of(options) == "mine"
    options.hf_checkpoint = None
    assert "--random-weights" in loop.arguments(options, tmp_path / "run", [])


def test_the_rollout_path_is_measured_by_an_engine_of_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has options that no command line has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "engine_attention", lambda: ["--sglang-attention-backend", "triton"])
    make_tiny_model.main(["mine"])
    options = bench.parse(["rollout", "--hf-checkpoint", "mine"])
    options.scratch = tmp_path
    words = loop.arguments(options, tmp_path / "run", [])
    args = parse_args([*words, "--debug-rollout-only", "--rollout-num-gpus", "1"])
    command = rollout.engine_of(args, tmp_path)._command(1234, 1235)
    assert command[command.index("--model-path") + 1] == str(tmp_path / "mine")
    assert command[command.index("--attention-backend") + 1] == "triton"


def test_engines_choose_their_attention_where_its_kernels_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    assert loop.engine_attention() == ["--sglang-attention-backend", "triton"]
    (tmp_path / "sgl_kernel/flash_ops.abi3.so").touch()
    assert loop.engine_attention() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hf-checkpoint", "shape"], "--hf-checkpoint shape: no directory with config.json and *.safetensors"),
        (["--hf-checkpoint", "mine", "--num-layers", "2"], "--num-layers 2: --hf-checkpoint has a number of its own"),
        (["--hf-checkpoint", "mine", "--model", "qwen3-4b"], "--model: not allowed with argument --hf-checkpoint"),
        (["--gpus", "0"], "argument --gpus: 0 is not above 0"),
        (["--gpu", "1"], "unrecognized arguments: --gpu 1"),
        (["--flags", "--x 'y"], "--flags --x 'y: No closing quotation"),
    ],
)
def test_a_wrong_command_line_is_told(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model.main(["shape", "--like", "qwen3-4b"])
    with pytest.raises(SystemExit):
        bench.parse(["step", *words])
    assert message in capsys.readouterr().err


def test_a_figure_says_whether_it_is_reached(tmp_path: Path) -> None:
    report = Report("command", math.inf, tmp_path / "out.jsonl")
    report.add("refit", "qwen3-4b", 1, 0.05, "s", at_most=0.1)
    report.add("train, MFU", "qwen3-4b", 1, 0.05, "", at_least=0.42)
    report.add("step", "qwen3-4b", 1, 3.0, "s", parts={"generation": 1.0})
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["target"], row["met"]) for row in rows] == [(0.1, True), (0.42, False), (None, None)]
    assert rows[2]["parts"] == {"generation": 1.0}
    part = Report("command", math.inf, published=False)
    part.add("refit", "qwen3-4b, 2 layers", 1, 0.05, "s", at_most=0.1)
    assert (part.rows[0]["target"], part.rows[0]["met"]) == (None, None)


def test_a_host_of_too_few_gpus_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench.device, "count", lambda: 1)
    assert bench.main(["step", "--gpus", "2", "--log-dir", str(tmp_path / "logs")]) == 1
    assert capsys.readouterr().err == "bench: error: --gpus 2: GPUs that torch sees on this host: 1\n"
    monkeypatch.setattr(bench.device, "count", lambda: 0)
    assert bench.main(["step", "--log-dir", str(tmp_path / "logs")]) == 1
    assert "tools/bench_rollout_load.py, and scripts/quickstart.sh, measure without any" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("gpu", "mfu"),
    [("NVIDIA H200", 0.5), ("NVIDIA H100 80GB HBM3", 0.5), ("NVIDIA H100 PCIe", None), ("NVIDIA B200", None)],
)
def test_the_mfu_is_of_gpus_whose_peak_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, gpu: str, mfu: float | None
) -> None:
    figures = ("tokens_per_s_per_gpu", "step_s", "asleep_gib", "sleep_s", "wake_s", "wake_all_s")
    found = dict.fromkeys((*figures, "tokens", "micro_batches", "memory", "phases"), 1.0)

    def ranks(*_: Any, **__: Any) -> CompletedProcess[str]:
        (tmp_path / "train.json").write_text(json.dumps(found | {"flops_per_s_per_gpu": 989e12 / 2}))
        return CompletedProcess([], 0)

    monkeypatch.setattr(bench.device, "hardware", lambda: f"8 x {gpu}")
    monkeypatch.setattr(train, "make_model", lambda options: tmp_path)
    monkeypatch.setattr(train.subprocess, "run", ranks)
    options, report = bench.parse(["train"]), Report("command", math.inf)
    options.scratch = options.log_dir = tmp_path
    train.measure(options, report)
    rows = {row["case"]: row["value"] for row in report.rows}
    assert rows.pop("train, MFU", None) == (None if mfu is None else pytest.approx(mfu))
    assert list(rows) == ["train, tokens", "train, asleep", "train, sleep and wake"]
    assert (f"no peak is known of {gpu}, but of" in capsys.readouterr().err) == (mfu is None)


def test_the_text_that_a_model_is_trained_on_is_in_pieces_of_one_length() -> None:
    found = list(trained.pieces(loop.ROOT))
    assert {len(piece) for piece in found} == {2000}
    assert len(found) > trained.STEPS * trained.PIECES  # none is seen twice
    assert Path(__file__).read_text()[:2000] in found


def test_the_floor_of_generation_is_what_its_memory_takes(tmp_path: Path) -> None:
    """Of Qwen3-1.7B's matrices and norms, and of two bytes for each key and value, written out."""
    make_tiny_model.main([str(tmp_path / "mine"), "--like", "qwen3-1.7b"])
    layer = 2048 * (2048 + 2 * 1024 + 2048 + 3 * 6144) + 2 * 2048
    weights = 2 * (28 * layer + 151936 * 2048 + 2048)
    cache = sum(256 * (14 + made) * 28 * 2 * 8 * 128 * 2 for made in range(512))
    found = generation_floor(tmp_path / "mine", "NVIDIA H200", 256, 14, 512)
    assert found == pytest.approx((512 * weights + cache) / 4.8e12, rel=1e-4)
    assert generation_floor(tmp_path / "mine", "NVIDIA H100 PCIe", 256, 14, 512) is None


def test_what_a_gpu_waits_is_told_by_what_comes_after() -> None:
    lines = train.idle(
        [(5000.0, 9000.0, "late"), (0.0, 1000.0, "first"), (500.0, 900.0, "within"), (1005.0, 3000.0, "b")]
    )
    assert lines[0] == "idle 2.0 ms of 9.0, 2 gaps between 4 kernels and copies"
    assert lines[1:5] == [
        "  above 1000 us: 1 gaps, 2.0 ms",
        "  above 100 us: 0 gaps, 0.0 ms",
        "  above 10 us: 0 gaps, 0.0 ms",
        "  above 0 us: 1 gaps, 0.0 ms",
    ]
    assert train.idle([]) == ["idle: the profiler recorded no kernel"]
    assert lines[5:] == ["  2.00 ms at 5.0 ms, before late", "  0.01 ms at 1.0 ms, before b"]
