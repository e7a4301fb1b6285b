#!/usr/bin/env bash
# Train a tiny model with PPO, SIGKILL it in the middle of a save, run the same command again.
# Run it with `make quickstart`. Everything it makes lies in ./quickstart-out.
set -euo pipefail

examples=$(cd "$(dirname "$0")" && pwd)
out=${1:-quickstart-out}
rm -rf "$out" && mkdir -p "$out"
cd "$out"

say() { if [ -t 1 ]; then printf "\n\033[1m# %s\033[0m\n" "$*"; else printf "\n# %s\n" "$*"; fi; }
run() { printf '$ %s\n' "$*"; "$@"; }

export CKPT_STORE=$PWD/checkpoints
export OMP_NUM_THREADS=1  # the model is too small to be shared among cores
train=(ckpt-train --config "$examples/digits.yaml")

say "PPO teaches a model of 115,000 parameters to write digits; a checkpoint every 5 steps. Kill it in a save"
printf '$ %s\n' "${train[*]}"
python "$examples/kill_mid_save.py" checkpoints/digits --after-step 25 -- "${train[@]}"

say "What is there: the save that was killed is no checkpoint, and nothing else is harmed"
run ckpt list --all
run ckpt resume-info digits@latest

say "The same command again: it goes on after the newest checkpoint, bit for bit as if nothing had happened"
run "${train[@]}"

say "All of them, and every byte verified"
run ckpt list
run ckpt verify digits@latest --deep

say "The reward over both lives"
run python -m trainer.plot logs/digits/metrics.jsonl

say "Done. The store is plain files: look at $out/checkpoints"
