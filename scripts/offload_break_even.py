#!/usr/bin/env python3
"""offload_break_even.py PROGRAM [--rounds N] [--out F.json]: from how many tokens per step on is offload hidden?

Trains a GPT of equal blocks on one rank and one thread with its optimizer state in host memory and a copier held to a speed
(tranche.debug.host_link_bandwidth) at which the link is what is slowest; compares the break-even that `tranche plan` prints, given the
measured speed of compute and of updates, with that at which the exposed time stops falling, and says what offload costs at 1.2 times
the plan's. Every step counts by the seconds that it computed, so that a machine which does other things at the same time
measures the same; the break-even is those seconds in tokens at the speed that the plan was given.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

SEQUENCE = 64
SHARES = (0.5, 0.65, 0.8, 1.2, 1.4, 1.7)  # of the tokens at the plan's break-even, rounded to whole sequences

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("program")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--steps", type=int, default=8, help="of a run; the first two do not count")
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--target", type=int, default=16, help="sequences of 64 tokens at which the link is to break even, about")
parser.add_argument("--ratio", default="1")
parser.add_argument("--out", help="JSON")
options = parser.parse_args()

folder = tempfile.mkdtemp(prefix="tranche-break-even-")


def path(name):
    return os.path.join(folder, name)


with open(path("model.json"), "w", encoding="utf-8") as file:
    json.dump({"model_type": "gpt2", "n_layer": options.layers, "n_head": options.width // 32, "n_embd": options.width,
               "vocab_size": 257, "n_positions": SEQUENCE, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}, file)
with open(path("text.txt"), "w", encoding="utf-8") as file:
    file.write("the cat sat on a mat and saw seven rats\n" * 20000)

MODEL = ["--model", path("model.json"), "--sequence", str(SEQUENCE), "--dtype", "fp32", "--threads", "1"]
OFFLOAD = ["--offload-optimizer", "cpu", "--offload-ratio", options.ratio]


def call(arguments):
    done = subprocess.run([options.program] + arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)}\nended with {done.returncode}: {done.stderr}")
    return done.stdout


def steps(sequences, link=None):
    """Steps of a run without the first two."""
    arguments = ["train"] + MODEL + OFFLOAD + ["--data", path("text.txt"), "--micro-batch", str(sequences), "--steps", str(options.steps),
                                               "--eval-batches", "1", "--debug-peak-seconds", "0.01", "--report", path("r.json")]
    if link:
        arguments += ["--set", f"tranche.debug.host_link_bandwidth={link}"]
    call(arguments)
    with open(path("r.json"), encoding="utf-8") as report:
        document = json.load(report)
    return document["steps"][2:], document["model"]["flops_per_token"]


def median(values):
    return statistics.median(list(values))


def plan(sequences, link, flops, update):
    return json.loads(call(["plan", "--json"] + MODEL + OFFLOAD + ["--micro-batch", str(sequences), "--host-link", str(int(link)),
                                                                   "--flops", str(flops), "--host-update", str(update)]))


# Measures how fast this machine computes and updates, and sets a link speed that breaks even at about --target sequences.
free, flops_per_token = steps(options.target)
tokens = options.target * SEQUENCE
flops = flops_per_token * tokens / median(s["seconds"] - s["exposed_offload_seconds"] for s in free)
guess = plan(options.target, 1e9, flops, 1e12)
updated = guess["offload_bytes"]["to_host"] / 4
update = updated / median(s["offload"]["host_update_seconds"] for s in free)
link = int(1e9 * guess["offload"]["break_even_tokens_per_step"] / tokens)
planned = plan(options.target, link, flops, update)["offload"]
break_even = planned["break_even_tokens_per_step"]
print(f"computes {flops / 1e9:.1f} GFLOP/s, updates {update / 1e9:.2f} G parameters/s; the link is held to {link / 1e6:.1f} MB/s")
print(f"plan: break-even at {break_even:.0f} tokens per step, {planned['least_exposed_seconds'] * 1e3:.0f} ms exposed beyond it")

compute_planned = break_even * flops_per_token / flops  # seconds of a step

points = []  # (seconds computed, seconds exposed) of every step, in units of compute_planned
sizes = []
for share in SHARES:
    sequences = max(1, round(share * break_even / SEQUENCE))
    held, alone = [], []
    for _ in range(options.rounds):
        held += steps(sequences, link)[0]
        alone += steps(sequences)[0]
    for step in held:
        points.append(((step["seconds"] - step["exposed_offload_seconds"]) / compute_planned,
                       step["exposed_offload_seconds"] / compute_planned))
    size = {"tokens": sequences * SEQUENCE, "exposed": median(s["exposed_offload_seconds"] for s in held),
            "seconds": median(s["seconds"] for s in held), "seconds_alone": median(s["seconds"] for s in alone)}
    sizes.append(size)
    print(f"{size['tokens']:>7} tokens ({size['tokens'] / break_even:.2f}): {size['exposed'] * 1e3:7.1f} ms exposed, step "
          f"{size['seconds'] * 1e3:7.1f} ms, {size['seconds_alone'] * 1e3:7.1f} ms without the held link")

# Below the break-even the exposed time falls along a line; above it stays constant. The two lines meet at the measured break-even.
below = [p for p in points if p[0] < 0.9]
beyond = [p for p in points if p[0] > 1.1]
near = [p for p in points if 1.15 < p[0] < 1.35] or beyond
if len(below) < 5 or len(beyond) < 5:
    sys.exit(f"{len(below)} steps computed for less than 0.9 of the planned break-even and {len(beyond)} for more than 1.1: too few; again")
floor = median(p[1] for p in beyond)
# The line through medians of distant pairs (Theil and Sen), which single late steps do not affect.
slope = median((q[1] - p[1]) / (q[0] - p[0]) for p in below for q in below if q[0] - p[0] > 0.1)
start = median(p[1] - slope * p[0] for p in below)
measured = (floor - start) / slope
overhead = median(p[1] / p[0] for p in near)
result = {"planned_break_even_tokens": break_even, "measured_over_planned": measured, "exposed_over_compute_at_1.2": overhead,
          "least_exposed_planned": planned["least_exposed_seconds"], "least_exposed_measured": floor * compute_planned,
          "planned": planned, "sizes": sizes, "steps": points}
print(f"measured break-even: {measured:.3f} of the plan's; least exposed {floor * compute_planned * 1e3:.1f} ms; at 1.2 of the plan's break-even "
      f"{100 * overhead:.1f}% of compute are exposed")
if options.out:
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
shutil.rmtree(folder)
