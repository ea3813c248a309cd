#!/usr/bin/env bash
# All tests, or those that pytest's arguments choose. The environment is that of launch/local.sh: the active
# one if it has all, else .venv, where this installs what is missing.
#
#     tests/run.sh
#     tests/run.sh tests/sampler/test_sampler.py -k tiny
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/launch/setup.sh"
set_up "$root/requirements.txt" "$root/tests/requirements.txt"
cd -- "$root"
[ $# -gt 0 ] || set -- -n 4 --dist worksteal # four tests at a time: most of them wait more than they compute
exec "$PYTHON" -m pytest "$@"
