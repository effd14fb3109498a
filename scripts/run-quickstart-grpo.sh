#!/usr/bin/env bash
# GRPO of the quickstart: one colocated slot that generates (SGLang) and trains (Megatron-core) in turn.
# Further flags of train.py may follow; they win over those below, but --eval-prompt-data adds a dataset.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DRY_RUN, RAY_ADDRESS and more
OUTPUT_DIR=${OUTPUT_DIR:-$SLIME_DIR/outputs/quickstart}
SEED=${SEED:-0}
RM_TYPE=${RM_TYPE:-math}

# Empty: the shape comes from config.json.
MODEL_ARGS=()

CKPT_ARGS=(
   --hf-checkpoint "${OUTPUT_DIR}/sft/hf"
   --save-hf "${OUTPUT_DIR}/hf"
   --run-dir "${OUTPUT_DIR}/grpo"
)

ROLLOUT_ARGS=(
   --prompt-data "${OUTPUT_DIR}/data/train.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --rm-type "${RM_TYPE}"
   --num-rollout 60
   --rollout-batch-size 64
   --n-samples-per-prompt 4
   --global-batch-size 256
   --rollout-max-response-len 16
   --rollout-temperature 1.0
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data addition "${OUTPUT_DIR}/data/eval.jsonl"
   --eval-temperature 0.0
   --n-samples-per-eval-prompt 1
)

PERF_ARGS=(
   --actor-num-gpus-per-node 1
   --colocate
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
   --fp32
   --seed "${SEED}"
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
   --entropy-coef 0.0
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 2e-4
   --min-lr 2e-5
   --lr-warmup-iters 10
   --lr-decay-style linear
   --weight-decay 0.0
   --adam-beta1 0.9
   --adam-beta2 0.98
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-enable-deterministic-inference
)

launch train.py \
   "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" \
   "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
