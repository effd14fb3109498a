#!/usr/bin/env bash
# tau-bench in small: a warm-up on demonstrations, and GRPO in a mock of its shop, with a user by script.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, OUTPUT_DIR, SEED, SFT_STEPS; TAU_MOCK=0 takes the package tau_bench.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=tau-bench
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

MODEL_ARGS=(--tools)
if [ "${TAU_MOCK:-1}" != 0 ]; then
   export PYTHONPATH=$SLIME_DIR/examples/tau-bench/mock${PYTHONPATH:+:$PYTHONPATH}
fi
warm_up slime.rollout.sft_rollout.generate_rollout messages

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/data/train.jsonl}"
   --input-key index
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --num-rollout 20
   --rollout-batch-size 16
   --n-samples-per-prompt 8
   --global-batch-size 128
   --rollout-max-response-len 48
   --rollout-max-context-len 512
   --rollout-temperature 1.0
)

CUSTOM_ARGS=(
   --custom-generate-function-path examples/tau-bench/generate_with_tau.py:generate
   --rm-type random # tau-bench rewards; a run has to name one
   --max-turns 6
)

launch_grpo "$@"
