#!/usr/bin/env bash
# Supervised training of Qwen3-4B-Instruct-2507 on ReTool's conversations, before retool_qwen3_4b_rl.sh.
# The data are by sft_data_processing.py; the interpreter's words are not trained on.
# Variables: HF_CHECKPOINT, PROMPT_DATA, SAVE_DIR, NUM_NODES, NUM_GPUS (of a node).
# Further flags of train.py may follow; they win.
HF_CHECKPOINT=${HF_CHECKPOINT:-Qwen/Qwen3-4B-Instruct-2507}
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/launch.sh" # DRY_RUN, RAY_ADDRESS and more
source "$SLIME_DIR/scripts/models/qwen3-4B.sh"
SAVE_DIR=${SAVE_DIR:-outputs/retool-qwen3-4b-sft}
MODEL_ARGS+=(--rotary-base 5000000) # of the models of July 2025

CKPT_ARGS+=(
   --load "$SAVE_DIR"
   --save "$SAVE_DIR"
   --save-hf "$SAVE_DIR/hf"
   --save-interval 1000
)

SFT_ARGS=(
   --rollout-function-path examples.demonstrations.generate_rollout
   --prompt-data "${PROMPT_DATA:-data/retool/ReTool-SFT.jsonl}"
   --input-key prompt
   --rollout-shuffle
   --num-epoch 3
   --rollout-batch-size 128
   --loss-type sft_loss
   --calculate-per-token-loss
   --disable-compute-advantages-and-returns
   --debug-train-only
)

PERF_ARGS=(
   --actor-num-nodes "$NUM_NODES"
   --actor-num-gpus-per-node "${NUM_GPUS:-8}"
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-5
   --min-lr 1e-6
   --lr-decay-style cosine
   --lr-warmup-fraction 0.1
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.95
)

launch train.py "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${SFT_ARGS[@]}" "${PERF_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "$@"
