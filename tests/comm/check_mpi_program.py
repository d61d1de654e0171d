#!/usr/bin/env python3
"""check_mpi_program.py RUN_MPI PROGRAM CASE...: runs a small MPI program in each case and checks how it ends. Four cases run at a time,
because they wait most of the time.

Each case has the arguments, the exit status of mpirun (None: anything but 0), lines that must appear and the longest time that it may take.
mpirun itself has a limit, so that a hang shows as status 110.
"""
import concurrent.futures
import os
import subprocess
import sys
import tempfile
import time

NO_DATA = "reduce_scatter of unit h.3 in backward: no data from rank 1 after 4.0 s (rank 1 has not entered the operation, or hangs)"
DIFFER = ("rank 0 issued reduce_scatter of unit h.3 (number 3) where rank 1 issued all_gather of unit h.2 (number 3): the ranks' calls "
          "differ")
CASES = {
    # name: (ranks, arguments, status, texts that must appear, texts that must not, seconds)
    "twice": (2, ["twice"], 0, [f"rank {rank} refuses: MPI has been finalised in this process and cannot start again; keep one communicator until the end"
                                for rank in (0, 1)], ["ends:"], 60),
    "none": (3, ["none"], 0, ["rank 0 is done", "rank 1 is done", "rank 2 is done"], ["ends:"], 60),
    # The peers end the job with the status that rank 1 sent them (6: numerical).
    "throw": (3, ["throw"], 6, [
        "rank 1 ends: loss is not finite in step 3",
        "rank 0 ends: [rank 0] reduce_scatter of unit h.3 in backward: rank 1 failed: loss is not finite in step 3",
        "rank 2 ends: [rank 2] reduce_scatter of unit h.3 in backward: rank 1 failed: loss is not finite in step 3",
    ], ["is done", "no data"], 60),
    "throw-two": (2, ["throw"], 6, ["rank 0 ends: [rank 0] reduce_scatter of unit h.3 in backward: rank 1 failed: "],
                  ["is done"], 60),
    # Two ranks wait for the one that hangs; the second may receive the first's time-out before its own.
    "hang": (3, ["hang"], 5, [NO_DATA], ["is done"], 60),
    "hang-two": (2, ["hang"], 5, ["rank 0 ends: [rank 0] " + NO_DATA], ["is done"], 60),
    # Either rank may notice it first.
    "differ": (2, ["differ"], 5, ["rank 0 ends: [rank 0] reduce_scatter of unit h.3 in backward: ", DIFFER], ["is done", "no data"], 60),
    # The rank that left waits for its peers in its destructor and answers their questions. mpirun's status depends on which process ends
    # first: 5 from the peers, or 1 because that rank returned 0 without MPI_Finalize.
    "leave": (2, ["leave"], None, ["rank 1 is done", "rank 0 ends: [rank 0] reduce_scatter of unit h.3 in backward: rank 1 has ended its engine "
                                "after 3 operations"], ["rank 0 is done", "no data"], 60),
    "window-leave": (3, ["leave", "shared"], None, ["rank 1 has ended its engine after 3 operations"],
                     ["rank 0 is done", "rank 2 is done", "no data"], 60),
    "kill": (3, ["kill"], None, ["signal 9 (Killed)"], ["is done"], 60),
    "window-none": (3, ["none", "shared"], 0, ["rank 0 is done", "rank 1 is done", "rank 2 is done"], ["ends:"], 60),
    "window-throw": (3, ["throw", "shared"], 6, [
        "rank 0 ends: [rank 0] reduce_scatter of unit h.3 in backward: rank 1 failed: loss is not finite in step 3",
        "rank 2 ends: [rank 2] reduce_scatter of unit h.3 in backward: rank 1 failed: loss is not finite in step 3",
    ], ["is done", "no data"], 60),
    "window-hang": (3, ["hang", "shared"], 5, [NO_DATA], ["is done"], 60),
    # Rank 0 or rank 2 notices first what rank 1 did, and ends the job.
    "window-differ": (3, ["differ", "shared"], 5, ["rank 1 issued all_gather of unit h.2 (number 3)", "issued reduce_scatter of unit h.3 (number 3)",
                                                   "the ranks' calls differ"], ["is done", "no data"], 60),
    "window-kill": (3, ["kill", "shared"], None, ["signal 9 (Killed)"], ["is done"], 60),
    # Nodes of two ranks: rank 0 sees that rank 1 is missing. The others wait for data of both and leave the report to rank 0.
    "nodes-none": (4, ["none", "nodes"], 0, [f"rank {rank} is done" for rank in range(4)], ["ends:"], 60),
    "nodes-throw": (4, ["throw", "nodes"], 6, [
        f"rank {rank} ends: [rank {rank}] reduce_scatter of unit h.3 in backward: rank 1 failed: loss is not finite in step 3"
        for rank in (0, 2, 3)
    ], ["is done", "no data"], 60),
    "nodes-hang": (4, ["hang", "nodes"], 5, [
        "rank 0 ends: [rank 0] " + NO_DATA,
        "rank 2 ends: [rank 2] reduce_scatter of unit h.3 in backward: rank 0 failed: " + NO_DATA,
        "rank 3 ends: [rank 3] reduce_scatter of unit h.3 in backward: rank 0 failed: " + NO_DATA,
    ], ["is done", "no data from rank 0"], 60),
    # The missing rank is alone on its node.
    "nodes-hang-alone": (3, ["hang-2", "nodes"], 5, [NO_DATA.replace("rank 1", "rank 2")], ["is done", "a rank that it waits for"], 60),
    "nodes-kill": (4, ["kill", "nodes"], None, ["signal 9 (Killed)"], ["is done"], 60),
    "adopt-multiple-thread": (3, ["multiple", "thread"], 0, ["adopted: ok"], [], 60),
    "adopt-serialized-inline": (3, ["serialized", "inline"], 0, ["adopted: ok"], [], 60),
    "adopt-funneled-inline": (2, ["funneled", "inline"], 0, ["adopted: ok"], [], 60),
    "adopt-multiple-inline": (2, ["multiple", "inline"], 0, ["adopted: ok"], [], 60),
    "adopt-serialized-thread": (2, ["serialized", "thread"], 0, [
        "MPI was initialised with MPI_THREAD_SERIALIZED, but a communication thread beside the program's own calls "
        "needs MPI_THREAD_MULTIPLE; initialise MPI with that, or choose progress: inline"], ["adopted: ok"], 60),
    # The program of tests/engine/mpi_memory_test.cpp: all ranks receive the reason.
    "memory": (3, [], 3, ["rank 1 was told: start of wide: 'wide parameters' (parameters) asks for"] + [
        f"rank {rank} was told: rank 1 ran out of memory: start of wide: 'wide parameters' (parameters) asks for" for rank in (0, 2)], [], 60),
}


