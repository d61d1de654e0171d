#!/usr/bin/env bash
# Compiles the vector loops of kernels/cpu for 64-bit ARM (NEON) and inspects the code of the host optimizer's loops. If qemu-aarch64 is
# installed, it also runs these on an emulated ARM processor: every digest must equal that of all other instruction sets
# (tests/kernels/optimizer_bits.txt). Needs the Debian packages g++-aarch64-linux-gnu (200 MB with its dependencies, so scripts/setup.sh
# leaves it out), libhwy-dev, libfmt-dev and, to run, qemu-user. Exit status: 0 compiled (and, with qemu-user, the same bits), 1 not, 77 the
# compiler or Highway's headers are missing.
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
ln -s "${FMT_INCLUDE:-/usr/include}/fmt" "$work/include/fmt"
# The options of the build (cmake/TrancheOptions.cmake, kernels/CMakeLists.txt); NEON alone, without run-time dispatch, needs no Highway
# library for ARM.
options=(-std=gnu++20 -O3 -ffp-contract=off -fopenmp -fPIC -Wall -Wextra -Wpedantic -Werror
  "-DHWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_AVX3_DL)" -DHWY_SHARED_DEFINE -DHWY_COMPILE_ONLY_STATIC -DFMT_HEADER_ONLY
  -isystem "$work/include" -I "$root/include" -I "$root")
# Generates and compiles the rules' sources as cmake/TrancheRules.cmake does.
mkdir "$work/rules"
{
  printf '#include <vector>\n#include "tranche/kernels/optimizer_update.h"\n'
  for name in adam sgd; do
    echo "namespace tranche::rules::$name { std::span<const UpdateRule> rules_of_file(); }"
  done
  echo "namespace tranche::kernels { std::span<const UpdateRule* const> built_in_rules() {"
  echo "  static const std::vector<const UpdateRule*> all{&rules::adam::rules_of_file()[0], &rules::sgd::rules_of_file()[0]};"
  echo "  return all; } }"
} > "$work/rules/list_of_rules.cpp"
for name in adam sgd; do
  sed -e "s|@rule_file@|$root/kernels/rules/$name.h|" -e "s|@rule_source@|$work/rules/$name.cpp|" \
    -e "s|@rule_name@|$name|" -e "s|@rule_on_gpu@|0|" "$root/kernels/rules/rule.cpp.in" > "$work/rules/$name.cpp"
  "$compiler" "${options[@]}" -fno-math-errno -fno-trapping-math -c "$work/rules/$name.cpp" -o "$work/$name.o"
done
for name in cpu/block8_codec cpu/optimizer_update cpu/reduction update_rule; do
  "$compiler" "${options[@]}" -c "$root/kernels/$name.cpp" -o "$work/${name#cpu/}.o"
done
grep -l foreach_target.h "$root"/kernels/cpu/*.cpp | while read -r source; do  # the other loops: do they compile at all
  "$compiler" "${options[@]}" -fsyntax-only "$source"
done
tools=${compiler%g++}
"${tools}objdump" -d --no-show-raw-insn "$work/adam.o" > "$work/listing"
roots=$(grep -c 'fsqrt.*v[0-9]*\.4s' "$work/listing" || true)
quotients=$(grep -c 'fdiv.*v[0-9]*\.4s' "$work/listing" || true)
echo "check_neon: compiled; whole-vector roots: $roots, divisions: $quotients"
if [ "$roots" -eq 0 ] || [ "$quotients" -eq 0 ]; then
  echo "check_neon: the loops hold no NEON root or division" >&2
  exit 1
fi
if ! command -v qemu-aarch64 > /dev/null; then
  echo "check_neon: not run: qemu-aarch64 is not there; apt-get install --no-install-recommends qemu-user"
  exit 0
fi
"$compiler" "${options[@]}" "$root"/tests/kernels/optimizer_bits.cpp "$root"/core/{block8,dtype,error,shape,thread}.cpp "$root/device/worker_team.cpp" \
  "$work/rules/list_of_rules.cpp" "$work"/{adam,sgd,block8_codec,optimizer_update,reduction,update_rule}.o -o "$work/optimizer_bits"
qemu-aarch64 -L "$(dirname "$("$compiler" -print-file-name=libc.so)")/.." "$work/optimizer_bits" > "$work/bits"
if ! diff "$root/tests/kernels/optimizer_bits.txt" "$work/bits" > "$work/differences"; then
  echo "check_neon: $(grep -c '^>' "$work/differences") of $(wc -l < "$work/bits") digests are not those of other instruction sets:" >&2
  head -5 "$work/differences" >&2
  exit 1
fi
echo "check_neon: run on an emulated ARM: all $(wc -l < "$work/bits") digests are those of other instruction sets"
