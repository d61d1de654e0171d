#!/usr/bin/env bash
# One command on a GPU host: takes the programs from the offline bundle (or builds them), checks the host, runs the tests
# labelled gpu, the benches, GPT-2 trainings and compute-sanitizer, and writes one results folder with a summary.md.
#   scripts/gpu/run.sh [--results DIR] [--only tests|benches] [--limit SECONDS] [--resume] [--allow-no-gpu]
#                      [--bundle FILE | --from BUILD_DIR] [--build] [--smoke]
#     --results DIR     default build/gpu-results, where a copy of all results stays; at most 8 files
#     --resume          goes on from the results of an earlier call for the same commit, in DIR or build/gpu-results: what
#                       passed does not run again, what failed runs once more, and the results are merged
#     --only WHAT       tests (with compute-sanitizer), or benches (with trainings)
#     --limit SECONDS   everything ends within these, 540 unless said; what did not fit is listed as not run
#     --allow-no-gpu    without a GPU tests say why they skip, and the rest is listed as skipped
#     --bundle FILE     an archive of scripts/gpu/bundle.sh (default: the unpacked bundle that this script lies in,
#                       else build/gpu-bundle.tar.xz)
#     --from BUILD_DIR  programs of a build folder, on a machine that has the libraries
#     --build           builds from these sources, with the bundle's headers and libraries where there is a bundle
#     --smoke           smallest sizes: that everything starts and ends, no figures
# Exit status: 0 all that ran passed, 1 a test or run failed, 2 usage, no GPU, or nothing to run, 3 the host lacks what
# nothing runs without (a gap in the table of check.sh), 4 the time ended before the tests did.
set -euo pipefail
started=$(date +%s)
here=$(cd "$(dirname "$0")" && pwd -P)
root=$(cd "$here/../.." && pwd -P)

results=$root/build/gpu-results limit=540 resume=0 bundle="" from="" compile=0 suite=() gpu=()
fail() { echo "run.sh: $1" >&2; exit "${2:-2}"; }
while [ $# -gt 0 ]; do
  case $1 in
    --results | --only | --limit | --bundle | --from) [ $# -gt 1 ] || fail "$1 needs a value; see --help" ;;
  esac
  case $1 in
    --results) results=$2; shift ;;
    --only)
      [ "$2" = tests ] || [ "$2" = benches ] || fail "--only '$2' is neither tests nor benches"
      suite+=(--only "$2")
      shift
      ;;
    --limit) limit=$2; shift ;;
    --bundle) bundle=$2; shift ;;
    --from) from=$2; shift ;;
    --build) compile=1 ;;
    --resume) resume=1; suite+=(--resume) ;;
    --allow-no-gpu) gpu=(--allow-no-gpu) ;;
    --smoke) suite+=(--smoke) ;;
    -h | --help) sed -n '2,20s/^# \?//p' "$0"; exit 0 ;;
    *) fail "unknown argument '$1'; see --help" ;;
  esac
  shift
done
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "--limit '$limit' is not a number of seconds"
[ -z "$from" ] || [ -z "$bundle$([ "$compile" = 0 ] || echo build)" ] || fail "--from takes programs as they are: neither --bundle nor --build goes with it"
python3 -c 'import argparse, json, random, sys, tarfile, tempfile; sys.exit(sys.version_info < (3, 8))' 2> /dev/null ||
  fail "python3 (3.8 or newer, with its standard modules) is needed"
# This run's programs and mpirun create files there.
if [ -n "${TMPDIR:-}" ] && ! { [ -d "$TMPDIR" ] && [ -w "$TMPDIR" ]; }; then
  echo "run.sh: note: TMPDIR is '$TMPDIR', where nothing can be written; /tmp is taken" >&2
  export TMPDIR=/tmp
fi
# No core dump, which may be tens of GB. Address space (CUDA reserves far more than it uses), locked memory and open files have the user's
# highest limits.
ulimit -S -c 0
for limited in v l n; do ulimit -S "-$limited" "$(ulimit -H "-$limited")" 2> /dev/null || true; done
keep=$root/build/gpu-results
mkdir -p "$keep"
if ! mkdir -p "$results" 2> /dev/null; then
  echo "run.sh: note: $results cannot be made; the results are in $keep" >&2
  results=$keep
fi
results=$(cd "$results" && pwd -P)
# Two runs at once would share the GPU's time and unpack into the same folder.
exec 8> "$root/build/gpu-run.lock"
if ! command -v flock > /dev/null; then
  echo "run.sh: note: this host has no flock, so a second run.sh beside this one would not be noticed"
elif ! flock -n 8; then
  fail "another run.sh runs here (it holds $root/build/gpu-run.lock): wait for its end"
fi
if [ "$resume" = 0 ]; then
  for folder in "$results" "$keep"; do
    rm -f "$folder"/{summary.md,results.json,tests.json,benches.json,training.json,machine.txt,log.txt,build.txt}
  done
