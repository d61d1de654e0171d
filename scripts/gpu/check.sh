#!/usr/bin/env bash
# Says whether an unpacked offline bundle can run on this host, as a table.
#   check.sh [--allow-no-gpu] [--full]
#     --allow-no-gpu  neither a GPU nor a driver is no gap
#     --full          compares all files with SHA256SUMS, and looks through every plugin of Open MPI: half a minute
# Run it inside the bundle. A row says 'gap' for what keeps the programs from running, and 'warn' for what costs some of the
# tests only. Exit status: 0 no gap, 1 a gap, 2 usage, or not inside a bundle.
set -euo pipefail

bundle=$(cd "$(dirname "$0")" && pwd -P)
need_gpu=1 full=0
for argument in "$@"; do
  case $argument in
    --allow-no-gpu) need_gpu=0 ;;
    --full) full=1 ;;
    -h | --help) sed -n '2,7s/^# \?//p' "$0"; exit 0 ;;
    *) echo "check.sh: unknown argument '$argument'; see --help" >&2; exit 2 ;;
  esac
done
if [ ! -f "$bundle/MANIFEST" ] || [ ! -f "$bundle/env.sh" ]; then
  echo "check.sh: $bundle holds no MANIFEST: this belongs into an unpacked bundle (scripts/gpu/bundle.sh makes one)" >&2
  exit 2
fi
# shellcheck source=env.sh
. "$bundle/env.sh"

manifest() { sed -n "s/^$1: //p" "$bundle/MANIFEST" | head -n 1; }
gaps=0 warnings=0
row() {  # VERDICT ITEM DETAIL
  [ "$1" = gap ] && gaps=$((gaps + 1))
  [ "$1" = warn ] && warnings=$((warnings + 1))
  printf '%-4s  %-22s %s\n' "$1" "$2" "$3"
}
at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }  # LEAST IS
last_line() { { grep '[[:alnum:]]' <<< "$1" || echo "it said nothing"; } | tail -n 1; }  # Open MPI frames its messages

row ok "bundle" "commit $(manifest commit), $(manifest date)"

if [ "$full" = 1 ]; then
  if damaged=$(cd "$bundle" && sha256sum --quiet -c SHA256SUMS 2>&1); then
    row ok "files" "$(wc -l < "$bundle/SHA256SUMS") as they were packed"
  else
    row warn "files" "damaged: $(head -n 1 <<< "$damaged"); unpack the archive again"
  fi
fi

glibc=$(getconf GNU_LIBC_VERSION 2> /dev/null | awk '{print $2}' || true)
needed=$(manifest needs-glibc)
if [ -n "$glibc" ] && at_least "$needed" "$glibc"; then
  row ok "glibc" "$glibc; $needed is needed"
else
  row gap "glibc" "${glibc:-none}; $needed is needed: build here instead (scripts/gpu/run.sh --build)"
fi

# Checks every program and the libraries that it loads; with --full plugins as well.
folders=("$bundle/bin" "$bundle/tests")
[ "$full" = 0 ] || folders+=("$bundle/deps")
missing=$(find "${folders[@]}" -type f \( -perm -u+x -o -name '*.so*' \) -print0 |
  while IFS= read -r -d '' file; do
    [ "$(head -c 4 "$file" | tail -c 3)" = ELF ] || continue
    { ldd "$file" 2>&1 || true; } | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p; s/.*\(version .GLIBC.*not found.*\)/\1/p' |
      while IFS= read -r library; do printf '%s (%s)\n' "$library" "${file##*/}"; done
  done | sort -u)
if [ -z "$missing" ]; then
  row ok "shared libraries" "all found"
else
  row warn "shared libraries" "not found: $(cut -d' ' -f1 <<< "$missing" | sort | uniq -c | awk '{printf "%s%s (%d files)", sep, $2, $1; sep = ", "}')"
fi

# Ranks of mpirun communicate through loopback, even on hosts without a network. A connection to a port without a server is refused if lo is
# up, and reports an unreachable network if it is down.
if said=$(LC_ALL=C timeout 5 bash -c 'exec 3<> /dev/tcp/127.0.0.1/9' 2>&1) || [[ $said != *unreachable* ]]; then
  row ok "loopback" "up"
else
  row warn "loopback" "the network interface lo is down, and mpirun and NCCL need it: ip link set lo up"
fi
if [ -z "$(manifest mpi)" ]; then
  row skip "mpirun -n 2" "not in this build"
elif said=$(TRANCHE_MPI_TIMEOUT=40 timeout -k 5 45 "$bundle/scripts/run_mpi.sh" 2 "$bundle/tests/comm_mpi_failing" none 2>&1) &&
    [ "$(grep -c 'is done' <<< "$said")" = 2 ]; then
  row ok "mpirun -n 2" "two ranks reduced and ended; $(mpirun --version 2> /dev/null | head -n 1)"
