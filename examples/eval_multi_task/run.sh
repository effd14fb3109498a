#!/usr/bin/env bash
# Score a model on two tasks; nothing is trained.
#
#   bash examples/eval_multi_task/run.sh [MODEL] [FLAG OF train.py ...]
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/launch.sh" # DRY_RUN, RAY_ADDRESS and more
MODEL=${1:-outputs/quickstart/sft/hf}
shift || true
DATA=outputs/eval_multi_task # as multi_task.yaml has it

"$PYTHON" "$SLIME_DIR/tools/make_arithmetic_data.py" "$DATA/two_digits" --digits 2 --num-eval 64
"$PYTHON" "$SLIME_DIR/tools/make_arithmetic_data.py" "$DATA/one_digit" --digits 1 --num-eval 20

RUN_ARGS=(
   --hf-checkpoint "$MODEL"
   "$(precision)"
   --debug-rollout-only
   --rollout-num-gpus 1
   --num-rollout 0
)

EVAL_ARGS=(
   --eval-interval 1
   --eval-config "$SLIME_DIR/examples/eval_multi_task/multi_task.yaml"
)

# Every run is asked for these; here nothing is trained on them.
ROLLOUT_ARGS=(
   --prompt-data "$DATA/two_digits/train.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rm-type math
   --rollout-batch-size 8
   --n-samples-per-prompt 4
   --rollout-max-response-len 16
)

launch train.py "${RUN_ARGS[@]}" "${EVAL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
