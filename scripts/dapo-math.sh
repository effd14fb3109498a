# Sourced by scripts/run-*.sh: GRPO on the problems of dapo-math-17k, scored on those of aime-2024.
# An array may be added to after sourcing: later flags win.
#
#   launch_grpo FLAG ...   launch train.py with all of them, resuming from and saving to SAVE_DIR, and these
PROMPT_DATA=${PROMPT_DATA:-/root/dapo-math-17k/dapo-math-17k.jsonl}
EVAL_DATA=${EVAL_DATA:-/root/aime-2024/aime-2024.jsonl}

ROLLOUT_ARGS=(
   --prompt-data "$PROMPT_DATA"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-max-response-len 8192
   --rollout-temperature 1.0
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime "$EVAL_DATA"
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-top-p 0.7
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
   --entropy-coef 0.0
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

launch_grpo() {
   launch train.py \
      "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" --load "$SAVE_DIR" --save "$SAVE_DIR" --save-interval 20 \
      "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "$@"
}
