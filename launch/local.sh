#!/usr/bin/env bash
# Train on this machine. The same command resumes the run after any stop.
#
#     launch/local.sh                             a process per GPU, or two without one
#     launch/local.sh --nproc 4 --epochs 10       four processes; other flags: train_ddp.py --help
#     NPROC=4 launch/local.sh                     the same number, from the environment
#     launch/local.sh my_loop.py                  another script, its flags behind it
#     launch/local.sh -m common.ledger RUN        a report, in the same environment
#
# An active environment that has all of requirements.txt is used as it is. Without one this makes .venv beside
# the project and installs there.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/launch/setup.sh"

if [ "${1-}" = -m ]; then
    set_up "$root/requirements.txt"
    export PYTHONSAFEPATH=1  # the folder where this is typed may have a common of its own
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$PYTHON" "$@"
fi
nproc=${NPROC:-}
flags=()
while [ $# -gt 0 ]; do
    case $1 in
        --nproc) [ $# -gt 1 ] || fail "--nproc needs a number" "for example --nproc 2"
                 nproc=$2; shift ;;
        --nproc=*) nproc=${1#*=} ;;
        *) flags+=("$1") ;;
    esac
    shift
done
gpus=0
[[ ${CUDA_VISIBLE_DEVICES-all} =~ ^(-1.*)?$ ]] || gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra visible <<< "$CUDA_VISIBLE_DEVICES"
    gpus=${#visible[@]}
fi
[ -n "$nproc" ] || nproc=$((gpus > 0 ? gpus : 2))
[[ $nproc =~ ^[1-9][0-9]{0,2}$ ]] ||
    fail "--nproc: '$nproc' is not a whole number from 1 to 999" "for example --nproc 2"

set_up "$root/requirements.txt"
script=$root/train_ddp.py
if [[ ${flags[0]-} == *.py ]]; then
    script=${flags[0]}
    flags=("${flags[@]:1}")
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
fi
exec "$PYTHON" "$root/launch/torchrun.py" --nproc_per_node="$nproc" "$script" ${flags[@]+"${flags[@]}"}
