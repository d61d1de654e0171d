#!/usr/bin/env bash
# Builds Tranche in release and runs its tests, in the folder that the quickstart built its program in. Ends at the first
# suite that fails; the time table is printed in any case.
#   scripts/test.sh [--sanitizers] [--full] [--filter REGEX]
#     --sanitizers    instead of release: AddressSanitizer and UndefinedBehaviorSanitizer, on an emulated GPU, then
#                     ThreadSanitizer over the programs whose threads are ours; of both, the programs that the last 20
#                     commits concern, those of comm, offload and pipeline, and a third of the others (scripts/sanitized_tests.py)
#     --full          the tests labelled slow too, all parts of drawn sweeps, all programs under sanitizers, and in release
#                     every source compiled as a unit of its own
#     --filter REGEX  only tests whose name matches; release tests are single cases then, else whole programs
# Where a CUDA toolkit is installed the release suites run without CUDA first. Then the CUDA libraries are added to the
# same folder, with the tests that need them. A folder that was configured with CUDA before keeps it from the start.
# Exit status: 0 all passed, 1 a suite failed, 2 usage or missing packages (see scripts/setup.sh).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

sanitizers=no
full=no
exclude=(-LE '^slow$')
filter=()
whole=ON
while [ $# -gt 0 ]; do
  case $1 in
    --sanitizers) sanitizers=yes ;;
    --full)
      full=yes
      exclude=()
      ;;
    --filter)
      [ $# -gt 1 ] || { echo "test.sh: --filter needs a regular expression" >&2; exit 2; }
      filter=(-R "$2" --no-tests=ignore)
      whole=OFF
      shift
      ;;
    -h | --help) sed -n '2,15s/^# \?//p' "$0"; exit 0 ;;
    *) echo "test.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done

scripts/setup.sh || exit 2
. scripts/build_settings.sh

# Each commit runs another third of the drawn sweeps, so that three successive commits run all of them. Without a history it is the first
# third. Under sanitizers a program may run in every third commit only (scripts/sanitized_tests.py): its parts move on by 11, which has no factor
# in common with the strides of tests/core/rounds.h, so that it meets all of them in its turns.
if [ $full = yes ]; then
  unset TRANCHE_TEST_PART
elif [ -z "${TRANCHE_TEST_PART+set}" ]; then
  commits=$(git rev-list --count HEAD 2> /dev/null || echo 0)
  export TRANCHE_TEST_PART=$((commits % 3))/3
  if [ $sanitizers = yes ]; then TRANCHE_TEST_PART=$(((commits + commits / 3 * 8) % 420))/420; fi
fi
echo "test.sh: part ${TRANCHE_TEST_PART:-0/1} of the drawn sweeps (TRANCHE_TEST_PART; --full runs all)"

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

# suite NAME COMMAND...: runs a suite, times and records it; ends the script at the first failure.
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
  # The time by label, summed over the tests (more than the suite's time if tests run at the same time).
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

# configure PRESET OPTION...
configure() {
  local preset=$1
  shift
  cmake --preset "$preset" -DTRANCHE_WHOLE_TESTS=$whole "$@" > "$logs/configure-$preset.log" 2>&1 ||
    { cat "$logs/configure-$preset.log"; return 1; }
}

# build PRESET TARGET...: treats a warning as an error. (With compiler flags for that, everything would be compiled again, because the
# quickstart has other flags.)
build() {
  local preset=$1 status=0
  shift
  cmake --build --preset "$preset" --target "$@" --parallel "$jobs" -- --quiet > "$logs/compile-$preset.log" 2>&1 || status=1
  cat "$logs/compile-$preset.log"
  if grep -qE 'warning( #[0-9]+-D)?:' "$logs/compile-$preset.log"; then
    echo "test.sh: the compiler warns, and warnings are errors here"
    status=1
  fi
  return $status
}

