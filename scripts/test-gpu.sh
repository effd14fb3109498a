#!/usr/bin/env bash
# What the GPUs of this host allow of tests/gpu, and the layouts of tests/parallel over NCCL; a table at the end.
#
#   bash scripts/test-gpu.sh            # in the environment that scripts/install.sh cuda made
#   bash scripts/test-gpu.sh -k layout  # further words go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
python3 - <<'CHECK'
import sys
import torch
if not torch.cuda.is_available():
    sys.exit("test-gpu: error: torch sees no GPU on this host; scripts/test.sh is for hosts without")
print(f"test-gpu: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
CHECK
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
python3 -m pytest -q -m "not full" --durations=0 --durations-min=5 tests/gpu tests/parallel/test_rl_layouts.py "$@"
