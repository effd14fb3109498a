#!/usr/bin/env bash
# Supervised warm-up of the quickstart: no engine, one training process.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DRY_RUN, RAY_ADDRESS and more
OUTPUT_DIR=${OUTPUT_DIR:-$SLIME_DIR/outputs/quickstart}
SEED=${SEED:-0}

CKPT_ARGS=(
   --hf-checkpoint "${OUTPUT_DIR}/model"
   --save-hf "${OUTPUT_DIR}/sft/hf_{rollout_id}"
   --save-interval 20
   --run-dir "${OUTPUT_DIR}/sft"
)

ROLLOUT_ARGS=(
   --rollout-function-path slime.rollout.sft_rollout.generate_rollout
   --prompt-data "${OUTPUT_DIR}/data/sft.jsonl"
   --input-key messages
   --rollout-shuffle
   --num-rollout 400
   --rollout-batch-size 64
)

SFT_ARGS=(
   --loss-type sft_loss
   --disable-compute-advantages-and-returns
   --debug-train-only
)

PERF_ARGS=(
   --actor-num-gpus-per-node 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
   --fp32
   --seed "${SEED}"
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-3
   --lr-decay-style constant
   --weight-decay 0.0
   --adam-beta1 0.9
   --adam-beta2 0.98
)

launch train.py \
   "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${SFT_ARGS[@]}" "${PERF_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "$@"
