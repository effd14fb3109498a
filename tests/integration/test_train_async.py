"""The asynchronous loop with the real parts: train_async.py, Ray, SGLang and its router, Megatron-core."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.data import Sample
from tests.integration.harness import (
    RUN_S,
    TrainProcess,
    assert_registered,
    kill_after_checkpoint,
    read_metrics,
    run_well,
    series,
)
from tests.integration.tiny import log_probs_of
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_ROLLOUTS = 5
_GROUPS = 4


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("train_async"))


def async_flags(workspace: Path, run_dir: Path, **changes: Value) -> list[str]:
    """Two trainers and an engine whose rollouts take far longer than training on one: pushes interrupt them."""
    values: dict[str, Value] = {
        "colocate": None,
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 1,
        "num_rollout": _ROLLOUTS,
        "rollout_max_response_len": 320,
        "max_tokens_per_gpu": 1024,
        "use_tis": True,
        "save_debug_rollout_data": str(run_dir / "samples_{rollout_id}.pt"),
    }
    return flags(workspace, run_dir, **(values | changes))


def start(line: list[str], log: Path) -> TrainProcess:
    return TrainProcess(line, log, driver="train_async.py")


def run_to_end(line: list[str], log: Path) -> None:
    run_well(line, log, driver="train_async.py")


def samples_of(run_dir: Path, rollout_id: int) -> list[Sample]:
    data = torch.load(run_dir / f"samples_{rollout_id}.pt", weights_only=True)
    return [Sample.from_dict(fields) for fields in data["samples"]]


def assert_every_prompt_once(run_dir: Path, num_rollout: int) -> None:
    """Each rollout trained the groups that a synchronous run would have given it."""
    for rollout_id in range(num_rollout):
        groups = [sample.group_index for sample in samples_of(run_dir, rollout_id)][::4]
        assert groups == list(range(_GROUPS * rollout_id, _GROUPS * (rollout_id + 1)))


def assert_accounted_for(run_dir: Path) -> None:
    lines = [line for line in read_metrics(run_dir) if "rollout/prompts_read" in line]
    for line in lines:
        parts = [line[f"rollout/prompts_{part}"] for part in ("trained", "dropped", "buffered", "in_flight")]
        assert line["rollout/prompts_read"] == sum(parts)
    assert any(line["rollout/prompts_in_flight"] for line in lines)


def version_models(workspace: Path, run_dir: Path) -> list[torch.nn.Module]:
    """The weights by version: the number of rollouts that they were trained on."""
    paths = [workspace / "model", *(run_dir / f"hf_{rollout_id}" for rollout_id in range(_ROLLOUTS - 1))]
    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]


def segment_errors(sample: Sample, models: list[torch.nn.Module]) -> tuple[float, float]:
    """Largest difference of the engine's log-probs to those of each segment's weights; and to those of other ones."""
    prompt, response = sample.tokens[: -sample.response_length], sample.tokens[-sample.response_length :]
    by_version = torch.stack([log_probs_of(model, prompt, response) for model in models])
    lengths = torch.tensor(sample.segment_lengths)
    made_with = torch.tensor([int(version) for version in sample.weight_versions]).repeat_interleave(lengths)
    errors = (by_version - torch.tensor(sample.rollout_log_probs)).abs()
    own = errors.gather(0, made_with[None])[0]
    other = errors.gather(0, (made_with[None] + 1) % len(models))[0]
    return float(own.max()), float(other.mean())


_LOGS = """
import json

def log_eval_rollout_data(rollout_id, args, data, extra_metrics):
    made_with = {int(v) for result in data.values() for s in result["samples"] for v in s.weight_versions}
    counts = {name: len(result["samples"]) for name, result in data.items()}
    with open(args.run_dir + "/evaluations.jsonl", "a") as file:
        file.write(json.dumps([rollout_id, sorted(made_with), counts]) + "\\n")
