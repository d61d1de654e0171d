#!/usr/bin/env python3
"""check_throwing.py RUN_MPI PROGRAM RANKS|threads-RANKS TIMES [WHERE ...]: runs throwing_rank in all its variants, or another program in
its own.

Within half a minute of the exception every rank must report that it ends, and the cause: the rank that threw as its own error, the others
as that rank's failure. The program's communication time-out is a minute. The time that mpirun takes to end the job does not count. Jobs
under mpirun mostly wait for its end, so three run at the same time.
"""
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
import time

CAUSE = "file 7 of rank 1 has no tokens"
SECONDS = 30
TOGETHER = 3  # jobs under mpirun


def problems_of(output: str, took: float, status: int, ranks: int) -> list[str]:
    problems = []
    if took > SECONDS:
        problems.append(f"the last rank said that it ends {took:.2f} s after the exception")
    ends = {int(rank): int(code) for rank, code in re.findall(r"rank (\d+) ends with (\d+)", output)}
    said = [line for line in output.splitlines() if CAUSE in line]
    for rank in range(ranks):
        if ends.get(rank) != 1:
            problems.append(f"rank {rank} ended with {ends.get(rank)}, wanted 1 as of the rank that threw")
        own = [line for line in said if f"[rank {rank}]" in line]
        if len(own) != 1:
            problems.append(f"rank {rank} said the cause {len(own)} times")
        elif rank != 1 and f"rank 1 failed: {CAUSE}" not in own[0]:
            problems.append(f"rank {rank} did not say whose failure it was")
    for text in ("no data from", "calls differ", "terminate called", "signal"):
        if text in output:
            problems.append(f"must not appear: {text}")
    if status == 0:
        problems.append("exit status 0")
    return problems


def run(command: list[str], ranks: int) -> tuple[float, list[str], str]:
    """Returns the seconds from the exception to the last rank's report that it ends, the problems, and the output."""
    output, end = "", float("inf")
    with tempfile.TemporaryDirectory() as errors, \
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                             env={**os.environ, "TRANCHE_MPI_TIMEOUT": "60", "TRANCHE_TEST_ERRORS": errors}) as job:
        for line in job.stdout:
            output += line
            if re.match(r"rank \d+ ends with", line):
                end = time.monotonic()
    threw = re.search(r"threw at ([\d.]+)", output)
    took = end - float(threw[1]) if threw else float("inf")
    return took, problems_of(output, took, job.returncode, ranks), output


def main() -> int:
    run_mpi, program, ranks_text, times, *places = sys.argv[1:]
    places = places or ["forward", "backward", "between", "evaluation"]
    threads = ranks_text.startswith("threads-")
    ranks = int(ranks_text.removeprefix("threads-"))
    ways = [(where, caught, turn) for where in places for caught in ("inside", "outside", "both") for turn in range(int(times))]
    commands = [[program, where, caught, str(ranks)] if threads else [run_mpi, str(ranks), program, where, caught] for where, caught, _ in ways]
    with concurrent.futures.ThreadPoolExecutor(1 if threads else TOGETHER) as jobs:
        results = list(jobs.map(run, commands, [ranks] * len(commands)))
    failed = 0
    for (where, caught, turn), (_, problems, output) in zip(ways, results):
        if problems:
            failed += 1
            print(f"{where}, caught {caught}, run {turn + 1}: {'; '.join(problems)}\n--- output\n{output}")
    longest = max(took for took, _, _ in results)
    print(f"{ranks_text} ranks: {failed} of {len(ways)} runs failed; all ranks had said that they end {longest:.2f} s after the exception at most")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
