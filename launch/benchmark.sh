#!/usr/bin/env bash
# DASH against GRPO on a small task: the same warm start, the same problems, several ways of training.
#
#   bash launch/benchmark.sh [dash-jax bench options]       for instance --seeds 0,1,2 --target 0.6
#
# Leaves runs/bench/bench.json and runs/bench/bench.html. Stopped half-way, it keeps the arms that are done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,6p' launch/benchmark.sh
  exit 0
fi
source launch/environment.sh
install ""

# 60 updates of 512 completions and what equals them; a constant rate, so that the number of steps does not matter.
config=(configs/quickstart.yaml run=runs/bench optimizer.schedule=constant train.steps=60 train.eval_every=5)
dash-jax sft "${config[@]}"
dash-jax bench "${config[@]}" model.path=runs/bench/sft/model --target 0.6 "$@"
