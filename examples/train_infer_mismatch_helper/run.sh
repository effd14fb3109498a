#!/usr/bin/env bash
# GRPO on responses of older weights, corrected by mis.py with the settings of mis.yaml: one slot trains, one generates.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, OUTPUT_DIR, SEED, SFT_STEPS, MIS_CONFIG.
# Further flags of train_async.py may follow; those of mis.yaml win over them, and they over the others.
EXAMPLE=train_infer_mismatch_helper
source "$(dirname "${BASH_SOURCE[0]}")/../tiny_model.sh" # warm_up, launch_grpo, DRY_RUN and more

: "${SFT_STEPS:=480}" # additions take longer than calls of a tool
warm_up slime.rollout.sft_rollout.generate_rollout messages

ROLLOUT_ARGS=(
   --prompt-data "${PROMPT_DATA:-${OUTPUT_DIR}/data/train.jsonl}"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-seed "${SEED}"
   --rm-type math
   --num-rollout 20
   --rollout-batch-size 32
   --n-samples-per-prompt 4
   --rollout-max-response-len 16
   --rollout-temperature 1.0
)

CUSTOM_ARGS=(
   --custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp
   --custom-config-path "${MIS_CONFIG:-examples/train_infer_mismatch_helper/mis.yaml}"
)

# A rollout is trained on while the next one is generated, and is one version old by then.
DRIVER=train_async.py
PERF_ARGS=(
   --actor-num-gpus-per-node 1
   --rollout-num-gpus 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
   "$(precision)"
   --seed "${SEED}"
)

OPTIMIZER_ARGS+=(--lr 1e-4)

launch_grpo "$@"
