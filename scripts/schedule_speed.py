#!/usr/bin/env python3
"""schedule_speed.py PROGRAM [--sequence N] [--rounds N] [--steps N] [--out F.md]: is a pipeline as fast as its schedule on paper?

Trains GPT-2 124M in fp32 on one rank of one thread, and on two ranks of one thread under each schedule, in turns, so that a machine that drifts
does so for all of them. The trace of a pipeline's run has the times of its passes on each stage; `tranche schedule` makes the length of a step of
their medians. Prints the medians over the rounds: the length on paper over the measured step (the bar is 0.94), and the step of one rank over it
(the bar is 1.6). Ends with status 1 when a bar is missed. At a sequence of 1024 a round takes about ten minutes on two cores.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

PAPER_BAR, SPEED_BAR = 0.94, 1.6

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("program")
parser.add_argument("--model", default="gpt2")
parser.add_argument("--sequence", type=int, default=1024)
parser.add_argument("--micro-batches", type=int, default=16)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--warmup", type=int, default=2, help="steps of a run that are not timed; the first two plan memory")
parser.add_argument("--steps", type=int, default=1, help="steps of a run that are timed")
parser.add_argument("--schedules", default="1f1b,zb-h1")
parser.add_argument("--set", action="append", default=[], help="of the configuration, for all runs")
parser.add_argument("--out", help="Markdown")
options = parser.parse_args()

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.path.abspath(options.program)
folder = tempfile.TemporaryDirectory(prefix="tranche-schedule-speed-")
report, trace = os.path.join(folder.name, "report.json"), os.path.join(folder.name, "trace.json")
# One file, because each page by itself has too few tokens for a sequence of validation.
text_of_docs = pathlib.Path(folder.name, "docs.md")
text_of_docs.write_text("\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("**/*.md"))), encoding="utf-8")


def run(words):
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=dict(os.environ, TRANCHE_MPI_TIMEOUT="7200"))
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: status {done.returncode}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    return done.stdout


def train(ranks, more):
    """Runs a training; returns the seconds of a step."""
    words = [str(ROOT / "scripts" / "run_mpi.sh"), str(ranks), PROGRAM, "train", "--model", options.model, "--dtype", "fp32", "--stage", "0",
             "--sequence", str(options.sequence), "--micro-batch", "1", "--accumulate", str(options.micro_batches), "--threads", "1",
             "--steps", str(options.warmup + options.steps), "--eval-batches", "1", "--data", str(text_of_docs),
             "--report", report, *more]
    for key in options.set:
        words += ["--set", key]
    run(words)
    with open(report, encoding="utf-8") as file:
        steps = json.load(file)["steps"]
    return statistics.median(step["seconds"] for step in steps[options.warmup:])


def passes():
    """The median seconds of F, I and W on each stage, in the trace's timed steps; B is half I and half W."""
    with open(trace, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    times = {}
    for event in events:
        if event["ph"] == "X" and event["name"][0] in "FBIW" and event["name"][1:].isdigit():
            times.setdefault((event["pid"], event["name"][0]), []).append(event["dur"] * 1e-6)
    skipped = options.warmup * options.micro_batches
    medians = {key: statistics.median(values[skipped:]) for key, values in times.items()}
    return {letter: [medians[stage, letter] if (stage, letter) in medians else medians[stage, "B"] / 2 for stage in (0, 1)]
            for letter in "FIW"}


def paper(schedule, times):
    def listed(letter):
        return ",".join(f"{value:.9f}" for value in times[letter])

    return json.loads(run([PROGRAM, "schedule", schedule, "--p", "2", "--m", str(options.micro_batches), "--f", listed("F"),
                           "--i", listed("I"), "--w", listed("W"), "--json"]))["length"]


alone, measured, on_paper, shares = [], {}, {}, {}
schedules = options.schedules.split(",")
for number in range(options.rounds):
    alone.append(train(1, []))
    for name in schedules if number % 2 == 0 else schedules[::-1]:
        seconds = train(2, ["--mesh", "pipeline=2", "--set", f"tranche.pipeline_schedule={name}", "--trace", trace])
        times = passes()
        measured.setdefault(name, []).append(seconds)
        on_paper.setdefault(name, []).append(paper(name, times) / seconds)
        shares[name] = times
    print(f"round {number + 1}: one rank {alone[-1]:.3f} s, " +
          ", ".join(f"{name} {measured[name][-1]:.3f} s, {on_paper[name][-1]:.3f} of it on paper" for name in schedules), flush=True)

lines = [f"{options.model}, fp32, ZeRO stage 0, sequence {options.sequence}, {options.micro_batches} micro-batches; medians of {options.rounds}, "
         f"one rank of one thread: {statistics.median(alone):.3f} s a step.", "",
         "| schedule | step | on paper / measured | times as fast as one rank | F, I, W of the stages in the last round, s |", "|---|---|---|---|---|"]
missed = False
for name in schedules:
    ratio = statistics.median(on_paper[name])
    speed = statistics.median(before / now for before, now in zip(alone, measured[name]))
    missed |= ratio < PAPER_BAR or speed < SPEED_BAR
    lines.append(f"| {name} | {statistics.median(measured[name]):.3f} s | {ratio:.3f} | {speed:.3f} | " +
                 "; ".join(", ".join(f"{shares[name][letter][stage]:.3f}" for letter in "FIW") for stage in (0, 1)) + " |")
text = "\n".join(lines) + "\n"
print(text, end="")
if options.out:
    pathlib.Path(options.out).write_text(text, encoding="utf-8")
sys.exit(1 if missed else 0)
