#!/usr/bin/env bash
# Builds and runs the tests of the LibTorch adapter (label libtorch), in build/libtorch.
#   scripts/libtorch_tests.sh FOLDER [OPTION...]   the folder torch of a wheel of PyPI, or an unpacked libtorch: 2.1 or later;
#                                                  options are CMake's: -DTRANCHE_CUDA=ON for the tests on a GPU
# A wheel without pip: `pip download torch --no-deps` and unzip it; what libtorch_cpu.so needs of CUDA besides (ldd says it) lies
# in wheels of its own, unpacked into the same folder.
# Exit status: 0 all passed, 1 a test or the build failed, 2 usage.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] && [ -d "$1" ] || { sed -n '2,7s/^# \?//p' "$0" >&2; exit 2; }
folder=$(realpath "$1")
shift
cmake --preset release -B build/libtorch -DTRANCHE_SHARED=OFF -DTRANCHE_CUDA=OFF -DTRANCHE_WERROR=ON -DTRANCHE_LIBTORCH=ON -DTRANCHE_TORCH="$folder" "$@"
cmake --build build/libtorch --target libtorch_tests --parallel "$(nproc)" -- --quiet
ctest --test-dir build/libtorch -L '^libtorch$' --output-on-failure
