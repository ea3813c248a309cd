# shellcheck shell=bash
# Sourced: `set_up REQUIREMENTS...` sets $PYTHON to the interpreter of an environment that has them: the
# active one (venv, conda), or else .venv beside the project, made on the first call and kept. It installs
# into that one alone.
fail() {  # FACT WAY-OUT
    printf 'error: %s\n       %s\n' "$1" "$2" >&2
    exit 2
}

set_up() {
    local own lack active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    own=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)/.venv
    if [ "$active" ] && [ "$active" != "$own" ]; then
        PYTHON=$active/bin/python
        if lack=$(has_all "$@"); then return; fi
        # a full log stops nothing
        echo "the active $active has no use here ($lack): $own is used" >&2 || :
    fi
    PYTHON=$own/bin/python
    # none yet, half of one, or it was moved
    "$PYTHON" -m pip --version >/dev/null 2>&1 || make_venv "$own"
    lack=$(has_all "$@") || install "$lack" "$@"
}

has_all() {  # or says what is missing; looks at what is installed: a note of ours could be out of date
    "$PYTHON" - "$@" 2>/dev/null <<'END'
import sys
from importlib import import_module, metadata, util
def lack(words):
    print(words)
    sys.exit(1)

if sys.version_info < (3, 10):
    lack("its Python is older than 3.10")
try:
    place = "pip._vendor.packaging" if util.find_spec("pip") else "packaging"
    lines = [line.partition("#")[0].strip() for path in sys.argv[1:] for line in open(path, encoding="utf-8")]
    for wanted in map(import_module(f"{place}.requirements").Requirement, filter(None, lines)):
        found = metadata.distribution(wanted.name)
        whole = found.read_text("RECORD") is not None  # pip writes it last: else it was cut short
        if not wanted.specifier.contains(found.version, prereleases=True):
            lack(f"{wanted.name} is {found.version}, wanted is {wanted.specifier}")
        if not whole:
            lack(f"{wanted.name} was not installed to its end")
except metadata.PackageNotFoundError:
    lack(f"{wanted.name} is missing")
except ImportError:
    lack("pip and packaging are missing")
END
}

make_venv() {
    local python
    python=$(command -v python3 || command -v python) ||
        fail "there is no python3 on the PATH" "on Debian and Ubuntu: apt install python3 python3-venv"
    check_version "$python"
    [ ! -e "$1" ] || [ -f "$1/pyvenv.cfg" ] || fail "$1 is in the way: it is no environment" "move it away"
    echo "making $1 with $("$python" --version)"
    "$python" -m venv --clear -- "$1" ||
        fail "$python cannot make a virtual environment" "on Debian and Ubuntu: apt install python3-venv"
}

check_version() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail \
        "$1 is $("$1" --version 2>&1), but Python 3.10 or newer is needed" "put a newer one first on the PATH"
}

install() {  # WHY REQUIREMENTS...
    echo "installing into ${PYTHON%/bin/python} ($1): torch with its GPU libraries takes some minutes and 6 GB" || :
    shift
    "$PYTHON" -m pip install --disable-pip-version-check "${@/#/-r}" ||
        fail "pip could not install what $* ask for" "mend that, then type the same command again"
    "$PYTHON" -c 'import torch, torchvision' || fail "torch and torchvision cannot be imported together" \
        "versions of one release fit each other: see the table in torchvision's README"
}
