#!/usr/bin/env bash
# All that a change must pass: lint, format, types, docs, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh dev
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
bash scripts/docs.sh
exec bash scripts/test.sh "$@"
