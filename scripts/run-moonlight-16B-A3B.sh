#!/usr/bin/env bash
# GRPO of Moonlight-16B-A3B-Instruct on math problems, on GPUs that train and generate in turn.
# Its tokenizer is published as code, which is never run: put a tokenizer.json beside the weights (docs/launch.md).
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, SAVE_DIR, NUM_NODES, NUM_GPUS (of a node).
# Further flags of train.py may follow; they win, but --eval-prompt-data adds a dataset.
HF_CHECKPOINT=${HF_CHECKPOINT:-/root/Moonlight-16B-A3B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DRY_RUN, RAY_ADDRESS and more
source "$SLIME_DIR/scripts/models/moonlight.sh"
source "$SLIME_DIR/scripts/dapo-math.sh"
SAVE_DIR=${SAVE_DIR:-outputs/moonlight-16B-A3B}

PERF_ARGS=(
   --actor-num-nodes "$NUM_NODES"
   --actor-num-gpus-per-node "${NUM_GPUS:-8}"
   --colocate
   --tensor-model-parallel-size 2
   --sequence-parallel
   --expert-model-parallel-size "${NUM_GPUS:-8}"
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 20480
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

launch_grpo "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