else
  row warn "mpirun -n 2" "failed, and tests under mpirun are left out: $(last_line "$said")"
fi

if said=$(timeout -k 5 60 "$bundle/tests/test_core" 2>&1); then
  row ok "a test program" "test_core: $(grep -o '[0-9]* tests\?' <<< "$said" | tail -n 1) passed"
else
  row warn "a test program" "test_core failed: $(last_line "$said")"
fi

for name in CUDA_LAUNCH_BLOCKING CUDA_FORCE_PTX_JIT CUDA_DISABLE_PTX_JIT NCCL_SOCKET_IFNAME NCCL_NET; do
  [ -z "${!name:-}" ] || row warn "environment" "$name is '${!name}', which changes what is tested and measured: leave it out"
done
[ "$(ulimit -v)" = unlimited ] || row warn "address space" "limited to $(ulimit -v) KiB, and CUDA reserves far more than it uses: ulimit -v unlimited"
gpu=""
if said=$(timeout -k 5 60 "$bundle/bin/tranche" info 2>&1); then
  gpu=$(sed -n 's/^CUDA *//p' <<< "$said" | head -n 1)
  row ok "tranche info" "$gpu"
else
  row gap "tranche info" "failed: $(last_line "$said")"
fi
capability=$(sed -n 's/.*compute capability \([0-9.]*\).*/\1/p' <<< "$gpu")
least=$(manifest needs-compute-capability)
if [ -n "$capability" ] && [ -n "$least" ]; then
  if at_least "$least" "$capability"; then
    row ok "compute capability" "$capability; kernels are for $(manifest compute-capabilities)"
  else
    row gap "compute capability" "$capability; the archive's kernels are for $(manifest compute-capabilities): make it without --gpu, or build here (run.sh --build)"
  fi
fi

if [ -z "$(manifest hdf5)" ]; then row skip "HDF5" "not in this build"; else row ok "HDF5" "$(manifest hdf5)"; fi

while IFS= read -r library; do
  [ -n "$library" ] || continue
  if folder=$(tranche_cuda_library "$library"); then
    row ok "$library" "$folder, $(basename "$(readlink -f "$folder/$library")")"
  else
    row gap "$library" "in no CUDA toolkit (CUDA_HOME, nvcc, /usr/local/cuda) and no Python package nvidia-*"
  fi
done <<< "$(tranche_cuda_libraries)"
for library in libnccl.so.2 libcublas.so.13; do
  if ! grep -qx "$library" <<< "$(tranche_cuda_libraries)"; then
    row ok "$library" "not asked for; $(tranche_cuda_library "$library" || echo 'none here')"
  fi
done

nvcc=$(command -v nvcc || ls "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" 2> /dev/null || true)
if [ -n "$nvcc" ]; then
  row ok "nvcc" "$(tranche_host "$nvcc" --version | sed -n 's/.*release //p'), $nvcc"
else
  row skip "nvcc" "none; only --build needs it"
fi
sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2> /dev/null || true)
row "$([ -n "$sanitizer" ] && echo ok || echo skip)" "compute-sanitizer" "${sanitizer:-none; its checks are left out}"
# Some distributions' Python packages lack most of its own modules.
if tranche_host python3 -c 'import argparse, json, random, sys, tarfile, tempfile; sys.exit(sys.version_info < (3, 8))' 2> /dev/null; then
  row ok "python3" "$(tranche_host python3 --version)"
else
  row gap "python3" "run.sh needs 3.8 or newer with its standard modules; here: $(tranche_host python3 --version 2> /dev/null || echo none)"
fi

if said=$(tranche_host timeout -k 5 45 nvidia-smi --query-gpu=name,driver_version,memory.total,compute_mode,persistence_mode --format=csv,noheader 2>&1); then
  row ok "GPU and driver" "$(head -n 1 <<< "$said")"
  case $said in
    *Prohibited*) row warn "compute mode" "the GPU admits no program: nvidia-smi -c DEFAULT" ;;
    *Exclusive*) row warn "compute mode" "the GPU admits one program at a time, so tests of several processes are left out: nvidia-smi -c DEFAULT" ;;
  esac
elif [ -n "$capability" ]; then
  row warn "GPU and driver" "nvidia-smi does not answer, so figures come without clocks and power: $(head -n 1 <<< "$said")"
elif [ "$need_gpu" = 1 ]; then
  # If there is a driver, the row of tranche info has the reason.
  row gap "GPU and driver" "nvidia-smi: $(head -n 1 <<< "$said")"
else
  row skip "GPU and driver" "none"
fi

echo
[ "$warnings" = 0 ] || echo "$warnings warnings"
if [ "$gaps" -gt 0 ]; then
  echo "$gaps gaps"
  exit 1
fi
echo "no gaps"
