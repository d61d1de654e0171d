#!/usr/bin/env bash
# Compiles the host optimizer's vector loops for 64-bit ARM (NEON) and looks at what came out. Nothing is run: this
# says that the source is portable, not that its results are right there. Needs the Debian packages
# g++-aarch64-linux-gnu (200 MB with what it depends on, so scripts/setup.sh leaves it out) and libhwy-dev.
# Exit status: 0 compiled, 1 not, 77 the compiler or Highway's headers are missing.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
compiler=${CXX_AARCH64:-aarch64-linux-gnu-g++}
highway=${HIGHWAY_INCLUDE:-/usr/include}
if ! command -v "$compiler" > /dev/null; then
  echo "check_neon: $compiler is not there; apt-get install --no-install-recommends g++-aarch64-linux-gnu" >&2
  exit 77
fi
if [ ! -f "$highway/hwy/highway.h" ]; then
  echo "check_neon: $highway/hwy/highway.h is not there; apt-get install libhwy-dev, or set HIGHWAY_INCLUDE" >&2
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/include"
ln -s "$highway/hwy" "$work/include/hwy"  # alone: the host's other headers are not the target's
ln -s "$root" "$work/include/tranche"
# The options of the build (cmake/TrancheOptions.cmake, kernels/CMakeLists.txt).
"$compiler" -std=gnu++20 -O3 -ffp-contract=off -fopenmp -fPIC -Wall -Wextra -Wpedantic -Werror \
  "-DHWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_AVX3_DL)" -DHWY_SHARED_DEFINE -isystem "$work/include" \
  -I "$work/include" -c "$root/kernels/cpu/optimizer_update.cpp" -o "$work/optimizer_update.o"
tools=${compiler%g++}
"${tools}objdump" -d --no-show-raw-insn "$work/optimizer_update.o" > "$work/listing"
names=$("${tools}nm" "$work/optimizer_update.o" | grep -o 'N_[A-Z0-9_]*adam' | sort -u | tr '\n' ' ')
roots=$(grep -c 'fsqrt.*v[0-9]*\.4s' "$work/listing" || true)
quotients=$(grep -c 'fdiv.*v[0-9]*\.4s' "$work/listing" || true)
echo "check_neon: compiled; whole-vector roots: $roots, divisions: $quotients"
if [ "$roots" -eq 0 ] || [ "$quotients" -eq 0 ]; then
  echo "check_neon: the loops hold no NEON root or division" >&2
  exit 1
fi
