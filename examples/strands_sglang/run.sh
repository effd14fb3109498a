#!/usr/bin/env bash
# An agent of strands-agents in small: a warm-up on demonstrations, and GRPO with Python in a sandbox as its tool.
# Needs strands-agents (the README says how). Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, OUTPUT_DIR, SEED, SFT_STEPS.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=strands_sglang
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

if [ "${DRY_RUN:-0}" = 0 ] && ! "$PYTHON" -c 'import strands' 2> /dev/null; then
   _die "$PYTHON has no strands-agents: examples/strands_sglang/README.md says how it is installed"
fi
MODEL_ARGS=(--tools)
warm_up slime.rollout.sft_rollout.generate_rollout messages

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --num-rollout 20
   --rollout-batch-size 16
   --n-samples-per-prompt 8
   --global-batch-size 128
   --rollout-max-response-len 64
   --rollout-max-context-len 512
   --rollout-temperature 1.0
)

CUSTOM_ARGS=(
   --custom-generate-function-path examples.strands_sglang.generate_with_strands.generate
   --custom-rm-path examples.strands_sglang.generate_with_strands.reward_func
   --max-turns 4
)

launch_grpo "$@"
