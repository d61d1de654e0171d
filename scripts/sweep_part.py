#!/usr/bin/env python3
"""This module cuts the sweeps of tests into parts: TRANCHE_TEST_PART="k/n" runs part k of n, 0 <= k < n, and all n parts together run everything.

Without the variable everything runs. Continuous integration runs another part on every commit (scripts/test.sh), and `--full` everything. What a
part leaves out is printed.

sweep_part.py NUMBER COMMAND...: runs a command that is number NUMBER of a sweep, if this run's part has it; else prints so and ends with status 77.
"""
import os
import re
import sys

VARIABLE = "TRANCHE_TEST_PART"


class BadPart(SystemExit):
    """Raised if the variable cannot be parsed; the test ends with this text."""


def current():
    """Returns (k, n); (0, 1) if the variable is not set."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return 0, 1
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise BadPart(f"{VARIABLE} is '{text}'; it has the form k/n with 0 <= k < n, such as 1/3, or is not set, and then everything runs")
    return int(found[1]), int(found[2])


def chosen(items, axes=None):
    """Returns the indices of this run's items, without printing."""
    k, n = current()
    count = len(items)
    taken = set(range(k, count, n)) or {k % count} if count else set()
    met = {value for index in taken for value in enumerate(axes(items[index]))} if axes else set()
    for index in [*range(k, count), *range(k)] if axes else []:
        values = set(enumerate(axes(items[index])))
        if not values <= met:
            taken.add(index)
            met |= values
    return sorted(taken)


def part(items, axes=None, name=str, what="configurations"):
    """Returns this run's items of a sweep, in their order, and prints how many there are and which are left out.

    `axes` returns a tuple of an item's values, such as (ranks, stage): every part then meets each value that the whole sweep has, with more than
    an n-th of the items if need be. A part has one item at least. `name` returns what stands for an item in the list of those left out.
    """
    items = list(items)
    taken = chosen(items, axes)
    k, n = current()
    if n > 1:
        left = ", ".join(name(item) for index, item in enumerate(items) if index not in taken)
        print(f"part {k}/{n} of {len(items)} {what}: {len(taken)} run ({VARIABLE}); left out: {left or 'none'}", flush=True)
    return [items[index] for index in taken]


def part_of_count(count, what):
    """Returns this part's share of `count` draws, one at least, and prints it. Draws have seeds of their own, which the caller prints."""
    k, n = current()
    share = max(1, len(range(k, count, n))) if count > 0 else 0
    if n > 1:
        print(f"part {k}/{n} of {count} {what}: {share} run ({VARIABLE})", flush=True)
    return share


def main():
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        print(__doc__.strip().split("\n")[-1], file=sys.stderr)
        return 2
    k, n = current()
    if int(sys.argv[1]) % n != k:
        print(f"part {k}/{n} ({VARIABLE}) leaves number {sys.argv[1]} of its sweep out: {' '.join(sys.argv[2:])}")
        return 77
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
