"""Moonlight-16B-A3B: latent attention, shared experts, and experts on ranks of their own."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import check_metrics
from tests.ci import scale

MODEL_NAME = "moonshotai/Moonlight-16B-A3B-Instruct"
MODEL_TYPE = "moonlight"
NUM_GPUS = 8
LABELS = ("run-ci-megatron",)
SLOTS = scale.Slots(NUM_GPUS, least=NUM_GPUS, tiny=2)
LAYOUTS = {"full": (2, 8, 2), "random": (2, 8, 2), "tiny": (1, 2, 1)}
"""Ranks that share a layer, ranks that share its experts, and slots of an engine."""


def prepare() -> None:
    tokenizer = Path(U.models_dir(), MODEL_NAME.rpartition("/")[2], "tokenizer.json")
    if scale.scale() == "full" and not tokenizer.exists():
        scale.refuse(f"{tokenizer} is missing: its tokenizer is published as code; docs/launch.md says what to do")
    scale.prepare(MODEL_NAME, MODEL_TYPE, SLOTS)


def execute() -> None:
    run_dir, slots = scale.work_dir(__file__), SLOTS.count()
    tensor, expert, engine = LAYOUTS[scale.scale()]
    train_args = f"""
        {scale.model_flags(MODEL_NAME)} {scale.data_flags()} {scale.size_flags()}
        --actor-num-gpus-per-node {slots} --colocate --rollout-num-gpus-per-engine {engine}
        --tensor-model-parallel-size {tensor} {"--sequence-parallel" if tensor > 1 else ""} {scale.RECOMPUTE}
        --expert-model-parallel-size {expert} --expert-tensor-parallel-size 1
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
