# shellcheck shell=bash
# Sourced: set_up REQUIREMENTS... sets $PYTHON to the interpreter of an environment that has them.
#
# That is the active environment (venv, conda), or else .venv beside the project, made on the first call. It
# keeps what is installed already, so a second call takes a fraction of a second and no network. The system's
# Python stays as it is.

fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
    exit 2
}

set_up() {
    local root
    root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        PYTHON=$VIRTUAL_ENV/bin/python
        [ -x "$PYTHON" ] || fail "VIRTUAL_ENV=$VIRTUAL_ENV has no bin/python" "deactivate it, or make it anew"
        check_version "$PYTHON"
    elif [ -n "${CONDA_PREFIX:-}" ]; then
        PYTHON=$CONDA_PREFIX/bin/python
        [ -x "$PYTHON" ] ||
            fail "the conda environment $CONDA_PREFIX has no Python" "conda install python=3.12 pip"
        check_version "$PYTHON"
    else
        PYTHON=$root/.venv/bin/python
        # there is none yet, making it was interrupted, or it was moved
        if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
            make_venv "$root/.venv"
        fi
    fi
    if ! satisfied "$@"; then
        install "$@"
    fi
}

make_venv() {
    local python
    python=$(command -v python3 || command -v python) ||
        fail "there is no python3 on the PATH" \
             "install Python 3.10 or newer; on Debian: apt install python3 python3-venv"
    check_version "$python"
    if [ -e "$1" ] && [ ! -f "$1/pyvenv.cfg" ]; then
        fail "$1 is in the way: it is no virtual environment" "move it away"
    fi
    echo "making $1 with $("$python" --version)"
    "$python" -m venv --clear -- "$1" ||
        fail "$python cannot make a virtual environment" "on Debian and Ubuntu: apt install python3-venv"
}

check_version() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$1 is $("$1" --version 2>&1), but Python 3.10 or newer is needed" \
             "put a newer python3 first on the PATH, or activate an environment that has one"
}

satisfied() {  # looks at what is installed: a file that we write could be out of date
    "$PYTHON" - "$@" <<'END'
import sys
from importlib.metadata import PackageNotFoundError, distribution

try:
    from pip._vendor.packaging.requirements import Requirement
except ImportError:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        sys.exit(1)
for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        if text := line.partition("#")[0].strip():
            wanted = Requirement(text)
            try:
                found = distribution(wanted.name)
            except PackageNotFoundError:
                sys.exit(1)
            # pip writes RECORD last: without it an installation was cut short.
            fits = wanted.specifier.contains(found.version, prereleases=True)
            if not fits or found.read_text("RECORD") is None:
                sys.exit(1)
END
}

install() {
    local file files=()
    for file in "$@"; do files+=(-r "$file"); done
    "$PYTHON" -m pip --version >/dev/null 2>&1 ||
        fail "$PYTHON lacks some of what $* ask for, and has no pip" \
             "$PYTHON -m ensurepip, or install them in your own way"
    echo "installing into $("$PYTHON" -c 'import sys; print(sys.prefix)'):" \
         "torch with its GPU libraries takes some minutes and 6 GB"
    "$PYTHON" -m pip install --disable-pip-version-check "${files[@]}" ||
        fail "pip could not install what $* ask for" \
             "pip's last lines say why; then type the same command again"
    "$PYTHON" -c 'import torch, torchvision' ||
        fail "torch and torchvision are installed, but cannot be imported together" \
             "versions of one release fit each other: see the table in torchvision's README"
}