def check(run_mpi: str, program: str, case: str) -> int:
    ranks, arguments, status, wanted, unwanted, seconds = CASES[case]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as errors:
        job = subprocess.run([run_mpi, str(ranks), program, *arguments], capture_output=True, text=True, errors="replace",
                             env={**os.environ, "TRANCHE_MPI_TIMEOUT": str(seconds + 10), "TRANCHE_TEST_ERRORS": errors})
    took = time.monotonic() - begin
    output = job.stdout + job.stderr
    problems = [f"missing: {text}" for text in wanted if text not in output]
    problems += [f"must not appear: {text}" for text in unwanted if text in output]
    if job.returncode == 110:
        problems.append("the job did not end by itself")
    if status is None and job.returncode == 0 or status is not None and job.returncode != status:
        problems.append(f"exit status {job.returncode}, wanted {'a failure' if status is None else status}")
    if took > seconds:
        problems.append(f"took {took:.1f} s, at most {seconds} s are allowed")
    if problems:
        print(f"{case}: {'; '.join(problems)}\n--- output\n{output}", flush=True)
        return 1
    print(f"{case}: exit status {job.returncode} after {took:.1f} s", flush=True)
    return 0


def main() -> int:
    run_mpi, program, *cases = sys.argv[1:]
    with concurrent.futures.ThreadPoolExecutor(4) as jobs:
        return max(jobs.map(lambda case: check(run_mpi, program, case), cases))


if __name__ == "__main__":
    sys.exit(main())
