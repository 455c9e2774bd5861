#!/usr/bin/env bash
# The whole story in a few minutes on a laptop: a tiny model learns worked sums from a few examples,
# then DASH teaches it to get them right.
#
#   bash launch/quickstart.sh [section.key=value ...]      for instance seed=1 run=runs/seed1
#
# Leaves in the run directory (runs/quickstart): summary.json, learning_curve.png, before.jsonl and
# after.jsonl with every completion, metrics.jsonl, checkpoints/. Stopped half-way, it goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for argument in "$@"; do
  if [[ "$argument" != *=* ]]; then
    sed -n '2,8p' launch/quickstart.sh
    [[ "$argument" == -h || "$argument" == --help ]] && exit 0
    echo "launch/quickstart.sh: $argument is no section.key=value" >&2
    exit 2
  fi
done
source launch/environment.sh
install ""

config=configs/quickstart.yaml
run=$(dash-jax config "$config" "$@" | sed -n 's/^run: \(.*[^ ]\) *#.*/\1/p')
warm=$run/sft/model

echo "== 1/5 warm start: supervised learning on worked solutions"
dash-jax sft "$config" "$@"
echo "== 2/5 held-out accuracy before DASH"
dash-jax eval "$config" "$@" model.path="$warm" --start --name before
echo "== 3/5 DASH"
dash-jax train "$config" "$@" model.path="$warm"
echo "== 4/5 held-out accuracy after DASH"
dash-jax eval "$config" "$@" model.path="$warm" --name after
echo "== 5/5 report"
dash-jax report "$run" --before "$run/before.json" --after "$run/after.json"
