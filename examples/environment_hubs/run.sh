#!/usr/bin/env bash
# A hub's environment, played by a model in training: run.sh verifiers|openenv|nemo_gym|harbor
# Variables: HUB_PYTHON (the Python in which the hub is installed), HUB_PORT, or HUB_URL and HUB_KEY of a server that runs;
# HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, OUTPUT_DIR, SEED, SFT_STEPS.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=environment_hubs
export HUB=${1:-}
case $HUB in
   verifiers | openenv | nemo_gym | harbor) shift ;;
   *) echo "environment_hubs: error: which hub: verifiers, openenv, nemo_gym or harbor; not '$HUB'" >&2; exit 2 ;;
esac
OUTPUT_DIR=${OUTPUT_DIR:-outputs/$HUB}
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more
export HUB_PYTHON=${HUB_PYTHON:-$PYTHON}

warm_up slime.rollout.sft_rollout.generate_rollout messages

# The hub's server of this run; for one that runs elsewhere set HUB_URL.
if [ -z "${HUB_URL:-}" ]; then
   HUB_KEY=${HUB_KEY:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')} # opens it
   export HUB_KEY
   HUB_PORT=${HUB_PORT:-8770}
   export HUB_URL=http://127.0.0.1:${HUB_PORT}/run
   start_server "the hub's server" "port ${HUB_PORT} (HUB_PORT)" \
      "$HUB_PYTHON" -u examples/environment_hubs/server.py "$HUB" --port "${HUB_PORT}"
fi

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
   --rollout-max-response-len 24
   --rollout-temperature 1.0
)

CUSTOM_ARGS=(
   --custom-generate-function-path slime.agent.rollout.generate
   --custom-agent-function-path examples.environment_hubs.agent.run
   --agent-max-turns 8
)

launch_grpo "$@"
