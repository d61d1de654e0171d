#!/usr/bin/env python3
"""check_throwing.py RUN_MPI PROGRAM RANKS|threads-RANKS TIMES [WHERE ...]: runs throwing_rank in all its ways, or another program in its own.

Every rank has to end within three seconds of the exception, and to say its cause: the rank that threw as its own error, the others as
that rank's failure. The communication time-out of the program is a minute.
"""
import os
import re
import subprocess
import sys
import time

CAUSE = "file 7 of rank 1 has no tokens"
SECONDS = 3


def problems_of(output: str, took: float, status: int, ranks: int) -> list[str]:
    problems = []
    if took > SECONDS:
        problems.append(f"the last rank ended {took:.2f} s after the exception")
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


def main() -> int:
    run_mpi, program, ranks_text, times, *places = sys.argv[1:]
    places = places or ["forward", "backward", "between", "evaluation"]
    threads = ranks_text.startswith("threads-")
    ranks = int(ranks_text.removeprefix("threads-"))
    failed, longest = 0, 0.0
    for where in places:
        for caught in ("inside", "outside", "both"):
            for turn in range(int(times)):
                command = [program, where, caught, str(ranks)] if threads else [run_mpi, str(ranks), program, where, caught]
                job = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRANCHE_MPI_TIMEOUT": "60"})
                end = time.monotonic()
                output = job.stdout + job.stderr
                threw = re.search(r"threw at ([\d.]+)", output)
                took = end - float(threw[1]) if threw else float("inf")
                longest = max(longest, took)
                problems = problems_of(output, took, job.returncode, ranks)
                if problems:
                    failed += 1
                    print(f"{where}, caught {caught}, run {turn + 1}: {'; '.join(problems)}\n--- output\n{output}")
    print(f"{ranks_text} ranks: {failed} of {3 * len(places) * int(times)} runs failed; the job ended {longest:.2f} s after the exception at most")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
