#!/usr/bin/env bash
# Install, then train a tiny model with reinforcement learning on this machine: about three minutes on two idle CPU cores after the install.
# Options are those of tools/quickstart.py: --output-dir DIR, --seed N, --rm-type random, --time-limit MINUTES.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
for word in "$@"; do
    # The program needs no package to print its options.
    case $word in -h | --help) exec python3 "$ROOT/tools/quickstart.py" --help ;; esac
done
# Nor to read them, which a wrong one should not wait for the installation for.
if python3 -c '' 2>/dev/null; then
    PYTHONPATH=$ROOT/tools python3 -c 'import quickstart; quickstart.parse_args()' "$@"
fi
bash "$ROOT/scripts/install.sh" auto
# shellcheck source=/dev/null # install.sh makes it
[ -n "${VIRTUAL_ENV:-}" ] || source "$ROOT/.venv/bin/activate"
exec python3 "$ROOT/tools/quickstart.py" "$@"
