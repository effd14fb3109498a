#!/usr/bin/env bash
# On-policy distillation in small: a teacher that was shown additions for long teaches a student that was for a moment.
# Variables: OPD_TYPE (sglang, by a server of the run, or megatron), HF_CHECKPOINT with TEACHER, PROMPT_DATA, EVAL_DATA,
# OUTPUT_DIR, SEED, SFT_STEPS of the student, TEACHER_STEPS; OPD_KL_COEF=0 is the control.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=on_policy_distillation
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

TEACHER=${TEACHER:-${OUTPUT_DIR}/teacher/sft/hf}
if [ -z "${HF_CHECKPOINT:-}" ] && [ ! -f "${TEACHER}/config.json" ]; then
   (OUTPUT_DIR=${OUTPUT_DIR}/teacher SFT_STEPS=${TEACHER_STEPS:-240} warm_up slime.rollout.sft_rollout.generate_rollout messages)
   [ "${DRY_RUN:-0}" = 0 ] || TEACHER=${OUTPUT_DIR}/teacher/model
fi
SFT_STEPS=${SFT_STEPS:-20}
warm_up slime.rollout.sft_rollout.generate_rollout messages

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --num-rollout 60
   --rollout-batch-size 64
   --n-samples-per-prompt 4
   --global-batch-size 256
   --rollout-max-response-len 16
   --rollout-temperature 1.0
)

# No --rm-type: the student learns from the teacher alone. Only evaluations look at the answers.
mkdir -p "${OUTPUT_DIR}"
cat > "${OUTPUT_DIR}/eval.yaml" << END
datasets:
  - {name: addition, path: "${EVAL_DATA:-${OUTPUT_DIR}/data/eval.jsonl}", rm_type: math, temperature: 0.0}
END
EVAL_ARGS=(--eval-interval 60 --eval-config "${OUTPUT_DIR}/eval.yaml")
CUSTOM_ARGS=(
   --use-opd
   --opd-type "${OPD_TYPE:=sglang}"
   --opd-kl-coef "${OPD_KL_COEF:-1.0}"
)
case $OPD_TYPE in
   sglang) CUSTOM_ARGS+=(--rm-model-path "${TEACHER}" --rm-num-gpus 1) ;;
   megatron) CUSTOM_ARGS+=(--opd-teacher-load "${TEACHER}") ;;
esac

launch_grpo --lr 6e-4 "$@"
