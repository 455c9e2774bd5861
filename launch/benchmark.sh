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

# 50 updates of 512 completions and what equals them; a constant rate, so that the number of steps does not
# matter. Of 1e-4 (the paper's third of DASH's rate), 3e-5 and 1e-5 the small updates learn best with 3e-5; with 1e-4
# they unlearn what the warm start has taught.
config=(configs/quickstart.yaml run=runs/bench train.steps=50 train.eval_every=5)
config+=(optimizer.schedule=constant optimizer.warmup_steps=20)
dash-jax sft "${config[@]}"
dash-jax bench "${config[@]}" model.path=runs/bench/sft/model --target 0.55 --small-learning-rate 3e-5 "$@"