# run_tests PRESET CTEST-OPTION...: runs $slots tests at a time, by default as many as compilers.
run_tests() {
  local preset=$1
  shift
  ctest --preset "$preset" --parallel "${slots:-$jobs}" "${exclude[@]}" "${filter[@]}" "$@" || return 1
  # The reason of a skipped test is only in its own output.
  awk '/^[0-9]+\/[0-9]+ Testing: / {name = $3}
       reason {line = "skipped " name ": " $0; if (!said[line]++) print line; reason = 0}
       /: Skipped$/ {reason = 1}' "build/$preset/Testing/Temporary/LastTest.log"
}

# Adds the CUDA libraries to the folder that was built without them. Only sources with CUDA's options are compiled again.
build_cuda() {
  local architecture=90-real before=$logs/before-cuda.json
  if [ $has_gpu = yes ]; then architecture=native; fi
  scripts/build_times.py build/release --mark "$before" &&
    configure release -DTRANCHE_CUDA=AUTO -DCMAKE_CUDA_ARCHITECTURES=$architecture && build release all &&
    scripts/build_times.py build/release --since "$before" --top 5
}

release_suites() {
  suite "include check" scripts/check_includes.py
  local cuda
  cuda=$(cached TRANCHE_CUDA build/release)
  suite "configure release" configure release "-DTRANCHE_CUDA=${cuda:-OFF}"
  suite "build release" build release all
  # Most of these tests wait for processes and messages: with twice as many at a time two cores idle for 11 % instead of 23 %.
  slots=$((2 * jobs)) suite "tests release" run_tests release
  if [ "${cuda:-OFF}" = OFF ] && [ $toolkit = yes ]; then
    suite "build CUDA" build_cuda
    suite "tests CUDA" run_tests release -L '^(gpu|cuda)$'
  fi
  if ! grep -q '^-- Tranche: LIBTORCH ON' "$logs/configure-release.log"; then
    echo "warning: no LibTorch is here, so nothing of the adapter (include/tranche/libtorch/) was compiled; see scripts/libtorch_tests.sh"
  fi
  if [ $full = yes ]; then
    suite "configure alone" configure alone
    suite "build alone" build alone all
  fi
}

# sanitized PRESET REGEX MOST TARGET...: builds and runs the due programs among those that match REGEX (TARGET... in the build). If more
# than MOST changed, a third of those is due.
sanitized() {
  local preset=$1 only=$2 most=$3 chosen=$logs/chosen-$1.txt
  shift 3
  suite "configure $preset" configure "$preset"
  if [ $full = yes ] || [ $whole = OFF ]; then
    suite "build $preset" build "$preset" "$@"
    suite "tests $preset" run_tests "$preset"
    return
  fi
  suite "choose $preset" scripts/sanitized_tests.py "build/$preset" --only "$only" --most "$most" --log "$chosen"
  # shellcheck disable=SC2046
  suite "build $preset" build "$preset" $(sed -n 's/^targets //p' "$chosen")
  slots=$((2 * jobs)) suite "tests $preset" run_tests "$preset" -R "$(sed -n 's/^tests //p' "$chosen")"
}

sanitizer_suites() {
  sanitized asan "" 24 unit_tests gpu_tests  # on emulated GPUs, where the toolkit's headers are
  if [ $full = yes ]; then
    # No label of the preset asan takes these: kernels that are loaded late, few queues, and the whole command for a GPU host.
    suite "build emulated flow" build asan tranche_program
    suite "tests emulated flow" ctest --preset emulation --parallel "$jobs" --no-tests=ignore "${filter[@]}"
  fi
  # Tests in which our own threads interact; the engine's tests run kernels and models.
  sanitized tsan '^test_(core|device|comm|offload|engine|engine_parts)$' 4 \
    test_core test_device test_comm test_offload test_engine test_engine_parts
}

if [ $sanitizers = yes ]; then sanitizer_suites; else release_suites; fi