fi
notes=$(mktemp)
trap 'rm -f "$notes" "$notes.json"' EXIT

unpack() {  # ARCHIVE FOLDER: once for each archive
  local sum
  sum=$(sha256sum "$1" | cut -d' ' -f1)
  [ "$(cat "$2/unpacked" 2> /dev/null)" = "$sum" ] && return
  rm -rf "$2"
  mkdir -p "$2"
  if command -v xz > /dev/null; then tar -C "$2" -xJf "$1"; else
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$1" "$2"
  fi || fail "$1 could not be unpacked"
  echo "$sum" > "$2/unpacked"
}

prefix="" source=$root build="" commit=""
if [ -n "$from" ]; then
  build=$(cd "$from" 2> /dev/null && pwd -P) || fail "--from '$from' is no folder"
elif [ -z "$bundle" ] && [ -f "$root/MANIFEST" ]; then
  prefix=$root
else
  [ -z "$bundle" ] || [ -f "$bundle" ] || fail "--bundle '$bundle' does not exist"
  [ -n "$bundle" ] || [ ! -f "$root/build/gpu-bundle.tar.xz" ] || bundle=$root/build/gpu-bundle.tar.xz
  if [ -n "$bundle" ]; then
    echo "== unpacking $bundle"
    unpack "$bundle" "$root/build/gpu-bundle"
    prefix=$root/build/gpu-bundle/tranche-gpu-bundle
  elif [ "$compile" = 0 ]; then
    fail "nothing to run: there is no build/gpu-bundle.tar.xz (scripts/gpu/bundle.sh makes one where there is a network); --build and --from are the other ways"
  fi
fi

# A guest without a network may start without its loopback interface, which mpirun and NCCL need.
if [ "$(id -u)" = 0 ] && [[ $(LC_ALL=C timeout 5 bash -c 'exec 3<> /dev/tcp/127.0.0.1/9' 2>&1) == *unreachable* ]]; then
  python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, struct.pack("16sh14x", b"lo", 1))' 2> /dev/null &&
    echo "run.sh: note: the network interface lo was down; it is up now"
fi

if [ -n "$prefix" ]; then
  commit=$(sed -n 's/^commit: //p' "$prefix/MANIFEST")
  for script in suite.py plan.py; do
    [ "$(sha256sum < "$here/$script")" = "$(sha256sum < "$prefix/scripts/gpu/$script")" ] ||
      echo "run.sh: note: scripts/gpu/$script is another than the archive's, whose programs are of commit $commit: this one is taken"
  done
  echo "== this host"
  status=0
  "$prefix/check.sh" "${gpu[@]}" > "$notes" || status=$?
  cat "$notes"
  # A missing GPU is handled below, with its reason. A warning affects only the item that it names.
  if [ "$status" -ne 0 ] && [ "$compile" = 0 ] && grep '^gap' "$notes" | grep -qv 'GPU and driver'; then
    cp "$notes" "$results/machine.txt" || true
    fail "this host lacks what the table above calls a gap" 3
  fi
  no_mpi=$(sed -n 's/^warn  *mpirun -n 2  *//p' "$notes")
  [ -z "$no_mpi" ] || suite+=(--no-mpi "mpirun does not work here: ${no_mpi#*: }")
  # shellcheck source=env.sh
  . "$prefix/env.sh"
  source=$prefix build=$prefix
fi

if [ "$compile" = 1 ]; then
  [ -f "$root/CMakeLists.txt" ] || fail "--build needs the sources: $root holds none"
  "$here/build.sh" "$root" "$root/build/gpu" > "$results/build.txt" 2>&1 ||
    { tail -n 40 "$results/build.txt" >&2; fail "the build failed; its log: $results/build.txt" 1; }
  source=$root build=$root/build/gpu
  commit=$(git -C "$root" rev-parse HEAD 2> /dev/null || echo "${commit:-unknown}")
fi

[ -x "$build/bin/tranche" ] || fail "$build/bin/tranche is missing: build it first"
tests=$prefix/gpu_tests.json
if [ -n "$from" ] || [ "$compile" = 1 ]; then
  tests=$notes.json
  "$here/test_list.py" "$build" --source "$root" --labels gpu > "$tests" || fail "no list of tests (is ctest there?)"
  commit=${commit:-$(git -C "$root" rev-parse HEAD 2> /dev/null || echo unknown)}
fi
status=0
host=()
[ -z "$prefix" ] || host=(tranche_host)
"${host[@]}" python3 "$here/suite.py" --source "$source" --build "$build" --tests "$tests" --results "$results" --limit "$limit" \
  --started "$started" --commit "$commit" --notes "$notes" --keep "$keep" "${gpu[@]}" "${suite[@]}" || status=$?
if [ -f "$results/summary.md" ]; then cat "$results/summary.md"; elif [ -f "$keep/summary.md" ]; then cat "$keep/summary.md"; fi
exit "$status"
