#!/bin/sh
# Puts the chapter into an environment once, and prints that environment's Python as the only line on stdout.
#
#   sh .ci/setup.sh         set up if something changed; what it does is told on stderr
#   sh .ci/setup.sh find    only print the Python that a new .venv would be made from
#
# PYTHON=name-or-path chooses the Python. Otherwise: an activated conda environment made from environment.yml is used
# as it is; else .venv, made from the first Python 3.12 to 3.14 on PATH, in pyenv's versions folder, or from uv.
set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."

here=$(pwd -P)
busy=.venv.setting-up # holds the process id of the set-up that is running, or that was cut short

say() { printf '%s\n' "$@" >&2; }
die() { say "$@"; exit 1; }

# Runs under any Python: says what it is (version and home), or why it does not do.
probe='
import sys
version = "%d.%d.%d" % sys.version_info[:3]
if not (3, 12) <= sys.version_info[:2] <= (3, 14):
    print("is Python " + version)
    sys.exit(1)
import sysconfig, importlib.util
if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("is not the standard build of CPython, which torch needs")
    sys.exit(1)
if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
    print("cannot make environments: install python%d.%d-venv" % sys.version_info[:2])
    sys.exit(1)
print(version + " " + sys.base_prefix)
'
fits() { "$1" -c "$probe" </dev/null 2>/dev/null; }