"""

_DATASETS = """
defaults: {max_response_len: 8}
datasets:
  words: {path: %s, rm_type: f1, n_samples_per_eval_prompt: 3}
"""


@pytest.fixture(scope="module")
def finished(workspace: Path) -> Path:
    """The directory of one uninterrupted run with evaluation and every version's weights."""
    run_dir = workspace / "finished"
    (workspace / "logs.py").write_text(_LOGS)
    (workspace / "eval.yaml").write_text(_DATASETS % (workspace / "eval.jsonl"))
    line = async_flags(
        workspace,
        run_dir,
        save_hf=str(run_dir / "hf_{rollout_id}"),
        save_interval=1,
        eval_interval=3,
        eval_prompt_data=["add", str(workspace / "eval.jsonl")],
        eval_config=str(workspace / "eval.yaml"),
        custom_eval_rollout_log_function_path=str(workspace / "logs.py"),
        log_passrate=True,
        check_weight_update_equal=True,
    )
    run_to_end(line, workspace / "finished.log")
    return run_dir


def test_rollouts_are_generated_while_the_trainer_trains(finished: Path) -> None:
    lines = read_metrics(finished)
    taken = [line for line in lines if "perf/wait_for_rollout_time" in line]
    trained = [line for line in lines if "train/loss" in line]
    assert len(taken) == len(trained) == _ROLLOUTS
    for line, trained_before in zip(taken[1:], trained[:-1], strict=True):
        began = line["time"] - line["perf/wait_for_rollout_time"] - line["perf/rollout_ahead_time"]
        assert began < trained_before["time"]
    assert max(series(finished, "rollout/weight_staleness_max")) == 1
    assert series(finished, "rollout/stale_groups_regenerated") == [0] * _ROLLOUTS
    assert_every_prompt_once(finished, _ROLLOUTS)
    assert_accounted_for(finished)
    log = (finished / "logs" / "engine_0.log").read_text()
    assert "was aborted" not in log, "a request came during a push, and was turned away"
    # The first rollout is that of the first weights; the trainer says so under --ci-test, too.
    assert series(finished, "train/train_rollout_logprob_abs_diff")[0] < 1e-4
    assert_registered(finished)


def check_interrupted(workspace: Path, finished: Path) -> None:
    """Samples of several versions, whose tokens are each of their own version's weights."""
    samples = [sample for rollout_id in range(_ROLLOUTS) for sample in samples_of(finished, rollout_id)]
    interrupted = [sample for sample in samples if len(sample.weight_versions) > 1]
    assert len(interrupted) == sum(series(finished, "rollout/multi_version_samples")) > 0
    for sample in interrupted:
        versions = [int(version) for version in sample.weight_versions]
        assert all(before < after for before, after in pairwise(versions))
        assert sum(sample.segment_lengths) == sample.response_length
    models = version_models(workspace, finished)
    for sample in interrupted[:12]:
        own, other = segment_errors(sample, models)
        assert own < 1e-3
        assert other > 10 * own, "the versions' weights must differ for this to show anything"


def test_tokens_after_a_push_come_from_the_new_weights_alone(workspace: Path, finished: Path) -> None:
    check_interrupted(workspace, finished)


@pytest.mark.full
def test_tokens_after_a_push_come_from_the_new_adapters_alone(workspace: Path) -> None:
    run_dir = workspace / "adapters"
    saved: dict[str, Value] = {"save_hf": str(run_dir / "hf_{rollout_id}"), "save_interval": 1}
    adapters: dict[str, Value] = {"lora_rank": 8, "lora_sync": "adapter", "ref_load": None, "lr": "2e-2"}
    run_to_end(async_flags(workspace, run_dir, **saved, **adapters), workspace / "adapters.log")
    check_interrupted(workspace, run_dir)


