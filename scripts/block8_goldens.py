#!/usr/bin/env python3
"""Writes tests/core/golden_block8.h: the dynamic maps of bitsandbytes, value for value, and a hash of its codes of 2^20 drawn
numbers by either map.

usage: block8_goldens.py [FILE]
Needs bitsandbytes and torch; the file names their versions. The codes are those of the library's search for the nearest value,
which it does on a CPU for every dtype but fp32, bf16 and fp16. For these three it rounds to a grid of 2^-15 before it searches, which
its GPU kernels do not.
"""
import pathlib
import sys

import bitsandbytes
import torch
from bitsandbytes.functional import create_dynamic_map

from golden_draw import draw

DRAWS = 1 << 20


def hashed(codes):
    """FNV-1a."""
    state = 0xCBF29CE484222325
    for code in codes:
        state = ((state ^ code) * 0x100000001B3) & (2**64 - 1)
    return state


def values(signed):
    """Values over 24 powers of two in each block, and blocks of different sizes."""
    drawn = draw(8 if signed else 9, DRAWS)
    return [(x if signed else abs(x)) * 2.0 ** (-(i % 24) - i // 256 % 11) for i, x in enumerate(drawn)]


def codes(signed):
    result = []
    numbers = torch.tensor(values(signed), dtype=torch.float64)
    assert torch.equal(numbers, numbers.float().double())
    for part in numbers.split(1 << 16):
        result += torch.ops.bitsandbytes.quantize_blockwise(part, create_dynamic_map(signed), 256)[0].tolist()
    return result


def main():
    here = pathlib.Path(__file__).resolve().parent.parent
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "tests/core/golden_block8.h"
    lines = ["#pragma once",
             f"// Written by scripts/block8_goldens.py with bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}.", "",
             "#include <cstdint>", "", "namespace tranche::test {", "", f"inline constexpr int golden_block8_draws = {DRAWS};"]
    for name, signed in (("signed", True), ("unsigned", False)):
        lines.append(f"inline constexpr std::uint64_t golden_{name}_codes = {hashed(codes(signed)):#018x}u;")
    for name, signed in (("signed", True), ("unsigned", False)):
        numbers = [f"{v:.9g}" for v in create_dynamic_map(signed).tolist()]
        numbers = [(v if "." in v or "e" in v else v + ".0") + "f," for v in numbers]
        lines += ["// clang-format off", f"inline constexpr float golden_{name}_map[256] = {{"]
        lines += ["    " + " ".join(numbers[at:at + 8]) for at in range(0, 256, 8)]
        lines += ["};", "// clang-format on"]
    lines += ["", "}  // namespace tranche::test", ""]
    target.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
