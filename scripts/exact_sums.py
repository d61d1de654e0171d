#!/usr/bin/env python3
"""exact_sums.py: writes tests/core/exact_sums.h, sums in rational arithmetic (Python's fractions) that are rounded once to fp64.

The test has the same generator of numbers: state = state * 6364136223846793005 + 1442695040888963407 modulo 2^64, beginning at the seed. A
number has the upper 32 bits of a state (fp32) or all 64 (fp64), changed as `kind` says.
"""

import fractions
import pathlib
import struct

FP32 = ["any", "gradients", "subnormal", "largest", "zeros"]
FP64 = ["any", "losses"]


def draw(seed, count):
    state = seed
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state


def fp32(kind, state):
    bits = state >> 32
    sign, exponent, mantissa = bits & 0x80000000, (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if kind == "gradients":
        exponent = 100 + exponent % 24
    elif kind == "subnormal":
        exponent = 0
    elif kind == "largest":
        exponent = 254
    elif kind == "zeros" and exponent % 2:
        exponent, mantissa = 0, 0
    exponent = min(exponent, 254)
    return struct.unpack("<f", struct.pack("<I", sign | exponent << 23 | mantissa))[0]


def fp64(kind, state):
    sign, exponent, mantissa = state & 2**63, (state >> 52) & 0x7FF, state & (2**52 - 1)
    if kind == "losses":
        sign, exponent = 0, 1023 + exponent % 16
    exponent = min(exponent, 2000)  # keeps all sums within the range
    return struct.unpack("<d", struct.pack("<Q", sign | exponent << 52 | mantissa))[0]


def rounded(total):
    return struct.unpack("<Q", struct.pack("<d", total.numerator / total.denominator))[0]


def main():
    squares, losses = [], []
    for index, kind in enumerate(FP32):
        for count in (1, 2, 3, 7, 97, 4096, 4099):
            seed = 1000 * index + count
            total = sum((fractions.Fraction(fp32(kind, s)) ** 2 for s in draw(seed, count)), fractions.Fraction(0))
            squares.append(f'    {{"{kind}", {seed}, {count}, 0x{rounded(total):016x}}},')
    for index, kind in enumerate(FP64):
        for count in (1, 2, 3, 7, 97, 997):
            seed = 100000 * (index + 1) + count
            total = sum((fractions.Fraction(fp64(kind, s)) for s in draw(seed, count)), fractions.Fraction(0))
            losses.append(f'    {{"{kind}", {seed}, {count}, 0x{rounded(total):016x}}},')
    path = pathlib.Path(__file__).resolve().parents[1] / "tests/core/exact_sums.h"
    path.write_text(
        "#pragma once\n"
        "/// Written by scripts/exact_sums.py: exact sums of drawn numbers, rounded once to fp64.\n\n"
        "#include <cstdint>\n\n"
        "namespace tranche {\n\n"
        "struct ExactCase {\n"
        "  const char* kind;\n"
        "  std::uint64_t seed;\n"
        "  int count;\n"
        "  std::uint64_t bits;  ///< of the sum\n"
        "};\n\n"
        "inline constexpr ExactCase square_sums[] = {\n" + "\n".join(squares) + "\n};\n\n"
        "inline constexpr ExactCase number_sums[] = {\n" + "\n".join(losses) + "\n};\n\n"
        "}  // namespace tranche\n"
    )


if __name__ == "__main__":
    main()
