#!/usr/bin/env bash
# GRPO of GLM-4-9B (or GLM-Z1-9B, by HF_CHECKPOINT) on math problems, on GPUs that train and generate in turn.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, SAVE_DIR, NUM_NODES, NUM_GPUS (of a node).
# Further flags of train.py may follow; they win, but --eval-prompt-data adds a dataset.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DRY_RUN, RAY_ADDRESS and more
source "$SLIME_DIR/scripts/models/glm4-9B.sh"
source "$SLIME_DIR/scripts/dapo-math.sh"
SAVE_DIR=${SAVE_DIR:-outputs/glm4-9B}

PERF_ARGS=(
   --actor-num-nodes "$NUM_NODES"
   --actor-num-gpus-per-node "${NUM_GPUS:-8}"
   --colocate
   --tensor-model-parallel-size 2
   --sequence-parallel
   --context-parallel-size 2
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 4608
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

launch_grpo "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
