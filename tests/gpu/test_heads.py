"""Engines that draft, in the colocated loop: by heads that the trainer trains (MTP), or by a model of their own."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from tests.gpu.test_loop import Record, check, run
from tests.integration.harness import series
from tests.integration.test_heads import write_mimo
from tests.integration.tiny_run import Value

NUM_GPUS = 1
_ROLLOUTS = 8
_ONE_TOKEN: dict[str, Value] = {
    "sglang_speculative_num_steps": 1,
    "sglang_speculative_eagle_topk": 1,
    "sglang_speculative_num_draft_tokens": 2,
    # SGLang 0.5.17 imports it, unused here, where it captures graphs of what drafts.
    "sglang_disable_cuda_graph": find_spec("deep_gemm") is None,
}
"""Drafts of one token."""


def test_engines_draft_by_the_trainers_heads(workspace: Path, tmp_path: Path, record_property: Record) -> None:
    """Every push is compared in the engine; drafts change no log-prob of what is taken."""
    model = tmp_path / "model"
    shutil.copytree(workspace / "model", model)
    write_mimo(model)
    drafting: dict[str, Value] = {
        "sglang_speculative_algorithm": "EAGLE",
        "sglang_speculative_draft_model_path": str(model),
        **_ONE_TOKEN,
    }
    run_dir = run(
        workspace,
        "heads",
        hf_checkpoint=str(model),
        ref_load=str(model),
        enable_mtp_training=True,
        num_rollout=_ROLLOUTS,
        **drafting,
    )
    check(run_dir, _ROLLOUTS, record_property)
    check_accepted(run_dir, record_property)
    losses = series(run_dir, "train/mtp_loss")  # of 16 short responses each, whose own noise is about 0.5
    record_property("heads' loss", f"{losses[0]:.3f} to {losses[-1]:.3f}")
    assert losses[-1] < losses[0] - 1


def test_engines_draft_by_a_model_of_their_own(workspace: Path, tmp_path: Path, record_property: Record) -> None:
    """What a draft of the first weights proposes changes no log-prob."""
    draft = tmp_path / "draft"
    shutil.copytree(workspace / "model", draft)
    drafting: dict[str, Value] = {
        "sglang_speculative_algorithm": "STANDALONE",
        "sglang_speculative_draft_model_path": str(draft),
        "check_weight_update_equal": None,  # SGLang would load the stored weights into the draft, too
        **_ONE_TOKEN,
    }
    run_dir = run(workspace, "standalone", num_rollout=_ROLLOUTS, **drafting)
    check(run_dir, _ROLLOUTS, record_property)
    check_accepted(run_dir, record_property)


def check_accepted(run_dir: Path, record_property: Record) -> None:
    """Some drafts of every rollout were right: a verification gives one token without any."""
    accepted = series(run_dir, "rollout/spec_accept_length")
    assert len(accepted) == _ROLLOUTS
    record_property("accepted", f"{accepted[0]:.2f} to {accepted[-1]:.2f}")
    assert all(length > 1 for length in accepted)
