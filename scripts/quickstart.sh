#!/usr/bin/env bash
# The main job on a fresh machine: installs into .venv, starts the engine, streams completions of the bundled model.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh
exec .venv/bin/sidestep generate --max-tokens 48 --temperature 0.3 --seed 1 \
  'def get_name(' \
  'import os

def read_file(path):' \
  'class Stack:' "$@"
