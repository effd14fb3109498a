"""GLM4-9B on ranks that share layers (and on GPUs sequences), beside engines on slots of their own."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import check_metrics
from tests.ci import scale

MODEL_NAME = "zai-org/GLM-4-9B-0414"
MODEL_TYPE = "glm4-9B"
NUM_GPUS = 8
LABELS = ("run-ci-megatron",)
SLOTS = scale.Slots(NUM_GPUS, least=NUM_GPUS, tiny=3)
LAYOUTS = {"full": (4, 2, 2, 2), "random": (4, 2, 2, 2), "tiny": (2, 2, 1, 1)}
"""Slots that train, ranks that share a layer, those that share a sequence, and slots of an engine."""


def prepare() -> None:
    scale.prepare(MODEL_NAME, MODEL_TYPE, SLOTS)


def execute() -> None:
    run_dir, slots = scale.work_dir(__file__), SLOTS.count()
    train, tensor, context, engine = LAYOUTS[scale.scale()]
    train_args = f"""
        {scale.model_flags(MODEL_NAME)} {scale.data_flags()} {scale.size_flags()}
        --actor-num-gpus-per-node {train} --rollout-num-gpus {slots - train} --rollout-num-gpus-per-engine {engine}
        --tensor-model-parallel-size {tensor} --sequence-parallel --context-parallel-size {context} {scale.RECOMPUTE}
        --advantage-estimator grpo --eps-clip-high 0.28
        {scale.run_flags(__file__, run_dir)}
    """
    U.execute_train(train_args, slots, scale.model_type(MODEL_TYPE))
    check_metrics(__file__, run_dir, scale.corridors())


if __name__ == "__main__":
    prepare()
    for proxy_var in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(proxy_var, None)
    execute()
