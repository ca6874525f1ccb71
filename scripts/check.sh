#!/usr/bin/env bash
# All that a change must pass: lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh dev
.venv/bin/ruff check .
.venv/bin/mypy
exec bash scripts/test.sh "$@"
