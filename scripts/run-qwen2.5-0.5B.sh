#!/usr/bin/env bash
# Smoke test: three short rollouts of Qwen2.5-0.5B-Instruct on one slot, a GPU or, with --fp32, a CPU.
# The problems are made here, unless PROMPT_DATA names a file of rows with chat messages `prompt` and a `label`.
# Variables: HF_CHECKPOINT, OUTPUT_DIR, NUM_GPUS.
# Further flags of train.py may follow; they win.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DRY_RUN, RAY_ADDRESS and more
source "$SLIME_DIR/scripts/models/qwen2.5-0.5B.sh"
OUTPUT_DIR=${OUTPUT_DIR:-outputs/qwen2.5-0.5B}

if [ -z "${PROMPT_DATA:-}" ]; then
   PROMPT_DATA=$OUTPUT_DIR/data/train.jsonl
   [ -f "$PROMPT_DATA" ] || "$PYTHON" "$SLIME_DIR/tools/make_arithmetic_data.py" "$OUTPUT_DIR/data"
fi

CKPT_ARGS+=(
   --save-hf "$OUTPUT_DIR/hf"
   --run-dir "$OUTPUT_DIR"
)

ROLLOUT_ARGS=(
   --prompt-data "$PROMPT_DATA"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type math
   --num-rollout 3
   --rollout-batch-size 8
   --n-samples-per-prompt 4
   --rollout-max-response-len 128
)

PERF_ARGS=(
   --actor-num-gpus-per-node "${NUM_GPUS:-1}"
   --colocate
   --use-dynamic-batch-size
   --max-tokens-per-gpu 4096
   --sglang-mem-fraction-static 0.5
)

launch train.py "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" "$@"
