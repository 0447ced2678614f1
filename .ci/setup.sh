# Sourced by ./quickstart and ./check: makes .venv and installs what is missing. Needs the variable EXTRAS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  if [ -n "${PYTHON:-}" ] && ! "$PYTHON" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
    echo "PYTHON=$PYTHON does not run as Python 3.11 or 3.12 with its venv module; name another, or leave PYTHON unset" >&2
    exit 1
  fi
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python 3.11 or 3.12 found; install one (with its venv module), or name it: PYTHON=/path/to/python $0" >&2
  exit 1
}

apt_install() { # apt_install PACKAGE PROGRAM WHY
  command -v "$2" >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing $1 ($3)"
    DEBIAN_FRONTEND=noninteractive apt-get update -qq >/dev/null &&
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1" >/dev/null && return
  fi
  echo "$1 is not installed ($3). Install it with: sudo apt-get install $1"
}

stamp=.venv/installed-$(echo "$EXTRAS" | tr ',' '-')
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
  python=$(find_python)
  echo "making .venv with $("$python" --version)"
  "$python" -m venv .venv
fi
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
  echo "installing Reins and what it needs into .venv (the first time: minutes, 1.7 to 6 GB, depending on the build of torch)"
  .venv/bin/python -m pip install -q --progress-bar on -c constraints.txt -e ".${EXTRAS:+[$EXTRAS]}"
  touch "$stamp"
fi
apt_install bubblewrap bwrap "the sandbox; without it agents run without isolation"
export PATH="$PWD/.venv/bin:$PATH"
