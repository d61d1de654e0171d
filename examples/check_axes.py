#!/usr/bin/env python3
"""Runs an example on one rank and on several. The losses, weights and states of all runs must equal those of one rank: in every character,
or with a tolerance T in every number within T times the largest number of its line.

usage: check_axes.py LAUNCHER PROGRAM [--tolerance T] [--expect TEXT]... [--between PATTERN LEAST MOST]... RUN...
RUN is "RANKS ARGUMENTS". TEXT is "RUN: beginning of a line that it prints"; PATTERN is a regular expression of that form, whose group
is a number between LEAST and MOST.
"""
import argparse
import re
import subprocess
import sys

NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()


def results(lines):
    return [line for line in lines if line.startswith(("step ", "weights ", "state "))]


def equal(expected, found, tolerance):
    if tolerance == 0 or len(expected) != len(found):
        return expected == found
    for one, other in zip(expected, found):
        numbers, others = ([float(number) for number in NUMBER.findall(line)] for line in (one, other))
        if one.startswith("step "):
            numbers, others = numbers[1:], others[1:]
        if len(numbers) != len(others):
            return False
        bound = tolerance * max(abs(number) for number in numbers)
        if any(abs(a - b) > bound for a, b in zip(numbers, others)):
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("launcher")
    parser.add_argument("program")
    parser.add_argument("--tolerance", type=float, default=0)
    parser.add_argument("--expect", action="append", default=[])
    parser.add_argument("--between", nargs=3, action="append", default=[])
    parser.add_argument("runs", nargs="+")
    options = parser.parse_args()
    expected = results(run([options.program]))
    losses = [float(line.split()[3]) for line in expected if line.startswith("step ")]
    if len(losses) < 2 or losses[-1] >= losses[0]:
        sys.exit(f"one rank does not learn: {losses}")
    printed = []
    for each in options.runs:
        ranks, *arguments = each.split()
        lines = run([options.launcher, ranks, options.program, *arguments])
        printed += [f"{each}: {line}" for line in lines]
        if not equal(expected, results(lines), options.tolerance):
            sys.exit("\n".join([f"{each} gave", *lines, "and one rank", *expected]))
    print("\n".join(printed))
    for text in options.expect:
        if not any(line.startswith(text) for line in printed):
            sys.exit(f"no line begins with '{text}'")
    for pattern, least, most in options.between:
        found = [float(match.group(1)) for line in printed if (match := re.match(pattern, line))]
        if len(found) != 1 or not float(least) <= found[0] <= float(most):
            sys.exit(f"'{pattern}' gave {found}, not one number between {least} and {most}")


main()
