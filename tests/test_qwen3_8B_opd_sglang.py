"""Qwen3-8B with a teacher that the run serves: at first both are one model, and the reward of the task parts them."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import Corridor, check_metrics
from tests.ci import scale

MODEL_NAME = "Qwen/Qwen3-8B"
MODEL_TYPE = "qwen3-8B"
NUM_GPUS = 8
LABELS = ("run-ci-megatron",)
SLOTS = scale.Slots(NUM_GPUS, least=2, tiny=2)


def prepare() -> None:
    scale.prepare(MODEL_NAME, MODEL_TYPE, SLOTS, weights=True)


def execute() -> None:
    run_dir, slots = scale.work_dir(__file__), SLOTS.count()
    half = slots // 2
    tensor = min(2, half)
    reward = None if scale.scale() == "full" else "lower_half_beside_a_teacher"
    train_args = f"""
        {scale.model_flags(MODEL_NAME)} {scale.data_flags(reward)} {scale.size_flags()}
        --actor-num-gpus-per-node {half} --colocate --rollout-num-gpus-per-engine {tensor}
        --tensor-model-parallel-size {tensor} {"--sequence-parallel" if tensor > 1 else ""} {scale.RECOMPUTE}
        --advantage-estimator grpo
        --use-opd --opd-type sglang --opd-kl-coef 0.1
        --rm-model-path {scale.model_directory(MODEL_NAME)} --rm-num-gpus {half} --rm-num-gpus-per-engine {tensor}
        {scale.run_flags(__file__, run_dir)}
    """
    U.execute_train(train_args, slots, scale.model_type(MODEL_TYPE))
    difference = scale.DIFFERENCE[scale.scale()]
    same = Corridor("train/opd_reverse_kl", steps=(0,), at_least=-difference, at_most=difference)
    check_metrics(__file__, run_dir, (*scale.corridors(), same))


if __name__ == "__main__":
    prepare()
    for proxy_var in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(proxy_var, None)
    execute()
