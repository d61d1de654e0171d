#!/usr/bin/env python3
"""case_times.py FILE.json... [--rows N]: the slowest cases of GoogleTest's JSON files (--gtest_output=json:FILE, or the tests.json of run.sh),
and for each program its slowest, which EMULATED_SECONDS of plan.py takes from a run on the emulation."""
import argparse
import json
import pathlib
import sys


def cases_of(name, document):
    """[(seconds, program, case)] of a report, or of a tests.json that contains reports by program."""
    if "testsuites" not in document:
        return [case for program, reports in document.items() for report in reports for case in cases_of(program, report)]
    return [(float(case["time"].rstrip("s")), name, f"{case['classname']}.{case['name']}")
            for suite in document["testsuites"] for case in suite["testsuite"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--rows", type=int, default=20)
    options = parser.parse_args()
    cases = []
    for file in options.files:
        try:
            cases += cases_of(file.stem, json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError) as error:
            sys.exit(f"case_times.py: {file} is no report of GoogleTest: {error}")
    cases.sort(reverse=True)
    for seconds, program, case in cases[:options.rows]:
        print(f"{seconds:8.2f} s  {program}  {case}")
    slowest = {}
    for seconds, program, _ in cases:
        slowest.setdefault(program, seconds)
    print("EMULATED_SECONDS = " + repr([(program, round(seconds, 1)) for program, seconds in slowest.items() if seconds > 10]))


if __name__ == "__main__":
    main()
