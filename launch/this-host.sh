# shellcheck shell=bash
# Functions about this host; the scripts that start a training source this file.

# torch warns of lost connections with pages of C++ frames; distap's own errors name rank, host and collective.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# Print the Python to run: $PYTHON, that of the active environment, that of .venv in the repository, or `python`.
find_python() {
    local own
    own=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python
    if [ -n "${PYTHON:-}" ]; then
        echo "$PYTHON"
    elif [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$own" ]; then
        echo "$own"
    else
        echo python
    fi
}

# Print the default number of ranks: one for each visible GPU, or one.
count_ranks() {
    local gpus=0
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
    elif command -v nvidia-smi >/dev/null; then
        gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ')
    fi
    echo $((gpus > 0 ? gpus : 1))
}

# share_cores RANKS: divide the cores among the ranks, unless OMP_NUM_THREADS is set; torchrun would give each one.
share_cores() {
    local cores
    [ "$1" -gt 0 ] || { echo "error: --ranks $1: one or more is expected" >&2 && exit 2; }
    if [ -z "${OMP_NUM_THREADS:-}" ]; then
        cores=$(nproc)
        export OMP_NUM_THREADS=$((cores > $1 ? cores / $1 : 1))
    fi
}

# is_number OPTION TEXT: exit with an error if TEXT is not a whole number.
is_number() {
    case $2 in
        '' | *[!0-9]*) echo "error: $1 $2: a whole number is expected" >&2 && exit 2 ;;
    esac
}
