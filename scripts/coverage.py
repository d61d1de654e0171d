#!/usr/bin/env python3
"""Line and branch coverage of the library's sources by folder, of a build whose tests have run.

    cmake --preset coverage && cmake --build --preset coverage && ctest --preset coverage
    coverage.py build/coverage [BUILD...] [--json FILE] [--compare OTHER.json [--allow POINTS]] [--lost]
    coverage.py --merge A.json B.json... [the same options]
    coverage.py --reset BUILD          forgets what has run there, before other tests run that are to be measured alone

It asks gcov about every object of a build that was compiled with --coverage. The counts of a source's line are added over all objects:
large units and headers count for their real sources, and a line is covered if any object has run it. A branch is the nth one of its line.
A call that may throw is no branch: neither the exception nor the normal return counts. Files in tests/, bench/ and examples/ do not count,
nor do those that CMake has written, nor those outside of the repository; a public header counts for its layer's folder. Objects that nothing has
run count as not covered. Processes that are killed or abort leave no counts. One that is killed while it writes them can damage the
.gcda file of an object; the script then fails and names the file.

--json writes what can be covered and what was, so that --merge can put the parts of a run together, and --compare can say the difference in points.
--lost lists the lines and branches that OTHER covered and this one did not, which is of use only where both have the same sources.

Exit status: 0, 1 --compare found that lines or branches in all have fallen by more than --allow (0.5 points), 2 usage, or gcov failed.
"""
import argparse
import array
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

SCHEMA = "tranche-coverage-1"
LEFT_OUT = ("tests", "bench", "examples")
KINDS = ("lines", "branches")
AT_ONCE = 8  # objects in one call of gcov
# gcov continues after these messages, and counts nothing of the object, or nothing from there on
UNUSABLE = re.compile(r":(stamp mismatch|version '|profile mismatch|unknown function|overflowed|corrupted|not a gcov data file)")
MEMBERS = ("lines", "covered_lines", "branches", "covered_branches")


class Unusable(Exception):
    """Raised if there is no result; exit status 2."""


def empty():
    """The numbers of lines, and (line, number) of branches: those that exist and those that were covered."""
    return {member: set() for member in MEMBERS}


def join(into, more):
    for path, found in more.items():
        mine = into.setdefault(path, empty())
        for member in MEMBERS:
            mine[member] |= found[member]


