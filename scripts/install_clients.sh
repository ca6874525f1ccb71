#!/usr/bin/env bash
# Install other projects' clients of the server into .clients, for tests/clients: Python's into a virtual environment
# of its own (they need older libraries than the tests do), Node's beside it. Do nothing if the same lists are installed
# already. Fail where a client cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
lists=(pyproject.toml tests/clients/node/package.json)
is_new() {
  [ ! -e "$1" ] || [ "$2" -nt "$1" ]
}

# The libraries are written for the Node versions that are maintained.
find_node() {
  if ! command -v npm >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null
  fi
  if ! command -v npm >/dev/null || [ "$(node -p 'parseInt(process.versions.node)')" -lt 20 ]; then
    echo "Node 20 or newer, with npm, is missing: Node's clients are not installed" >&2
    exit 1
  fi
}

mkdir -p .clients
if is_new .clients/.installed-python "${lists[0]}"; then
  echo "installing Python clients into .clients ..." >&2
  .venv/bin/python -m venv .clients/venv
  .clients/venv/bin/python -m pip install --quiet --upgrade "pip>=25.1"
  .clients/venv/bin/python -m pip install --quiet --group clients
  touch .clients/.installed-python
fi
if is_new .clients/.installed-node "${lists[1]}"; then
  find_node
  echo "installing Node clients into .clients ..." >&2
  cp "${lists[1]}" .clients/package.json
  npm install --prefix .clients --silent --no-audit --no-fund --no-package-lock --ignore-scripts
  ln -sfn ../../../.clients/node_modules tests/clients/node/node_modules
  touch .clients/.installed-node
fi
