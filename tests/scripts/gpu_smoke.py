#!/usr/bin/env python3
"""gpu_smoke.py BUILD RESULTS: runs scripts/gpu/run.sh --smoke on emulated GPUs twice. Every part that needs no real device must run once,
the first results must exist within 30 s, and with --resume nothing that passed may run again. The benches that plan.py names must exist."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

RUN = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "gpu" / "run.sh"
sys.dont_write_bytecode = True
sys.path.insert(0, str(RUN.parent))
import plan  # noqa: E402


def missing_benches(build):
    """Names and filters of plan.py that no bench of a built program has."""
    names = {}
    for program in {program for program, _ in plan.FIRST_BENCHES} | {program for _, program, _ in plan.PROFILED}:
        if (build / "bin" / program).exists():
            listed = subprocess.run([str(build / "bin" / program), "--benchmark_list_tests"], stdout=subprocess.PIPE, text=True, check=True)
            names[program] = listed.stdout.splitlines()
    wanted = [*plan.FIRST_BENCHES, *((program, bench) for _, program, bench in plan.PROFILED),
              *((ours.split("/", 1)[0], f"^{ours.split('/', 1)[1]}(/|$)") for ours, _ in plan.PEERS)]
    return [f"{program} {bench}" for program, bench in wanted
            if program in names and not any(re.search(bench, name) for name in names[program])]


def call(build, results, *more):
    """Returns (seconds until the first record was in the results, seconds in total, output)."""
    begin, first = time.time(), []

    def watch():
        while not first and time.time() < begin + 200:
            try:
                text = (results / "results.json").read_text(encoding="utf-8")
                if json.loads(text)["records"]:
                    first.append(time.time() - begin)
            except (OSError, ValueError):
                pass
            time.sleep(0.2)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    result = subprocess.run([str(RUN), "--from", str(build), "--smoke", "--limit", "150", "--results", str(results), *more],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(result.stdout)
    if result.returncode != 0:
        sys.exit(f"gpu_smoke: run.sh {' '.join(more)} ended with status {result.returncode}")
    return first[0] if first else None, time.time() - begin, result.stdout


def main():
    build, results = map(pathlib.Path, sys.argv[1:3])
    shutil.rmtree(results, ignore_errors=True)
    first, seconds, output = call(build, results)
    problems = []
    if first is None or first > 30:
        problems.append(f"first results were there after {first} s, not within 30")
    records = json.loads((results / "results.json").read_text(encoding="utf-8"))["records"]
    for part in ("probe", "tests", "training"):
        if not any(record["part"] == part and record["status"] in ("passed", "measured") for record in records):
            problems.append(f"nothing of the part '{part}' passed")
    for way in plan.WAYS:
        status = {record["status"] for record in records if record["item"] == plan.item_of(way)}
        if not status <= {"passed", "skipped"} or not status:  # skipped: a build without MPI
            problems.append(f"'{plan.item_of(way)}' has the results {status or 'none'}")
    problems += [f"no bench is named by '{bench}'" for bench in missing_benches(build)]
    passed = [record["item"] for record in records if record["status"] == "passed"]
    _, again, output = call(build, results, "--resume")
    kept = [item for item in passed if f"  {item}: kept from an earlier call" in output]
    rerun = [item for item in passed if f"  {item}: passed" in output]
    if rerun:
        problems.append(f"with --resume these ran again: {', '.join(rerun)}")
    if not kept:
        problems.append("with --resume nothing was kept")
    merged = json.loads((results / "results.json").read_text(encoding="utf-8"))["records"]
    lost = set(passed) - {record["item"] for record in merged}
    if lost:
        problems.append(f"with --resume these results were lost: {', '.join(sorted(lost))}")
    print(f"first results after {first:.1f} s; {seconds:.0f} s, with --resume {again:.0f} s; {len(passed)} passed, {len(kept)} kept")
    sys.exit("gpu_smoke: " + "; ".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
