#!/usr/bin/env bash
# Makes the API's pages from the comments of the public headers, with Doxygen: scripts/api_pages.sh [FOLDER]
#   FOLDER   where they go (build/api); FOLDER/html/index.html is the first
# Exit status: 0 made, 1 a comment is wrong (every warning counts), 77 there is no doxygen.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/api}
command -v doxygen > /dev/null || { echo "api_pages: doxygen is missing: apt-get install doxygen" >&2; exit 77; }
mkdir -p "$folder"
if ! { cat docs/Doxyfile; echo "OUTPUT_DIRECTORY = $folder"; } | doxygen - 2> "$folder/warnings.txt"; then
  cat "$folder/warnings.txt" >&2
  exit 1
fi
echo "$folder/html/index.html"
