#!/usr/bin/env python3
"""Runs the example branches on one rank and on four. The losses and the state must be equal in every bit. The traces of the four ranks must
show in each step that the branches run at the same time, and two sums: the first after the forward of the longest branch, the second after
its backward.

usage: check_branches.py LAUNCHER PROGRAM FOLDER
"""
import json
import pathlib
import shutil
import subprocess
import sys

STEPS = 20


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if line.startswith(("step ", "state "))]


def spans(path, name):
    """Begin and end, in milliseconds, of each span with that name."""
    events = json.loads(path.read_text())["traceEvents"]
    return [(event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000) for event in events if event.get("name") == name]


def main():
    launcher, program, folder = sys.argv[1:]
    shutil.rmtree(folder, ignore_errors=True)
    pathlib.Path(folder).mkdir(parents=True)
    expected, found = run([program]), run([launcher, "4", program, "pipeline=4", folder])
    print("\n".join(found))
    if found != expected or len(found) != STEPS + 1:
        sys.exit("one rank gave\n" + "\n".join(expected))
    traces = [pathlib.Path(folder) / f"rank{rank}.json" for rank in range(4)]
    for phase, name in (("forward", "sum of outputs"), ("backward", "sum of input gradients")):
        branches = [spans(trace, f"{phase} of branch {rank}") for rank, trace in enumerate(traces)]
        sums = [spans(trace, name) for trace in traces]
        if any(len(each) != STEPS for each in branches + sums):
            sys.exit(f"{phase}: {[len(each) for each in branches]} branches and {[len(each) for each in sums]} sums")
        shares = []
        for step in range(STEPS):
            longest = branches[3][step]
            if any(each[step][1] < longest[1] for each in sums):
                sys.exit(f"step {step + 1}: a {name} ended before the longest branch did")
            begin = min(each[step][0] for each in branches)
            end = max(each[step][1] for each in sums)
            shares.append((end - begin) / sum(each[step][1] - each[step][0] for each in branches))
        # One after the other the branches would take all of this time; at the same time the longest takes 6 of 12 layers.
        print(f"{phase}: the block takes {min(shares):.2f} of the time of all branches")
        if min(shares) > 0.85:
            sys.exit("the branches did not work side by side")


main()
