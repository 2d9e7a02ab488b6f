#!/bin/sh
# Makes the warmed-up model in DIR/sft unless it is there: prepare.sh DIR (SEED=1 for another one)
set -eu
here=$(dirname "$0")
out=$1
seed=${SEED:-0}
if [ -f "$out/sft/config.json" ]; then
  exit 0
fi
rm -rf "$out/base" "$out/sft"
sluice init-model "$out/base" --seed "$seed"
python "$here/demonstrations.py" "$out/demonstrations.jsonl" --seed "$seed"
sluice sft @ "$here/sft.toml" --seed "$seed" --model "$out/base" --data "$out/demonstrations.jsonl" --output "$out/sft"
