#!/usr/bin/env bash
# Usage: build_conda.sh [cuda|cpu]
#
# Makes the micromamba environment "slime" and installs this checkout in it, with the packages and versions of
# scripts/install.sh. For hosts where no image is wanted; scripts/install.sh alone does with any Python 3.11 or 3.12.
#
#   BASE_DIR=$HOME      micromamba goes into BASE_DIR/bin when none is on PATH, environments into BASE_DIR/micromamba
#                       (or MAMBA_ROOT_PREFIX)
#   SLIME_DIR=...       the checkout, by default that of this script
#   SLIME_CUDA=13.0     or 12.9
#   SLIME_PYTHON=3.12   or 3.11
#   SLIME_TORCH_INDEX, SLIME_SGLANG_INDEX, CONDA_CHANNEL=conda-forge
#                       other places of packages, such as mirrors
set -euo pipefail
SLIME_DIR=${SLIME_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}
BASE_DIR=${BASE_DIR:-$HOME}

die() { printf 'build_conda.sh: error: %s\n' "$*" >&2; exit "${status:-1}"; }

mode=${1:-cuda}
case $mode in
    cuda | cpu) [ $# -le 1 ] || status=2 die "one argument at most, not '$*'" ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) status=2 die "the argument must be cuda or cpu, not '$mode'" ;;
esac
[ -f "$SLIME_DIR/scripts/install.sh" ] || status=2 die "SLIME_DIR=$SLIME_DIR is not a checkout of slime"
# shellcheck source=requirements/pins.sh
source "$SLIME_DIR/requirements/pins.sh"
export SLIME_CUDA MAMBA_ROOT_PREFIX=${MAMBA_ROOT_PREFIX:-$BASE_DIR/micromamba}

micromamba=$(command -v micromamba || true)
if [ -z "$micromamba" ]; then
    case $(uname -m) in
        x86_64) platform=linux-64 ;;
        aarch64) platform=linux-aarch64 ;;
        *) die "there is no micromamba for $(uname -m); install scripts/install.sh's packages in a virtual environment" ;;
    esac
    mkdir -p "$BASE_DIR"
    curl -fsSL "https://micro.mamba.pm/api/micromamba/$platform/latest" | tar -xj -C "$BASE_DIR" bin/micromamba ||
        die "micromamba could not be downloaded; install it (https://mamba.readthedocs.io) and put it on PATH"
    micromamba=$BASE_DIR/bin/micromamba
fi

# A compiler, which torch and megatron-core need at first use; with cuda nvcc, too, by which FlashInfer and SGLang compile.
packages=("python=$SLIME_PYTHON" pip gxx)
[ "$mode" = cpu ] || packages+=("cuda-toolkit=$SLIME_CUDA_TOOLKIT")
prefix=$MAMBA_ROOT_PREFIX/envs/slime
verb=create
[ ! -d "$prefix/conda-meta" ] || verb=install # as an earlier call left it: what is there already stays
"$micromamba" "$verb" --yes --name slime --override-channels --channel "${CONDA_CHANNEL:-conda-forge}" "${packages[@]}"

# So that scripts/*.sh install into this environment and find its nvcc.
mkdir -p "$prefix/etc/conda/activate.d" "$prefix/etc/conda/deactivate.d"
echo "export VIRTUAL_ENV=\"\$CONDA_PREFIX\" CUDA_HOME=\"\$CONDA_PREFIX\" SLIME_CUDA=$SLIME_CUDA" \
    >"$prefix/etc/conda/activate.d/slime.sh"
echo 'unset VIRTUAL_ENV CUDA_HOME SLIME_CUDA' >"$prefix/etc/conda/deactivate.d/slime.sh"

"$micromamba" run --name slime env VIRTUAL_ENV="$prefix" bash "$SLIME_DIR/scripts/install.sh" "$mode"
echo "build_conda.sh: done; activate it with:"
printf "    eval \"\$(%q shell hook --shell bash --root-prefix %q)\" && micromamba activate slime\n" \
    "$micromamba" "$MAMBA_ROOT_PREFIX"
