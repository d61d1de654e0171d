#!/usr/bin/env python3
"""offload_speed.py PROGRAM [--against PROGRAM] [--variants 'A;B'] [--ranks N] [--rounds N] [--steps N] [--out F.md] -- FLAGS: how near is a step to its bound?

Trains with the FLAGS of `tranche train` (model, tiers, budgets), in turns for each variant, so that a machine that drifts does so for all of them. A
variant is a text of more flags: 'off: --host-state 0; on:' names two. With --against each variant runs with both programs. Prints, for each, the
medians over all timed steps: the step, the time exposed for offload, each part, and the step over its longest part. Steps before --warmup are not
timed: they plan memory, and the first update is not hidden.

The measurements of the issue:
  offload_speed.py NEW --against OLD --bar 1.15 -- --model llama-3.2-1b --stage 3 --dtype bf16 --sequence 128 --micro-batch 1 \\
    --device-memory 3GiB --offload-optimizer nvme --offload-param nvme
  the same with --bar 1.3 and --host-memory 8GiB
  offload_speed.py NEW --against OLD --ranks 2 --bar 1.25 -- --model gpt2-xl --stage 3 --threads 1 --sequence 128 --micro-batch 1 \\
    --offload-optimizer nvme --offload-param nvme --host-state 0
  state in host memory or on the device, 20 pairs: --rounds 20 --steps 1 --pairs 1.02 -- ... --offload-optimizer cpu
Flags that a program does not know (--host-state, of an older one) are left out for it with --old-without '--host-state 0'.
"""

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--against", help="another program, for the same runs: the one before a change")
    parser.add_argument("--variants", default=":", help="NAME: FLAGS, with ; between several")
    parser.add_argument("--old-without", default="", help="flags that --against does not know")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run")
    parser.add_argument("--bar", type=float, default=0, help="most of the step over its longest part, of PROGRAM")
    parser.add_argument("--pairs", type=float, default=0, help="most of PROGRAM's step over that of --against, the median of the rounds' ratios")
    parser.add_argument("--nvme-path", default=None, help="folder for swap files; a temporary one unless it is given")
    parser.add_argument("--out", help="Markdown")
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:own])
    options.flags = words[own + 1:]
    return options


def without(flags, unknown):
    """`flags` less one appearance of the words of `unknown`."""
    words = shlex.split(unknown)
    for at in range(len(flags) - len(words) + 1):
        if words and flags[at:at + len(words)] == words:
            return flags[:at] + flags[at + len(words):]
    return flags


def train(options, program, flags, folder):
    """The timed steps of the report."""
    report, text = os.path.join(folder, "report.json"), os.path.join(folder, "text.txt")
    if not os.path.exists(text):
        with open(text, "w", encoding="utf-8") as file:
            file.write("\n".join(str(i) for i in range(200000)))
    words = [str(ROOT / "scripts" / "run_mpi.sh"), str(options.ranks)] if options.ranks > 1 else []
    words += [os.path.abspath(program), "train", "--data", text, "--eval-batches", "1", "--nvme-path", options.nvme_path or folder,
              "--steps", str(options.warmup + options.steps), "--report", report, *flags]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=dict(os.environ, TRANCHE_MPI_TIMEOUT="7200"))
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: status {done.returncode}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    with open(report, encoding="utf-8") as file:
        result = json.load(file)
    return result["steps"][options.warmup:], result["state_digest"]


def parts_of(step):
    """Returns the seconds of a step, and of each of its parts."""
    seconds, exposed = step["seconds"], step["exposed_offload_seconds"]
    roads = {name: step["offload"][name + "_seconds"] for name in ("to_host", "from_host", "host_update", "disk")}
    roads["compute"] = max(0.0, seconds - exposed - step["exposed_gather_seconds"] - step["exposed_reduce_seconds"])
    return {"step": seconds, "exposed": exposed, **roads}


def main():
    options = arguments()
    programs = {"new": options.program, **({"old": options.against} if options.against else {})}
    variants = [tuple(part.strip() for part in variant.split(":", 1)) for variant in options.variants.split(";")]
    seen = {}  # by program and variant: the parts of each timed step
    ratios, digests = [], set()
    with tempfile.TemporaryDirectory(prefix="tranche-offload-speed-") as folder:
        for round_ in range(options.rounds):
            medians = {}
            cases = [(name, variant) for variant in variants for name in programs]
            for name, variant in cases if round_ % 2 == 0 else reversed(cases):
                flags = options.flags + shlex.split(variant[1])
                steps, digest = train(options, programs[name], without(flags, options.old_without) if name == "old" else flags, folder)
                digests.add(digest)
                parts = [parts_of(step) for step in steps]
                seen.setdefault((name, variant[0]), []).extend(parts)
                medians[name, variant[0]] = statistics.median(part["step"] for part in parts)
            if "old" in programs:
                ratios += [medians["new", variant[0]] / medians["old", variant[0]] for variant in variants]
    lines = ["| program | variant | step | exposed | compute | to host | from host | update | disk | step / longest |", "|---|---|---|---|---|---|---|---|---|---|"]
    missed = []
    for (name, variant), parts in sorted(seen.items()):
        median = {key: statistics.median(part[key] for part in parts) for key in parts[0]}
        longest = max(value for key, value in median.items() if key not in ("step", "exposed"))
        times = statistics.median(part["step"] / max(value for key, value in part.items() if key not in ("step", "exposed")) for part in parts)
        cells = [f"{median[key]:.3f}" for key in ("step", "exposed", "compute", "to_host", "from_host", "host_update", "disk")]
        lines.append(f"| {name} | {variant} | " + " | ".join(cells) + f" | {median['step'] / longest:.3f} ({times:.3f}) |")
        if name == "new" and options.bar and median["step"] / longest > options.bar:
            missed.append(f"{variant or 'step'}: {median['step'] / longest:.3f} of its longest part, above {options.bar}")
    if ratios:
        lines.append(f"\nnew over old, median of {len(ratios)} pairs: {statistics.median(ratios):.4f}")
        if options.pairs and statistics.median(ratios) > options.pairs:
            missed.append(f"new over old is above {options.pairs}")
    if len(digests) > 1:
        missed.append(f"states differ: {sorted(digests)}")
    text = "\n".join(lines)
    print(text)
    if options.out:
        pathlib.Path(options.out).write_text(f"`{' '.join(shlex.quote(word) for word in sys.argv)}`\n\n{text}\n", encoding="utf-8")
    for line in missed:
        print("missed: " + line)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
