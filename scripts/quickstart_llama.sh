#!/usr/bin/env bash
# From nothing to a small Llama that was fine-tuned, in about three minutes of work on two cores: makes a Llama on the spot and
# writes it as a folder of Hugging Face's, imports that, fine-tunes it on prompts and completions packed into sequences (the
# words of a dictionary and their meanings; completions alone are learned), generates, and exports the result.
#   scripts/quickstart_llama.sh [--fresh]
#     --fresh   starts over: removes what an earlier run left in build/quickstart/llama
# Exit status: 0 learned, 1 not enough, 2 something is missing, else the program's.
set -euo pipefail
cd "$(dirname "$0")/.."

text=build/quickstart/gcide.txt
folder=build/quickstart/llama
program=build/release/bin/tranche
started=$(date +%s)

phase() { printf '\n== %s\n' "$*"; }

case ${1:-} in
  "") ;;
  --fresh) rm -rf "$folder" ;;
  -h | --help) sed -n '2,7s/^# \?//p' "$0"; exit 0 ;;
  *) echo "quickstart_llama: unknown argument '$1'; see --help" >&2; exit 2 ;;
esac
scripts/quickstart_prepare.sh
mkdir -p "$folder"
begun=$(date +%s)
export TRANCHE_MPI_TIMEOUT=${TRANCHE_MPI_TIMEOUT:-3600}
train() { scripts/run_mpi.sh 2 "$program" train --config scripts/quickstart.json --sequence 128 "$@"; }

phase "1/5 A small Llama, made on the spot: stage 3 on two ranks, a minute"
if [ ! -d "$folder/base" ]; then
  rm -rf "$folder/base-run" "$folder/base.part"
  train --model llama-mini --data "$text" --validation-fraction 0.005 --steps 400 --max-seconds 60 --min-steps 60 \
    --checkpoint-dir "$folder/base-run"
  "$program" checkpoint export "$folder/base-run" --to "$folder/base.part"
  mv "$folder/base.part" "$folder/base"
fi

phase "2/5 Prompts and completions: words and their meanings"
python3 - "$text" "$folder/words.jsonl" << 'END'
import json, re, sys
pairs = []
for entry in open(sys.argv[1], encoding="ascii").read().split("\n\n"):
    found = re.match(r"([A-Z][a-z-]+), (?:n|a|adv)\. (?:\[[^]]*\] )?([A-Z][^.;]{20,100})[.;]", entry)
    if found:
        pairs.append({"prompt": f"{found[1]}:", "completion": f" {found[2]}.\n"})
with open(sys.argv[2], "w", encoding="ascii") as output:
    output.writelines(json.dumps(pair) + "\n" for pair in pairs)
print(f"{len(pairs)} words, like {pairs[0]}")
END
rm -f "$folder/words.safetensors"
"$program" tokenize --data "$folder/words.jsonl" --out "$folder/words.safetensors"

phase "3/5 Fine-tune: packed documents, completions alone are learned, less than a minute"
rm -rf "$folder/imported" "$folder/tuned-run" "$folder/tuned"
"$program" checkpoint import "$folder/base" --to "$folder/imported"
"$program" evaluate --from "$folder/imported" --model "$folder/base/config.json" --dtype bf16 --data "$folder/words.safetensors" \
  --sequence 128 --validation-fraction 0.02 --report "$folder/before.json"
train --model "$folder/base/config.json" --data "$folder/words.safetensors" --validation-fraction 0.02 --lr 0.001 \
  --steps 200 --max-seconds 45 --min-steps 40 --resume-weights-only "$folder/imported" --checkpoint-dir "$folder/tuned-run" \
  --report "$folder/after.json"

phase "4/5 Generate"
for word in Sailor Kindness; do
  "$program" generate --from "$folder/tuned-run" --prompt "$word:" --stop $'\n' --tokens 100 --temperature 0.5
done

phase "5/5 Export"
"$program" checkpoint export "$folder/tuned-run" --to "$folder/tuned"

python3 - "$folder" "$started" "$begun" << 'END'
import json, sys, time
before, after = (json.load(open(f"{sys.argv[1]}/{name}.json", encoding="utf-8"))["validation_loss"] for name in ("before", "after"))
now = time.time()
print(f"""
Nats per byte of held-out meanings: {before:.4f} before, {after:.4f} after.
Open with transformers: {sys.argv[1]}/tuned   (in all {now - float(sys.argv[2]):.0f} s, {now - float(sys.argv[3]):.0f} s without the build)""")
if after > before - 0.1:
    sys.exit("quickstart_llama: the loss should have fallen by 0.1 at least; something is wrong")
END
