#!/usr/bin/env python3
"""driver_test.py FOLDER TARGET...: each kind of planted mistake must be found, its input kept, and the printed line must repeat it.

FOLDER contains the programs fuzz_TARGET of the build.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# The mistake, and the text that reports it.
PLANTED = {
    "exception": "foreign exception: .*out_of_range.*: of a container",
    "status": "foreign exception: exit status 1: of the caller",
    "hang": "took more than 1 s",
    "crash": "ended it with signal 6",
    "memory": "allocation-size-too-big",
}


# The seconds after which a mistake counts as a hang. The limit is short only for the planted hang; on a busy machine a sanitizer may take
# longer than a second to print its report.
def limit_of(planted):
    return "1" if planted == "hang" else "120"


def run(command, folder, planted):
    environment = {**os.environ, "TRANCHE_PLANTED": planted}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def problems(programs, targets, folder):
    program = programs / "fuzz_planted"
    for planted, said in PLANTED.items():
        status, output = run([program, "--executions", "100", "--limit", limit_of(planted)], folder, planted)
        line = re.search(r"again by\n  (\S+) (\S+)\n", output)
        if status != 1 or line is None or re.search(said, output) is None:
            yield f"{planted}: status {status}, wanted 1 and '{said}':\n{output}"
            continue
        if pathlib.Path(line[2]).read_bytes() in (b"", b"accepted", b"refused"):
            yield f"{planted}: {line[2]} does not hold the input that was found"
        again, output = run([line[1], "--limit", limit_of(planted), line[2]], folder, planted)
        if again == 0:
            yield f"{planted}: '{line[0]}' ends with status 0:\n{output}"
        os.remove(line[2])
    status, output = run([program, "--executions", "100"], folder, "nothing")
    if status != 0 or "100 executions" not in output or "no finding" not in output:
        yield f"nothing planted: status {status}:\n{output}"
    if left := os.listdir(folder):
        yield f"left behind: {left}"
    status, output = run([program, "--list"], folder, "nothing")
    if output.split() != targets:
        yield f"CMakeLists.txt has {targets}, the program {output.split()}"
    status, output = run([program, folder / "absent"], folder, "nothing")
    if status != 2 or "cannot read" not in output:
        yield f"an absent file: status {status}, wanted 2:\n{output}"


def main():
    programs, targets = pathlib.Path(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        found = list(problems(programs, targets, pathlib.Path(folder)))
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
