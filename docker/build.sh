#!/usr/bin/env bash
# Usage: docker/build.sh [--print] [--push] release-primary|release-cu13|debug|cpu
#
#   release-primary   CUDA 12.9: slimerl/slime:latest, latest-cu129 and VERSION-cu129
#   release-cu13      CUDA 13.0: slimerl/slime:latest-cu130 and VERSION-cu130
#   debug             CUDA 12.9: slimerl/slime-test:latest, which a pull request's image tests use
#   cpu               no CUDA:   slimerl/slime:latest-cpu and VERSION-cpu
#
#   --print           print the docker commands, and run none
#   --push            push every tag that was built
#   SLIME_PYTHON      3.11 or 3.12, by default that of requirements/pins.sh
#   SLIME_TORCH_INDEX, SLIME_SGLANG_INDEX
#                     other places of packages, such as mirrors: scripts/install.sh --help
#
# VERSION is that of pyproject.toml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'build.sh: error: %s\n' "$*" >&2; exit 2; }

# TARGET: DOCKERFILE CUDA REPOSITORY TAG...; %s is the version.
declare -A targets=(
    [release-primary]="Dockerfile 12.9 slimerl/slime latest latest-cu129 %s-cu129"
    [release-cu13]="Dockerfile 13.0 slimerl/slime latest-cu130 %s-cu130"
    [debug]="Dockerfile 12.9 slimerl/slime-test latest"
    [cpu]="Dockerfile.cpu none slimerl/slime latest-cpu %s-cpu"
)

print=false push=false target=
while [ $# -gt 0 ]; do
    case $1 in
        --print) print=true ;;
        --push) push=true ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) die "unknown option '$1'; usage: docker/build.sh [--print] [--push] release-primary|release-cu13|debug|cpu" ;;
        *)
            [ -z "$target" ] || die "one target at a time, not '$target' and '$1'"
            target=$1
            ;;
    esac
    shift
done
[ -n "${targets[${target:-none}]:-}" ] ||
    die "the target must be one of release-primary, release-cu13, debug, cpu, not '$target'"
read -r dockerfile cuda repository words <<<"${targets[$target]}"
read -ra tags <<<"$words"

[ "$cuda" = none ] || SLIME_CUDA=$cuda
# shellcheck source=requirements/pins.sh
source requirements/pins.sh
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[ -n "$version" ] || die "pyproject.toml has no line 'version = \"...\"'"

run() { # COMMAND...: run it, or print it
    if $print; then printf '%q ' "$@"; echo; else "$@"; fi
}

$print || command -v docker >/dev/null || die "no docker on PATH; install Docker, or see the commands with --print"
arguments=(--build-arg "PYTHON=$SLIME_PYTHON")
[ "$cuda" = none ] || arguments+=(--build-arg "CUDA=$cuda")
for name in SLIME_TORCH_INDEX SLIME_SGLANG_INDEX; do
    if [ -n "${!name:-}" ]; then arguments+=(--build-arg "$name=${!name}"); fi
done
images=()
for tag in "${tags[@]}"; do
    images+=("$repository:${tag//%s/$version}")
    arguments+=(--tag "${images[-1]}")
done
run docker build --file "docker/$dockerfile" "${arguments[@]}" .
if $push; then
    for image in "${images[@]}"; do run docker push "$image"; done
fi
