#!/usr/bin/env bash
# What the GPUs of this host allow of tests/gpu, and the layouts and checkpoints of tests/parallel over NCCL: first the
# cases of one GPU, each GPU with a case of its own, then those of several, two at a time. A table ends each half.
#
#   bash scripts/test-gpu.sh            # in the environment that scripts/install.sh cuda made
#   bash scripts/test-gpu.sh --full     # every case, not one per mechanism
#   bash scripts/test-gpu.sh --share 4  # the cases of several GPUs, up to 4, on the first one, which all ranks share:
#                                       # slow, NCCL then goes through sockets; with --full or without
#   bash scripts/test-gpu.sh -k layout  # further words go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
fail() {
    echo "test-gpu: error: $*" >&2
    exit 2
}
tier="not full" share=
while :; do
    case ${1:-} in
        --full) tier="full or not full" ;;
        --share)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || fail "--share wants the number of ranks"
            share=$2
            shift
            ;;
        *) break ;;
    esac
    shift
done
if [ -n "$share" ] && [[ ! "${CUDA_VISIBLE_DEVICES:-0}" =~ ^0(,|$) ]]; then
    fail "--share takes the host's first GPU, and CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES begins with another"
fi
gpus=$(python3 - <<'CHECK'
import os
import sys
from slime.entry.installation import check_installation
check_installation("test-gpu")
import torch
if not torch.cuda.is_available():
    sys.exit("test-gpu: error: torch sees no GPU on this host; scripts/test.sh is for hosts without")
count = torch.cuda.device_count()
print(f"test-gpu: {count} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}", file=sys.stderr)
print(*(os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count])
CHECK
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
INTERRUPTED=2 NO_TESTS=5 # pytest's status after Ctrl-C or -x, and where -k leaves nothing
ran=false failed=false

cases() { # AT_ONCE MARKERS WORDS...
    local at_once=$1 markers=$2 status=0
    shift 2
    python3 -m pytest -q -n "$at_once" -m "($tier) and ($markers)" --durations=0 --durations-min=5 "$@" || status=$?
    [ "$status" != "$INTERRUPTED" ] || exit "$status"
    [ "$status" = "$NO_TESTS" ] || ran=true
    [ "$status" = 0 ] || [ "$status" = "$NO_TESTS" ] || failed=true
}

if [ -n "$share" ]; then
    unset CUDA_VISIBLE_DEVICES
    export SLIME_TEST_SHARE=$share PYTHONPATH="$PWD/tests/gpu/shared${PYTHONPATH:+:$PYTHONPATH}"
    export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 # processes are hosts of their own to NCCL
    export SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS=1 SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0
    cases 1 "gpus or not gpu" tests/gpu tests/parallel/test_{rl_layouts,shares}.py "$@"
else
    # Chunks of one: cases take from a second to minutes.
    SLIME_TEST_GPUS=$gpus cases "$(wc -w <<<"$gpus")" "not gpus" --maxschedchunk 1 tests/gpu "$@"
    cases 2 "gpus or not gpu" --dist loadfile tests/gpu tests/parallel/test_{rl_layouts,shares}.py "$@"
fi
"$ran" || exit "$NO_TESTS"
! "$failed"
