#!/usr/bin/env bash
# Trains on this machine:  bash launch/train.sh CONFIG.yaml [section.key=value ...]
# EXTRA=cuda or EXTRA=tpu installs JAX for that accelerator; nothing is set for the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -lt 1 ]]; then
  echo "usage: bash launch/train.sh CONFIG.yaml [section.key=value ...]   (configs are in configs/)" >&2
  exit 2
fi
source launch/environment.sh
install "${EXTRA:-}"
exec dash-jax train "$@"
