#!/usr/bin/env bash
# Installs Debian's chromium where there is none, for the tests of the page. Fails where it cannot.
set -euo pipefail
command -v chromium >/dev/null && exit
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
  echo "chromium is missing, and only root on Debian can install it here" >&2
  exit 1
fi
echo "installing chromium ..." >&2
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
