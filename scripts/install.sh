#!/usr/bin/env bash
# Makes .venv where it is missing and installs the project into it: install.sh [EXTRA]   (test, dev, bench or docs)
# Does nothing when that was done before for the same pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
extra="${1:-}"
stamp=".venv/.installed-${extra:-base}"

find_python() {
  for candidate in python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null &&
       "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11, 3.12 or 3.13 is needed" >&2
  exit 1
}

# Debian keeps venv's own installer in a package that a bare machine lacks.
make_venv() {
  local python="$1"
  "$python" -m venv .venv 2>/dev/null && return
  rm -rf .venv
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq
    apt-get install -y -qq python3-venv >/dev/null
  fi
  "$python" -m venv .venv
}

[ -x .venv/bin/python ] || make_venv "$(find_python)"
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
  echo "installing into .venv ..." >&2
  .venv/bin/python -m pip install --quiet --upgrade pip
  cpu_torch="$(.venv/bin/python scripts/cpu_torch.py)"
  if [ -n "$cpu_torch" ]; then
    echo "no NVIDIA GPU here: taking torch's CPU build" >&2
    # shellcheck disable=SC2086  # it is a list of words
    .venv/bin/python -m pip install --quiet --no-deps $cpu_torch || echo "that failed: taking PyPI's build" >&2
  fi
  .venv/bin/python -m pip install --quiet --editable ".${extra:+[$extra]}"
  touch "$stamp"
fi
