#!/usr/bin/env python3
"""mesh_search_check.py PROGRAM [--machine F.json] [--repeats N] [--only TEXT] [--limit SECONDS] [--out F.md]: is the mesh that the search chooses the fastest?

Calibrates two ranks (unless a machine file is given), lets `tranche plan --fit --mesh search` choose for three models, and runs every mesh of
two ranks at every stage and schedule, each with the settings that the same search finds for it alone. Repeats are interleaved: the speed of a
machine that others share changes within minutes. A time is the median over the repeats of the median of a run's steps behind the third.

A model has some 23 configurations, so five repeats are some 115 short runs. No repeat begins that would end behind --limit by the time of the
last one, and the report says how many there were.

Exit status: 0 the choice takes at most 1.10 of the best's time for each model, 1 it takes more, 3 there were fewer than --repeats.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

BAR = 1.10
SETTLED = 3  # steps that are not counted
LONGEST_CALL = 300  # seconds after which a call counts as hung
RANKS = 2
AXES = ("replicate", "pipeline", "shard", "context", "tensor")
SCHEDULES = ("1f1b", "afab", "interleaved", "breadth-first", "zb-h1", "zb-v")

# name: layers, width, heads, sequence, samples of a given micro-batch, and micro-batches of a step on data ranks alone. Every mesh has the
# same samples in a step.
MODELS = {"small": (4, 128, 4, 128, 2, 4), "middle": (4, 256, 4, 128, 2, 4), "large": (3, 512, 8, 128, 1, 4)}

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("program")
parser.add_argument("--machine", help="machine file; without, this machine is calibrated")
parser.add_argument("--seconds", default="20", help="of the calibration")
parser.add_argument("--repeats", type=int, default=5)
parser.add_argument("--steps", type=int, default=8, help="of a run; the first three do not count")
parser.add_argument("--only", default="", help="models whose name has this text")
parser.add_argument("--limit", type=float, default=float("inf"), help="seconds within which the last repeat ends; no limit by default")
parser.add_argument("--out", help="Markdown")
options = parser.parse_args()
begin = time.monotonic()

folder = tempfile.mkdtemp(prefix="tranche-mesh-search-")
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
       "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_btl": "self,vader", "OMPI_MCA_pml": "ob1",
       "OMPI_MCA_orte_tmpdir_base": folder}  # a session folder of its own


def path(name):
    return os.path.join(folder, name)


def call(arguments, ranks=1, may_fail=False):
    launch = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    try:
        done = subprocess.run(launch + [options.program] + arguments, capture_output=True, text=True, check=False, env={**os.environ, **MPI}, timeout=LONGEST_CALL)
    except subprocess.TimeoutExpired:
        sys.exit(f"{' '.join(arguments)}\nhas not ended within {LONGEST_CALL} s")
    if done.returncode != 0 and may_fail:
        return None
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)}\nended with {done.returncode}: {done.stderr}")
    return done.stdout


def search(model, machine, axes, more, config):
    """Returns the search's choice within `axes` and writes its configuration; None if everything is refused."""
    _, _, _, sequence, batch, micro_batches = MODELS[model]
    text = call(["plan", "--json", "--ranks", str(RANKS), "--machine", machine, "--model", path(model + ".json"), "--sequence", str(sequence),
                 "--micro-batch", str(batch), "--set", f"train_batch_size={RANKS * batch * micro_batches}", "--dtype", "fp32", "--threads", "1", "--fit", "8GiB",
                 "--mesh", ", ".join(["search"] + axes), "--write", path(config)] + more, may_fail=bool(axes))
    return json.loads(text)["search"]["chosen"] if text else None


