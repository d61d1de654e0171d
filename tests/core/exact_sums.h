#pragma once
/// Written by scripts/exact_sums.py: exact sums of drawn numbers, rounded once to fp64.

#include <cstdint>

namespace tranche {

struct ExactCase {
  const char* kind;
  std::uint64_t seed;
  int count;
  std::uint64_t bits;  ///< of the sum
};

inline constexpr ExactCase square_sums[] = {
    {"any", 1, 1, 0x4b26a99873d37200},
    {"any", 2, 2, 0x4ac38e1f14b64720},
    {"any", 3, 3, 0x44db78621d441440},
    {"any", 7, 7, 0x4fa298e29c6977e3},
    {"any", 97, 97, 0x4fe7f635a066837f},
    {"any", 4096, 4096, 0x50369399d46ec728},
    {"any", 4099, 4099, 0x503568d6a7557ffe},
    {"gradients", 1001, 1, 0x3cae55d8b3bc5820},
    {"gradients", 1002, 2, 0x3ec821f9a41d0bc8},
    {"gradients", 1003, 3, 0x3ee49c7a58c40fab},
    {"gradients", 1007, 7, 0x3f7266398145ffe9},
    {"gradients", 1097, 97, 0x3f9b5efdb85ffe5b},
    {"gradients", 5096, 4096, 0x3fff3cf644fda191},
    {"gradients", 5099, 4099, 0x3ffeb5eb3feda452},
    {"subnormal", 2001, 1, 0x2fe6e5b005ba2000},
    {"subnormal", 2002, 2, 0x3029493b94934100},
    {"subnormal", 2003, 3, 0x3032cdb142a1a580},
    {"subnormal", 2007, 7, 0x303299fe48bd48c0},
    {"subnormal", 2097, 97, 0x30805c071c561c08},
    {"subnormal", 6096, 4096, 0x30d556bedb535f8e},
    {"subnormal", 6099, 4099, 0x30d597a219d9165f},
    {"largest", 3001, 1, 0x4fe16baf78e32320},
    {"largest", 3002, 2, 0x4fe3a4089de27740},
    {"largest", 3003, 3, 0x50011ae9f184f608},
    {"largest", 3007, 7, 0x5013ab5cea82febc},
    {"largest", 3097, 97, 0x504c3cdb98841cae},
    {"largest", 7096, 4096, 0x50a29abc7d41bee8},
    {"largest", 7099, 4099, 0x50a2bade6fef117b},
    {"zeros", 4001, 1, 0x0000000000000000},
    {"zeros", 4002, 2, 0x415e79c04b58bb45},
    {"zeros", 4003, 3, 0x0000000000000000},
    {"zeros", 4007, 7, 0x42a691abe4d55220},
    {"zeros", 4097, 97, 0x4e65289b0de3a1e6},
    {"zeros", 8096, 4096, 0x502423fde890af62},
    {"zeros", 8099, 4099, 0x50228f208fd45b3b},
};

inline constexpr ExactCase number_sums[] = {
    {"any", 100001, 1, 0x798d0ea7e12b0a9c},     {"any", 100002, 2, 0xd1df02d52dc089c9},
    {"any", 100003, 3, 0x5770d3c2f880d318},     {"any", 100007, 7, 0xfd0e3678d5887ccb},
    {"any", 100097, 97, 0x7ceea09fa96df46a},    {"any", 100997, 997, 0xfd1d03d033e577cc},
    {"losses", 200001, 1, 0x40b2ada37e5914bc},  {"losses", 200002, 2, 0x4045d0b64e040183},
    {"losses", 200003, 3, 0x40d193fcdc83f1f5},  {"losses", 200007, 7, 0x40eeb6b2e93075f9},
    {"losses", 200097, 97, 0x4122a294aec60036}, {"losses", 200997, 997, 0x4159fdf2b37062e7},
};

}  // namespace tranche
