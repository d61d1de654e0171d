#!/usr/bin/env python3
"""Writes tests/optim/golden_muon.h: steps of two small matrices by torch.optim.Muon in fp64. Drawn numbers replace the orthogonal factor,
so that momentum and update can be compared without the error of the iterations.

usage: muon_goldens.py [FILE]
Needs torch; the file names its version.
"""
import pathlib
import sys

import torch
import torch.optim._muon as muon

from golden_draw import draw

SHAPES = [(100, 4), (25, 25)]  # both factors of the rate are whole numbers for these
STEPS = 20
RATE = 0.01


def matrix(seed, shape, scale=1.0):
    return torch.tensor([scale * x for x in draw(seed, shape[0] * shape[1])], dtype=torch.float64).reshape(shape)


def factor(step, t):
    """A factor with five bits, so that five times the factor is a bf16 number."""
    return torch.floor(matrix(500000 + 100 * step + t, SHAPES[t], 8.0)) / 8


CASES = [
    ("nesterov, match_rms_adamw", {"nesterov": True, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}),
    ("plain, original", {"nesterov": False, "weight_decay": 0.0, "momentum": 0.9, "adjust_lr_fn": "original"}),
]


def run(options):
    parameters = [matrix(1000 + t, shape, 0.5).requires_grad_() for t, shape in enumerate(SHAPES)]
    optimizer = torch.optim.Muon(parameters, lr=RATE, **options)
    calls = []

    def replaced(update, *_):
        calls.append(update.clone())
        return factor(len(calls) // len(SHAPES) + (1 if len(calls) % len(SHAPES) else 0), (len(calls) - 1) % len(SHAPES))

    muon._zeropower_via_newtonschulz = replaced
    for step in range(1, STEPS + 1):
        for t, parameter in enumerate(parameters):
            parameter.grad = matrix(100000 + 100 * step + t, SHAPES[t], 2.0 ** (step % 3))
        optimizer.step()
    last = [u.flatten().tolist() for u in calls[-len(SHAPES):]]
    return ([p.detach().flatten().tolist() for p in parameters],
            [optimizer.state[p]["momentum_buffer"].flatten().tolist() for p in parameters], last)


def numbers(values):
    flat = [v for tensor in values for v in tensor]
    return ["      " + " ".join(f"{v:.9e}f," for v in flat[at:at + 12]) for at in range(0, len(flat), 12)]


def main():
    file = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1] / "tests/optim/golden_muon.h")
    lines = [
        "#pragma once",
        f"/// Written by scripts/muon_goldens.py with torch {torch.__version__.split('+')[0]}.",
        "",
        "#include <vector>",
        "",
        "namespace tranche::test {",
        "",
        "// clang-format off",
        "/// The elements of both matrices, one after the other, after 20 steps at a rate of 0.01.",
        "struct GoldenMuon {",
        "  const char* name;",
        "  std::vector<float> weights, momentum, orthogonalized;  // `orthogonalized`: input of the iterations",
        "};",
        "inline const std::vector<GoldenMuon>& golden_muon() {",
        "  static const std::vector<GoldenMuon> all = {",
    ]
    for name, options in CASES:
        lines.append(f'    {{"{name}",')
        for part in run(options):
            lines += ["     {"] + numbers(part) + ["     },"]
        lines.append("    },")
    lines += ["  };", "  return all;", "}", "// clang-format on", "", "}  // namespace tranche::test", ""]
    file.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
