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
text=$folder/gcide.txt
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

phase "English text: the Collaborative International Dictionary of English"
if [ ! -s "$text" ]; then
  if ! ls "$folder"/dict-gcide_*.deb > /dev/null 2>&1; then
    # The download goes to a folder of its own first, so that an incomplete package is never used.
    rm -rf "$folder/download"
    mkdir -p "$folder/download"
    fetch() { (cd "$folder/download" && apt-get download -q -o APT::Sandbox::User=root dict-gcide); }
    if ! fetch; then
      # apt knows no package without lists, which only root can fetch.
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
