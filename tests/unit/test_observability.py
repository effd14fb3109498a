"""Metrics sinks and the end-of-step line."""

import argparse
import json
import random
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.observability.metrics import MetricsLogger
from slime.observability.progress import done_line, step_line
from slime.utils.errors import BadInputError

NUM_GPUS = 0


def make_args(run_dir: Path, **changes: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {
        "run_dir": run_dir,
        "use_tensorboard": False,
        "tb_project_name": None,
        "tb_experiment_name": None,
        "use_wandb": False,
        "wandb_mode": None,
        "wandb_dir": None,
        "wandb_key": None,
        "wandb_host": None,
        "wandb_team": None,
        "wandb_group": None,
        "wandb_project": None,
        "wandb_run_id": None,
        "disable_wandb_random_suffix": False,
        "wandb_always_use_train_step": False,
        "num_steps_per_rollout": 2,
    }
    return argparse.Namespace(**{**defaults, **changes})


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_line_is_on_disk_at_once_with_step_key_and_time(tmp_path: Path) -> None:
    logger = MetricsLogger(make_args(tmp_path / "made" / "here"))
    values = {f"train/m{i}": random.uniform(-1e6, 1e6) for i in range(20)}
    before = time.time()
    logger.log(values, "train/step", 7)
    (line,) = read_lines(tmp_path / "made" / "here")
    assert before <= line.pop("time") <= time.time()
    assert line == {"train/step": 7, **values}
    logger.close()
    logger.close()


def test_numpy_and_torch_scalars_become_plain_numbers(tmp_path: Path) -> None:
    logger = MetricsLogger(make_args(tmp_path))
    value = random.random()
    values = {
        "float32": np.float32(value),
        "int64": np.int64(-3),
        "array": np.array([value]),
        "tensor": torch.tensor(value, dtype=torch.float64),
        "bool": np.bool_(True),
    }
    logger.log(values, "rollout/step", 0)
    (line,) = read_lines(tmp_path)
    assert line["float32"] == pytest.approx(value, rel=1e-6)
    assert (line["int64"], line["array"], line["tensor"], line["bool"]) == (-3, value, value, True)


def test_values_that_are_not_finite_are_valid_json_and_keep_their_meaning(tmp_path: Path) -> None:
    logger = MetricsLogger(make_args(tmp_path))
    logger.log({"nan": float("nan"), "inf": np.float32("inf"), "minus": -float("inf")}, "rollout/step", 0)
    (line,) = read_lines(tmp_path)
    assert np.isnan(float(line["nan"]))
    assert (float(line["inf"]), float(line["minus"])) == (float("inf"), -float("inf"))


@pytest.mark.parametrize("value", [None, "fast", [1.0], np.zeros(2), np.zeros(0), torch.zeros(3), {"a": 1}])
def test_what_is_no_scalar_is_refused_by_name_and_nothing_is_written(tmp_path: Path, value: Any) -> None:
    logger = MetricsLogger(make_args(tmp_path))
    with pytest.raises(TypeError, match=r"metric 'rollout/odd' is a "):
        logger.log({"rollout/fine": 1.0, "rollout/odd": value}, "rollout/step", 0)
    assert read_lines(tmp_path) == []


def test_a_resumed_run_appends_and_a_line_cut_off_by_a_crash_stays_alone(tmp_path: Path) -> None:
    first = MetricsLogger(make_args(tmp_path))
    first.log({"a": 1}, "rollout/step", 0)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"rollout/step": 1, "a')
    second = MetricsLogger(make_args(tmp_path))
    second.log({"a": 2}, "rollout/step", 1)
    second.close()
    third = MetricsLogger(make_args(tmp_path))
    third.log({"a": 3}, "rollout/step", 2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[1] == '{"rollout/step": 1, "a'
    assert [json.loads(lines[i])["a"] for i in (0, 2, 3)] == [1, 2, 3]


def test_tensorboard_holds_what_was_logged_also_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"use_tensorboard": True, "tb_project_name": str(tmp_path / "tb"), "tb_experiment_name": "one"}
    values = [random.random() for _ in range(6)]
    for steps in ((0, 1, 2), (3, 4, 5)):
        logger = MetricsLogger(make_args(tmp_path, **options))
        for step in steps:
            logger.log({"rollout/raw_reward": values[step]}, "rollout/step", step)
        logger.close()
    events = EventAccumulator(str(tmp_path / "tb" / "one"))
    events.Reload()
    points = events.Scalars("rollout/raw_reward")
    assert [point.step for point in points] == list(range(6))
    assert [point.value for point in points] == pytest.approx(values, rel=1e-6)


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format (blocks of 32 KiB, parts of long records) after a header."""
    data, position, record = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if position + 7 + length > len(data):
            return  # the file is still being written
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def finished_wandb_records(directory: Path, timeout: float = 60.0) -> list[Any]:
    """The records of the one offline run below ``directory``, waiting for its last one.

    ``finish`` returns once W&B's service has taken everything, which it may still be writing on a busy machine.
    """
    from wandb.proto import wandb_internal_pb2

    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    end = time.monotonic() + timeout
    while True:
        records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file)]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < end, f"{file} has no exit record after {timeout:g} s"
        time.sleep(0.05)


def read_wandb(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """History rows, configuration and run record of the one offline run below ``directory``."""
    rows, config, run = [], {}, None
    for record in finished_wandb_records(directory):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif kind == "run":
            run = record.run
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return rows, config, run


def test_wandb_offline_writes_metrics_and_options_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    args = make_args(
        tmp_path,
        use_wandb=True,
        wandb_mode="offline",
        wandb_dir=str(tmp_path / "w"),
        wandb_project="arithmetic",
        wandb_group="g",
        disable_wandb_random_suffix=True,
        wandb_run_id="run1234",
        wandb_key="0123456789" * 4,
        wandb_always_use_train_step=True,
        sglang_router_api_key="sk-router-secret",
        sglang_cli=["--api-key", "sk-cli-secret"],
        sglang_ssl_keyfile_password="p-secret",
        train_env_vars={"HF_TOKEN": "hf-secret", "N": "env-secret"},
        judge_secret="yaml-secret",
        input_key="question",
        lr=0.25,
    )
    words = ["train.py", "--wandb-key", args.wandb_key, "--judge-token=word-secret", "--lr", "0.25"]
    monkeypatch.setattr(sys, "argv", words)
    logger = MetricsLogger(args)
    reward = random.random()
    logger.log({"rollout/raw_reward": reward}, "rollout/step", 3)
    logger.log({"train/loss": 0.5}, "train/step", 6)
    logger.close()

    rows, config, run = read_wandb(tmp_path / "w")
    assert [(row.get("rollout/raw_reward"), row.get("rollout/step")) for row in rows[:1]] == [(reward, 6)]
    assert [(row.get("train/loss"), row.get("train/step")) for row in rows[1:]] == [(0.5, 6)]
    assert (run.run_id, run.project, run.run_group, run.display_name) == ("run1234", "arithmetic", "g", "g")
    assert (config["lr"], config["input_key"]) == (0.25, "question")
    assert config["train_env_vars"] == {"HF_TOKEN": "<redacted>", "N": "<redacted>"}
    for file in (tmp_path / "w").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"-secret" not in content, file
            assert args.wandb_key.encode() not in content, file
    assert read_lines(tmp_path)[0]["rollout/step"] == 3
    recorded = [record.environment.args for record in finished_wandb_records(tmp_path / "w")]
    assert ["--wandb-key", "<redacted>", "--judge-token=<redacted>", "--lr", "0.25"] in [list(a) for a in recorded]


def test_wandb_without_a_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(BadInputError, match=r"^--use-wandb: .*API key.* \(see --wandb-key, .*--wandb-mode offline\)$"):
        MetricsLogger(make_args(tmp_path, use_wandb=True))


def test_wandb_disabled_writes_no_files(tmp_path: Path) -> None:
    logger = MetricsLogger(make_args(tmp_path, use_wandb=True, wandb_mode="disabled", wandb_group="g"))
    logger.log({"a": 1.0}, "rollout/step", 0)
    logger.close()
    assert not (tmp_path / "wandb").exists()


def test_step_line_names_the_phase_that_took_longest() -> None:
    metrics = {
        "rollout/raw_reward": 0.4141,
        "rollout/rewards": 0.0,
        "train/loss": -0.00123,
        "perf/rollout_time": 1.9,
        "perf/train_time": 0.9,
        "perf/update_weights_time": 0.3,
        "perf/step_time": 3.24,
        "eval/step": 12,
        "eval/aime-2024": 0.53,
        "eval/aime-2024-pass@4": 0.9,
        "eval/aime-2024-avg@4": 0.53,
        "eval/aime-2024-truncated_ratio": 0.1,
        "eval/aime-2024-no_reward": 0.0,
        "eval/aime-2024/response_len/mean": 80.0,
    }
    assert step_line(11, 60, metrics) == (
        "rollout 12/60 | reward 0.414 | loss -0.0012 | eval/aime-2024 0.530 | 3.2 s | bound by rollout (1.9 s)"
    )
    with_probe = step_line(11, 60, metrics | {"rollout/push_probe_abs_diff": 3.21e-7})
    assert with_probe.startswith("rollout 12/60 | reward 0.414 | loss -0.0012 | probe 3e-07 | eval/aime-2024 0.530 | ")
    assert step_line(11, 60, metrics | {"perf/train_time": 2.5}).endswith("bound by training (2.5 s)")
    assert step_line(11, 60, metrics | {"perf/update_weights_time": 2}).endswith("bound by push (2.0 s)")


def test_done_line_says_where_the_results_are() -> None:
    saves = {"save": "out/ckpt", "save_hf": "out/hf_{rollout_id}", "save_lora": None}
    args = argparse.Namespace(num_rollout=3, start_rollout_id=0, placement="colocate", run_dir="out/run", **saves)
    places = "checkpoint in out/ckpt, Hugging Face model in out/hf_2, "
    assert done_line(args) == f"done: 3 rollouts, {places}metrics and logs in out/run"
    args.start_rollout_id = 3
    assert done_line(args) == "done: 3 rollouts, metrics and logs in out/run", "nothing was trained, or written"


def test_step_line_counts_of_a_background_rollout_what_was_waited_for() -> None:
    metrics = {"perf/rollout_time": 9.0, "perf/wait_for_rollout_time": 0.5, "perf/train_time": 0.9}
    assert step_line(0, 3, metrics) == "rollout 1/3 | 1.4 s | bound by training (0.9 s)"
    assert step_line(0, 3, metrics | {"perf/wait_for_rollout_time": 2.0}).endswith("bound by rollout (2.0 s)")


def test_step_line_leaves_out_what_was_not_logged() -> None:
    assert step_line(0, 3, {}) == "rollout 1/3"
    line = step_line(0, 3, {"train/loss": 2.5, "perf/rollout_time": 0.1, "perf/train_time": 0.5})
    assert line == "rollout 1/3 | loss 2.5000 | 0.6 s | bound by training (0.5 s)"
