#!/usr/bin/env bash
# Search-R1 in small: a search server, a warm-up on demonstrations, and GRPO with several turns.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, OUTPUT_DIR, SEED, SFT_STEPS, SEARCH_URL or SEARCH_PORT.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=search-r1
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

warm_up examples.demonstrations.generate_rollout prompt

# The search server of this run; for one that runs elsewhere set SEARCH_URL.
if [ -z "${SEARCH_URL:-}" ]; then
   SEARCH_PORT=${SEARCH_PORT:-8765}
   SEARCH_URL=http://127.0.0.1:${SEARCH_PORT}/retrieve
   start_server "the search server" "port ${SEARCH_PORT} (SEARCH_PORT)" \
      "$PYTHON" -u -m examples.search-r1.search_server "${OUTPUT_DIR}/data/corpus.jsonl" --port "${SEARCH_PORT}"
fi

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
   --rollout-max-response-len 192
   --rollout-temperature 1.0
)

CUSTOM_ARGS=(
   --custom-generate-function-path examples.search-r1.generate_with_search.generate
   --custom-rm-path examples.search-r1.generate_with_search.reward_func
   --max-turns 3
   --search-url "${SEARCH_URL}"
   --search-topk 1
)

launch_grpo "$@"
