#!/usr/bin/env bash
# Usage: scripts/test.sh [--full] [--shard I/N]
#
# Installs (scripts/install.sh), then runs linters (of Python, shell and Dockerfiles), format check, type check, the
# documentation site and tests: what CI runs.
#
#   --full        every case, not one per mechanism, and tests/gpu (which skips itself without a GPU)
#   --shard I/N   lint and types, then only the I-th of N parts of the test files; the site with the first
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'test: error: %s\n' "$*" >&2; exit "${status:-1}"; }

full=false shard=1 shards=1
while [ $# -gt 0 ]; do
    case $1 in
        --full) full=true ;;
        --shard)
            [[ ${2:-} =~ ^([1-9][0-9]*)/([1-9][0-9]*)$ ]] && [ "${BASH_REMATCH[1]}" -le "${BASH_REMATCH[2]}" ] ||
                status=2 die "--shard takes I/N with 1 <= I <= N, e.g. --shard 2/4; got '${2:-}'"
            shard=${BASH_REMATCH[1]} shards=${BASH_REMATCH[2]}
            shift
            ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) status=2 die "unknown argument '$1'; usage: scripts/test.sh [--full] [--shard I/N]" ;;
    esac
    shift
done

step() { # LABEL COMMAND...: run it and say how long it took
    local label=$1 start=$SECONDS
    shift
    printf '== %s\n' "$label"
    "$@" || die "$label failed (status $?, $((SECONDS - start)) s)"
    printf '== %s: ok (%s s)\n' "$label" "$((SECONDS - start))"
}

step install bash scripts/install.sh auto
# shellcheck source=/dev/null # install.sh makes it
[ -n "${VIRTUAL_ENV:-}" ] || source .venv/bin/activate
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export RAY_USAGE_STATS_ENABLED=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_DEDUP_LOGS=0

step "ruff check" ruff check .
step "ruff format" ruff format --check .
step mypy mypy
mapfile -t scripts < <(git ls-files '*.sh' .ci/run)
step shellcheck shellcheck "${scripts[@]}"
step hadolint hadolint docker/Dockerfile*
[ "$shard" -ne 1 ] || step docs bash scripts/docs.sh check

# Those that wait for processes first: two workers then fill their waits with the rest.
directories=(tests/integration tests/parallel tests/unit tests/plugin_contracts)
selection=(-m "not full")
if $full; then
    directories+=(tests/gpu)
    selection=()
    export SLIME_TEST_TORCHRUN=1 # ranks are programs of their own, not forks of one
fi
files=()
for directory in "${directories[@]}"; do
    [ -d "$directory" ] || continue
    mapfile -t found < <(find "$directory" -name 'test_*.py' | sort)
    # A directory whose tests were renamed or lost must not count as passed.
    [ ${#found[@]} -gt 0 ] || die "$directory has no test_*.py"
    files+=("${found[@]}")
done
chosen=()
for i in "${!files[@]}"; do
    if [ $((i % shards)) -eq $((shard - 1)) ]; then chosen+=("${files[i]}"); fi
done
[ ${#chosen[@]} -gt 0 ] || die "shard $shard/$shards has no test file: there are only ${#files[@]}"

label="pytest, ${#chosen[@]} of ${#files[@]} files (the longest first: the percentage stays low for minutes)"
start=$SECONDS code=0
printf '== %s\n' "$label"
python -m pytest -q --durations=15 -n 2 --dist loadfile --no-loadscope-reorder "${selection[@]}" "${chosen[@]}" || code=$?
[ "$code" -ne 5 ] || echo "test: error: pytest found no test to run in the files of this tier and shard" >&2
exit "$code"
