"""Qwen3-4B by PPO: a critic learns beside the actor, and in the first rollout alone."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import Corridor, check_metrics
from tests.ci import scale

MODEL_NAME = "Qwen/Qwen3-4B"
MODEL_TYPE = "qwen3-4B"
NUM_GPUS = 8
LABELS = ("run-ci-megatron",)
SLOTS = scale.Slots(NUM_GPUS, least=2)


def prepare() -> None:
    scale.prepare(MODEL_NAME, MODEL_TYPE, SLOTS)


def execute() -> None:
    run_dir, slots = scale.work_dir(__file__), SLOTS.count()
    tensor = min(2, slots)
    train_args = f"""
        {scale.model_flags(MODEL_NAME)} {scale.data_flags()} {scale.size_flags()}
        --actor-num-gpus-per-node {slots} --colocate --rollout-num-gpus-per-engine {tensor}
        --tensor-model-parallel-size {tensor} {"--sequence-parallel" if tensor > 1 else ""} {scale.RECOMPUTE}
        --advantage-estimator ppo --normalize-advantages --num-critic-only-steps 1
        --critic-lr {"1e-2" if scale.scale() == "tiny" else "1e-5"}
        {scale.run_flags(__file__, run_dir)}
    """
    U.execute_train(train_args, slots, scale.model_type(MODEL_TYPE))
    critic = (
        Corridor("train/critic-value_loss", steps=(0, -1), at_least=1e-6, at_most=10.0),
        Corridor("train/critic-grad_norm", steps=(0, -1), at_least=1e-6, at_most=1e4),
    )
    check_metrics(__file__, run_dir, (*scale.corridors(first=2), *critic))


if __name__ == "__main__":
    prepare()
    for proxy_var in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(proxy_var, None)
    execute()
