#!/usr/bin/env bash
# From nothing to a GPT that has learned English, in about three minutes of training: installs what is missing, builds
# the program, takes the dictionary out of Debian's package dict-gcide (without installing it), and trains on two
# ranks, with parameters, gradients and optimizer state partitioned (stage 3, bf16).
#   scripts/quickstart.sh [--fresh]
#     --fresh   starts over: removes what an earlier run left in build/quickstart, but the downloaded package
# Needs no network when the packages of scripts/setup.sh are installed and build/quickstart holds the package (put
# dict-gcide_*.deb there), or its text. Exit status: 0 learned, 1 not enough, 2 something is missing, else the
# program's.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=build/quickstart
text=$folder/gcide.txt
report=$folder/report.json
started=$(date +%s)

phase() { printf '\n== %s\n' "$*"; }

case ${1:-} in
  "") ;;
  --fresh)
    mkdir -p "$folder"
    find "$folder" -mindepth 1 -maxdepth 1 ! -name '*.deb' -exec rm -rf {} +
    ;;
  -h | --help) sed -n '2,10s/^# \?//p' "$0"; exit 0 ;;
  *) echo "quickstart: unknown argument '$1'; see --help" >&2; exit 2 ;;
esac
mkdir -p "$folder"

phase "1/4 What Tranche is built from"
scripts/setup.sh

phase "2/4 Build the program (log: $folder/build.log)"
jobs=$(nproc)
# A compiler takes up to 1.5 GB.
memory_jobs=$(awk '/MemAvailable/ {print int($2 / 1500000)}' /proc/meminfo)
[ "$memory_jobs" -lt "$jobs" ] && jobs=$((memory_jobs > 0 ? memory_jobs : 1))
if ! { cmake --preset release &&
       cmake --build --preset release --target tranche_program --parallel "$jobs"; } > "$folder/build.log" 2>&1; then
  tail -n 40 "$folder/build.log" >&2
  exit 1
fi
program=build/release/bin/tranche
"$program" info

phase "3/4 English text: the Collaborative International Dictionary of English"
if [ ! -s "$text" ]; then
  if ! ls "$folder"/dict-gcide_*.deb > /dev/null 2>&1; then
    # Into a folder of its own first, so that a part of a package is never taken for one.
    rm -rf "$folder/download"
    mkdir -p "$folder/download"
    fetch() { (cd "$folder/download" && apt-get download -q -o APT::Sandbox::User=root dict-gcide); }
    if ! fetch; then
      # Without lists of packages apt knows none; only root can fetch them.
      if [ "$(id -u)" -ne 0 ] || ! { apt-get update -q && fetch; }; then
        echo "quickstart: dict-gcide could not be downloaded. With a network: sudo apt-get update, and run this again." >&2
        echo "Without one: put dict-gcide_*.deb of Debian into $folder." >&2
        exit 2
      fi
    fi
    mv "$folder"/download/dict-gcide_*.deb "$folder/"
    rm -rf "$folder/download"
  fi
  package=$(ls "$folder"/dict-gcide_*.deb | tail -n 1)
  dpkg -x "$package" "$folder/dict-gcide"
  python3 scripts/dictionary_text.py "$folder/dict-gcide/usr/share/dictd/gcide.dict.dz" "$text"
  rm -rf "$folder/dict-gcide"
fi
echo "$text: $(wc -c < "$text") bytes; the last hundredth is held out"

phase "4/4 Train on two ranks: stage 3, bf16, about three minutes"
# The training is bounded by time, but a slow machine gets the least number of steps that reaches the goal.
TRANCHE_MPI_TIMEOUT=${TRANCHE_MPI_TIMEOUT:-3600} scripts/run_mpi.sh 2 "$program" train \
  --config scripts/quickstart.json --model gpt-mini --sequence 128 --data "$text" --validation-fraction 0.01 \
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