def test_evaluations_are_of_one_version_while_training_goes_on(workspace: Path, finished: Path) -> None:
    lines = read_metrics(finished)
    scores = [line for line in lines if "eval/add" in line]
    assert [line["eval/step"] for line in scores] == [0, 3]
    assert all(
        {"eval/words", "eval/words-avg@3", "eval/words-pass@3", "eval/add-no_reward"} <= line.keys() for line in scores
    )
    for line in scores:
        # The rollout after the push was trained on before anybody waited for the scores.
        trained = next(i for i, other in enumerate(lines) if other.get("train/step") == line["eval/step"])
        assert trained < lines.index(line)
    records = [json.loads(text) for text in (finished / "evaluations.jsonl").read_text().splitlines()]
    assert records == [[version, [version], {"add": 6, "words": 18}] for version in (0, 3)]
    printed = [text for text in (workspace / "finished.log").read_text().splitlines() if text.startswith("rollout ")]
    assert [line.split(" | ")[0] for line in printed if " | eval/add " in line] == ["rollout 0/5", "rollout 3/5"]
    assert len(series(finished, "passrate/pass@4")) == _ROLLOUTS


@pytest.mark.full
def test_a_killed_run_resumes_with_every_prompt_exactly_once(workspace: Path) -> None:
    run_dir = workspace / "killed"
    line = async_flags(workspace, run_dir, save=str(run_dir), load=str(run_dir), save_interval=1)
    latest = run_dir / "latest_checkpointed_iteration.txt"
    with start(line, workspace / "killed.log") as process:
        process.wait_until(lambda: latest.exists() and latest.read_text().strip() == "1", RUN_S, "a checkpoint")
        process.kill()
        process.wait(10)
        process.assert_no_process_left()
    resumed_at = int(latest.read_text()) + 1
    assert resumed_at < _ROLLOUTS, "killed too late to show a resume"
    state = torch.load(run_dir / f"iter_{resumed_at - 1:07d}" / "rollout_state.pt", weights_only=False)
    in_flight = [group[0]["group_index"] for group in state["data_source"]["in_flight"]]
    assert in_flight[:_GROUPS] == list(range(_GROUPS * resumed_at, _GROUPS * (resumed_at + 1)))
    for path in run_dir.glob("samples_[0-9]*.pt"):
        if int(path.stem.split("_")[1]) >= resumed_at:
            path.unlink()

    run_to_end(line, workspace / "resumed.log")
    assert_every_prompt_once(run_dir, _ROLLOUTS)
    assert_accounted_for(run_dir)
    assert series(run_dir, "rollout/prompts_trained")[-1] == _GROUPS * _ROLLOUTS


@pytest.mark.full
def test_pushes_after_every_second_rollout(workspace: Path) -> None:
    run_dir = workspace / "interval"
    changes: dict[str, Value] = {"update_weights_interval": 2, "max_weight_staleness": 3, "async_buffer_size": 2}
    changes |= {"keep_old_actor": True, "use_tis": None}
    run_to_end(async_flags(workspace, run_dir, **changes), workspace / "interval.log")
    versions = {int(v) for i in range(_ROLLOUTS) for sample in samples_of(run_dir, i) for v in sample.weight_versions}
    assert versions <= {0, 2, 4}
    assert 2 in versions
    pushes = [line["rollout/step"] for line in read_metrics(run_dir) if "perf/update_weights_time" in line]
    assert pushes == [0, 1, 3]
    assert 1 < max(series(run_dir, "rollout/weight_staleness_max")) <= 3
    # The trainer's log-probs are by the weights that made each token: the engine's own, however old these are.
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff_max")) < 1e-4
    assert any(series(run_dir, "train/ppo_kl"))
    assert_every_prompt_once(run_dir, _ROLLOUTS)
    assert_accounted_for(run_dir)


_BREAKS_LATER = """
import asyncio

async def reward_func(args, sample, **kwargs):
    if sample.group_index >= 12:
        raise RuntimeError("the judge is gone")
    if sample.group_index >= 8:
        await asyncio.sleep(1000)
    return float(sample.index % 2)
"""
"""Rollout 2, which the trainer waits for, would go on until the reward's deadline; rollout 3 fails meanwhile."""


