#!/usr/bin/env bash
# GRPO of Qwen3-235B-A22B on math problems, on eight nodes of eight GPUs that train and generate in turn.
# Run it on every node, with NODE_RANK from 0 and MASTER_ADDR the address of node 0, or once with RAY_ADDRESS where a
# Ray of all nodes runs. The paths must be the same on every node.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, SAVE_DIR, NUM_NODES, NUM_GPUS (of a node).
# Further flags of train.py may follow; they win, but --eval-prompt-data adds a dataset.
NUM_NODES=${NUM_NODES:-8}
NUM_GPUS=${NUM_GPUS:-8}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DRY_RUN, RAY_ADDRESS and more
source "$SLIME_DIR/scripts/models/qwen3-235B-A22B.sh"
source "$SLIME_DIR/scripts/dapo-math.sh"
SAVE_DIR=${SAVE_DIR:-outputs/qwen3-235B-A22B}

PERF_ARGS=(
   --actor-num-nodes "$NUM_NODES"
   --actor-num-gpus-per-node "$NUM_GPUS"
   --colocate
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 4
   --decoder-last-pipeline-num-layers 22
   --expert-model-parallel-size "$((NUM_NODES * NUM_GPUS / 4))" # the GPUs of a pipeline stage
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine "$NUM_GPUS"
   --sglang-mem-fraction-static 0.7
)

launch_grpo "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
