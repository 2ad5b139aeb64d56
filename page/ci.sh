#!/usr/bin/env bash
# The page: types, lint, a fresh asset, and visits of a reader in Chromium.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if [ -z "${CHROMIUM:-}" ] && ! command -v chromium >/dev/null; then
  apt-get update --quiet --quiet
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --quiet --no-install-recommends chromium >/dev/null
fi
npm ci --no-audit --no-fund
npm run check
npm test
