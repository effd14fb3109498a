#!/usr/bin/env bash
# On-policy distillation in small: a model that can add is shown subtractions, and forgets additions for it; then it
# learns them again from what it was before, its teacher, on prompts without answers.
# Variables: OPD_TYPE (sglang, by a server of the run, or megatron), HF_CHECKPOINT with TEACHER, PROMPT_DATA, EVAL_DATA,
# OUTPUT_DIR, SEED, SFT_STEPS of the student, TEACHER_STEPS; OPD_TOP_K=0 learns from the sampled tokens alone, and
# OPD_KL_COEF=0 is the control.
# Further flags of train.py may follow; they win over those of the GRPO run, but --eval-prompt-data adds a dataset.
EXAMPLE=on_policy_distillation
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

TEACHER=${TEACHER:-${OUTPUT_DIR}/teacher/sft/hf}
if [ -z "${HF_CHECKPOINT:-}" ] && [ ! -f "${TEACHER}/config.json" ]; then
   (OUTPUT_DIR=${OUTPUT_DIR}/teacher SFT_STEPS=${TEACHER_STEPS:-240} warm_up slime.rollout.sft_rollout.generate_rollout messages)
   [ "${DRY_RUN:-0}" = 0 ] || TEACHER=${OUTPUT_DIR}/teacher/model
fi
SFT_STEPS=${SFT_STEPS:-20}
START=$TEACHER
DATA_ARGS=(--operator -)
warm_up slime.rollout.sft_rollout.generate_rollout messages

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/teacher/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --num-rollout 60
   --rollout-batch-size 32
   --n-samples-per-prompt 4
   --global-batch-size 128
   --rollout-max-response-len 16
   --rollout-temperature 1.0
)

# No --rm-type: the student learns from the teacher alone. Only evaluations look at the answers, and at the distance to
# the teacher on prompts that are not trained on, which a served one tells.
mkdir -p "${OUTPUT_DIR}"
cat > "${OUTPUT_DIR}/eval.yaml" << END
datasets:
  - {name: addition, path: "${EVAL_DATA:-${OUTPUT_DIR}/teacher/data/eval.jsonl}", rm_type: math, temperature: 0.0}
END
[ "${OPD_TYPE:=sglang}" != sglang ] || cat >> "${OUTPUT_DIR}/eval.yaml" << END
  - {name: distance, path: "${EVAL_DATA:-${OUTPUT_DIR}/teacher/data/eval.jsonl}@[0:128]", n_samples_per_eval_prompt: 4,
     custom_rm_path: examples.on_policy_distillation.distance.reward_func}
END
EVAL_ARGS=(--eval-interval 10 --eval-config "${OUTPUT_DIR}/eval.yaml")
CUSTOM_ARGS=(
   --use-opd
   --opd-type "${OPD_TYPE}"
   --opd-kl-coef "${OPD_KL_COEF:-1.0}"
   --opd-top-k "${OPD_TOP_K:-16}"
)
case $OPD_TYPE in
   sglang) CUSTOM_ARGS+=(--rm-model-path "${TEACHER}" --rm-num-gpus 1) ;;
   megatron) CUSTOM_ARGS+=(--opd-teacher-load "${TEACHER}") ;;
esac

launch_grpo --lr 1e-3 --lr-decay-style linear --min-lr 0.0 "$@"
