"""What a run logged of its training, and what it dumped of it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.integration.harness import read_metrics


def training(run_dir: Path) -> list[dict[str, float]]:
    """What was logged of every optimizer step, without times."""
    lines = [line for line in read_metrics(run_dir) if "train/step" in line]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("perf/")} for line in lines]


_OF_SAMPLES = ("index", "tokens", "rollout_log_probs", "reward", "weight_versions", "label")


def assert_same_bits(run_dir: Path, other: Path, rollouts: range) -> None:
    """Two deterministic runs, of which either may have been struck: in these rollouts the same samples, engines'
    log-probs, rewards, losses, gradient norms and all else that is logged of a step, and weights after the last one."""
    steps, wanted = ({line["train/step"]: line for line in training(each)} for each in (run_dir, other))
    assert {"train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff"} <= wanted[rollouts[0]].keys()
    for rollout_id in rollouts:
        ours, theirs = (
            torch.load(each / f"samples_{rollout_id}.pt", weights_only=True)["samples"] for each in (run_dir, other)
        )
        for field in _OF_SAMPLES:
            assert [sample[field] for sample in ours] == [sample[field] for sample in theirs], (rollout_id, field)
        assert steps[rollout_id] == wanted[rollout_id]  # of a step that was gone back behind, the last one
    found, expected = (load_file(each / f"hf_{rollouts[-1]}/model.safetensors") for each in (run_dir, other))
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


def check_dumps(details: Path, live: Path, rollout_id: int) -> None:
    """The samples again, and what the one training rank made of them."""
    samples, again = (
        torch.load(path, weights_only=True)["samples"]
        for path in (live / f"samples_{rollout_id}.pt", details / f"rollout_data/{rollout_id}.pt")
    )
    assert again == samples
    dump = torch.load(details / f"train_data/{rollout_id}_0.pt", weights_only=True)
    columns, (step,) = dump["samples"], dump["steps"]
    assert sorted(columns["sample_indices"]) == sorted(sample["index"] for sample in samples)
    assert sorted(row for rows in step["micro_batches"] for row in rows) == list(range(len(samples)))
    of_index = {sample["index"]: sample for sample in samples}
    for row, index in enumerate(columns["sample_indices"]):
        assert columns["tokens"][row].tolist() == of_index[index]["tokens"]
        engine = torch.tensor(of_index[index]["rollout_log_probs"])
        assert torch.equal(columns["rollout_log_probs"][row], engine)
        assert (columns["log_probs"][row] - engine).abs().max() < 1e-3
        assert (columns["advantages"][row] == columns["rewards"][row]).all()  # GRPO, every token trained
