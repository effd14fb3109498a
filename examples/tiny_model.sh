# Sourced by the run.sh of examples, which set EXAMPLE: a tiny model is made (tools/make_tiny_model.py, with the flags in
# MODEL_ARGS, or that of START is taken), warmed up on demonstrations, and trained by GRPO on one slot. The data are those
# of the example's make_data.py, or additions (or what DATA_ARGS say) where it has none. With HF_CHECKPOINT set to a model (and PROMPT_DATA, EVAL_DATA to your
# files) nothing is made or warmed up. Further flags of train.py may follow those of a script; they win over those of the
# GRPO run, but --eval-prompt-data adds a dataset.
#
#   warm_up ROLLOUT_FUNCTION INPUT_KEY   model, data, SFT_STEPS steps of supervised training
#   launch_grpo FLAG ...                 launch train.py, or DRIVER, with the script's ROLLOUT_ARGS and CUSTOM_ARGS, what is
#                                        below, and these
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/launch.sh" # DRY_RUN, RAY_ADDRESS and more
cd "$SLIME_DIR"
OUTPUT_DIR=${OUTPUT_DIR:-outputs/$EXAMPLE}
SEED=${SEED:-0}
MODEL_ARGS=()
DATA_ARGS=()

warm_up() {
   local model=${START:-${OUTPUT_DIR}/model} maker=(-m "examples.$EXAMPLE.make_data")
   local args=(
      --hf-checkpoint "$model"
      --save-hf "${OUTPUT_DIR}/sft/hf"
      --run-dir "${OUTPUT_DIR}/sft"
      --rollout-function-path "$1"
      --prompt-data "${OUTPUT_DIR}/data/sft.jsonl"
      --input-key "$2"
      --rollout-shuffle
      --num-rollout "${SFT_STEPS:-240}"
      --rollout-batch-size 32
      --loss-type sft_loss
      --calculate-per-token-loss
      --disable-compute-advantages-and-returns
      --debug-train-only
      --actor-num-gpus-per-node 1
      --use-dynamic-batch-size
      --max-tokens-per-gpu 8192
      --fp32
      --seed "${SEED}"
      --optimizer adam
      --lr 2e-3
      --min-lr 0.0
      --lr-decay-style linear
      --lr-warmup-iters 10
      --weight-decay 0.0
      --adam-beta2 0.98
   )
   [ -z "${HF_CHECKPOINT:-}" ] || return 0
   [ -f "examples/$EXAMPLE/make_data.py" ] || maker=(tools/make_arithmetic_data.py)
   [ -n "${START:-}" ] || "$PYTHON" tools/make_tiny_model.py "${OUTPUT_DIR}/model" --overwrite --seed "${SEED}" "${MODEL_ARGS[@]}"
   "$PYTHON" "${maker[@]}" "${OUTPUT_DIR}/data" --seed "${SEED}" "${DATA_ARGS[@]}"
   (launch train.py "${args[@]}")
   # A dry run has warmed up nothing, and checks the GRPO run with the model as it was made.
   [ "${DRY_RUN:-0}" = 0 ] || HF_CHECKPOINT=$model
}

EVAL_ARGS=(
   --eval-interval 10
   --eval-prompt-data "$EXAMPLE" "${EVAL_DATA:-${OUTPUT_DIR}/data/eval.jsonl}"
   --eval-temperature 1.0
   --n-samples-per-eval-prompt 4
)

PERF_ARGS=(
   --actor-num-gpus-per-node 1
   --colocate
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
   "$(precision)"
   --seed "${SEED}"
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 3e-4
   --lr-decay-style constant
   --weight-decay 0.0
   --adam-beta2 0.98
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
)

launch_grpo() {
   local checkpoints=(
      --hf-checkpoint "${HF_CHECKPOINT:-${OUTPUT_DIR}/sft/hf}"
      --save-hf "${OUTPUT_DIR}/hf"
      --run-dir "${OUTPUT_DIR}/grpo"
   )
   launch "${DRIVER:-train.py}" \
      "${checkpoints[@]}" "${ROLLOUT_ARGS[@]}" "${CUSTOM_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" \
      "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
}
