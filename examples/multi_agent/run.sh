#!/usr/bin/env bash
# Solvers, rewriters and a selector of one model: a warm-up for each role, and GRPO on what one rollout is cut into.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, OUTPUT_DIR, SEED, SFT_STEPS.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=multi_agent
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

warm_up slime.rollout.sft_rollout.generate_rollout messages

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --num-rollout 20
   --rollout-batch-size 16
   --n-samples-per-prompt 4
   --global-batch-size 64
   --rollout-max-response-len 8
   --rollout-temperature 1.0
)

CUSTOM_ARGS=(
   --custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents
   --rm-type math
   --agents-solvers 3
   --agents-rewriters 2
)

launch_grpo "$@"
