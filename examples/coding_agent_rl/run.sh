#!/usr/bin/env bash
# A coding agent in small: a warm-up on demonstrations, and GRPO on repositories in sandboxes of this host.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, OUTPUT_DIR, SEED, SFT_STEPS, and those of the README.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=coding_agent_rl
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

MODEL_ARGS=(--tools)
if [ -z "${HF_CHECKPOINT:-}" ]; then # what a tiny model was shown, and has room for
   export SWE_CC_PROMPT=${SWE_CC_PROMPT:-mend calc.py}
   short="--system '' --max-turns 4 --output-chars 400"
   export SLIME_AGENT_MINI_EXTRA_ARGS=${SLIME_AGENT_MINI_EXTRA_ARGS:-$short}
   export SWE_AGENT_TIME_BUDGET_SEC=${SWE_AGENT_TIME_BUDGET_SEC:-120} SWE_EVAL_TIMEOUT_SEC=${SWE_EVAL_TIMEOUT_SEC:-60}
fi
warm_up slime.rollout.sft_rollout.generate_rollout messages

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --metadata-key metadata
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --num-rollout 5
   --rollout-batch-size 4
   --n-samples-per-prompt 4
   --global-batch-size 16
   --rollout-max-response-len 96
   --rollout-max-context-len 1024
   --rollout-temperature 1.0
)

CUSTOM_ARGS=(
   --custom-generate-function-path examples.coding_agent_rl.generate.generate
   --rm-type random # the generate function rewards; a run has to name one
)

launch_grpo "$@"
