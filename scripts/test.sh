#!/usr/bin/env bash
# Runs the tests, installing what they need into .venv first. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh test
bash scripts/install_chromium.sh || echo "the tests of the page in a browser are skipped" >&2
exec .venv/bin/python -m pytest -q "$@"