def points_of(model, machine):
    """Returns every mesh, stage and schedule that can run, with name and prediction."""
    points = {}
    for axis in AXES:
        axes = [f"{one}={RANKS if one == axis else 1}" for one in AXES]
        for schedule in SCHEDULES if axis == "pipeline" else [""]:
            keep = ["--set", f"tranche.pipeline_schedule={schedule}"] if schedule else []
            keep += ["--set", "tranche.pipeline_chunks=1"] if schedule == "1f1b" else []
            for stage in "0123":
                if axis == "pipeline" and stage != "0":
                    continue  # nothing is sharded
                name = f"{axis}={RANKS} {schedule} stage {stage}".replace("  ", " ")
                found = search(model, machine, axes, keep + ["--stage", stage], f"{model} {name}.json")
                if found:
                    points[name] = found
    return points


def measure(model, config):
    sequence = MODELS[model][3]
    call(["train", "--data", path("text.txt"), "--steps", str(options.steps), "--eval-batches", "1", "--debug-peak-seconds", "0.01", "--model",
          path(model + ".json"), "--sequence", str(sequence), "--config", path(config), "--report", path("r.json")], RANKS)
    with open(path("r.json"), encoding="utf-8") as report:
        return statistics.median(step["seconds"] for step in json.load(report)["steps"][SETTLED:])


for name, (layers, width, heads, sequence, _, _) in MODELS.items():
    with open(path(name + ".json"), "w", encoding="utf-8") as file:
        json.dump({"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": width, "vocab_size": 257, "n_positions": sequence}, file)
with open(path("text.txt"), "w", encoding="utf-8") as file:
    file.write("the cat sat on a mat and saw seven rats\n" * 20000)

machine_file = options.machine or path("machine.json")
load_before = os.getloadavg()[0]
if not options.machine:
    call(["calibrate", "--out", machine_file, "--seconds", options.seconds, "--threads", "1"], RANKS)
models = [name for name in MODELS if options.only in name]
if not models:
    sys.exit(f"--only {options.only}: the models are {', '.join(MODELS)}")
chosen, points, times = {}, {}, {}
for model in models:
    chosen[model] = search(model, machine_file, [], [], f"{model} chosen.json")
    points[model] = points_of(model, machine_file)
    times[model] = {name: [] for name in ["chosen", *points[model]]}
repeats, longest = 0, 0.0
while repeats < options.repeats and (repeats == 0 or time.monotonic() - begin + longest <= options.limit):
    began = time.monotonic()
    for model in models:
        for name, measured in times[model].items():
            measured.append(measure(model, f"{model} {name}.json"))
    repeats, longest = repeats + 1, max(longest, time.monotonic() - began)
    print(f"repeat {repeats} of {options.repeats} took {time.monotonic() - began:.0f} s; {time.monotonic() - begin:.0f} s so far", file=sys.stderr)

lines = ["| model | choice | choice ms | best | best ms | choice / best |", "|---|---|---|---|---|---|"]
details = ["| model | mesh, schedule, stage | predicted ms | measured ms |", "|---|---|---|---|"]
missed = False
for model in models:
    medians = {name: statistics.median(measured) for name, measured in times[model].items()}
    best = min(medians, key=medians.get)
    ratio = medians["chosen"] / medians[best]
    missed = missed or ratio > BAR
    choice = chosen[model]
    lines.append(f"| {model} | {choice['mesh']}, {choice['schedule'] or '-'}, stage {choice['stage']}, {choice['micro_batch']} x {choice['accumulation']} | "
                 f"{1000 * medians['chosen']:.1f} | {best} | {1000 * medians[best]:.1f} | {ratio:.3f} |")
    for name, point in sorted(points[model].items(), key=lambda one: medians[one[0]]):
        details.append(f"| {model} | {name}, {point['micro_batch']} x {point['accumulation']} | {1000 * point['seconds']:.1f} | {1000 * medians[name]:.1f} |")
text = "\n".join(lines + ["", f"Load of the machine before {load_before:.1f}, after {os.getloadavg()[0]:.1f}; medians of {repeats}.", ""] + details)
print(text)
if options.out:
    with open(options.out, "w", encoding="utf-8") as file:
        file.write(text + "\n")
if repeats < options.repeats:
    print(f"--limit {options.limit:.0f} left {options.repeats - repeats} of {options.repeats} repeats out", file=sys.stderr)
    sys.exit(3)
sys.exit(1 if missed else 0)
