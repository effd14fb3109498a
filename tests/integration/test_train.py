"""The whole loop with the real parts: train.py, Ray, SGLang and its router, Megatron-core."""

from __future__ import annotations

import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.chrome_trace import assert_shows, read_chrome, roles, seconds_of_lanes
from tests.integration.harness import (
    RUN_S,
    TrainProcess,
    assert_registered,
    kill_after_checkpoint,
    read_metrics,
    read_traces,
    run_well,
    series,
)
from tests.integration.replays import assert_same_bits, check_dumps, training
from tests.integration.strikes import back, events_of, kill_server
from tests.integration.tiny import log_probs_of
from tests.integration.tiny_run import ROLLOUTS, flags, make_workspace
from tools import make_trace

NUM_GPUS = 0
pytestmark = pytest.mark.integration

_OWN = {"driver", "rollout_manager", "trainer_0"}
_KEY = "key-of-a-tracker-0123456789"
_MODELS = """
sglang:
  - {name: policy, server_groups: [{num_gpus: 1}]}
  - {name: reference, update_weights: false, server_groups: [{num_gpus: 1, overrides: {context_length: 256}}]}
"""
_ASKS = """
from slime.rollout.model_urls import get_model_url
from slime.utils.http_utils import post


async def sample_hook(args, sample, **kwargs):
    assert args.sglang_model_routers.keys() == {"policy", "reference"}
    assert get_model_url(args) == get_model_url(args, "policy") != get_model_url(args, "reference")
    request = {"input_ids": sample.tokens, "return_logprob": True, "logprob_start_len": 0}
    reply = await post(get_model_url(args, "reference"), request | {"sampling_params": {"max_new_tokens": 1}})
    found = reply["meta_info"]["input_token_logprobs"][-sample.response_length :]
    sample.metadata["reference"] = [log_prob for log_prob, *_ in found]
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def colocated(workspace: Path) -> Path:
    """The directory of one uninterrupted colocated run with checkpoints, evaluation and dumped samples, in which the
    model that it starts from is served beside the trained one."""
    run_dir = workspace / "colocated"
    (workspace / "models.yaml").write_text(_MODELS)
    (workspace / "asks.py").write_text(_ASKS)
    line = flags(
        workspace,
        run_dir,
        save=str(run_dir),
        save_interval=1,
        save_hf=str(run_dir / "hf_{rollout_id}"),
        save_debug_rollout_data=str(run_dir / "samples_{rollout_id}.pt"),
        eval_interval=ROLLOUTS,
        eval_prompt_data=["add", str(workspace / "eval.jsonl")],
        n_samples_per_eval_prompt=2,
        log_multi_turn=True,
        log_correct_samples=True,
        check_weight_update_equal=True,
        sglang_config=str(workspace / "models.yaml"),
        rollout_sample_hook_path=str(workspace / "asks.py"),
        wandb_key=_KEY,
        deterministic_mode=True,
    )
    run_well(line, workspace / "colocated.log")
    return run_dir


def test_colocated_run_trains_and_agrees_with_the_engine(colocated: Path) -> None:
    differences = series(colocated, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == ROLLOUTS
    assert max(differences) < 1e-4
    probes = series(colocated, "rollout/push_probe_abs_diff")
    assert len(probes) == 1 + ROLLOUTS
    assert max(probes) < 1e-4
    # Of the first, without a KL, chance may make it 0: where in each group all responses have the same reward.
    assert all(x > 0 for x in series(colocated, "train/grad_norm")[1:])
    # The first rollout comes from the reference's own weights: no KL yet, some later.
    kl = series(colocated, "train/kl_loss")
    assert kl[0] == 0.0
    assert kl[-1] > 0.0
    assert len(series(colocated, "eval/add")) == 2
    assert series(colocated, "rollout/prompts_read") == series(colocated, "rollout/prompts_trained") == [4, 8, 12]
    lines = (colocated.parent / "colocated.log").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines if " | eval/add " in line] == ["rollout 0/3", "rollout 3/3"]
    assert all(" | probe " in line for line in lines if " | loss " in line)
    assert f"training starts from {colocated.parent / 'model'} (--ref-load)" in lines
    assert all("time" in line for line in read_metrics(colocated))
    assert_registered(colocated)


def test_every_process_tells_where_its_time_goes(colocated: Path) -> None:
    traces, rollouts = read_traces(colocated), range(ROLLOUTS)
    engines = ["engine_0_actor", "reference_engine_0_actor"]
    assert list(traces) == ["driver", engines[0], engines[1], "rollout_manager", "trainer_0"]

    def of(role: str, *names: str) -> list[dict[str, Any]]:
        return [line for line in traces[role] if line["name"] in names]

    assert [line["rollout"] for line in of("driver", "driver/train")] == list(rollouts)
    assert [line["version"] for line in of("driver", "driver/push_weights")] == [0, 1, 2, 3]
    samples = of("rollout_manager", "rollout/generating", "rollout/rewarding")
    # Those of an evaluation are of no rollout.
    counts = Counter((line.get("rollout"), line["version"]) for line in samples)
    trained = {(i, i): 2 * 4 * 4 for i in rollouts}
    assert counts == trained | {(None, 0): 2 * 12, (None, 3): 2 * 12}
    assert [line["rollout"] for line in of("trainer_0", "train/optimizer")] == list(rollouts)
    for metric, name in (("ref_log_probs", "train/ref_log_probs"), ("actor_train", "train/actor_train")):
        seconds = [line["seconds"] for line in of("trainer_0", name)]
        assert seconds == series(colocated, f"perf/{metric}_time"), name
    assert not [line for lines in traces.values() for line in lines if "error" in line]


def test_a_trace_for_perfetto_shows_all_of_them(colocated: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    assert make_trace.main([str(colocated), "--output", str(output)]) == 0
    events, traces = read_chrome(output), read_traces(colocated)
    assert_shows(events, [line for lines in traces.values() for line in lines])
    assert set(roles(events).values()) == set(traces)
    # The driver is always within a span: what is between them is less than a hundredth of the run.
    seconds = seconds_of_lanes(events, "driver")
    assert seconds["between"] < 0.01 * sum(seconds.values()), seconds
    in_memory = [event["args"]["host"] for event in events if event["ph"] == "C"]
    assert all(0.1 < gib < 64 for gib in in_memory)
    assert len(in_memory) >= 4 * ROLLOUTS
    requests = [line for line in traces["rollout_manager"] if line["name"] == "rollout/request"]
    assert {line["finish_reason"] for line in requests} <= {"stop", "length"}
    assert sum(line["completion_tokens"] for line in requests if line.get("rollout") == 0) > 4 * 4
    samples = torch.load(colocated / f"samples_{ROLLOUTS - 1}.pt", weights_only=True)["samples"]
    for sample in samples:
        recorded = [(event["type"], event["name"]) for event in sample["trace"]["events"]]
        assert recorded[:2] == [("span_start", "rollout/generating"), ("span_end", "rollout/generating")]


def test_every_process_has_a_log(colocated: Path) -> None:
    logs = colocated / "logs"
    names = {path.stem for path in logs.iterdir()}
    servers = {"engine_0", "router", "reference_engine_0", "reference_router"}
    assert names == servers | {f"{server}_actor" for server in servers if "engine" in server} | _OWN
    assert all("process" in (logs / f"{name}.log").read_text() for name in names - servers)
    printed = [line for line in (colocated.parent / "colocated.log").read_text().splitlines() if " | " in line]
    logged = (logs / "driver.log").read_text()
    assert printed
    assert all(line in logged for line in printed)


def test_a_model_that_is_not_trained_keeps_its_weights_behind_a_router_of_its_own(
    workspace: Path, colocated: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(workspace / "model").eval()
    samples = torch.load(colocated / f"samples_{ROLLOUTS - 1}.pt", weights_only=True)["samples"]
    for sample in samples[::4]:
        tokens, length = sample["tokens"], sample["response_length"]
        expected = log_probs_of(model, tokens[:-length], tokens[-length:])
        reference, policy = (
            torch.tensor(found) for found in (sample["metadata"]["reference"], sample["rollout_log_probs"])
        )
        assert (reference - expected).abs().max() < 1e-4
        assert (policy - expected).abs().max() > 1e-3
    log = (colocated / "logs/reference_engine_0.log").read_text()
    assert re.search(r"\bcontext_length'?[=:] ?256\b", log)


def test_no_file_of_a_run_has_a_key_of_its_command_line(workspace: Path, colocated: Path) -> None:
    files = [workspace / "colocated.log", *(path for path in colocated.rglob("*") if path.is_file())]
    assert any(path.name == "config.yaml" for path in files)
    assert not [path for path in files if _KEY.encode() in path.read_bytes()]


def test_checkpoints_are_complete_and_load_in_transformers(colocated: Path) -> None:
    assert (colocated / "latest_checkpointed_iteration.txt").read_text().strip() == str(ROLLOUTS - 1)
    assert not list(colocated.glob(".iter_*"))
    first, last = (AutoModelForCausalLM.from_pretrained(colocated / f"hf_{i}").state_dict() for i in (0, ROLLOUTS - 1))
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.full
def test_a_run_that_is_over_ends_before_a_model_is_loaded(workspace: Path, colocated: Path) -> None:
    """Its rollouts come from ``--num-epoch``, so that it must read its data to know."""
    logged, trace = (colocated / "metrics.jsonl").read_text(), colocated / "trace" / "driver.jsonl"
    begun = trace.read_text().count("driver/load_data"), trace.read_text().count("driver/start")
    line = flags(workspace, colocated, load=str(colocated), num_rollout=None, num_epoch=1)
    run_well(line, workspace / "over.log")
    now = trace.read_text().count("driver/load_data"), trace.read_text().count("driver/start")
    assert now == (begun[0] + 1, begun[1]), "the data were read, and nothing was told to load a model"
    said = (workspace / "over.log").read_text()
    over = f"the checkpoint in {colocated} is after rollout 3 of 3: nothing is left to do"
    assert said.splitlines()[-1] == f"{over}; a larger --num-rollout goes on"
    assert "starting" not in said
    assert (colocated / "metrics.jsonl").read_text() == logged


def _has_trained(run_dir: Path, rollout_id: int) -> bool:
    return rollout_id in series(run_dir, "train/step")


def test_a_resumed_run_that_loses_trainer_and_engine_equals_the_uninterrupted_one_and_ends_by_ctrl_c(
    workspace: Path, colocated: Path
) -> None:
    run_dir = workspace / "resumed"
    run_dir.mkdir()
    shutil.copytree(colocated / "iter_0000000", run_dir / "iter_0000000")
    latest = run_dir / "latest_checkpointed_iteration.txt"
    latest.write_text("0")
    line = flags(
        workspace,
        run_dir,
        load=str(run_dir),
        save_debug_rollout_data=str(run_dir / "samples_{rollout_id}.pt"),
        save_hf=str(run_dir / "hf_{rollout_id}"),
        save_interval=ROLLOUTS,
        trainer_snapshot_interval=1,
        num_rollout=100,
        deterministic_mode=True,
    )
    with TrainProcess(line, workspace / "resumed.log") as process:
        process.wait_until(lambda: _has_trained(run_dir, 1), RUN_S, "a step", 0.02)
        process.find("ray::TrainActor").kill()
        process.wait_until(lambda: events_of(run_dir, "trainer_died"), RUN_S, "the trainer that was killed", 0.02)
        kill_server(run_dir, 0)
        process.wait_until(lambda: back(run_dir, "engine 0"), RUN_S, "the engine that was killed")
        process.wait_until(lambda: _has_trained(run_dir, ROLLOUTS), RUN_S, "the steps to compare")
        process.kill(signal.SIGINT)
        assert process.wait(RUN_S) == 128 + signal.SIGINT, process.tail()
        process.assert_no_process_left()
    event, *others = events_of(run_dir)
    assert (event["kind"], event["subject"]) == ("trainer_died", "trainer 0")
    assert [(other["kind"], other["subject"]) for other in others] == [
        ("engine_died", "engine 0"),
        ("engine_back", "engine 0"),
    ]
    # It was seen before, within or after the snapshot of that step; without one there is the checkpoint.
    origin = re.search(r"made anew from (\S+) after rollout [012]; going on with rollout", event["action"])
    assert (origin is not None and not Path(origin[1]).exists()) or "as the run began" in event["action"]
    said = (workspace / "resumed.log").read_text().splitlines()
    assert f"training goes on from {run_dir / 'iter_0000000'} (--load)" in said
    assert_same_bits(run_dir, colocated, range(1, ROLLOUTS))


@pytest.mark.full
def test_saved_rollouts_replay_to_the_same_steps_bit_for_bit(workspace: Path, colocated: Path) -> None:
    """Loss, gradient norm, every other metric of training, and the parameters after each step."""
    run_dir = workspace / "replay"
    line = flags(
        workspace,
        run_dir,
        load_debug_rollout_data=str(colocated / "samples_{rollout_id}.pt"),
        dump_details=str(run_dir / "details"),
        save_interval=1,
        save_hf=str(run_dir / "hf_{rollout_id}"),
    )
    run_well(line, workspace / "replay.log")
    assert len(training(run_dir)) == ROLLOUTS
    assert training(run_dir) == training(colocated)
    for rollout_id in range(ROLLOUTS):
        live, again = (load_file(path / f"hf_{rollout_id}" / "model.safetensors") for path in (colocated, run_dir))
        assert live.keys() == again.keys()
        assert all(torch.equal(live[name], again[name]) for name in live)
        check_dumps(run_dir / "details", colocated, rollout_id)
    assert_registered(run_dir)


@pytest.mark.full
def test_resume_after_a_killed_driver_equals_the_uninterrupted_run(workspace: Path, colocated: Path) -> None:
    run_dir = workspace / "killed"
    line = flags(
        workspace,
        run_dir,
        save=str(run_dir),
        load=str(run_dir),
        save_interval=1,
        save_hf=str(run_dir / "hf_{rollout_id}"),
        save_debug_rollout_data=str(run_dir / "samples_{rollout_id}.pt"),
        deterministic_mode=True,
    )
    latest = run_dir / "latest_checkpointed_iteration.txt"
    with TrainProcess(line, workspace / "killed.log") as process:
        resumed_at = kill_after_checkpoint(process, run_dir, 0)
    assert resumed_at < ROLLOUTS, "killed too late to show a resume"

    run_well(line, workspace / "went_on.log")
    assert latest.read_text().strip() == str(ROLLOUTS - 1)
    assert_same_bits(run_dir, colocated, range(ROLLOUTS))

    late = run_dir / "asked_for_later"
    run_well([*line, "--save-hf", str(late)], workspace / "late.log")
    assert "nothing is left but writing the exports that are missing" in (workspace / "late.log").read_text()
    files = [directory / "model.safetensors" for directory in (colocated / f"hf_{ROLLOUTS - 1}", late)]
    expected, found = map(load_file, files)
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in expected.items())
    run_well([*line, "--save-hf", str(late)], workspace / "over.log")
    assert "nothing is left to do" in (workspace / "over.log").read_text()
