# Sourced by the other scripts: prepares .venv at the repository's root, and does nothing when that is up to date.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="$root/.venv/bin/python"
# torch finds ninja on PATH when it builds the native GraphRunner.
export PATH="$root/.venv/bin:$PATH"

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        if is_supported "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    return 1
}

make_environment() {
    if [ -x "$python" ]; then
        is_supported "$python" || fail ".venv holds a Python that is not 3.10 to 3.13, or is broken. Remove .venv and try again."
        "$python" -c 'import pip' 2>/dev/null && return
    fi
    local base
    base="$(find_python)" || fail "Python 3.10, 3.11, 3.12 or 3.13 is needed and none was found as python3 or python3.N."
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base has no venv module. Install it (Debian and Ubuntu: apt-get install python3-venv)."
    say "making .venv with $("$base" --version)"
    "$base" -m venv .venv || fail "$base could not make .venv; see above."
}

# hash_of PATH...: one line that changes when a file's content or name does, or a folder's name.
hash_of() {
    "$python" - "$@" <<'PYTHON'
import hashlib, pathlib, sys

digest = hashlib.sha256(sys.version.encode())
for name in sys.argv[1:]:
    path = pathlib.Path(name)
    digest.update(name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b"") + b"\0")
print(digest.hexdigest())
PYTHON
}

# unless_stamped NAME HASH COMMAND...: runs the command when the last one that succeeded had another hash.
unless_stamped() {
    local stamp="$root/.venv/stamp-$1" hash="$2"
    shift 2
    [ "$(cat "$stamp" 2>/dev/null)" = "$hash" ] && return
    rm -f "$stamp"
    "$@"
    printf '%s\n' "$hash" >"$stamp"
}

install_pins() {
    say "installing the pinned packages (the first time takes minutes)"
    "$python" -m pip install --quiet --disable-pip-version-check \
        -r requirements/base.txt -r requirements/bench.txt -r requirements/dev.txt -r requirements/placement.txt ||
        fail "pip could not install the pinned packages of requirements/; see above."
}

build_project() {
    say "building coexec"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . ||
        fail "pip could not install coexec itself; see above."
}

warn_without_native() {
    ls coexec/_native/*.cpp >/dev/null 2>&1 || return 0
    ls coexec/_native/_core*.so >/dev/null 2>&1 ||
        say "the native GraphRunner could not be built (is a C++20 compiler installed?):" \
            "the Python runner and the aten executor will be used."
}

prepare() {
    shopt -s nullglob
    local pins=(requirements/*.txt)
    local sources=(pyproject.toml setup.py coexec/_native/*.cpp coexec/_native/*.h)
    local packages=(*/__init__.py)
    shopt -u nullglob
    make_environment
    unless_stamped pins "$(hash_of "${pins[@]}")" install_pins
    unless_stamped build "$(hash_of "${pins[@]}" "${sources[@]}" "${packages[@]%/__init__.py}")" build_project
    warn_without_native
}
