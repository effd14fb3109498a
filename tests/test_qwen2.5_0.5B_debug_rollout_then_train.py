"""Qwen2.5-0.5B: rollouts first, by engines alone, and then training on what they left, without engines."""

import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import Corridor, check_metrics
from tests.ci import scale

MODEL_NAME = "Qwen/Qwen2.5-0.5B-Instruct"
MODEL_TYPE = "qwen2.5-0.5B"
NUM_GPUS = 8
LABELS = ("run-ci-megatron",)
SLOTS = scale.Slots(NUM_GPUS, least=1)
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def prepare() -> None:
    scale.prepare(MODEL_NAME, MODEL_TYPE, SLOTS, weights=True)


def execute() -> None:
    work_dir, slots = scale.work_dir(__file__), SLOTS.count()
    rollouts = shlex.quote(f"{work_dir}/rollouts/{{rollout_id}}.pt")
    both = f"""
        {scale.model_flags(MODEL_NAME)} {scale.data_flags()} {scale.size_flags()} --num-rollout 2
        --advantage-estimator grpo --eps-clip-high 0.28
    """
    generate = f"""
        {both} --debug-rollout-only --rollout-num-gpus {slots} --save-debug-rollout-data {rollouts}
        {scale.run_flags(__file__, work_dir / "generated")}
    """
    train = f"""
        {both} --debug-train-only --actor-num-gpus-per-node {slots} --load-debug-rollout-data {rollouts}
        --ci-train-rollout-logprob-abs-diff-threshold 5
        {scale.run_flags(__file__, work_dir / "trained")}
    """
    U.execute_train(generate, slots, scale.model_type(MODEL_TYPE))
    U.execute_train(train, slots, scale.model_type(MODEL_TYPE))
    check_metrics(__file__, work_dir / "generated", (Corridor("rollout/raw_reward", (0, 1), at_least=0.01),))
    corridors = (
        Corridor("train/ppo_kl", steps=(0,), at_least=-5e-4, at_most=5e-4),
        Corridor(DIFFERENCE, steps=(0, 1), at_most=scale.DIFFERENCE[scale.scale()]),
        Corridor("train/grad_norm", steps=(0, -1), at_least=1e-6, at_most=1e3),
        scale.STEP_TIME,
    )
    if scale.scale() == "tiny":
        # No trainer was there to push: the second rollout is still of the first weights, of which these are far now.
        corridors += (Corridor(DIFFERENCE, steps=(2, 3), at_least=1e-3),)
    check_metrics(__file__, work_dir / "trained", corridors)


if __name__ == "__main__":
    prepare()
    for proxy_var in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(proxy_var, None)
    execute()
