#!/usr/bin/env bash
# Builds and runs the tests of the LibTorch adapter (label libtorch), in build/libtorch.
#   scripts/libtorch_tests.sh FOLDER     the folder torch of a wheel of PyPI, or an unpacked libtorch: 2.1 or later
# A wheel without pip: `pip download torch --no-deps` and unzip it; what libtorch_cpu.so needs of CUDA besides (ldd says it) lies
# in wheels of its own, unpacked into the same folder.
# Exit status: 0 all passed, 1 a test or the build failed, 2 usage.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 1 ] && [ -d "$1" ] || { sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; }
cmake --preset ci -B build/libtorch -DTRANCHE_CUDA=OFF -DTRANCHE_WERROR=ON -DTRANCHE_LIBTORCH=ON -DTRANCHE_TORCH="$(realpath "$1")"
cmake --build build/libtorch --target libtorch_tests --parallel "$(nproc)" -- --quiet
ctest --test-dir build/libtorch -L '^libtorch$' --output-on-failure
