#!/usr/bin/env bash
# Usage: scripts/install.sh [auto|cpu|cuda]
#
# Installs slime and everything it needs into the active virtual environment, or into .venv (made when missing) when
# none is active. auto takes cuda where nvidia-smi lists a GPU, else cpu. A second call with nothing changed returns at once.
#
#   SLIME_COLUMN=new         with cpu: the newer releases of SGLang and megatron-core, for Python 3.12 (requirements/new/);
#                            proven, the default, is what all tests are developed on. docs/install.md has what was run.
#   SLIME_TORCH_INDEX=URL    take torch from this package index, e.g. https://download.pytorch.org/whl/cpu
#   SLIME_CUDA=12.9          with cuda: builds for CUDA 12.9, not 13.0. The package index has none: they are taken from
#                            https://download.pytorch.org/whl/cu129 (or SLIME_TORCH_INDEX) and
#                            https://docs.sglang.ai/whl/cu129/ (or SLIME_SGLANG_INDEX)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=requirements/pins.sh
source requirements/pins.sh
case ${SLIME_COLUMN:=proven} in
    proven) SETS=requirements ;;
    new) SETS=requirements/new ;;
    *) echo "error: SLIME_COLUMN must be proven or new, not '$SLIME_COLUMN'" >&2; exit 2 ;;
esac

say() { printf 'install: %s\n' "$*"; }
die() { printf 'install: error: %s\n' "$*" >&2; exit 1; }

OLDEST=11 PYTHONS="3.11 or 3.12"
[ "$SLIME_COLUMN" = proven ] || OLDEST=12 PYTHONS=3.12 # as megatron-core asks for

supported() { # PYTHON: it runs and is one of PYTHONS (a version manager's shim can exist and not run)
    "$1" -c "import sys; sys.exit(not (3, $OLDEST) <= sys.version_info[:2] <= (3, 12))" >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11 python; do
        if supported "$candidate"; then echo "$candidate"; return; fi
    done
    die "no Python $PYTHONS on PATH; install one (e.g. apt-get install python3.$OLDEST python3.$OLDEST-venv)" \
        "or activate a virtual environment that has it"
}

environment() { # prints the virtual environment to install into; makes .venv when there is none
    local venv=${VIRTUAL_ENV:-$PWD/.venv} python
    if [ ! -e "$venv" ]; then
        python=$(find_python) || exit 1
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            die "$python has no venv module; install it (on Debian and Ubuntu: apt-get install" \
                "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))"
        "$python" -m venv "$venv" >&2 || die "$python -m venv $venv failed; see the lines above"
    fi
    supported "$venv/bin/python" ||
        die "the virtual environment $venv does not have Python $PYTHONS; deactivate or remove it and run this again"
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null 2>&1 ||
        die "the virtual environment $venv has no pip and no ensurepip to get it; remove it and run this again"
    echo "$venv"
}

detected() { # prints cuda where nvidia-smi lists a GPU, else cpu
    local listed code=0
    listed=$(timeout -k 5 60 nvidia-smi -L 2>/dev/null) || code=$?
    case $code in
        124 | 137) die "nvidia-smi -L has not answered within 60 s; give cpu or cuda to go on without asking it" ;;
    esac
    if grep -q '^GPU' <<<"$listed"; then echo cuda; else echo cpu; fi
}

check_compiler() { # torch.compile, triton and megatron-core's data helpers compile on first use
    local compiler="${CC:-}"
    [ -n "$compiler" ] || compiler=$(command -v cc gcc clang | head -n 1) || true
    command -v "${compiler%% *}" >/dev/null 2>&1 ||
        die "no C compiler on PATH; install one (e.g. apt-get install build-essential) or set CC"
}

