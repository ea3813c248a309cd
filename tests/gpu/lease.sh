#!/usr/bin/env bash
# All that one GPU can show in ten minutes; installs nothing. tests/gpu/lease.py says more.
#
#     bash tests/gpu/lease.sh FOLDER
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname -- "${BASH_SOURCE[0]}")/lease.py" "$@"
