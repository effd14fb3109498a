#!/usr/bin/env bash
# ReTool in small: a warm-up on demonstrations, and GRPO with Python in a sandbox.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, OUTPUT_DIR, SEED, SFT_STEPS.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=retool
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

warm_up examples.demonstrations.generate_rollout prompt

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

launch_grpo "$@"
