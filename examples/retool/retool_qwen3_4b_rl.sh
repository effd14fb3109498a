#!/usr/bin/env bash
# GRPO of Qwen3-4B-Instruct-2507 that runs Python, from what retool_qwen3_4b_sft.sh has made.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, SAVE_DIR, NUM_NODES, NUM_GPUS (of a node).
# Further flags of train.py may follow; they win, but --eval-prompt-data adds a dataset.
HF_CHECKPOINT=${HF_CHECKPOINT:-outputs/retool-qwen3-4b-sft/hf}
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/launch.sh" # DRY_RUN, RAY_ADDRESS and more
source "$SLIME_DIR/scripts/models/qwen3-4B.sh"
source "$SLIME_DIR/scripts/dapo-math.sh"
SAVE_DIR=${SAVE_DIR:-outputs/retool-qwen3-4b}
MODEL_ARGS+=(--rotary-base 5000000) # of the models of July 2025

CUSTOM_ARGS=(
   --custom-generate-function-path examples.retool.generate_with_retool.generate
   --custom-rm-path examples.retool.generate_with_retool.reward_func
   --max-turns 16
   --tool-timeout 120
   --tool-memory-mb 4096
   --tool-concurrency 32
   --eval-top-p 1
)

PERF_ARGS=(
   --actor-num-nodes "$NUM_NODES"
   --actor-num-gpus-per-node "${NUM_GPUS:-4}"
   --colocate
   --tensor-model-parallel-size 2
   --sequence-parallel
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

launch_grpo "${CUSTOM_ARGS[@]}" "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
