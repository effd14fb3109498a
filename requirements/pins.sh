# What has a version and is not a Python package: those are in the *.txt beside this. Sourced by scripts/install.sh,
# docker/build.sh and build_conda.sh, where a variable of the environment wins. The Dockerfiles repeat what they need
# before they can read a file; tests/unit/test_repository_pins.py compares.
: "${SLIME_PYTHON:=3.12}" # of images and of the conda environment: 3.11 or 3.12
: "${SLIME_CUDA:=13.0}"   # what the packages are built for: 12.9 or 13.0, which is what the package index has
# shellcheck disable=SC2034 # for those that source this
case $SLIME_CUDA in
    12.9) SLIME_CUDA_TOOLKIT=12.9.1 ;;
    13.0) SLIME_CUDA_TOOLKIT=13.0.2 ;;
    *) echo "error: SLIME_CUDA must be 12.9 or 13.0, not '$SLIME_CUDA'" >&2; exit 2 ;;
esac
case $SLIME_PYTHON in
    3.11 | 3.12) ;;
    *) echo "error: SLIME_PYTHON must be 3.11 or 3.12, not '$SLIME_PYTHON'" >&2; exit 2 ;;
esac
