#!/usr/bin/env bash
# Fuzzes the readers of foreign files (tests/fuzz/) with libFuzzer under AddressSanitizer and UBSan, in a clang build of
# its own, and prints a line for each target.
#   scripts/fuzz.sh [--seconds S | --executions N] [--targets NAME,...] [--jobs J] [--build DIR]
#     --seconds S       for each target (60)
#     --executions N    for each target, however long it takes
#     --targets NAMES   only these, separated by commas
#     --jobs J          so many targets at once (1)
#     --build DIR       build folder (build/fuzz); inputs that reach new code stay in DIR/corpus for the next time
# A target ends at its first finding: a crash, a sanitizer's report, an exception of another kind than the reader promises, a read of
# more than 5 s, or more than 512 MiB asked for at once. The input is kept in DIR/findings, and the line that repeats it printed.
# Exit status: 0 no finding, 1 findings, 2 usage or packages missing.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

budget=-max_total_time=60
targets=""
jobs=1
build=build/fuzz
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,12s/^# \?//p' "$0"; exit 0 ;;
    --seconds | --executions | --targets | --jobs | --build)
      [ $# -gt 1 ] || { echo "fuzz.sh: $1 needs a value" >&2; exit 2; } ;;&
    --seconds) budget=-max_total_time=$2 ;;
    --executions) budget=-runs=$2 ;;
    --targets) targets=${2//,/ } ;;
    --jobs) jobs=$2 ;;
    --build) build=$2 ;;
    *) echo "fuzz.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
  shift 2
done

# The newest clang with libFuzzer, OpenMP and the necessary C++20 (16 has it, 14 does not).
works() {
  printf '#include <source_location>\nstd::source_location at();\nextern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n' |
    "$1" -std=c++20 -x c++ -fsanitize=fuzzer,address -fopenmp -o /dev/null - 2> /dev/null
}
compiler=""
for candidate in ${CXX:+"$CXX"} clang++-19 clang++-18 clang++-17 clang++-16 clang++; do
  if command -v "$candidate" > /dev/null && works "$candidate"; then compiler=$candidate; break; fi
done
if [ -z "$compiler" ]; then
  echo "fuzz.sh: there is no clang++ of version 16 or later with libFuzzer and OpenMP (\$CXX names one elsewhere); on Debian 12:" \
    "apt-get install clang-16 libclang-rt-16-dev libomp-16-dev" >&2
  exit 2
fi

mkdir -p "$build/corpus" "$build/findings" "$build/logs"
build=$(cd "$build" && pwd)
cmake --preset fuzz -B "$build" -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_C_COMPILER="${compiler/++/}" > "$build/logs/configure.log" 2>&1 ||
  { cat "$build/logs/configure.log" >&2; exit 2; }
cmake --build "$build" --target fuzz_readers --parallel "$(nproc)" -- --quiet || exit 2

known=$("$build/tests/fuzz_readers" --list | grep -vx planted)
for target in $targets; do
  grep -qx "$target" <<< "$known" ||
    { echo "fuzz.sh: there is no target '$target'; there are" $known >&2; exit 2; }
done

# fuzz TARGET: prints one line of the table, and lines for a finding.
fuzz() {
  local target=$1 log="$build/logs/$1.log" program="$build/tests/fuzz_$1" corpus="$build/corpus/$1" found kind="-" words number
  "$program" --corpus "$corpus" || return 1
  rm -f "$build/findings/$target-"*
  local begin; begin=$(date +%s.%N)
  "$program" "$budget" -timeout=5 -rss_limit_mb=4096 -malloc_limit_mb=512 -max_len=65536 -print_final_stats=1 -dict="$corpus.dict" \
    -artifact_prefix="$build/findings/$target-" "$corpus" > "$log" 2>&1
  local status=$? seconds; seconds=$(awk -v a="$begin" -v b="$(date +%s.%N)" 'BEGIN {printf "%.0f", b - a}')
  number=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -1)
  words=$(grep -E '^#[0-9]+.* cov: ' "$log" | tail -1)
  if [ $status -ne 0 ]; then
    kind=$(grep -oE 'foreign exception: .*|runtime error: .*|ERROR: (AddressSanitizer|libFuzzer|LeakSanitizer): .*' "$log" | head -1)
    kind=${kind:-status $status, see $log}
  fi
  awk -v t="$target" -v n="${number:-0}" -v s="$seconds" -v w="$words" -v k="$kind" 'BEGIN {
    cov = ft = corp = "-"; count = split(w, word, " ")
    for (i = 1; i < count; ++i) { if (word[i] == "cov:") cov = word[i + 1]; if (word[i] == "ft:") ft = word[i + 1]; if (word[i] == "corp:") corp = word[i + 1] }
    printf "%-14s %11d %8d %8.0f %7s %8s %16s  %s\n", t, n, s, n / (s > 0 ? s : 1), cov, ft, corp, k }'
  for found in "$build/findings/$target-"*; do
    [ -e "$found" ] && echo "  again by: $program $found"
  done
  return $((status != 0))
}
export -f fuzz
export build budget

printf '%-14s %11s %8s %8s %7s %8s %16s  %s\n' target executions seconds "a second" cov ft corpus finding
# xargs ends with 123 if one of the commands did not end with 0.
printf '%s\n' ${targets:-$known} | xargs -P "$jobs" -I NAME bash -c 'fuzz NAME'
[ $? -eq 0 ] || exit 1
