"""Qwen3-4B: a run that is saved and goes on is as one that was never interrupted."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import Corridor, check_metrics
from tests.ci import scale

MODEL_NAME = "Qwen/Qwen3-4B"
MODEL_TYPE = "qwen3-4B"
NUM_GPUS = 8
LABELS = ("run-ci-ckpt",)
SLOTS = scale.Slots(NUM_GPUS, least=2)
SAMPLED = {
    "train/grad_norm": (4, 7),
    "train/entropy_loss": (4, 7),
    "rollout/log_probs": (4, 7),
    "rollout/raw_reward": (2, 3),
}
"""What is the same only if the same tokens are sampled, as on CPUs they are; by steps, or rollouts, to look at."""


def prepare() -> None:
    scale.prepare(MODEL_NAME, MODEL_TYPE, SLOTS)


def execute() -> None:
    work_dir, slots = scale.work_dir(__file__), SLOTS.count()
    whole, first, second = (work_dir / name for name in ("whole", "first", "second"))
    saved, tensor = work_dir / "saved", min(2, slots)
    every = f"""
        {scale.model_flags(MODEL_NAME)} {scale.data_flags()} {scale.size_flags()}
        --actor-num-gpus-per-node {slots} --colocate --rollout-num-gpus-per-engine {tensor}
        --tensor-model-parallel-size {tensor} {"--sequence-parallel" if tensor > 1 else ""} {scale.RECOMPUTE}
        --advantage-estimator grpo --eps-clip-high 0.28 --lr-decay-iters 8
        --sglang-enable-deterministic-inference
    """
    for run_dir, flags in (
        (whole, "--num-rollout 4"),
        (first, f"--num-rollout 2 --save {shlex.quote(str(saved))}"),
        (second, f"--num-rollout 4 --load {shlex.quote(str(saved))}"),
    ):
        train_args = f"{every} {flags} {scale.run_flags(__file__, run_dir)}"
        U.execute_train(train_args, slots, scale.model_type(MODEL_TYPE))
    assert steps(first) == [0, 1, 2, 3]
    assert steps(second) == [4, 5, 6, 7], "it went on"
    metrics = (Corridor("train/lr-pg_0", (4, 7)), Corridor("rollout/prompts_read", (2, 3)))
    if scale.scale() == "tiny":
        metrics += tuple(Corridor(name, at) for name, at in SAMPLED.items())
    seen = check_metrics(__file__, whole, metrics)
    agree = Corridor("train/train_rollout_logprob_abs_diff", (4, 7), at_most=scale.DIFFERENCE[scale.scale()])
    check_metrics(__file__, second, (*scale.around(seen, 0.0), agree))
    shutil.rmtree(saved)  # of a run that failed it stays, to be looked at; with published weights it is large


def steps(run_dir: Path) -> list[int]:
    """The optimizer steps of a run, as its metrics have them."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["train/step"] for line in lines if "train/step" in line]


if __name__ == "__main__":
    prepare()
    for proxy_var in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(proxy_var, None)
    execute()