def whole(counts):
    """Says if a .gcda file has its end: records of a tag, a length and data, and then a tag of 0. gcov takes the end of a file for that tag. GCC 12
    and later count lengths in bytes and have a fourth word before the first record; a length below 0 stands for counters that are all 0."""
    words = array.array("i", counts[:len(counts) // 4 * 4])
    major = words[1].to_bytes(4, "big")[:2] if len(words) > 1 else b""
    at, size = (4, 4) if major >= b"B2" else (3, 1)
    while at < len(words) and words[at] != 0:
        at += 2 + (max(words[at + 1], 0) // size if at + 1 < len(words) else 0)
    return at < len(words)


def source_name(path, folder, root, build):
    """The name in the repository of a file that gcov reports; None if it does not count."""
    resolved = pathlib.Path(os.path.realpath(os.path.join(folder, path)))
    if not resolved.is_relative_to(root) or resolved.is_relative_to(build):
        return None
    name = resolved.relative_to(root)
    return None if name.parts[0] in LEFT_OUT else name.as_posix()


def decisions(branches):
    """The indices of branches that are decisions. A call has two others, one after the other: the exception's path and the normal one
    beside it."""
    calls = set()
    for index, branch in enumerate(branches):
        if not branch["throw"]:
            continue
        calls.add(index)
        for beside in (index - 1, index + 1):
            if 0 <= beside < len(branches) and beside not in calls and branches[beside]["fallthrough"] and not branches[beside]["throw"]:
                calls.add(beside)
                break
    return [index for index in range(len(branches)) if index not in calls]


def covered_by(objects, gcov, prefix, root, build):
    """Runs gcov on some objects and combines its results by source. `prefix`: only files below it are read; None: all."""
    command = [gcov, "--json-format", "--stdout", "--branch-probabilities"]
    if prefix is not None:
        command += ["--relative-only", "--source-prefix", prefix]
    done = subprocess.run(command + objects, cwd=build, capture_output=True, text=True, check=False)
    if done.returncode != 0 or UNUSABLE.search(done.stderr):
        raise Unusable(f"gcov failed with status {done.returncode}: {done.stderr.strip()[-2000:]}\nWhere counts are of an earlier build, "
                       f"use --reset and run the tests again; remove a file that a killed process has damaged, and run the tests again; --gcov "
                       f"names the gcov of the compiler.")
    files, names = {}, {}
    for text in done.stdout.splitlines():
        if not text:
            continue
        document = json.loads(text)
        folder = os.path.join(build, document["current_working_directory"])
        for entry in document["files"]:
            place = (folder, entry["file"])
            if place not in names:
                names[place] = source_name(entry["file"], folder, root, build)
            if names[place] is None:
                continue
            found = files.setdefault(names[place], empty())
            for line in entry["lines"]:
                number = line["line_number"]
                found["lines"].add(number)
                if line["count"] > 0:
                    found["covered_lines"].add(number)
                for index in decisions(line["branches"]):
                    found["branches"].add((number, index))
                    if line["branches"][index]["count"] > 0:
                        found["covered_branches"].add((number, index))
    return files


def source_folder(build):
    """The repository's path as CMake and therefore gcov write it; None if the folder is not a CMake build."""
    try:
        for line in (build / "CMakeCache.txt").read_text(encoding="utf-8").splitlines():
            if line.startswith("CMAKE_HOME_DIRECTORY:INTERNAL="):
                return line.split("=", 1)[1]
    except OSError:
        pass
    return None


def collect(build, gcov, root, jobs):
    if not build.is_dir():
        raise Unusable(f"there is no folder {build}")
    objects = sorted(str(path) for path in build.rglob("*.gcno"))
    if not objects:
        raise Unusable(f"{build} has no .gcno files: it was not compiled with --coverage (cmake --preset coverage)")
    counted = sorted(build.rglob("*.gcda"))
    if not counted:
        raise Unusable(f"{build} has no .gcda files: no test has run there")
    for path in counted:
        if not whole(path.read_bytes()):
            raise Unusable(f"{path} has no end: a process was killed while it wrote the file. Remove it, and run the tests again")
    prefix = source_folder(build)
    root = pathlib.Path(os.path.realpath(root or prefix or pathlib.Path(__file__).resolve().parent.parent))
    files = {}
    # Parts are small, so that one with large units does not delay the end.
    parts = [objects[i:i + AT_ONCE] for i in range(0, len(objects), AT_ONCE)]
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        for part in pool.map(covered_by, parts, [gcov] * len(parts), [prefix] * len(parts), [root] * len(parts), [build] * len(parts)):
            join(files, part)
    if not files:
        raise Unusable(f"{build} has objects of no source below {root}; --root names the repository")
    return files


def to_json(files):
    def members(found):
        return {"lines": sorted(found["lines"]), "covered_lines": sorted(found["covered_lines"]),
                **{member: [f"{line}.{index}" for line, index in sorted(found[member])] for member in ("branches", "covered_branches")}}
    text = ",\n".join(f"  {json.dumps(path)}: {json.dumps(members(files[path]), separators=(',', ':'))}" for path in sorted(files))
    return f'{{"schema": "{SCHEMA}", "files": {{\n{text}\n}}}}\n'


def from_json(path):
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']}")
        return {name: {member: {tuple(map(int, each.split("."))) for each in found[member]} if "branches" in member else set(found[member])
                       for member in MEMBERS} for name, found in document["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise Unusable(f"{path} is no file that --json wrote: {problem!r}") from problem


def folder_of(path):
    parts = path.split("/")
    if parts[:2] == ["include", "tranche"] and len(parts) > 3:
        return parts[2]
    return parts[0] if len(parts) > 1 else "."


def counts_of(files):
    """{folder: {kind: (all, covered)}}; the last entry, "all", is the total of all folders."""
    folders = {}
    for path, found in files.items():
        for folder in (folder_of(path), "all"):
            counts = folders.setdefault(folder, {kind: [0, 0] for kind in KINDS})
            for kind in KINDS:
                counts[kind][0] += len(found[kind])
                counts[kind][1] += len(found["covered_" + kind])
    return {**{folder: folders[folder] for folder in sorted(set(folders) - {"all"})}, "all": folders["all"]}


def percent(counts, kind):
    count, covered = counts[kind] if counts is not None else (0, 0)
    return 100.0 * covered / count if count > 0 else None


def table(mine, other):
    rows = [f"{'folder':<12}" + "".join(f"{kind:>10}{'covered':>11}" + (f"{'points':>9}" if other else "") for kind in KINDS)]
    for folder in [each for each in sorted(set(mine) | set(other or {})) if each != "all"] + ["all"]:
        text = f"{folder:<12}"
        for kind in KINDS:
            now = percent(mine.get(folder), kind)
            text += f"{mine[folder][kind][0] if folder in mine else 0:>10}" + (f"{now:>9.2f} %" if now is not None else f"{'-':>11}")
            if other:
                before = percent(other.get(folder), kind)
                text += f"{now - before:>+9.2f}" if now is not None and before is not None else f"{'-':>9}"
        rows.append(text)
    return "\n".join(rows)


def ranges(numbers):
    """Formats line numbers as "3-5, 9"."""
    runs = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def lost(files, other):
    for path in sorted(other):
        mine = files.get(path, empty())
        lines = other[path]["covered_lines"] - mine["covered_lines"]
        branches = {line for line, _ in other[path]["covered_branches"] - mine["covered_branches"]} - lines
        if lines:
            yield f"{path}: lost lines {ranges(lines)}"
        if branches:
            yield f"{path}: lost branches in lines {ranges(branches)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*", type=pathlib.Path, metavar="BUILD", help="a build folder; several are put together")
    parser.add_argument("--merge", nargs="+", type=pathlib.Path, default=[], metavar="FILE", help="files of --json, put together")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="writes what there is and what is covered")
    parser.add_argument("--compare", type=pathlib.Path, metavar="OTHER.json", help="prints the differences to it")
    parser.add_argument("--allow", type=float, default=0.5, metavar="POINTS", help="by which a total may fall; 0.5 unless given")
    parser.add_argument("--lost", action="store_true", help="with --compare: the lines and branches that it alone covered")
    parser.add_argument("--reset", action="store_true", help="removes the counts of BUILD and ends")
    parser.add_argument("--root", type=pathlib.Path, metavar="DIR", help="the repository, where it is not that of the build")
    parser.add_argument("--gcov", default="gcov", metavar="PROGRAM", help="the gcov of the compiler")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="calls of gcov at once; as many as cores unless given")
    options = parser.parse_args()
    try:
        if not options.builds and not options.merge:
            raise Unusable("it needs a build folder, or files of --json behind --merge")
        if options.lost and options.compare is None:
            raise Unusable("--lost needs --compare")
        if options.reset:
            removed = [path for build in options.builds for path in build.rglob("*.gcda")]
            for path in removed:
                path.unlink()
            print(f"{len(removed)} files with counts were removed.")
            return 0
        other = from_json(options.compare) if options.compare is not None else None
        files = {}
        for build in options.builds:
            join(files, collect(pathlib.Path(os.path.realpath(build)), options.gcov, options.root, options.jobs))
        for path in options.merge:
            join(files, from_json(path))
    except (Unusable, FileNotFoundError) as reason:
        print(f"coverage.py: {reason}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(to_json(files), encoding="utf-8")
    mine = counts_of(files)
    before = counts_of(other) if other is not None else None
    print(table(mine, before))
    if before is None:
        return 0
    if options.lost:
        print("\n".join(lost(files, other)))
    status = 0
    for kind in KINDS:
        now, then = percent(mine["all"], kind), percent(before["all"], kind)
        if now is not None and then is not None and then - now > options.allow + 1e-9:
            print(f"coverage.py: {kind} have fallen by {then - now:.2f} points; at most {options.allow:g} are allowed", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
