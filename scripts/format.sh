#!/usr/bin/env bash
# Formats the C++ sources in place, as .clang-format says. With --check changes nothing, names the files that differ
# and ends with exit status 1. Other versions than 14 format differently. Without 14 the script says so and does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

check=false
case ${1:-} in
  "") ;;
  --check) check=true ;;
  *) echo "usage: scripts/format.sh [--check]" >&2; exit 2 ;;
esac

formatter=""
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" > /dev/null && [[ $("$candidate" --version) == *"version 14."* ]]; then
    formatter=$candidate
    break
  fi
done
if [ -z "$formatter" ]; then
  echo "format: clang-format 14 is not installed (Debian package clang-format-14); nothing checked"
  exit 0
fi

mapfile -t files < <(git ls-files '*.h' '*.cpp' '*.cu')
if ! $check; then
  "$formatter" -i "${files[@]}"
  exit 0
fi
status=0
for file in "${files[@]}"; do
  if ! "$formatter" --dry-run -Werror "$file" > /dev/null 2>&1; then
    echo "$file differs: scripts/format.sh"
    status=1
  fi
done
exit $status
