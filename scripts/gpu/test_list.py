#!/usr/bin/env python3
"""test_list.py BUILD --source DIR [--labels gpu,...]: the tests of a build folder as JSON, one entry a program.

GoogleTest registers every case with CTest; started one by one each of them would create a CUDA context of its own,
which takes longer than the case. So the cases of a program become one entry, with a filter when only some of its
cases have the label. A program that is one test as a whole (TRANCHE_WHOLE_TESTS, shards) is 'whole': its timeout is for
all of its cases. Paths are written as @BUILD@ and @SOURCE@, so that the list is good wherever these are.
"""
import argparse
import json
import re
import subprocess
import sys

SHARD = re.compile(r"GTEST_(TOTAL_SHARDS|SHARD_INDEX)=")


def properties(test):
    return {entry["name"]: entry["value"] for entry in test.get("properties", [])}


def relocatable(word, build, source):
    # The build folder may be inside the source folder; then it is the longer prefix.
    for prefix, token in sorted(((build, "@BUILD@"), (source, "@SOURCE@")), key=lambda pair: -len(pair[0])):
        word = re.sub(r"(?<![\w/.-])" + re.escape(prefix) + r"(?=/|$)", token, word)
    return "python3" if word.rsplit("/", 1)[-1].startswith("python3") else word


def gathered(tests, labels, build, source):
    """Returns entries in CTest's order. `tests` is the list of `ctest --show-only=json-v1`."""
    entries, programs, left_out = [], {}, set()
    for test in tests:
        command, its = test.get("command"), properties(test)
        if not command:  # the program was not built
            continue
        if {"TRANCHE_TEST_AS_ON_GPU=1", "TRANCHE_EMULATION_LAZY=1"} & set(its.get("ENVIRONMENT", [])):
            continue  # the emulation repeats some cases of a program; on a GPU the program's own entry covers them
        if "libtorch" in its.get("LABELS", []):
            continue  # the bundle has no LibTorch (see scripts/libtorch_tests.sh)
        wanted = sorted(set(its.get("LABELS", [])) & set(labels))
        patterns = [word.split("=", 1)[1] for word in command if word.startswith("--gtest_filter=")]
        whole = "--gtest_brief=1" in command
        key = command[0] if whole or (patterns and len(command) <= 3) else None
        if not wanted:
            if not whole:
                left_out.add(key)
            continue
        entry = programs.get(key) if key else None
        if entry is None:
            entry = {"name": test["name"], "labels": wanted, "timeout": float(its.get("TIMEOUT", 120)),
                     "environment": [text for text in its.get("ENVIRONMENT", []) if not SHARD.match(text)],
                     "command": [relocatable(word, build, source) for word in command], "googletest": False}
            entries.append(entry)
            if key:
                entry.update(name=key.rsplit("/", 1)[-1], command=entry["command"][:1], googletest=True, cases=[],
                             whole=whole)
                programs[key] = entry
        if key:
            entry["cases"] += patterns if not whole or not entry["cases"] else []
            entry["labels"] = sorted(set(entry["labels"]) | set(wanted))
    for key, entry in programs.items():
        cases = entry.pop("cases")
        entry["count"] = len(cases)
        entry["filter"] = ":".join(cases) if key in left_out or (entry["whole"] and cases) else "*"
    return entries


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("build")
    parser.add_argument("--source", required=True)
    parser.add_argument("--labels", default="gpu")
    options = parser.parse_args()
    listing = subprocess.run(["ctest", "--show-only=json-v1"], cwd=options.build, stdout=subprocess.PIPE,
                             check=False)
    if listing.returncode != 0:
        sys.exit(f"test_list: ctest could not list the tests of {options.build}")
    tests = json.loads(listing.stdout)["tests"]
    json.dump(gathered(tests, options.labels.split(","), options.build, options.source), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
