#!/usr/bin/env bash
# Install Ray, with what Ray Serve needs, into .venv for tests/ray_cluster. Without it they are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh dev
stamp=.venv/.installed-ray
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
  echo "installing Ray into .venv ..." >&2
  .venv/bin/python -m pip install --quiet --editable ".[ray-serve]"
  touch "$stamp"
fi
