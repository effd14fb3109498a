#!/usr/bin/env bash
# Train twice from the same model, data and seeds, and compare what came of it.
# Variables: HF_CHECKPOINT, PROMPT_DATA, OUTPUT_DIR, SEED, SFT_STEPS.
# Further flags of train.py may follow, for both runs; they win, but for directories and files that are compared.
EXAMPLE=reproducibility
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

warm_up slime.rollout.sft_rollout.generate_rollout messages

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --rm-type math
   --num-rollout 5
   --rollout-batch-size 32
   --n-samples-per-prompt 4
   --rollout-max-response-len 16
   --rollout-temperature 1.0
)

# Trainers and engines take kernels that give the same bits each time, and each request has a seed of its own.
CUSTOM_ARGS=(
   --deterministic-mode
)

EVAL_ARGS=()

# This shell waits for the run, and passes on what tells it to end.
trap 'kill "$run"; wait "$run"; exit' INT TERM
for name in first second; do
   output=${OUTPUT_DIR}/$name
   (launch_grpo "$@" --run-dir "$output" --save-hf "$output/hf" \
      --save-debug-rollout-data "$output/samples_{rollout_id}.pt") &
   run=$!
   wait "$run"
   [ "${DRY_RUN:-0}" = 0 ] || exit 0
done
exec "$PYTHON" -m examples.reproducibility.compare "${OUTPUT_DIR}/first" "${OUTPUT_DIR}/second"
