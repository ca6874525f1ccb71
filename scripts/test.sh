#!/usr/bin/env bash
# Runs the tests, installing what they need into .venv first. Arguments go to pytest.
# Files run side by side, in as many processes as the machine has room for; `-n 0` runs them in one.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh test
bash scripts/install_chromium.sh || echo "the tests of the page in a browser are skipped" >&2
bash scripts/install_clients.sh || echo "the tests of other projects' clients are skipped" >&2
# Each of some hundred processes would compile the sources anew where this is set.
export PYTHONDONTWRITEBYTECODE=
exec .venv/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder --durations 10 "$@"
