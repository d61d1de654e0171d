#!/usr/bin/env bash
# What both quickstarts begin with: installs what is missing, builds the program (build/release/bin/tranche), and takes the
# dictionary out of Debian's package dict-gcide, without installing it, as build/quickstart/gcide.txt.
#   scripts/quickstart_prepare.sh [--cuda]
#     --cuda    builds the CUDA code also where there is no GPU; with a GPU and a toolkit it is built anyway, for that GPU
# Needs no network when the packages of scripts/setup.sh are installed and build/quickstart holds the package (put
# dict-gcide_*.deb there), or its text. Exit status: 0 all is there, 1 the program does not build, 2 something is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

cuda=no
case ${1:-} in
  "") ;;
  --cuda) cuda=yes ;;
  *) echo "quickstart_prepare: unknown argument '$1'" >&2; exit 2 ;;
esac

folder=build/quickstart
mkdir -p "$folder"

phase() { printf '\n== %s\n' "$*"; }

phase "What Tranche is built from"
scripts/setup.sh

phase "Build the program (log: $folder/build.log)"
. scripts/build_settings.sh
# Without a GPU there is no use for the CUDA code, even if a toolkit is installed. An existing folder keeps its configuration, because
# scripts/test.sh continues in it.
configure=()
if [ "$cuda" = yes ]; then
  configure+=(-DTRANCHE_CUDA=ON)
elif [ ! -f build/release/CMakeCache.txt ]; then
  if [ "$has_gpu" = yes ]; then configure+=(-DTRANCHE_CUDA=AUTO); else configure+=(-DTRANCHE_CUDA=OFF); fi
fi
if [ "$has_gpu" = yes ] && [ ${#configure[@]} -gt 0 ]; then configure+=(-DCMAKE_CUDA_ARCHITECTURES=native); fi
if ! { cmake --preset release "${configure[@]}" &&
       cmake --build --preset release --target tranche_program --parallel "$jobs"; } > "$folder/build.log" 2>&1; then
  tail -n 40 "$folder/build.log" >&2
  exit 1
fi
program=build/release/bin/tranche
"$program" info

scripts/quickstart_text.sh "$folder"