# Prints $1 if it is a Python that does; remembers one that would do but for a missing Debian package.
lacking=
try() {
    [ -x "$1" ] && [ ! -d "$1" ] || return 1
    if reason=$(fits "$1"); then printf '%s\n' "$1"; return; fi
    case $reason in "cannot make"*) lacking=" $1 $reason." ;; esac
    return 1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        # shellcheck disable=SC2088 # make passes the tilde on as it was typed
        case $PYTHON in "~/"*) PYTHON=$HOME/${PYTHON#??} ;; esac
        path=$(command -v -- "$PYTHON") || die "PYTHON=$PYTHON: no such program." "$wanted"
        reason=$(fits "$path") || die "PYTHON=$PYTHON ${reason:-does not run: $("$path" --version 2>&1 | head -n 1)}." "$wanted"
        printf '%s\n' "$path"
        return
    fi
    set -f; old=$IFS; IFS=:
    # shellcheck disable=SC2086 # split on purpose
    set -- $PATH
    IFS=$old; set +f
    for name in python3.12 python3.13 python3.14 python3 python; do
        for folder; do try "${folder:-.}/$name" && return; done
    done
    # pyenv's shims refuse a version that is installed but not chosen; the folder behind them does not.
    for minor in 12 13 14; do
        for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv" "$(pyenv root 2>/dev/null)"; do
            for path in "$root"/versions/*/bin/python3."$minor"; do try "$path" && return; done
        done
    done
    if command -v uv >/dev/null 2>&1; then
        try "$(uv python find --system '>=3.12,<3.15' 2>/dev/null)" && return
        say "Asking uv for Python 3.12."
        uv python install 3.12 >&2 && try "$(uv python find --system 3.12 2>/dev/null)" && return
    fi
    die "This chapter needs Python 3.12, 3.13 or 3.14; none is on PATH, in pyenv's versions folder or with uv.$lacking" \
        "Get one: 'uv python install 3.12', 'pyenv install 3.12', or 'conda env create -f environment.yml && conda activate chapter19-9'." \
        "Then call make again, or name one that you have: make lab PYTHON=/path/to/python3.12"
}
wanted="Give the name or path of a Python 3.12, 3.13 or 3.14: make lab PYTHON=/path/to/python3.12"

# An activated conda environment is ours if this checkout is installed in it, or if it bears the name in environment.yml
# and no other checkout is installed in it. (-I: not what an egg-info in this folder says.)
is_ours='
import importlib.metadata, json, os, sys, urllib.parse, urllib.request
try:
    origin = importlib.metadata.distribution("chapter19-9").read_text("direct_url.json")
except importlib.metadata.PackageNotFoundError:
    sys.exit(os.environ.get("CONDA_DEFAULT_ENV") != "chapter19-9")
folder = urllib.request.url2pathname(urllib.parse.urlsplit(json.loads(origin or "{}").get("url", "")).path)
sys.exit(not (os.path.exists(folder) and os.path.samefile(folder, ".")))
'
conda_is_ours() {
    [ -z "${PYTHON:-}" ] && [ -x "${CONDA_PREFIX:-}/bin/python" ] && fits "$CONDA_PREFIX/bin/python" >/dev/null &&
        "$CONDA_PREFIX/bin/python" -I -c "$is_ours" </dev/null 2>/dev/null
}

# What an environment is the result of: pyproject.toml, the interpreter, and the folder that it points to.
fingerprint() { printf '%s\n' "$(cksum <pyproject.toml)" "$(fits "$python")" "$here"; }
is_up_to_date() { [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ] && is_chosen; }

# PYTHON=... asks for another Python than the one that .venv was made from?
is_chosen() { [ -z "${PYTHON:-}" ] || [ "$(fits "$base")" = "$(fits "$python")" ]; }

# One set-up at a time. One that was killed may leave a package half written, which pip would take for whole: begin anew.
take_turn() {
    told=
    until (set -C; echo $$ >"$busy") 2>/dev/null; do
        [ -w . ] || die "Cannot write in $here, where the environment would go."
        sleep 1
        other=$(cat "$busy" 2>/dev/null) || continue
        if [ -n "$other" ] && kill -0 "$other" 2>/dev/null; then
            [ -n "$told" ] || say "Waiting for another set-up, process $other. If there is none, remove $busy."
            told=yes
        else
            say "The last set-up was cut short; beginning anew."
            rm -rf .venv
            rm -f "$busy"
        fi
    done
}

# A Python of an activated environment leads to the one it was made from: .venv itself may be about to go.
outside='import sys; print(sys.executable if sys.prefix == sys.base_prefix else sys._base_executable)'

make_environment() {
    # Neither a moved checkout nor a Python that is gone can be mended from inside.
    if [ -x "$python" ] && is_chosen && fits "$python" >/dev/null && "$python" -m pip --version >/dev/null 2>&1; then
        [ ! -f "$stamp" ] || [ "$(sed -n 3p "$stamp")" = "$here" ] && return
    fi
    [ -n "$base" ] || base=$(find_python)
    base=$("$base" -c "$outside" </dev/null)
    what=$(fits "$base")
    say "Making .venv with Python ${what%% *} of ${what#* }: a few minutes and about 7 GB the first time."
    rm -rf .venv
    "$base" -m venv --prompt chapter19.9 .venv >&2
}

set_up() {
    [ "$env" != "$here/.venv" ] || make_environment
    rm -f "$stamp"
    say "Installing what pyproject.toml asks for."
    quiet=-q
    [ ! -t 2 ] || quiet= # a person wants to see what takes so long
    # shellcheck disable=SC2086 # empty means no argument
    "$python" -m pip install $quiet --disable-pip-version-check -e '.[test]' >&2 </dev/null ||
        die "Installing failed; the lines above say why. Call make again to try anew."
    fingerprint >"$stamp"
}

case ${1:-} in
find) find_python; exit ;;
?*) die "Usage: sh .ci/setup.sh [find]" ;;
esac

base=
[ -z "${PYTHON:-}" ] || base=$(find_python)
if conda_is_ours; then env=$CONDA_PREFIX; else env=$here/.venv; fi
python=$env/bin/python
stamp=$env/.set-up

if [ -e "$busy" ] || ! is_up_to_date; then
    take_turn
    trap 'rm -f "$busy"' EXIT
    trap 'trap - EXIT; exit 130' INT TERM HUP # the file stays, and says that this was cut short
    is_up_to_date || set_up
fi
printf '%s\n' "$python"
