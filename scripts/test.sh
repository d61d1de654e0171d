#!/usr/bin/env bash
# Builds Tranche and runs its tests in release. Ends at the first suite that fails; the time table is printed in any case.
#   scripts/test.sh [--sanitizers] [--full] [--filter REGEX]
#     --sanitizers    instead of release: AddressSanitizer and UndefinedBehaviorSanitizer, on an emulated GPU, then
#                     ThreadSanitizer over the programs whose threads are ours
#     --full          the tests labelled slow too, and in release every source compiled as a unit of its own
#     --filter REGEX  only tests whose name matches; release tests are single cases then, else whole programs
# Exit status: 0 all passed, 1 a suite failed, 2 usage or missing packages (see scripts/setup.sh).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

sanitizers=no
exclude=(-LE '^slow$')
filter=()
whole=ON
while [ $# -gt 0 ]; do
  case $1 in
    --sanitizers) sanitizers=yes ;;
    --full) exclude=() ;;
    --filter)
      [ $# -gt 1 ] || { echo "test.sh: --filter needs a regular expression" >&2; exit 2; }
      filter=(-R "$2" --no-tests=ignore)
      whole=OFF
      shift
      ;;
    -h | --help) sed -n '2,9s/^# \?//p' "$0"; exit 0 ;;
    *) echo "test.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done

scripts/setup.sh || exit 2

# Sources that two build folders compile alike come from the compiler's cache the second time: paths are as seen from
# the folder.
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR:-1}

# A compiler takes up to 1.5 GB: as many at once as cores and memory allow.
jobs=$(nproc)
memory_jobs=$(awk '/MemAvailable/ {print int($2 / 1500000)}' /proc/meminfo)
[ "$memory_jobs" -lt "$jobs" ] && jobs=$((memory_jobs > 0 ? memory_jobs : 1))

logs=build/test-logs
mkdir -p "$logs"
table=()
closing=""
started=$(date +%s.%N)

seconds_since() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN {printf "%.1f", b - a}'; }

finish() {
  local status=$?
  echo
  printf '%-24s %9s  %s\n' suite seconds result
  printf '%s\n' "${table[@]}"
  printf '%-24s %9s  %s\n' total "$(seconds_since "$started")" "$([ $status -eq 0 ] && echo passed || echo FAILED)"
  [ -n "$closing" ] && echo "$closing"
  exit $status
}
trap finish EXIT

# suite NAME COMMAND...: runs, times and records it; leaves at the first failure.
suite() {
  local name=$1 begin status result log
  shift
  log="$logs/${name// /-}.log"
  begin=$(date +%s.%N)
  echo "== $name"
  "$@" 2>&1 | tee "$log" | show
  status=${PIPESTATUS[0]}
  result=$(grep -E '^[0-9]+% tests passed' "$log" | tail -1)
  [ -n "$result" ] && closing=$result
  [ -n "$result" ] || result=$([ $status -eq 0 ] && echo passed || echo FAILED)
  table+=("$(printf '%-24s %9s  %s' "$name" "$(seconds_since "$begin")" "$result")")
  # Time by label, summed over the tests (more than the suite's where they run side by side).
  local label seconds
  while read -r label seconds; do
    table+=("$(printf '  %-22s %9.1f' "$label" "$seconds")")
  done < <(sed -n 's/^\([a-z_]*\) *= *\([0-9.]*\) sec\*proc.*/\1 \2/p' "$log")
  if [ $status -ne 0 ]; then
    echo "$name failed (status $status); its log: $log" >&2
    exit 1
  fi
}

# Tests that pass are in the log only.
show() { grep --line-buffered -vE '^ +(Start +)?[0-9]+(: |/[0-9]+ Test .* Passed )|^Test project|^$' || true; }

build() {  # PRESET TARGET...
  local preset=$1
  shift
  cmake --preset "$preset" -DTRANCHE_WERROR=ON -DTRANCHE_WHOLE_TESTS=$whole > "$logs/configure-$preset.log" 2>&1 ||
    { cat "$logs/configure-$preset.log"; return 1; }
  cmake --build --preset "$preset" --target "$@" --parallel "$jobs" -- --quiet
}

run_tests() {  # PRESET
  ctest --preset "$1" --parallel "$jobs" "${exclude[@]}" "${filter[@]}" || return 1
  # Why a test was skipped is known only to its own output.
  awk '/^[0-9]+\/[0-9]+ Testing: / {name = $3}
       reason {line = "skipped " name ": " $0; if (!said[line]++) print line; reason = 0}
       /: Skipped$/ {reason = 1}' "build/$1/Testing/Temporary/LastTest.log"
}

release_suites() {
  suite "include check" scripts/check_includes.py
  # Release too is built in few large units here (preset ci): half the time of preset release, which nothing else differs from.
  suite "build release" build ci all
  # Most machines have no CUDA toolkit: a build without one has to link everything, and to say why it skips what it does.
  if grep -q '^-- Tranche: CUDA ON' "$logs/configure-ci.log"; then
    suite "build without CUDA" build ci-no-cuda all
    suite "tests without CUDA" run_tests ci-no-cuda
  fi
  suite "tests release" run_tests ci
  if ! grep -q '^-- Tranche: LIBTORCH ON' "$logs/configure-ci.log"; then
    echo "warning: no LibTorch is here, so nothing of the adapter (include/tranche/libtorch/) was compiled; see scripts/libtorch_tests.sh"
  fi
  if [ ${#exclude[@]} -eq 0 ]; then suite "build alone" build release all; fi
}

sanitizer_suites() {
  suite "build asan" build asan unit_tests gpu_tests  # on emulated GPUs, where the toolkit's headers are
  suite "tests asan" run_tests asan
  # Tests in which our own threads meet; kernels and models are run by those of the engine's tests.
  suite "build tsan" build tsan test_core test_device test_comm test_offload test_engine test_engine_parts
  suite "tests tsan" run_tests tsan
}

if [ $sanitizers = yes ]; then sanitizer_suites; else release_suites; fi
