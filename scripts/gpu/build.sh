#!/usr/bin/env bash
# build.sh SOURCE BUILD: the release build on a host with nvcc, CMake and a compiler, for the GPUs that it has. Used by
# run.sh --build, which has sourced the bundle's env.sh before where there is a bundle. Exit status: CMake's.
set -euo pipefail
[ $# = 2 ] || { echo "build.sh: SOURCE BUILD are needed" >&2; exit 2; }
source=$1 build=$2
flags=(-DCMAKE_BUILD_TYPE=Release -DTRANCHE_CUDA=ON -DTRANCHE_EXAMPLES=OFF)

# Builds only for the GPUs of this host, because each further architecture takes time.
architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | tr -d . | sort -u | paste -sd ';' || true)
[[ $architectures =~ ^[0-9\;]+$ ]] && flags+=("-DCMAKE_CUDA_ARCHITECTURES=$architectures")
if [ -n "${TRANCHE_BUNDLE:-}" ]; then
  flags+=(-DCMAKE_LIBRARY_ARCHITECTURE=x86_64-linux-gnu)
  # Compilers of other distributions do not search Debian's folders.
  libraries=$TRANCHE_BUNDLE/deps/usr/lib/x86_64-linux-gnu
  export CPATH=$TRANCHE_BUNDLE/deps/usr/include:$TRANCHE_BUNDLE/deps/usr/include/x86_64-linux-gnu${CPATH:+:$CPATH}
  export LIBRARY_PATH=$libraries${LIBRARY_PATH:+:$LIBRARY_PATH}
  # The libraries in Python's CUDA packages lack the names that linkers look for.
  links=$build/cuda-links
  mkdir -p "$links/lib" "$links/include"
  IFS=: read -r -a folders <<< "${TRANCHE_CUDA_LIBRARIES:-}"
  for folder in "${folders[@]}"; do
    for library in "$folder"/lib{cublas,cublasLt,nccl}.so.*; do
      if [ -e "$library" ]; then
        name=${library##*/}
        ln -sf "$library" "$links/lib/${name%%.so*}.so"
      fi
    done
    for header in "${folder%/lib*}"/include/{cublas*,nccl*}; do
      if [ -e "$header" ]; then ln -sf "$header" "$links/include/"; fi
    done
  done
  export CMAKE_PREFIX_PATH=$links${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH} NCCL_HOME=${NCCL_HOME:-$links}
fi
command -v ninja > /dev/null && flags+=(-G Ninja)
cmake -S "$source" -B "$build" "${flags[@]}"
targets=$(cmake --build "$build" --target help | grep -oE '\b(gpu_tests|bench_[a-z_]*gpu[a-z_]*)\b' | sort -u || true)
# shellcheck disable=SC2086
cmake --build "$build" --parallel "$(nproc)" --target tranche_program $targets
