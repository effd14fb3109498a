#!/usr/bin/env bash
# ReTool in small: a warm-up on demonstrations, and GRPO with Python in a sandbox.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset. With
# HF_CHECKPOINT set to a model (and PROMPT_DATA, EVAL_DATA to your files) nothing is made or warmed up.
set -euo pipefail
OUTPUT_DIR=${OUTPUT_DIR:-outputs/retool}
SEED=${SEED:-0}
PYTHON=${PYTHON:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SFT_ARGS=(
   --hf-checkpoint "${OUTPUT_DIR}/model"
   --save-hf "${OUTPUT_DIR}/sft/hf"
   --run-dir "${OUTPUT_DIR}/sft"
   --rollout-function-path examples.demonstrations.generate_rollout
   --prompt-data "${OUTPUT_DIR}/data/sft.jsonl"
   --input-key prompt
   --rollout-shuffle
   --num-rollout "${SFT_STEPS:-240}"
   --rollout-batch-size 32
   --loss-type sft_loss
   --calculate-per-token-loss
   --disable-compute-advantages-and-returns
   --debug-train-only
   --actor-num-gpus-per-node 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
   --fp32
   --seed "${SEED}"
   --optimizer adam
   --lr 2e-3
   --min-lr 0.0
   --lr-decay-style linear
   --lr-warmup-iters 10
   --weight-decay 0.0
   --adam-beta2 0.98
)

if [ -z "${HF_CHECKPOINT:-}" ]; then
   "$PYTHON" tools/make_tiny_model.py "${OUTPUT_DIR}/model" --overwrite --seed "${SEED}"
   "$PYTHON" -m examples.retool.make_data "${OUTPUT_DIR}/data" --seed "${SEED}"
   "$PYTHON" train.py "${SFT_ARGS[@]}"
fi

CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-${OUTPUT_DIR}/sft/hf}"
   --save-hf "${OUTPUT_DIR}/hf"
   --run-dir "${OUTPUT_DIR}/grpo"
)

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --num-rollout 20
   --rollout-batch-size 16
   --n-samples-per-prompt 8
   --global-batch-size 128
   --rollout-max-response-len 128
   --rollout-temperature 1.0
)

CUSTOM_ARGS=(
   --custom-generate-function-path examples.retool.generate_with_retool.generate
   --custom-rm-path examples.retool.generate_with_retool.reward_func
   --max-turns 3
   --tool-timeout 5
)

EVAL_ARGS=(
   --eval-interval 10
   --eval-prompt-data retool "${EVAL_DATA:-${OUTPUT_DIR}/data/eval.jsonl}"
   --eval-temperature 1.0
   --n-samples-per-eval-prompt 4
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
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 3e-4
   --lr-decay-style constant
   --weight-decay 0.0
   --adam-beta2 0.98
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
)

exec "$PYTHON" train.py \
   "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${CUSTOM_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" \
   "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
