#!/usr/bin/env bash
# GRPO of Qwen3-4B on math problems, corrected by mis.py with the settings of mis.yaml.
# Variables: HF_CHECKPOINT, PROMPT_DATA, EVAL_DATA, SAVE_DIR, NUM_NODES, NUM_GPUS (of a node), MIS_CONFIG.
# Further flags of train.py may follow; those of mis.yaml win over them, and they over the others, but --eval-prompt-data
# adds a dataset.
EXAMPLE_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$EXAMPLE_DIR/../../scripts/run-qwen3-4B.sh" \
   --custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp \
   --custom-config-path "${MIS_CONFIG:-$EXAMPLE_DIR/mis.yaml}" \
   --context-parallel-size 2 --rollout-num-gpus-per-engine 1 "$@"
