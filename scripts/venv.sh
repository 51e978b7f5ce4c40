# Sourced by the other scripts, never run: finds a Python and keeps one virtual environment up to date.
#
# The environment is .venv in the checkout. MQMESH_VENV=<folder> puts it elsewhere. It is built once
# and renewed only when setup.cfg, setup.py, pyproject.toml, the C source or the wanted extras change.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${MQMESH_VENV:-$ROOT/.venv}"

# A machine may be set to keep no compiled Python; then each of the thousands of processes that tests
# start compiles 300 modules anew, which is more than half of a broker's start.
unset PYTHONDONTWRITEBYTECODE

say() { printf '==> %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints the first Python >= 3.11 that really runs (a pyenv shim may exist and still refuse).
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.14; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "mqmesh needs Python 3.11 or newer and found none; install one or set PYTHON=/path/to/python3"
}

# What the environment was built from; a difference means it must be renewed.
venv_stamp() {
    printf 'extras=%s root=%s ' "$1" "$ROOT"
    cat "$ROOT"/{setup.cfg,setup.py,pyproject.toml} "$ROOT"/mqmesh/native/*.[ch] | cksum
}

has_java() {
    local version
    version="$("${JAVA_HOME:+$JAVA_HOME/bin/}java" -version 2>&1 |
        sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -1)" || return 1
    [ "${version:-0}" -ge 17 ]
}

# What all tests need; where there is no Java for Spark, it comes from PyPI.
TEST_EXTRAS="dev,spark,spark-test"
has_java || TEST_EXTRAS="$TEST_EXTRAS,spark-java"

# Who asks for less is content with an environment that has more.
venv_is_current() {
    local stamp extras enough=("$1")
    stamp="$(cat "$VENV/.mqmesh-stamp" 2>/dev/null)" || return 1
    case "$1" in
        "") enough+=(dev "$TEST_EXTRAS") ;;
        dev | spark) enough+=("$TEST_EXTRAS") ;;
    esac
    for extras in "${enough[@]}"; do
        if [ "$stamp" = "$(venv_stamp "$extras")" ]; then
            "$VENV/bin/python" -c 'import mqmesh.cli' 2>/dev/null
            return
        fi
    done
    return 1
}

build_venv() {
    local extras="$1" python
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)"
        say "making a virtual environment in $VENV with $("$python" --version)"
        "$python" -m venv --clear "$VENV" ||
            fail "could not make $VENV; on Debian and Ubuntu: apt install python3-venv"
    fi
    say "installing mqmesh${extras:+[$extras]} into $VENV"
    rm -f "$VENV/.mqmesh-stamp"
    # Most of what the packages hold is never loaded; what is, Python compiles then.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --editable "$ROOT${extras:+[$extras]}" >&2 ||
        fail "pip could not install mqmesh${extras:+[$extras]}; its message stands above"
    venv_stamp "$extras" >"$VENV/.mqmesh-stamp"
}

# ensure_venv EXTRAS: afterwards $VENV/bin holds mqmesh with these extras (may be ""), installed
# editable, and the current folder is the checkout.
# A lock makes two scripts that start together build it once.
ensure_venv() {
    # From the checkout's root the folder mqmesh/ would shadow the installed package.
    cd "$ROOT/scripts"
    if ! venv_is_current "$1"; then
        mkdir -p "$(dirname "$VENV")"
        (
            if command -v flock >/dev/null; then flock 9; fi
            if ! venv_is_current "$1"; then build_venv "$1"; fi
        ) 9>"$VENV.lock"
    fi
    cd "$ROOT"
}

# use_tools [EXTRAS]: sets BIN to the folder with mqmesh and all developers' tools. That is the active
# environment when it has everything, otherwise ours.
use_tools() {
    local extras="${1:-dev}" active="${VIRTUAL_ENV:-}"
    if [ -n "$active" ] && [ -z "${MQMESH_VENV:-}" ] && has_tools "$active" "$extras"; then
        BIN="$active/bin"
    else
        ensure_venv "$extras"
        BIN="$VENV/bin"
    fi
    cd "$ROOT"
}

has_tools() {
    (
        cd "$ROOT/scripts" &&
            "$1/bin/python" - "$ROOT" "$2" <<'PY'
import importlib.util, pathlib, sys

tools = ("h2", "hypothesis", "jinja2", "mypy", "psutil", "psycopg", "pytest", "pytest_timeout", "ruff", "selenium", "sqlalchemy", "starlette", "uvicorn", "xdist")
if "spark" in sys.argv[2].split(","):
    tools += ("pyspark", "delta", "deltalake", "pyarrow", "duckdb", "matplotlib", "polars")
if any(importlib.util.find_spec(tool) is None for tool in tools):
    sys.exit(1)
import mqmesh.cli

sys.exit(pathlib.Path(mqmesh.cli.__file__).parent.parent != pathlib.Path(sys.argv[1]))
PY
    ) 2>/dev/null
}

# Tests that start processes mostly wait for them, so more run at once than there are cores. The
# tests of a file stay together: they share their cluster. In order of their folders, so that the
# last ones are short, and no worker is busy alone at the end.
WORKERS=(-n "${MQMESH_TEST_WORKERS:-4}" --dist loadfile --no-loadscope-reorder)

# step NAME COMMAND…: runs one step, remembers how it went; a failure does not stop the next ones.
SUMMARY=()
FAILED=0
step() {
    local name="$1" begin=$SECONDS verdict=ok
    shift
    say "$name"
    if ! "$@"; then
        verdict=FAILED
        FAILED=1
    fi
    SUMMARY+=("$(printf '  %-14s %-6s %4d s' "$name" "$verdict" $((SECONDS - begin)))")
}

# summary: prints all steps and ends the script with 0 or 1.
summary() {
    printf '\n'
    printf '%s\n' "${SUMMARY[@]}"
    if [ "$FAILED" -ne 0 ]; then
        printf '%s: FAILED\n' "$1"
        exit 1
    fi
    printf '%s: all is well (%d s)\n' "$1" "$SECONDS"
}
