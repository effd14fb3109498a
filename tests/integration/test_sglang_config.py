"""Layouts of engines that --sglang-config and --prefill-num-servers name, with train.py and real servers.

That prefill and decode engines hand over what they have computed is seen with mooncake's transfers by TCP, where
``mooncake-transfer-engine-non-cuda`` and libibverbs are installed: SGLang 0.5.17 starts no prefill engine with its
transfers that are fake.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import run_well, series
from tests.integration.test_membership import calls_of, versions_of
from tests.integration.tiny_run import Value, flags, make_workspace

NUM_GPUS = 0
pytestmark = [pytest.mark.integration, pytest.mark.full]

_ROLLOUTS = 2
_SIZES = """
sglang:
  - name: policy
    server_groups:
      - {num_gpus: 2, num_gpus_per_engine: 2}
      - {num_gpus: 1}
"""
_TENSOR, _DISTRIBUTED = "/update_weights_from_tensor", "/update_weights_from_distributed"


def run(tmp_path: Path, **changes: Value) -> Path:
    """The directory of a run whose trainer and engines agreed at every rollout, with the weights of that rollout."""
    workspace, run_dir = make_workspace(tmp_path), tmp_path / "run"
    samples = str(run_dir / "samples_{rollout_id}.pt")
    values: dict[str, Value] = {"num_rollout": _ROLLOUTS, "lr": "1e-2", "save_debug_rollout_data": samples}
    run_well(flags(workspace, run_dir, **values | changes), tmp_path / "log")
    differences = series(run_dir, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == _ROLLOUTS
    assert max(differences) < 1e-4
    assert [versions_of(run_dir, rollout_id) for rollout_id in range(_ROLLOUTS)] == [{"0"}, {"1"}]
    return run_dir


def test_engines_of_two_sizes_beside_trainers_and_apart_get_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(_SIZES)
    run_dir = run(
        tmp_path,
        actor_num_gpus_per_node=2,
        sglang_config=str(tmp_path / "models.yaml"),
        router_policy="round_robin",
        check_weight_update_equal=True,
    )
    beside, apart = (calls_of(run_dir, rank) for rank in range(2))
    assert (_TENSOR in beside, _DISTRIBUTED in beside) == (True, False)
    assert (_TENSOR in apart, _DISTRIBUTED in apart) == (False, True)
    assert beside.count("/continue_generation") == apart.count("/continue_generation") == _ROLLOUTS + 1
    halves = 16 + _ROLLOUTS + 1
    assert beside.count("/generate") == apart.count("/generate") == halves, "of the samples; and each push is probed"


def test_responses_go_on_where_their_prompts_were_not_computed(tmp_path: Path) -> None:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    run_dir = run(
        tmp_path,
        colocate=None,
        rollout_num_gpus=2,
        prefill_num_servers=1,
        sglang_disaggregation_transfer_backend="mooncake_tcp",
        check_weight_update_equal=True,
    )
    for rank in range(2):
        asked = calls_of(run_dir, rank)
        assert asked.count("/generate") == 32
        assert asked.count("/pause_generation") == asked.count("/continue_generation") == _ROLLOUTS + 1
        assert asked.index("/generate") > asked.index("/continue_generation") > asked.index(_DISTRIBUTED)
