#!/usr/bin/env python3
"""Draws the README's learning curve from the report of a quickstart: the loss of every step, and what tables of n-grams reach.

    scripts/quickstart.sh && scripts/curve_picture.py build/quickstart/report.json > docs/images/curve.svg
"""
import json
import pathlib
import sys

from svg_drawing import BOLD, Drawing

LEFT, TOP, WIDTH, HEIGHT = 40, 60, 500, 220
LOW, HIGH = 1.5, 6.0  # nats a byte
LEVELS = [("bigram_entropy", "bigram table", "#E69F00"), ("trigram_entropy", "trigram table", "#009E73"), ("validation_loss", "this model", "#0072B2")]


def height_of(loss):
    return TOP + (HIGH - min(loss, HIGH)) / (HIGH - LOW) * HEIGHT


def picture(report):
    losses = [step["loss"] for step in report["steps"]]
    reached = ", ".join(f"{name} {report[key]:.4f}" for key, name, _ in LEVELS)
    drawing = Drawing(560, 350, "Learning curve of the quickstart", f"Training loss of {len(losses)} steps, from {losses[0]:.2f} to {losses[-1]:.2f} nats "
                      f"a byte; of the held-out text: {reached}.")
    drawing.text(20, 26, "Loss of each step, nats a byte", more=BOLD)
    parameters = report["model"]["parameters"] / 1e6
    drawing.text(20, 44, f"{report['model_name']}, {parameters:.1f} million parameters, bf16, stage {report['stage']} on {report['world']} ranks")
    for loss in range(2, int(HIGH) + 1):
        drawing.line(LEFT, height_of(loss), LEFT + WIDTH, height_of(loss))
        drawing.text(LEFT - 8, height_of(loss) + 4, str(loss), "end")
    for step in range(0, len(losses) + 1, 100):
        drawing.text(LEFT + step / len(losses) * WIDTH, TOP + HEIGHT + 18, str(step), "middle")
    drawing.text(LEFT + WIDTH, TOP + HEIGHT + 36, "step", "end")
    drawing.curve([(LEFT + step / len(losses) * WIDTH, height_of(loss)) for step, loss in enumerate(losses, 1)], "#56B4E9")
    drawing.text(20, TOP + HEIGHT + 58, "Held-out text:", more=BOLD)
    for number, (key, name, colour) in enumerate(LEVELS):
        drawing.curve([(LEFT, height_of(report[key])), (LEFT + WIDTH, height_of(report[key]))], colour)
        drawing.box(132 + 145 * number, TOP + HEIGHT + 47, 12, 12, colour)
        drawing.text(148 + 145 * number, TOP + HEIGHT + 58, f"{name} {report[key]:.2f}")
    return str(drawing)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(picture(json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")


main()
