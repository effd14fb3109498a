"""The whole loop in its other ways: disaggregated, adapters, a critic, transport by disk, rollouts alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
from tests.integration.tiny_run import ROLLOUTS, Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("train_ways"))


@pytest.mark.full
def test_disaggregated_run_with_two_trainers(workspace: Path) -> None:
    run_dir = workspace / "disaggregated"
    slots: dict[str, Value] = {"colocate": None, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 1}
    run_well(flags(workspace, run_dir, check_weight_update_equal=True, **slots), workspace / "disaggregated.log")
    differences = series(run_dir, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == ROLLOUTS
    assert max(differences) < 1e-4


@pytest.mark.full
def test_adapters_alone_give_the_engine_the_trainers_log_probs(workspace: Path) -> None:
    run_dir = workspace / "adapters"
    adapters: dict[str, Value] = {"lora_rank": 4, "lora_sync": "adapter", "ref_load": None, "lr": "2e-2"}
    asked: dict[str, Value] = {"check_weight_update_equal": True, "save_lora": str(run_dir / "adapters")}
    merged = str(run_dir / "merged")
    line = flags(workspace, run_dir, save=str(run_dir), save_hf=merged, **adapters, **asked)
    run_well(line, workspace / "adapters.log")
    differences = series(run_dir, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == ROLLOUTS
    assert max(differences) < 1e-4
    assert series(run_dir, "train/kl_loss")[0] == 0.0
    assert series(run_dir, "train/kl_loss")[-1] > 0.0
    saved = load_file(run_dir / "adapters" / "adapter_model.safetensors")
    pushed = series(run_dir, "perf/update_weights_wire_bytes")
    assert pushed == [sum(tensor.nbytes for tensor in saved.values())] * (ROLLOUTS + 1)

    twice = flags(workspace, run_dir, load=str(run_dir), hf_checkpoint=merged, num_rollout=ROLLOUTS + 1, **adapters)
    with TrainProcess(twice, workspace / "twice.log") as process:
        assert process.wait(RUN_S) == 2, process.tail()
        process.assert_no_process_left()
    assert "Traceback" not in process.tail()
    problem = rf"iter_\d+ holds adapters of {workspace}/model \(float32\), and the base of this run, {merged} "
    assert re.search(problem, process.tail().splitlines()[-1])


@pytest.mark.full
def test_ppo_trains_both_models_and_a_resumed_run_equals_the_uninterrupted_one(workspace: Path) -> None:
    whole, resumed = workspace / "ppo", workspace / "ppo_resumed"
    ppo: dict[str, Value] = {"advantage_estimator": "ppo", "num_critic_only_steps": 1, "critic_lr": "1e-2"}
    changes = ppo | {"use_kl_loss": None, "kl_loss_coef": None, "kl_coef": "0.01", "save_interval": 1}
    run_well(flags(workspace, whole, save=str(whole), **changes), workspace / "ppo.log")
    # The first rollout trains the critic alone: the actor's loss begins with the second one.
    critic = ("train/critic-value_loss", "train/critic-grad_norm")
    assert {key: len(series(whole, key)) for key in (*critic, "train/pg_loss")} == {
        critic[0]: ROLLOUTS,
        critic[1]: ROLLOUTS,
        "train/pg_loss": ROLLOUTS - 1,
    }
    assert all(norm > 0 for norm in series(whole, critic[1]))
    assert max(series(whole, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert_registered(whole)

    resumed.mkdir()
    for source, directory in ((whole, resumed), (whole / "critic", resumed / "critic")):
        shutil.copytree(source / "iter_0000000", directory / "iter_0000000")
        (directory / "latest_checkpointed_iteration.txt").write_text("0")
    run_well(flags(workspace, resumed, save=str(resumed), load=str(resumed), **changes), workspace / "ppo_resumed.log")
    for key in (*critic, "train/pg_loss"):
        expected = series(whole, key)[1 - ROLLOUTS :]
        assert series(resumed, key) == pytest.approx(expected, rel=1e-5, abs=1e-7), key


@pytest.mark.full
def test_resume_with_a_buffer_of_partial_and_surplus_groups(workspace: Path) -> None:
    run_dir = workspace / "partial"
    changes: dict[str, Value] = {
        "over_sampling_batch_size": 8,
        "sglang_server_concurrency": 16,  # of 32 at least: when a rollout has enough, the last ones are under way
        "partial_rollout": True,
        "mask_offpolicy_in_partial_rollout": True,
        "mismatch_threshold": 0.3,  # a response that goes on has tokens of the weights before
        "dynamic_sampling_filter_path": "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        "rollout_max_response_len": 200,
        "num_rollout": 5,
    }
    samples = str(run_dir / "samples_{rollout_id}.pt")
    save: dict[str, Value] = {"save": str(run_dir), "load": str(run_dir), "save_interval": 1}
    line = flags(workspace, run_dir, save_debug_rollout_data=samples, **save, **changes)
    with TrainProcess(line, workspace / "partial.log") as process:
        resumed_at = kill_after_checkpoint(process, run_dir, 1)
    state = torch.load(run_dir / f"iter_{resumed_at - 1:07d}" / "rollout_state.pt", weights_only=False)
    assert state["data_source"]["buffer"], "what was not needed is in the checkpoint"
    run_well(line, workspace / "partial_resumed.log")
    trained = [
        sample["index"]
        for rollout_id in range(5)
        for sample in torch.load(run_dir / f"samples_{rollout_id}.pt", weights_only=False)["samples"]
    ]
    assert len(trained) == len(set(trained)) == 5 * 16, "nothing is trained twice"
    for figures in (entry for entry in read_metrics(run_dir) if "rollout/prompts_read" in entry):
        parts = [figures[f"rollout/prompts_{part}"] for part in ("trained", "dropped", "buffered", "in_flight")]
        assert figures["rollout/prompts_read"] == sum(parts)
    assert max(series(run_dir, "rollout/partial_samples")) > 0
    assert_registered(run_dir)
    assert sum(series(run_dir, "rollout/offpolicy_tokens_masked")) > 0
    for rollout_id in range(5):
        for fields in torch.load(run_dir / f"samples_{rollout_id}.pt", weights_only=False)["samples"]:
            sample = Sample.from_dict(fields)
            assert sample.loss_mask == [int(version == str(rollout_id)) for version in sample.token_versions()]
    # Masked or not, every token's log-prob is the engine's own of then: those of partial ones are older.
    assert series(run_dir, "train/train_rollout_logprob_abs_diff")[0] < 1e-4


@pytest.mark.full
def test_disk_transport_with_two_steps_a_rollout_and_two_eval_sets(workspace: Path) -> None:
    run_dir = workspace / "disk"
    sets = ["one", str(workspace / "eval.jsonl"), "two", f"{workspace / 'eval.jsonl'}@[0:2]"]
    changes: dict[str, Value] = {"update_weight_transport": "disk", "num_steps_per_rollout": 2, "eval_interval": 1}
    run_well(flags(workspace, run_dir, eval_prompt_data=sets, **changes), workspace / "disk.log")
    assert len(series(run_dir, "train/loss")) == 2 * ROLLOUTS
    assert len(series(run_dir, "eval/one")) == len(series(run_dir, "eval/two")) == ROLLOUTS + 1
    # The first of the two steps is on policy, and the ratio exactly 1; the second is not.
    clipped, drift = series(run_dir, "train/pg_clipfrac"), series(run_dir, "train/ppo_kl")
    assert clipped[0::2] == drift[0::2] == [0.0] * ROLLOUTS
    assert all(drift[1::2])
    assert max(series(run_dir, "train/train_rollout_logprob_abs_diff")) < 1e-4


@pytest.mark.full
def test_rollout_only(workspace: Path) -> None:
    run_dir = workspace / "rollout_only"
    changes: dict[str, Value] = {"colocate": None, "debug_rollout_only": True, "rollout_num_gpus": 1, "num_epoch": 1}
    run_well(
        flags(workspace, run_dir, num_rollout=None, use_kl_loss=None, kl_loss_coef=None, **changes), workspace / "r.log"
    )
    assert len(series(run_dir, "rollout/raw_reward")) == 3  # ten prompts in batches of four
    assert not series(run_dir, "train/loss")
    steps = [text for text in (workspace / "r.log").read_text().splitlines() if text.startswith("rollout ")]
    assert len(steps) == 3
    assert all(re.match(r"rollout \d/3 \| reward -?\d", text) for text in steps)
