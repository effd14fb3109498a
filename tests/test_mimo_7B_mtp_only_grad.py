"""MiMo-7B with MTP heads: where all rewards are the same the heads learn, and the policy has no gradient."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import Corridor, check_metrics
from tests.ci import scale

MODEL_NAME = "XiaomiMiMo/MiMo-7B-RL"
MODEL_TYPE = "mimo-7B-rl"
NUM_GPUS = 8
LABELS = ("run-ci-megatron",)
SLOTS = scale.Slots(NUM_GPUS, least=2)


def prepare() -> None:
    scale.prepare(MODEL_NAME, MODEL_TYPE, SLOTS)


def execute() -> None:
    run_dir, slots = scale.work_dir(__file__), SLOTS.count()
    tensor = min(2, slots)
    train_args = f"""
        {scale.model_flags(MODEL_NAME)} {scale.data_flags("always_one")} {scale.size_flags()}
        --enable-mtp-training
        --actor-num-gpus-per-node {slots} --colocate --rollout-num-gpus-per-engine {tensor}
        --tensor-model-parallel-size {tensor} {"--sequence-parallel" if tensor > 1 else ""} {scale.RECOMPUTE}
        --advantage-estimator grpo --entropy-coef 0 --weight-decay 0
        {scale.run_flags(__file__, run_dir)}
    """
    U.execute_train(train_args, slots, scale.model_type(MODEL_TYPE))
    steps, exact = (0, 1, 2, -1), 0.0 if scale.scale() == "tiny" else 5e-4
    corridors = (
        Corridor("train/grad_norm", steps, at_least=0.0, at_most=0.0),  # of all but the heads
        Corridor("train/ppo_kl", steps, at_least=-exact, at_most=exact),
        Corridor("train/train_rollout_logprob_abs_diff", steps, at_most=scale.DIFFERENCE[scale.scale()]),
        Corridor("train/mtp_loss", (0, -1), at_least=0.0, at_most=20.0),
        scale.STEP_TIME,
    )
    seen = check_metrics(__file__, run_dir, corridors)
    before, after = seen.values["train/mtp_loss"].values()
    # Published heads are trained: what a few steps teach them is less than chance.
    assert scale.scale() == "full" or after < before - 0.1, f"the loss of the heads was {before}, and is {after}"


if __name__ == "__main__":
    prepare()
    for proxy_var in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(proxy_var, None)
    execute()