@pytest.mark.full
def test_a_rollout_that_fails_in_the_background_ends_the_run_at_once(workspace: Path) -> None:
    hook = workspace / "judge.py"
    hook.write_text(_BREAKS_LATER)
    line = async_flags(workspace, workspace / "broken", num_rollout=50, rm_type=None, custom_rm_path=str(hook))
    with start(line, workspace / "broken.log") as process:
        assert process.wait(RUN_S) == 1, process.tail()
        process.assert_no_process_left()
    (error,) = [text for text in process.log.read_text().splitlines() if text.startswith("train_async.py: error:")]
    assert "rollout 3: the rollout manager failed" in error
    assert "the judge is gone" in error


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_with_rollouts_in_flight_leaves_no_process(workspace: Path, signum: signal.Signals) -> None:
    run_dir = workspace / signum.name
    with start(async_flags(workspace, run_dir, num_rollout=100), workspace / f"{signum.name}.log") as process:
        process.wait_until(lambda: series(run_dir, "train/loss"), RUN_S, "the first training step")
        process.kill(signum)
        assert process.wait(60) == 128 + signum, process.tail()
        process.assert_no_process_left()


_KEEPS_A_POOL = '''
"""A rollout function that generates ahead and hands out last what it generated first: too old, in the end."""
from slime.rollout.sglang_rollout import generate_rollout as once

pool = []

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        return once(args, rollout_id, data_source, evaluation=True)
    if not pool:
        pool.append(once(args, rollout_id, data_source).samples)
    pool.append(once(args, rollout_id, data_source).samples)
    return pool.pop(1 if rollout_id < 3 else 0)
'''


@pytest.mark.full
def test_what_a_pool_kept_too_long_is_generated_anew(workspace: Path) -> None:
    hook, run_dir = workspace / "pool.py", workspace / "pool"
    hook.write_text(_KEEPS_A_POOL)
    line = async_flags(workspace, run_dir, rollout_function_path=str(hook), rollout_max_response_len=16)
    run_to_end(line, workspace / "pool.log")
    assert series(run_dir, "rollout/stale_groups_regenerated")[3] == _GROUPS
    assert max(series(run_dir, "rollout/weight_staleness_max")) <= 1
    ages: list[Any] = [sample.group_index for sample in samples_of(run_dir, 3)]
    assert set(ages) == set(range(_GROUPS)), "the groups that were drawn first"


@pytest.mark.full
def test_rollouts_without_end_train_every_prompt_once_and_resume(workspace: Path) -> None:
    run_dir = workspace / "without_end"
    changes: dict[str, Value] = {
        "rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "max_weight_staleness": 2,
        "save": str(run_dir),
        "load": str(run_dir),
        "save_interval": 1,
        "eval_interval": 2,
        "eval_prompt_data": ["add", str(workspace / "eval.jsonl")],
    }
    line = async_flags(workspace, run_dir, **changes)
    with start(line, workspace / "without_end.log") as process:
        resumed_at = kill_after_checkpoint(process, run_dir, 1)
    assert resumed_at < _ROLLOUTS, "killed too late to show a resume"
    for path in run_dir.glob("samples_[0-9]*.pt"):
        if int(path.stem.split("_")[1]) >= resumed_at:
            path.unlink()
    run_to_end(line, workspace / "went_on_without_end.log")
    trained = [sample.index for rollout_id in range(_ROLLOUTS) for sample in samples_of(run_dir, rollout_id)]
    assert len(trained) == len(set(trained)) == 4 * _GROUPS * _ROLLOUTS
    assert_accounted_for(run_dir)
    staleness = max(series(run_dir, "rollout/weight_staleness_max"))
    assert 1 <= staleness <= 2, "a rollout is begun while the one before it is trained, and not too early"
    assert len(series(run_dir, "eval/add")) >= 2
    assert_registered(run_dir)
