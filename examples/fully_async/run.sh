#!/usr/bin/env bash
# GRPO on the quickstart's task with a rollout that never stops: one slot trains, one generates.
# Needs the model and data of `bash scripts/quickstart.sh`, or HF_CHECKPOINT and PROMPT_DATA. Further flags may follow.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/launch.sh" # DRY_RUN, RAY_ADDRESS and more
cd "$SLIME_DIR"
QUICKSTART_DIR=${QUICKSTART_DIR:-outputs/quickstart}
OUTPUT_DIR=${OUTPUT_DIR:-outputs/fully_async}

ROLLOUT_ARGS=(
   --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
   --max-weight-staleness 2
   --hf-checkpoint "${HF_CHECKPOINT:-${QUICKSTART_DIR}/sft/hf}"
   --run-dir "${OUTPUT_DIR}"
   --prompt-data "${PROMPT_DATA:-${QUICKSTART_DIR}/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type math
   --num-rollout 20
   --rollout-batch-size 32
   --n-samples-per-prompt 4
   --rollout-max-response-len 16
)

# What older weights generated is corrected for.
GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip-high 0.28
   --use-tis
)

PERF_ARGS=(
   --actor-num-gpus-per-node 1
   --rollout-num-gpus 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
   "$(precision)"
   --lr 1e-4
   --lr-decay-style constant
)

launch train_async.py "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${PERF_ARGS[@]}" "$@"
