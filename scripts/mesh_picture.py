#!/usr/bin/env python3
"""Draws the README's picture of a mesh: 32 ranks along five axes, with the coordinates that `tranche info --mesh` gives them.

    scripts/mesh_picture.py                  prints the SVG
    scripts/mesh_picture.py --compare FILE   prints nothing where FILE is that SVG; exit status 1 where it is not

`tranche` has to be in PATH.
"""
import json

from svg_drawing import BOLD, Drawing, main, output_of

AXES = "replicate=2, pipeline=2, shard=2, context=2, tensor=2"
RANKS = 32
LEGEND = [("replicate", "copies of the state"), ("pipeline", "parts of the layers"), ("shard", "parts of the state (dark, light)"),
          ("context", "parts of a sequence (rows of a block)"), ("tensor", "parts of a layer (columns of a block)")]
SHADES = {(0, 0): "#56B4E9", (0, 1): "#A6D8F5", (1, 0): "#E69F00", (1, 1): "#F5CF80"}  # by pipeline stage and shard
CELL = 48
GROUP = 2 * CELL + 14  # a shard: two parts of a sequence, one over the other, each on two ranks
STAGE = GROUP + 22
COPY = 2 * STAGE + 22


def coordinates():
    return json.loads(output_of(["tranche", "info", "--mesh", AXES, "--ranks", str(RANKS), "--json"]))["mesh"]["coordinates"]


def picture():
    height = 2 * GROUP + 112
    drawing = Drawing(650, height + 44, "A mesh of 32 ranks", f"Ranks 0 to 31 along the axes {AXES}: two copies side by side; in each the two pipeline "
                      "stages side by side, in each stage two shards, and in each shard two parts of a sequence on two ranks each.")
    drawing.text(20, 26, f'--mesh "{AXES}"', more=BOLD)
    for copy in range(2):
        left = 20 + copy * (COPY + 14)
        drawing.box(left, 40, COPY, height - 64, "#f0f0f0")
        drawing.text(left + COPY / 2, 57, f"replicate {copy}", "middle")
        for stage in range(2):
            drawing.text(left + 22 + stage * STAGE + GROUP / 2, 76, f"pipeline {stage}", "middle")
    for rank, at in enumerate(coordinates()):
        x = 42 + at["replicate"] * (COPY + 14) + at["pipeline"] * STAGE + at["tensor"] * CELL + 7
        y = 84 + at["shard"] * (GROUP - 2) + at["context"] * CELL
        drawing.box(x, y, CELL - 3, CELL - 3, SHADES[at["pipeline"], at["shard"]])
        drawing.text(x + CELL / 2 - 1, y + CELL / 2 + 3, str(rank), "middle")
    for number, (axis, cuts) in enumerate(LEGEND):
        x, y = 20 + 300 * (number % 2), height - 4 + 20 * (number // 2)
        drawing.text(x, y, axis, more=BOLD)
        drawing.text(x + 72, y, cuts)
    return str(drawing)


main(__doc__, picture, "mesh_picture.py")
