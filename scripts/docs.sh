#!/usr/bin/env bash
# Builds the docs site into site/, and fails on any warning, broken link, picture or anchor. It needs
# the network only to install what it runs into .venv for the first time.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh docs
.venv/bin/python -m scripts.docs_site copy
.venv/bin/zensical build --strict --clean
.venv/bin/python -m scripts.docs_site check
echo "the site is in site/index.html" >&2
