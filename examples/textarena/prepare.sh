#!/bin/sh
# Makes the warmed-up model in DIR/sft unless it is there: prepare.sh DIR PYTHON, the interpreter that has textarena
set -eu
here=$(dirname "$0")
out=$1
if [ -f "$out/sft/config.json" ]; then
  exit 0
fi
rm -rf "$out/base" "$out/sft"
sluice init-model "$out/base" --max-positions 1024
"$2" "$here/demonstrations.py" "$out/demonstrations.jsonl"
sluice sft @ "$here/sft.toml" --model "$out/base" --data "$out/demonstrations.jsonl" --output "$out/sft"