# Wanted state of the environment in one line: what the stamp holds when the last installation finished.
wanted_state() { # MODE PYTHON
    {
        echo "$1 $SLIME_CUDA ${SLIME_TORCH_INDEX:-} ${SLIME_SGLANG_INDEX:-} $PWD"
        "$2" -V
        cat requirements/*.txt pyproject.toml setup.py
        [ "$SLIME_COLUMN" = proven ] || cat "$SETS"/*.txt
    } | sha256sum
}

pip_install() { # LABEL PIP_ARGUMENT...
    local label=$1 start=$SECONDS pip
    shift
    "$venv/bin/python" -m pip install --no-compile --quiet --disable-pip-version-check "$@" >>"$log" 2>&1 &
    pip=$!
    trap 'kill "$pip" 2>/dev/null; exit 130' INT # of itself it would go on
    trap 'kill "$pip" 2>/dev/null; exit 143' TERM
    while sleep 2 && kill -0 "$pip" 2>/dev/null; do # pip itself says nothing for minutes
        [ $(((SECONDS - start) % 60)) -lt 58 ] || say "$label: $((SECONDS - start)) s, $(du -sh "$venv" | cut -f 1) so far"
    done
    trap - INT TERM
    if ! wait "$pip"; then
        # pip repeats one such warning per package and configured but missing index directory.
        grep -v '^WARNING: Location ' "$log" | tail -n 30 >&2 || true
        die "pip could not install $label; whole log: $log"
    fi
    say "$label ($((SECONDS - start)) s)"
}

pinned() { # FILE PACKAGE: the "package==version" line of a requirements file
    grep -E "^$2==" "$1"
}

install_packages() { # for MODE: requirements as the package index has them
    local constraints=$SETS/constraints-$mode.txt
    if [ -n "${SLIME_TORCH_INDEX:-}" ]; then
        pip_install "torch from $SLIME_TORCH_INDEX" --no-deps --index-url "$SLIME_TORCH_INDEX" \
            "$(pinned "$SETS/$mode.txt" torch)"
    fi
    pip_install "$SETS/$mode.txt and dev.txt" \
        -r "$SETS/$mode.txt" -r requirements/dev.txt -c "$constraints"
    if [ "$mode" = cpu ]; then
        pip_install "$SETS/cpu-nodeps.txt" --no-deps -r "$SETS/cpu-nodeps.txt"
    fi
}

# SGLang asks for packages of CUDA 13 by name, which torch for 12.9 excludes: every package is listed, and none resolved.
install_packages_for_cuda_12() {
    pip_install "requirements/constraints-cuda-12.9.txt" --no-deps -r requirements/constraints-cuda-12.9.txt \
        --extra-index-url "${SLIME_TORCH_INDEX:-https://download.pytorch.org/whl/cu129}" \
        --extra-index-url "${SLIME_SGLANG_INDEX:-https://docs.sglang.ai/whl/cu129/}"
}

compile_modules() { # pip itself does it one after the other. Later, where Python may not write, each process would.
    local start=$SECONDS
    # Some packages bring templates, and modules of other Pythons, which are not to be compiled.
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
    say "compiled modules ($((SECONDS - start)) s)"
}

mode=${1:-auto}
case $mode in
    auto) mode=$(detected) || exit 1 ;;
    cpu | cuda) ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) say "error: unknown argument '$mode'; usage: scripts/install.sh [auto|cpu|cuda]" >&2; exit 2 ;;
esac
[ "$mode $SLIME_COLUMN" != "cuda new" ] ||
    die "SLIME_COLUMN=new is for cpu: on GPUs these releases have not been run (docs/install.md)"

venv=$(environment) || exit 1
state=$(wanted_state "$mode" "$venv/bin/python")
stamp=$venv/.slime-install
if [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
    say "up to date: $venv ($mode)"
    exit 0
fi
check_compiler

log=$venv/slime-install.log
: >"$log"
rm -f "$stamp"
say "$mode, $("$venv/bin/python" -V), into $venv (a few minutes; log: $log)"
if [ "$mode $SLIME_CUDA" = "cuda 12.9" ]; then install_packages_for_cuda_12; else install_packages; fi
pip_install slime --no-deps -e .
compile_modules
echo "$state" >"$stamp"
say "done: $venv"
