#!/usr/bin/env python3
"""projection_check.py PROGRAM [--machine F.json] [--repeats N] [--only TEXT] [--out F.md]: is the step time as `tranche plan` says?

Runs 30 configurations on 1 and 2 ranks: stages, model sizes, dtypes, accumulation, no overlap, offload over links held to a speed and to the disk of the temporary folder. Every
round calibrates (unless a machine file is given) and runs each once, so that repeats and calibrations are interleaved: the speed of a machine
that others share changes within minutes. A repeat's step time is the median of its steps behind the third; a point's the median of its
repeats, and its spread half of what lies between the largest and the smallest of them, over the point. What is predicted is the median over
the calibrations, which know nothing of the points. Writes predicted beside measured as a Markdown table, with the load of the machine, and ends with
status 1 when the bar is missed: median error 5 %, each within 10 % or twice its own spread.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile

MEDIAN_BAR, WORST_BAR = 0.05, 0.10
SETTLED = 3  # steps that are not counted

# name: layers, width, heads, sequence, sequences of a micro-batch
MODELS = {"small": (4, 128, 4, 128, 4), "middle": (4, 256, 4, 128, 4), "large": (3, 512, 8, 128, 2)}


def link(rate):
    return ["--offload-optimizer", "cpu", "--set", f"tranche.debug.host_link_bandwidth={rate}"]


def nvme(*more, host_state="0"):
    return ["--offload-optimizer", "nvme", "--nvme-path", tempfile.gettempdir(), "--host-state", host_state, "--set", "gradient_clipping=0", *more]


AS_REDUCED = ["--set", "tranche.update=as_reduced"]
ACCUMULATE = ["--accumulate", "3"]
SERIAL = ["--set", "zero_optimization.overlap_comm=false"]

# ranks, model, dtype, stage, other settings, and their flags
POINTS = [
    (1, "small", "fp32", 0, "", []),
    (1, "middle", "fp32", 0, "", []),
    (1, "large", "fp32", 0, "", []),
    (1, "middle", "bf16", 0, "", []),
    (1, "large", "bf16", 0, "", []),
    (1, "middle", "fp32", 0, "3 micro-batches", ACCUMULATE),
    (1, "middle", "bf16", 2, "3 micro-batches", ACCUMULATE),
    (1, "small", "fp32", 0, "link 20 MB/s", link("20000000")),
    (1, "middle", "fp32", 0, "link 50 MB/s", link("50000000")),
    (1, "middle", "fp32", 0, "link 200 MB/s", link("200000000")),
    (1, "large", "fp32", 0, "link 100 MB/s", link("100000000")),
    (1, "middle", "fp32", 0, "link 50 MB/s, 3 micro-batches", link("50000000") + ACCUMULATE),
    (1, "large", "bf16", 0, "nvme", nvme()),
    (1, "large", "bf16", 0, "nvme, as reduced", nvme(*AS_REDUCED)),
    (1, "large", "bf16", 0, "nvme, half of it in host memory", nvme(host_state="60MiB")),
    (1, "large", "bf16", 3, "nvme, weights too", nvme("--offload-param", "nvme")),
    (1, "large", "bf16", 3, "nvme, weights too, as reduced", nvme("--offload-param", "nvme", *AS_REDUCED)),
    (2, "small", "fp32", 1, "", []),
    (2, "small", "fp32", 3, "", []),
    (2, "middle", "fp32", 0, "", []),
    (2, "middle", "fp32", 1, "", []),
    (2, "middle", "fp32", 2, "", []),
    (2, "middle", "fp32", 3, "", []),
    (2, "large", "fp32", 0, "", []),
    (2, "large", "fp32", 2, "", []),
    (2, "large", "fp32", 3, "", []),
    (2, "middle", "bf16", 2, "", []),
    (2, "middle", "bf16", 3, "", []),
    (2, "middle", "fp32", 3, "no overlap", SERIAL),
    (2, "middle", "fp32", 2, "link 50 MB/s", link("50000000")),
]

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("program")
parser.add_argument("--machine", help="machine file; without, this machine is calibrated in every round")
parser.add_argument("--seconds", default="30", help="of the calibration")
parser.add_argument("--repeats", type=int, default=5)
parser.add_argument("--steps", type=int, default=10, help="of a run; the first three do not count")
parser.add_argument("--only", default="", help="points whose line has this text")
parser.add_argument("--processor-time", action="store_true",
                    help="one rank and one thread, in processor time: what of the model a busy machine can be asked about")
parser.add_argument("--out", help="Markdown")
options = parser.parse_args()

folder = tempfile.mkdtemp(prefix="tranche-projection-")
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
       "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_btl": "self,vader", "OMPI_MCA_pml": "ob1",
       "OMPI_MCA_orte_tmpdir_base": folder}  # a session folder of its own


def path(name):
    return os.path.join(folder, name)


def call(arguments, ranks=1):
    launch = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run(launch + [options.program] + arguments, capture_output=True, text=True, check=False, env={**os.environ, **MPI})
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)}\nended with {done.returncode}: {done.stderr}")
    return done.stdout


def title(point):
    ranks, model, dtype, stage, more, _ = point
    return f"{ranks} | {model} | {dtype} | {stage} | {more or '-'}"


def model_flags(point):
    _, model, dtype, stage, _, flags = point
    _, _, _, sequence, batch = MODELS[model]
    return ["--model", path(model + ".json"), "--sequence", str(sequence), "--micro-batch", str(batch), "--dtype", dtype,
            "--stage", str(stage)] + flags + (["--threads", "1"] if options.processor_time else [])


def predict(point, machine):
    ranks = str(point[0])
    text = call(["plan", "--json", "--ranks", ranks, "--machine", machine] + model_flags(point))
    return json.loads(text)["projection"]


def processor_seconds(point, steps):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call(["train", "--data", path("text.txt"), "--steps", str(steps), "--eval-batches", "1", "--debug-peak-seconds", "0.01"] + model_flags(point))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(point):
    if options.processor_time:
        return (processor_seconds(point, options.steps + SETTLED) - processor_seconds(point, SETTLED)) / options.steps
    call(["train", "--data", path("text.txt"), "--steps", str(options.steps), "--eval-batches", "1", "--debug-peak-seconds", "0.01",
          "--report", path("r.json")] + model_flags(point), point[0])
    with open(path("r.json"), encoding="utf-8") as report:
        return statistics.median(step["seconds"] for step in json.load(report)["steps"][SETTLED:])


for name, (layers, width, heads, sequence, _) in MODELS.items():
    with open(path(name + ".json"), "w", encoding="utf-8") as file:
        json.dump({"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": width, "vocab_size": 257, "n_positions": sequence}, file)
with open(path("text.txt"), "w", encoding="utf-8") as file:
    file.write("the cat sat on a mat and saw seven rats\n" * 20000)

load_before = os.getloadavg()[0]
machine_files = [options.machine] if options.machine else []
points = [point for point in POINTS if options.only in title(point)
          and not (options.processor_time and (point[0] > 1 or "link" in title(point) or "nvme" in title(point)))]
measured = [[] for _ in points]
for round_number in range(options.repeats):
    if not options.machine:
        machine_files.append(path(f"machine-{round_number}.json"))
        print(call(["calibrate", "--out", machine_files[-1], "--seconds", options.seconds, "--dir", tempfile.gettempdir()]
                   + (["--threads", "1"] if options.processor_time else []), 1 if options.processor_time else 2), end="", flush=True)
    for times, point in zip(measured, points):
        times.append(measure(point))
load_after = os.getloadavg()[0]

lines = ["| ranks | model | dtype | stage | more | predicted ms | their spread | measured ms | error | spread | within |",
         "|---|---|---|---|---|---|---|---|---|---|---|"]
errors, missed = [], 0
for times, point in zip(measured, points):
    predictions = [predict(point, file)["step_seconds"] for file in machine_files]
    predicted = statistics.median(predictions)
    apart = (max(predictions) - min(predictions)) / 2 / predicted
    middle = statistics.median(times)
    spread = (max(times) - min(times)) / 2 / middle
    error = predicted / middle - 1
    errors.append(abs(error))
    within = abs(error) <= max(WORST_BAR, 2 * spread)
    missed += not within
    lines.append(f"| {title(point)} | {1e3 * predicted:.1f} | {100 * apart:.1f} % | {1e3 * middle:.1f} | {100 * error:+.1f} % | {100 * spread:.1f} % | {'yes' if within else 'NO'} |")
median = statistics.median(errors)
lines += ["", f"{len(points)} points, {options.repeats} interleaved repeats, {len(machine_files)} calibrations: median error {100 * median:.1f} % (bar {100 * MEDIAN_BAR:.0f} %), worst "
          f"{100 * max(errors):.1f} %, {missed} beyond {100 * WORST_BAR:.0f} % and twice their spread. Load {load_before:.1f} before, {load_after:.1f} after."]
text = "\n".join(lines) + "\n"
print(text, end="")
if options.out:
    with open(options.out, "w", encoding="utf-8") as file:
        file.write(text)
shutil.rmtree(folder)
sys.exit(0 if median <= MEDIAN_BAR and missed == 0 else 1)
