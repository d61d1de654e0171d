#!/usr/bin/env bash
# Runs clang-tidy 16 with the checks of .clang-tidy; any finding is an error.
#   scripts/tidy.sh [--changed [COMMITS]] [--build DIR] [FILE...]
#     --changed [COMMITS]  only files that the last COMMITS commits (5) or the working tree changed, the newest first, at most
#                          20 of them; in a shallow clone as far as its history goes. Without FILE and --changed: all files.
#     --build DIR          where compile_commands.json lies; by default build/tidy, which is configured if need be (no unity
#                          build, no CUDA: CUDA sources are nvcc's, and are not checked)
# Exit status: 0 clean, or clang-tidy 16 is not installed (it says so); 1 findings; 2 usage, or the build cannot be configured.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

changed=0
build=""
files=()
while [ $# -gt 0 ]; do
  case $1 in
    --changed)
      changed=5
      if [[ ${2:-} =~ ^[1-9][0-9]*$ ]]; then
        changed=$2
        shift
      fi
      ;;
    --build)
      [ $# -gt 1 ] || { echo "tidy: --build needs a folder" >&2; exit 2; }
      build=$2
      shift
      ;;
    -h | --help) sed -n '2,9s/^# \?//p' "$0"; exit 0 ;;
    -*) echo "tidy: unknown argument '$1'; see --help" >&2; exit 2 ;;
    *) files+=("$1") ;;
  esac
  shift
done

tidy=""
for candidate in clang-tidy-16 clang-tidy; do
  if command -v "$candidate" > /dev/null && [[ $("$candidate" --version) == *"version 16."* ]]; then
    tidy=$candidate
    break
  fi
done
if [ -z "$tidy" ]; then
  echo "tidy: clang-tidy 16 is not installed (Debian package clang-tidy-16; scripts/setup.sh --checks installs it); nothing checked"
  exit 0
fi

if [ -z "$build" ]; then
  build=build/tidy
  mkdir -p "$build"
  cmake --preset release -B "$build" -DTRANCHE_CUDA=OFF -DCMAKE_UNITY_BUILD=OFF > "$build/configure.log" 2>&1 ||
    { cat "$build/configure.log" >&2; exit 2; }
fi

most=20
if [ ${#files[@]} -eq 0 ]; then
  if [ "$changed" -gt 0 ]; then
    # The newest files first, each once; files that no longer exist are skipped. If the history is not as deep as requested, its oldest
    # commit, which seems to change all files, is left out.
    mapfile -t files < <({ git diff --name-only HEAD
                           git log -n "$changed" --format= --name-only --diff-filter=d --no-merges "$(git rev-list --max-parents=0 HEAD |
                             sed 's/$/../; q')HEAD" 2> /dev/null; } | grep -E '\.(h|cpp)$' | awk '!seen[$0]++')
  else
    mapfile -t files < <(git ls-files '*.cpp')  # headers are checked where they are included
  fi
fi

# The sources that the build compiles, and headers, for which flags are guessed from the sources beside them.
checked=()
for file in "${files[@]}"; do
  [[ -f $file && $file =~ \.(h|cpp)$ ]] || continue
  if [[ $file == *.h ]]; then
    source=${file%.h}.cpp
    source=${source#include/tranche/}
    [[ $file == *-inl.h || $file == */cuda* || $file == */nccl* || $file == tests/* || $file == include/tranche/libtorch* ]] && continue
    if [ -f "$source" ]; then file=$source; fi
  fi
  if [[ $file == *.cpp ]] && ! grep -qF "/$file\"" "$build/compile_commands.json"; then continue; fi
  [[ " ${checked[*]} " == *" $file "* ]] || checked+=("$file")
done
if [ "$changed" -gt 0 ] && [ ${#checked[@]} -gt $most ]; then
  echo "tidy: ${#checked[@]} files changed; checking the $most that changed last (scripts/tidy.sh checks all)"
  checked=("${checked[@]:0:$most}")
fi
if [ ${#checked[@]} -eq 0 ]; then
  echo "tidy: no files to check"
  exit 0
fi

folders=$(git ls-files | sed -n 's|/.*||p' | sort -u | paste -sd '|')
printf '%s\0' "${checked[@]}" |
  xargs -0 -P "$(nproc)" -n 1 "$tidy" -p "$build" --quiet --extra-arg=-Wno-pragma-once-outside-header \
    --header-filter="^$(printf '%s' "$PWD" | sed 's/[.+]/\\&/g')/($folders)/" 2> >(grep -vE '^[0-9]+ warnings? (and [0-9]+ errors? )?generated|^Suppressed|^Use -' >&2)
status=$?
[ $status -eq 0 ] && echo "tidy: ${#checked[@]} files, no findings" && exit 0
echo "tidy: findings in ${#checked[@]} files checked; mend them, or silence a line with NOLINT(check): reason" >&2
exit 1
