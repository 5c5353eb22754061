# shellcheck shell=bash
# Sourced by tools/run and tools/test, which set $root (the checkout) and $me (their own name).
# Everything here speaks on stderr. Exit code 5: this host lacks what it takes.

say() { printf '%s: %s\n' "$me" "$*" >&2; }
die() { say "$*"; exit 5; }

# Prints the real interpreter behind $1 if it is a Python >= 3.11, and fails otherwise. Shims and
# venvs are looked through: an active .venv may be about to be made anew.
interpreter() {
  "$1" -c 'import os, sys
sys.version_info >= (3, 11) or sys.exit(1)
print(os.path.realpath(sys._base_executable))' 2>/dev/null </dev/null
}

# Sets $python. What .venv was made with stays, so that another PATH does not make it anew.
find_python() {
  local name
  if [[ -n ${PYTHON:-} ]]; then
    python=$(interpreter "$PYTHON") || die "PYTHON=$PYTHON is not a Python >= 3.11"
    return
  fi
  for name in "$root/.venv/bin/python" python3 python3.13 python3.12 python3.11 python3.14; do
    if python=$(interpreter "$name"); then return; fi
  done
  die "needs Python >= 3.11 and finds none. Install one, for example with" \
    "\`apt install python3.11 python3.11-venv\`, or set PYTHON=/path/to/python3"
}

# ensure_venv DIR PYTHON EXTRAS: makes DIR a virtual environment of PYTHON that has this checkout
# installed (editable) with EXTRAS (comma-separated) and whatever extras it had before.
ensure_venv() {
  if _is_current "$@"; then return; fi
  if command -v flock >/dev/null; then
    # Two first runs at once: the second waits, and then finds the work done.
    (flock 9 && { _is_current "$@" || _make_venv "$@"; }) 9>"$1.lock" || exit
  else
    _make_venv "$@" || exit
  fi
}

# The stamp is removed first and written last: a venv without one was interrupted. Its lines:
# what the venv is bound to, what was installed from, and the extras.
_is_current() {
  local extra
  identity=$("$2" -c 'import sys; print(sys.version.split()[0], sys.argv[1:])' "$2" "$root") || exit
  project=$("$2" -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$root/pyproject.toml") || exit
  had_identity='' had_project='' extras=''
  if [[ -f $1/.stamp ]]; then
    { read -r had_identity && read -r had_project && read -r extras; } <"$1/.stamp" || true
  fi
  [[ $identity == "$had_identity" ]] || extras=''
  local had_extras=$extras
  for extra in ${3//,/ }; do
    [[ ,$extras, == *,$extra,* ]] || extras+=${extras:+,}$extra
  done
  [[ $identity == "$had_identity" && $project == "$had_project" && $extras == "$had_extras" ]]
}

_make_venv() {
  local dir=$1 python=$2
  if [[ $identity != "$had_identity" ]]; then
    say "making ${dir##*/} with $python"
    rm -rf "$dir"
    _bare_venv "$dir" "$python"
  fi
  rm -f "$dir/.stamp"
  say "installing aot-lora${extras:+[$extras]} into ${dir##*/}; the first time takes a minute or two"
  "$dir/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
    -e "$root${extras:+[$extras]}" >&2 </dev/null || { say "pip failed, see above"; exit 1; }
  printf '%s\n' "$identity" "$project" "$extras" >"$dir/.stamp"
}

# Debian ships Python without ensurepip, which `python3 -m venv` needs, in a package of its own.
# A pip of the system can stand in for it: it only has to put another pip into the new venv.
_bare_venv() {
  if "$2" -c 'import venv, ensurepip' 2>/dev/null; then
    "$2" -m venv "$1" >&2 || die "\`$2 -m venv\` failed; see above"
  elif "$2" -m pip --version >/dev/null 2>&1 && "$2" -m venv --without-pip "$1" >&2 &&
    "$2" -m pip --python "$1/bin/python" install --quiet --no-input pip >&2 </dev/null; then
    return
  else
    local package
    package=$("$2" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    rm -rf "$1"
    die "$2 has no whole venv module. Install it: \`apt install $package\` (as root), then run again"
  fi
}
