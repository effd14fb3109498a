#!/usr/bin/env bash
# An agent of your own in small: a warm-up on demonstrations, and GRPO with an agent that speaks OpenAI's API.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, OUTPUT_DIR, SEED, SFT_STEPS; RANDOM_REWARDS=1 is the control.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=agent_tool_use
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

MODEL_ARGS=(--tools)
warm_up slime.rollout.sft_rollout.generate_rollout messages

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --num-rollout 30
   --rollout-batch-size 16
   --n-samples-per-prompt 8
   --global-batch-size 128
   --rollout-max-response-len 32
   --rollout-max-context-len 512
   --rollout-temperature 1.0
)

CUSTOM_ARGS=(
   --custom-generate-function-path slime.agent.rollout.generate
   --custom-agent-function-path examples.agent_tool_use.agent.run
)
if [ "${RANDOM_REWARDS:-0}" != 0 ]; then
   CUSTOM_ARGS+=(--custom-reward-post-process-path examples.agent_tool_use.agent.random_rewards)
fi

# One wrong token spoils a session of 60: the last steps are small.
launch_grpo --lr-decay-style linear --min-lr 3e-5 "$@"
