"""Qwen2.5-0.5B on slots that generate and train in turn: the quickest answer."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import check_metrics
from tests.ci import scale

MODEL_NAME = "Qwen/Qwen2.5-0.5B-Instruct"
MODEL_TYPE = "qwen2.5-0.5B"
NUM_GPUS = 4
LABELS = ("run-ci-short",)
SLOTS = scale.Slots(NUM_GPUS, least=1)


def prepare() -> None:
    scale.prepare(MODEL_NAME, MODEL_TYPE, SLOTS)


def execute() -> None:
    run_dir, slots = scale.work_dir(__file__), SLOTS.count()
    train_args = f"""
        {scale.model_flags(MODEL_NAME)} {scale.data_flags()} {scale.size_flags()}
        --actor-num-gpus-per-node {slots} --colocate
        --advantage-estimator grpo --eps-clip-high 0.28
        {"--num-rollout 100000" if U.get_env_enable_infinite_run() else ""}
        {scale.run_flags(__file__, run_dir)}
    """
    U.execute_train(train_args, slots, scale.model_type(MODEL_TYPE))
    check_metrics(__file__, run_dir, scale.corridors())


if __name__ == "__main__":
    prepare()
    for proxy_var in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(proxy_var, None)
    execute()
