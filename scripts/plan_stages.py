#!/usr/bin/env python3
"""Plans a run at every stage and prints one rank's memory and traffic as Markdown.

    scripts/plan_stages.py --model gpt2-xl --ranks 8 ...

All arguments are those of `tranche plan`, which has to be in PATH. Of a list of units, which has no activations, model
state alone is printed, in units of 10^9 bytes as papers count.
"""
import json
import subprocess
import sys


def plan(stage):
    command = ["tranche", "plan", *sys.argv[1:], "--stage", str(stage), "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"status {result.returncode} from: {' '.join(command)}\n{result.stderr}")
    return json.loads(result.stdout)


def gib(count):
    return f"{count / 2**30:.2f}"


def memory_cells(found):
    peak = found["peak"]["device"]
    return [gib(found["state"]["parameters"]), gib(found["state"]["gradients"]), gib(found["state"]["optimizer"]),
            gib(peak["by_category"]["gathered"]), gib(peak["by_category"]["activations"]), gib(peak["bytes"]),
            f"{peak['phase']} of {peak['unit']}", f"{found['traffic_total']['elements']:,}"]


def state_cells(found):
    state = found["state"]
    in_all = state["parameters"] + state["gradients"] + state["optimizer"]
    return [f"{count / 1e9:.3f}" for count in (state["parameters"], state["gradients"], state["optimizer"], in_all)] + \
           [f"{state['padding'] / 1e6:.2f} MB"]


def main():
    plans = [plan(stage) for stage in range(4)]
    if plans[0]["covers_activations"]:
        cells = memory_cells
        heads = ["parameters", "gradients", "optimizer", "gathered", "activations at the peak", "peak", "in", "elements sent"]
    else:
        cells = state_cells
        heads = ["parameters", "gradients", "optimizer", "in all", "of it padding"]
    print("| " + " | ".join(["stage", *heads]) + " |")
    print("|" + "---|" * (len(heads) + 1))
    for stage, found in enumerate(plans):
        print("| " + " | ".join([str(stage), *cells(found)]) + " |")


main()
