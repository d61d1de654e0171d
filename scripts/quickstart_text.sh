#!/usr/bin/env bash
# Takes the dictionary out of Debian's package dict-gcide, without installing it, as FOLDER/gcide.txt; does nothing when that is there.
#   scripts/quickstart_text.sh FOLDER
# Needs no network when FOLDER holds the package (put dict-gcide_*.deb there). Exit status: 0 it is there, 2 something is missing.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: quickstart_text.sh FOLDER" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
text=$folder/gcide.txt

printf '\n== %s\n' "English text: the Collaborative International Dictionary of English"
[ ! -s "$text" ] || exit 0
mkdir -p "$folder"
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
python3 "$here/dictionary_text.py" "$folder/dict-gcide/usr/share/dictd/gcide.dict.dz" "$text"
rm -rf "$folder/dict-gcide"
