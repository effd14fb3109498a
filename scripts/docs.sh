#!/usr/bin/env bash
# Usage: scripts/docs.sh build | check | serve [PORT]
#
# The documentation site, in English and Chinese, of docs/site.yml. Installs requirements/docs.txt into build/docs-venv.
#
#   build          write the site to build/site
#   check          build it, and keep nothing
#   serve [PORT]   build it, then serve it on 127.0.0.1 (default port 8000)
#
# A link that leads nowhere, a page that docs/site.yml lacks, and a file from another host end it with status 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'docs: error: %s\n' "$*" >&2; exit "${status:-1}"; }
usage="usage: scripts/docs.sh build | check | serve [PORT]"

command=${1:-} port=${2:-8000} venv=build/docs-venv
case $command in
    build | check) [ $# -eq 1 ] || status=2 die "$command takes no '$2'; $usage" ;;
    serve)
        [ $# -le 2 ] || status=2 die "serve takes one port; $usage"
        { [[ $port =~ ^[1-9][0-9]{0,4}$ ]] && [ "$port" -le 65535 ]; } ||
            status=2 die "the port must be a number from 1 to 65535, not '$port'"
        ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) status=2 die "unknown command '$command'; $usage" ;;
esac

install() { # makes $venv anew, unless it has what requirements/docs.txt asks for
    local python=${PYTHON:-python3} log=build/docs-install.log
    [ "$(cat "$venv/.installed" 2>/dev/null)" != "$(cat requirements/docs.txt)" ] || return 0
    "$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "'$python' is not a Python 3.11 or later with venv; name one by PYTHON=, e.g. PYTHON=python3.12"
    mkdir -p build
    { rm -rf "$venv" && "$python" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --disable-pip-version-check -r requirements/docs.txt; } >"$log" 2>&1 ||
        die "could not install requirements/docs.txt: $(grep -v '^WARNING' "$log" | tail -n 1); whole log: $log"
    cp requirements/docs.txt "$venv/.installed"
}

install
site=build/site
if [ "$command" = check ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
fi
"$venv/bin/python" -m tools.website.build "$site"
[ "$command" != serve ] || exec "$venv/bin/python" -m http.server "$port" --bind 127.0.0.1 --directory "$site"
