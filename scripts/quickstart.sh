#!/usr/bin/env bash
# From nothing to a GPT that has learned English, in about three minutes of training: installs what is missing, builds
# the program, takes the dictionary out of Debian's package dict-gcide (without installing it), and trains on two
# ranks, with parameters, gradients and optimizer state partitioned (stage 3, bf16).
#   scripts/quickstart.sh [--fresh] [--cuda]
#     --fresh   starts over: removes what an earlier run left in build/quickstart, but the downloaded package
#     --cuda    builds the CUDA code also where there is no GPU; with a GPU and a toolkit it is built anyway, for that GPU
# An installed one (share/tranche/quickstart.sh) trains with the installed program, in the folder quickstart of the current folder.
# Needs no network when the packages of scripts/setup.sh are installed and build/quickstart holds the package (put
# dict-gcide_*.deb there), or its text. Exit status: 0 learned, 1 not enough, 2 something is missing, else the
# program's.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if [ -f "$here/../CMakeLists.txt" ]; then
  cd "$here/.."
  installed=no folder=build/quickstart program=build/release/bin/tranche
else
  installed=yes folder=quickstart program=$here/../../bin/tranche
fi
text=$folder/gcide.txt
report=$folder/report.json
started=$(date +%s)

phase() { printf '\n== %s\n' "$*"; }

prepare=()
for argument in "$@"; do
  case $argument in
    --fresh)
      mkdir -p "$folder"
      find "$folder" -mindepth 1 -maxdepth 1 ! -name '*.deb' -exec rm -rf {} +
      ;;
    --cuda)
      [ $installed = no ] || { echo "quickstart: --cuda is for the build in a clone; this program is installed" >&2; exit 2; }
      prepare+=(--cuda)
      ;;
    -h | --help) sed -n '2,12s/^# \?//p' "$0"; exit 0 ;;
    *) echo "quickstart: unknown argument '$argument'; see --help" >&2; exit 2 ;;
  esac
done
mkdir -p "$folder"

if [ $installed = yes ]; then
  "$here/quickstart_text.sh" "$folder"
else
  scripts/quickstart_prepare.sh "${prepare[@]}"
fi
echo "$text: $(wc -c < "$text") bytes; the last hundredth is held out"

phase "Train on two ranks: stage 3, bf16, about three minutes"
# The training is limited by time, but a slow machine runs at least the number of steps that reaches the goal.
TRANCHE_MPI_TIMEOUT=${TRANCHE_MPI_TIMEOUT:-3600} "$here/run_mpi.sh" 2 "$program" train \
  --config "$here/quickstart.json" --model gpt-mini --sequence 128 --data "$text" --validation-fraction 0.01 \
  --steps 400 --max-seconds 180 --min-steps 250 \
  --ngrams --sample-bytes 400 --report "$report"

python3 - "$report" "$started" << 'END'
import json, sys, time
report = json.load(open(sys.argv[1], encoding="utf-8"))
loss, bigram, trigram = (report[key] for key in ("validation_loss", "bigram_entropy", "trigram_entropy"))
print(f"""
Nats per byte of the held-out text:
  bigram table     {bigram:.4f}
  trigram table    {trigram:.4f}
  this GPT         {loss:.4f}   {bigram - loss:.2f} below the bigram table
Everything that was measured: {sys.argv[1]}   (in all {time.time() - float(sys.argv[2]):.0f} s)""")
if loss > bigram - 0.2:
    sys.exit("quickstart: the model should be at least 0.2 below the bigram table; something is wrong")
END
