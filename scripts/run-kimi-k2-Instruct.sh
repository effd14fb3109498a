#!/usr/bin/env bash
# GRPO of Kimi-K2-Instruct on math problems, on 32 nodes of eight H200 that train and generate in turn.
# The engines, of two nodes each, serve the published float8, 64 GB a GPU, and are pushed what the trainers learn in
# bfloat16 in the same blocks (docs/launch.md). No machine of that size has run it yet.
# Its tokenizer is published as code, which is never run: put a tokenizer.json beside the weights (docs/launch.md).
# Run it on every node, with NODE_RANK from 0 and MASTER_ADDR the address of node 0, or once with RAY_ADDRESS where a
# Ray of all nodes runs. The paths must be the same on every node.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, SAVE_DIR, NUM_NODES, NUM_GPUS (of a node).
# Further flags of train.py may follow; they win, but --eval-prompt-data adds a dataset.
NUM_NODES=${NUM_NODES:-32}
NUM_GPUS=${NUM_GPUS:-8}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DRY_RUN, RAY_ADDRESS and more
: "${HF_CHECKPOINT:=/root/Kimi-K2-Instruct}"
source "$SLIME_DIR/scripts/models/kimi-k2.sh"
source "$SLIME_DIR/scripts/dapo-math.sh"
SAVE_DIR=${SAVE_DIR:-outputs/kimi-k2-Instruct}

PERF_ARGS=(
   --actor-num-nodes "$NUM_NODES"
   --actor-num-gpus-per-node "$NUM_GPUS"
   --colocate
   --tensor-model-parallel-size 8
   --sequence-parallel
   --pipeline-model-parallel-size 8
   --decoder-last-pipeline-num-layers 5
   --expert-model-parallel-size "$((NUM_NODES * NUM_GPUS / 8))" # the GPUs of a pipeline stage
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
   --num-gpus-per-node "$NUM_GPUS"
   --rollout-num-gpus-per-engine "$((2 * NUM_GPUS))"
   --sglang-mem-fraction-static 0.85
)

# Engines in float8 are further from trainers in bfloat16.
MISMATCH_ARGS=(
   --use-tis
   --tis-clip 2.0
)

launch_grpo "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISMATCH_ARGS[@]}" "$@"
