"""Qwen3-0.6B: the same losses and gradients under every layout, over responses and over tokens."""

import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.utils.external_utils.command_utils as U
from slime.utils.external_utils.metric_gate import Corridor, check_metrics
from tests.ci import scale

MODEL_NAME = "Qwen/Qwen3-0.6B"
MODEL_TYPE = "qwen3-0.6B"
NUM_GPUS = 8
LABELS = ("run-ci-precision",)
SLOTS = scale.Slots(NUM_GPUS, least=2, tiny=2)
LAYOUTS = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --context-parallel-size 2",
    "--tensor-model-parallel-size 4 --sequence-parallel",
    "--pipeline-model-parallel-size 4",
    "--context-parallel-size 4",
)
LAYOUTS_OF_TWO = (
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
)
"""On fewer than eight slots."""
AGREE = {"full": (0.01, 1e-3), "random": (0.01, 1e-3), "tiny": (1e-4, 1e-6)}
"""How far a layout may be from data parallelism alone: as a share, and of what is about 0 as a loss is, by how much."""
METRICS = ("train/loss", "train/entropy_loss", "train/grad_norm", "rollout/log_probs")


def prepare() -> None:
    scale.prepare(MODEL_NAME, MODEL_TYPE, SLOTS, weights=True)


def execute() -> None:
    work_dir, slots = scale.work_dir(__file__), SLOTS.count()
    every = tuple(Corridor(metric, (0, 1)) for metric in METRICS)
    rollouts = shlex.quote(f"{work_dir}/rollouts/{{rollout_id}}.pt")
    both = f"{scale.model_flags(MODEL_NAME)} {scale.data_flags()} {scale.size_flags()} --num-rollout 2"
    generate = f"""
        {both} --debug-rollout-only --rollout-num-gpus {slots} --save-debug-rollout-data {rollouts}
        {scale.run_flags(__file__, work_dir / "generated")}
    """
    U.execute_train(generate, slots, scale.model_type(MODEL_TYPE))
    for loss in ("", "--calculate-per-token-loss"):
        allowed = every
        for layout in ("", *(LAYOUTS if slots == NUM_GPUS else LAYOUTS_OF_TWO)):
            print(f"layout: {layout or 'data parallel alone'} {loss}", flush=True)
            run_dir = work_dir / "-".join(["trained", *f"{layout} {loss}".replace("--", "").split()])
            train = f"""
                {both} {layout} {loss}
                --debug-train-only --actor-num-gpus-per-node {slots} --load-debug-rollout-data {rollouts}
                --ci-train-rollout-logprob-abs-diff-threshold 5
                {scale.run_flags(__file__, run_dir)}
            """
            U.execute_train(train, slots, scale.model_type(MODEL_TYPE))
            seen = check_metrics(__file__, run_dir, allowed)
            if allowed is every:
                allowed = scale.around(seen, *AGREE[scale.scale()])


if __name__ == "__main__":
    prepare()
    for proxy_var in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(proxy_var, None)
    execute()
