#!/usr/bin/env python3
"""Writes tests/optim/golden_updates.h: 100 steps of six small tensors by torch.optim and optax in fp64, which the library's
rules are held to.

usage: optimizer_goldens.py [FILE]
Needs torch, optax and jax; the file names their versions.
"""
import math
import pathlib
import sys

import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
import optax
import torch

from golden_draw import draw

SHAPES = [(7, 11), (13,), (1,), (3, 5, 2), (257,), (31, 9)]
STEPS = 100
RATE = 0.01


def sizes():
    return [math.prod(shape) for shape in SHAPES]


def weights():
    return [[0.5 * x for x in draw(1000 + t, n)] for t, n in enumerate(sizes())]


def gradients(step):
    """Drawn gradients; some of tensor 2 are zero, and magnitudes differ by tensor and step."""
    return [[x * 2.0 ** (t - 3) * (1 + step % 3) for x in draw(100000 + 100 * step + t, n)] for t, n in enumerate(sizes())]


def by_torch(make):
    parameters = [torch.tensor(w, dtype=torch.float64, requires_grad=True) for w in weights()]
    optimizer = make(parameters)
    for step in range(1, STEPS + 1):
        for parameter, gradient in zip(parameters, gradients(step)):
            parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return [p.detach().tolist() for p in parameters]


def by_optax(rule):
    parameters = [jnp.array(w, dtype=jnp.float64) for w in weights()]
    state = rule.init(parameters)
    update = jax.jit(rule.update)
    for step in range(1, STEPS + 1):
        changes, state = update([jnp.array(g, dtype=jnp.float64) for g in gradients(step)], state, parameters)
        parameters = optax.apply_updates(parameters, changes)
    return [p.tolist() for p in parameters]


# name, optimizer.type, parameters under the library's keys, reference
CASES = [
    ("adamw", "AdamW", {"weight_decay": 0.1}, lambda: by_torch(lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.1))),
    ("adam", "Adam", {"weight_decay": 0.1, "adam_w_mode": 0},
     lambda: by_torch(lambda p: torch.optim.Adam(p, RATE, weight_decay=0.1))),
    ("amsgrad", "AdamW", {"weight_decay": 0.1, "amsgrad": 1},
     lambda: by_torch(lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.1, amsgrad=True))),
    ("sgd", "SGD", {"momentum": 0.9, "weight_decay": 0.01, "nesterov": 1},
     lambda: by_torch(lambda p: torch.optim.SGD(p, RATE, momentum=0.9, weight_decay=0.01, nesterov=True))),
    ("adagrad", "Adagrad", {"lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
     lambda: by_torch(lambda p: torch.optim.Adagrad(p, RATE, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.1))),
    ("rmsprop", "RMSprop", {"weight_decay": 0.1}, lambda: by_torch(lambda p: torch.optim.RMSprop(p, RATE, weight_decay=0.1))),
    ("rmsprop_momentum", "RMSprop", {"momentum": 0.5}, lambda: by_torch(lambda p: torch.optim.RMSprop(p, RATE, momentum=0.5))),
    ("rmsprop_all", "RMSprop", {"momentum": 0.5, "centered": 1, "eps": 1e-3},
     lambda: by_torch(lambda p: torch.optim.RMSprop(p, RATE, momentum=0.5, centered=True, eps=1e-3))),
    ("lion", "Lion", {"weight_decay": 0.1}, lambda: by_optax(optax.lion(RATE, b1=0.9, b2=0.99, weight_decay=0.1))),
    ("lamb", "Lamb", {"eps": 1e-6, "weight_decay": 0.1}, lambda: by_optax(optax.lamb(RATE, eps=1e-6, weight_decay=0.1))),
    ("lars", "LARS", {"weight_decay": 0.1, "trust_coefficient": 0.1},
     lambda: by_optax(optax.lars(RATE, weight_decay=0.1, trust_coefficient=0.1, momentum=0.9))),
    ("lars_nesterov", "LARS", {"trust_coefficient": 0.1, "nesterov": 1},
     lambda: by_optax(optax.lars(RATE, trust_coefficient=0.1, momentum=0.9, nesterov=True))),
]


def main():
    file = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1] / "tests/optim/golden_updates.h")
    lines = [
        "#pragma once",
        f"/// Written by scripts/optimizer_goldens.py with torch {torch.__version__.split('+')[0]}, optax {optax.__version__},"
        f" jax {jax.__version__}.",
        "",
        "#include <map>",
        "#include <string>",
        "#include <vector>",
        "",
        "namespace tranche::test {",
        "",
        "// clang-format off",
        "struct GoldenUpdate {",
        "  const char *name, *type;",
        "  std::map<std::string, double> parameters;",
        "  std::vector<float> weights;  // of all tensors in order, after 100 steps at a rate of 0.01",
        "};",
        "inline const std::vector<GoldenUpdate>& golden_updates() {",
        "  static const std::vector<GoldenUpdate> all = {",
    ]
    for name, kind, parameters, reference in CASES:
        keys = ", ".join(f'{{"{key}", {value}}}' for key, value in parameters.items())
        lines.append(f'    {{"{name}", "{kind}", {{{keys}}}, {{')
        values = [v for tensor in reference() for v in tensor]
        for at in range(0, len(values), 12):
            lines.append("      " + " ".join(f"{v:.9e}f," for v in values[at:at + 12]))
        lines.append("    }},")
    lines += ["  };", "  return all;", "}", "// clang-format on", "", "}  // namespace tranche::test", ""]
    file.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
