#!/usr/bin/env bash
# Install, then train a tiny model with reinforcement learning on this machine: six to ten minutes on two CPU cores after the install.
# Options are those of tools/quickstart.py: --output-dir DIR, --seed N, --rm-type random, --time-limit MINUTES.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for word in "$@"; do
    # The program needs no package to print its options.
    case $word in -h | --help) exec python3 tools/quickstart.py --help ;; esac
done
bash scripts/install.sh auto
[ -n "${VIRTUAL_ENV:-}" ] || source .venv/bin/activate
exec python3 tools/quickstart.py "$@"
