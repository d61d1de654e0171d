# build_settings.sh: sourced by scripts that build, in the root of the sources. Sets
#   jobs       how many compilers run at once: as many as there are cores, and memory for 1.5 GB each
#   has_gpu    yes where this machine has an NVIDIA GPU
#   toolkit    yes where this machine has a CUDA toolkit
# and exports what the compiler's cache needs, so that it knows a source again in another folder.
# shellcheck shell=bash
jobs=$(nproc)
memory_jobs=$(awk '/MemAvailable/ {print int($2 / 1500000)}' /proc/meminfo)
if [ "$memory_jobs" -lt "$jobs" ]; then jobs=$((memory_jobs > 0 ? memory_jobs : 1)); fi

has_gpu=no
if compgen -G '/dev/nvidia[0-9]*' > /dev/null; then has_gpu=yes; fi
toolkit=no
for nvcc in "${CUDACXX:-}" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" "${CUDA_PATH:-/usr/local/cuda}/bin/nvcc" "$(command -v nvcc || true)"; do
  if [ -n "$nvcc" ] && [ -x "$nvcc" ]; then toolkit=yes; fi
done

export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR:-1}

# cached NAME FOLDER: the value of a variable in a folder's CMakeCache.txt; empty if there is none
cached() { sed -n "s/^$1:[A-Z]*=//p" "$2/CMakeCache.txt" 2> /dev/null || true; }
