#!/usr/bin/env bash
# Installs what the tests need and runs them:  bash launch/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
install dev
exec python -m pytest "$@"
