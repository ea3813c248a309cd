#!/usr/bin/env bash
# Train on this machine. Type it again after any stop: the run goes on where it was.
#
#     launch/local.sh                             a process per GPU, or two without one
#     launch/local.sh --nproc 4 --epochs 10       four processes; other flags are those of train_ddp.py (--help)
#     NPROC=4 launch/local.sh                     the same number, from the environment
#
# Makes .venv and installs requirements.txt first, unless an environment that has it all is active.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/launch/setup.sh"

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
if [ -z "$nproc" ]; then
    nproc=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    [ "$nproc" -gt 0 ] || nproc=2
fi
[[ $nproc =~ ^[1-9][0-9]{0,2}$ ]] || fail "--nproc: '$nproc' is not a whole number from 1 to 999" "for example --nproc 2"

set_up "$root/requirements.txt"
exec "$PYTHON" "$root/launch/agent.py" --nproc_per_node="$nproc" "$root/train_ddp.py" ${flags[@]+"${flags[@]}"}
