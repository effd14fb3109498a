"""Qwen3-30B-A3B: experts on ranks of their own; also with engines in float8."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import check_metrics
from tests.ci import scale

MODEL_NAME = "Qwen/Qwen3-30B-A3B"
MODEL_TYPE = "qwen3-30B-A3B"
NUM_GPUS = 8
LABELS = ("run-ci-megatron",)
VARIANTS = ("", "SLIME_TEST_USE_FP8_ROLLOUT=1")
SLOTS = scale.Slots(NUM_GPUS, least=NUM_GPUS, tiny=2)
LAYOUTS = {"full": (4, 8, 8), "random": (4, 8, 8), "tiny": (1, 2, 1)}
"""Ranks that share a layer, ranks that share its experts, and slots of an engine."""
_FLOAT8 = "SLIME_TEST_USE_FP8_ROLLOUT"


def prepare() -> None:
    scale.prepare(checkpoint(), MODEL_TYPE, SLOTS)


def checkpoint() -> str:
    """Engines compute in float8 if the checkpoint is in float8, and only the published one is."""
    if not U.get_bool_env_var(_FLOAT8):
        return MODEL_NAME
    if scale.scale() != "full":
        scale.refuse(f"{_FLOAT8}=1: only the published checkpoint is in float8; unset SLIME_TEST_SCALE")
    return f"{MODEL_NAME}-FP8"


def execute() -> None:
    run_dir, slots = scale.work_dir(__file__), SLOTS.count()
    tensor, expert, engine = LAYOUTS[scale.scale()]
    in_float8 = U.get_bool_env_var(_FLOAT8)
    train_args = f"""
        {scale.model_flags(checkpoint())} {scale.data_flags()} {scale.size_flags()}
        --actor-num-gpus-per-node {slots} --colocate
        --rollout-num-gpus-per-engine {2 if in_float8 else engine}
        --tensor-model-parallel-size {tensor} {"--sequence-parallel" if tensor > 1 else ""} {scale.RECOMPUTE}
        --expert-model-parallel-size {expert} --expert-tensor-parallel-size 1
        --advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --use-tis
        {scale.run_flags(__file__, run_dir)}
    """
    U.execute_train(train_args, slots, scale.model_type(MODEL_TYPE))
    check_metrics(__file__, run_dir, scale.corridors(difference=0.1 if in_float8 else None))


if __name__ == "__main__":
    prepare()
    for proxy_var in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(proxy_var, None)
    execute()
