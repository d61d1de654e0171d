#!/usr/bin/env python3
"""Measures where the time of a build and of its tests goes. The tables are Markdown.

usage: build_times.py BUILD [--json FILE] [--top N]
       build_times.py BUILD --mark FILE
       build_times.py BUILD --since FILE [--json FILE] [--top N]
       build_times.py BUILD [--json FILE] [--top N] --run [CTEST ARGUMENTS...]

BUILD is a folder that Ninja has built. The first form reads its .ninja_log and prints the seconds of each folder and kind of work, and the
slowest sources and links. A command of the build is one process, so its duration counts as its processor seconds. This is too much where more
commands ran at once than there were free cores, too little where a command has several processes at once, and next to nothing where the
compiler's cache had the object. A large unit (CMAKE_UNITY_BUILD) counts as one source. Commands that build.ninja no longer has are left out.

--mark writes down which compilations the log has now. --since says how many have run after that mark: those that are new, those whose
command line changed, and those with the same command line, whose source, headers or generated files changed.

--run starts ctest in BUILD with all arguments that follow, passes its output through, returns its status, and looks at /proc every 50 ms. It prints
for each test the wall seconds, which ctest says, the processor seconds of all its processes, and the difference, which are the seconds waited.
In them the test used less than one core, because it slept or because other work had the cores: run it on a quiet machine. A test with several threads
may hide waits. It needs Linux and ctest's usual output (not --quiet or --progress). A test with several labels counts for each of them.

Exit status: 0, with --run that of ctest; 2 wrong usage, or a BUILD or FILE that cannot be read.
"""
import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys

sys.dont_write_bytecode = True  # a build writes no files beside the sources
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from process_times import Unusable, measure  # noqa: E402

KINDS = ["C++ compile", "CUDA compile", "header check", "link", "other steps"]
VERSIONS = (5, 6, 7)  # These versions of .ninja_log differ in the hash of a command line only.
OBJECT = re.compile(r"^(?:(.*)/)?CMakeFiles/([^/]+)\.dir(?:/(.*?)(?:\.o|\.obj|\.gch)?)?$")
LONG_WAIT = 2  # A test that waits for more seconds is named.


def table(header, rows):
    """Returns the lines of a Markdown table, with columns of numbers to the right."""
    rows = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    right = [bool(rows) and all(re.fullmatch(r"[\d.]+ ?%?", row[n]) for row in rows) for n in range(len(header))]
    width = [max(len(row[n]) for row in [header, *rows]) for n in range(len(header))]
    lines = [[cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, width, right)] for row in [header, *rows]]
    lines.insert(1, ["-" * (w - 1) + (":" if r else "-") for w, r in zip(width, right)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def relative(name, build):
    """Returns the path as it is seen from the build folder, which the log has for most outputs."""
    return os.path.relpath(name, build.resolve()) if os.path.isabs(name) else name


def read_rules(build):
    """Returns {output: (rule, folder of the target's objects)} of build.ninja, or None if there is none."""
    if not (build / "build.ninja").exists():
        return None
    rules, outputs = {}, []
    for line in (build / "build.ninja").read_text(encoding="utf-8", errors="replace").splitlines():
        found = re.match(r"build (.*?): (\S+)", line)
        if found:
            names = re.split(r"(?<!\$) +", found[1].replace("${cmake_ninja_workdir}", ""))
            outputs = [relative(name.replace("$ ", " "), build) for name in names if name != "|"]
            rules.update((output, (found[2], "")) for output in outputs)
        elif line.startswith("  OBJECT_DIR = "):
            rules.update((output, (rules[output][0], line.split(" = ", 1)[1])) for output in outputs)
    return rules


def place(path):
    """Returns the name of the row of the first table in which a folder of the build is counted."""
    parts = re.split(r"(?:^|/)CMakeFiles(?:/|$)", path)[0].split("/")
    return "/".join(parts[:2 if parts[0] == "tests" else 1]) or "."


def edge(output, rule, objects):
    """Returns (kind, folder, target, source) of a command of the build. `rule` and `objects` are "" if build.ninja does not contain them.
    """
    found = OBJECT.match(output) if output.endswith((".o", ".obj", ".gch")) else OBJECT.match(objects)
    folder, target, source = (found[1] or "", found[2], found[3] or "") if found else (os.path.dirname(output), "", "")
    if folder == "tests/headers" or folder.startswith("tests/headers/"):
        kind = "header check"
    elif output.endswith("cmake_device_link.o"):
        kind, source = "link", ""
    elif source:
        kind = "CUDA compile" if source.endswith(".cu") else "C++ compile"
    elif "LINKER" in rule or "SYMLINK" in rule:
        kind = "link"
    elif not rule and "CMakeFiles/" not in output and re.search(r"(^|/)[^/.]+$|\.a$|\.so[.\d]*$", output):
        kind = "link"
    else:
        kind = "other steps"
    return kind, place(folder), target, os.path.normpath(os.path.join(folder, source.replace("__/", "../"))) if source else ""


def read_log(build):
    """Returns the commands that .ninja_log has, each once, and the number of those that build.ninja no longer has."""
    if not build.is_dir():
        raise Unusable(f"there is no folder {build}")
    log = build / ".ninja_log"
    if not log.is_file():
        raise Unusable(f"there is no .ninja_log in {build}: build it with Ninja first")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    version = re.fullmatch(r"# ninja log v(\d+)", lines[0] if lines else "")
    if not version or int(version[1]) not in VERSIONS:
        raise Unusable(f"{log} begins with '{lines[0] if lines else ''}'; only '# ninja log v{VERSIONS[0]}' to v{VERSIONS[-1]} can be read")
    last = {}
    for line in lines[1:]:
        fields = line.split("\t")
        if len(fields) == 5 and fields[0].isdigit() and fields[1].isdigit():  # A line may be cut off; Ninja passes over it too.
            last[fields[3]] = (int(fields[0]), int(fields[1]), fields[2], fields[4])
    outputs = collections.defaultdict(list)
    for output, (begin, end, _, command) in last.items():
        outputs[begin, end, command].append(output)
    rules, edges, gone = read_rules(build), [], 0
    for (begin, end, command), names in outputs.items():
        short = sorted((relative(name, build) for name in names), key=lambda name: (name.startswith(".."), name))
        known = [name for name in short if rules is None or name in rules]
        if not known:
            gone += 1
            continue
        rule, objects = (rules or {}).get(known[0], ("", ""))
        kind, folder, target, source = edge(known[0], rule, objects)
        edges.append({"output": known[0], "kind": kind, "folder": folder, "target": target, "source": source, "seconds": (end - begin) / 1000,
                      "ran": [begin, end, min(last[name][2] for name in names), command]})
    return edges, gone


def unit(build, one):
    """Returns the name of a compiled source in the tables, which for a large unit has the sources that it includes."""
    if "/Unity/" not in one["output"]:
        return one["source"] or one["output"]
    path = build / re.sub(r"\.o(bj)?$", "", one["output"])
    names = [os.path.basename(name) for name in re.findall(r'^#include "(.*)"', path.read_text(encoding="utf-8"), re.MULTILINE)] if path.is_file() else []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{one['source'].replace('/Unity/', '/')} ({', '.join(names[:3])}{more})" if names else one["source"]


def compiled(edges):
    return [one for one in edges if one["source"] or one["kind"] == "header check"]


def build_report(build, top):
    edges, gone = read_log(build)
    folders = collections.defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    for one in edges:
        folders[one["folder"]][one["kind"]] += one["seconds"]
    columns = {kind: [one for one in edges if one["kind"] == kind] for kind in KINDS}
    sums = {kind: sum(one["seconds"] for one in ones) for kind, ones in columns.items()}
    total = float(sum(sums.values()))
    rows = [[name, *of.values(), sum(of.values())] for name, of in sorted(folders.items(), key=lambda item: -sum(item[1].values()))]
    rows += [["all", *map(float, sums.values()), total], ["number of commands", *map(len, columns.values()), len(edges)]]
    slowest = sorted(edges, key=lambda one: -one["seconds"])
    sources = compiled(slowest)
    links = [one for one in slowest if one["kind"] == "link"]
    print(f"Processor seconds of the build, {total:.1f} in all:\n")
    print(table(["folder", *KINDS, "total"], rows))
    if gone:
        print(f"Left out, as build.ninja no longer has them: {gone} commands of the log.\n")
    print(f"The slowest of {len(sources)} compiled sources:\n")
    print(table(["seconds", "source", "target"], [[one["seconds"], unit(build, one), one["target"]] for one in sources[:top]]))
    print(f"The slowest of {len(links)} links:\n")
    print(table(["seconds", "output", "folder"], [[one["seconds"], one["output"], one["folder"]] for one in links[:top]]))
    return {"seconds": total, "folders": folders, "kinds": sums, "edges": slowest, "gone": gone}


def mark(build, path):
    edges = {one["output"]: one["ran"] for one in compiled(read_log(build)[0])}
    path.write_text(json.dumps({"compilations": edges}), encoding="utf-8")


def since_report(build, path, top):
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["compilations"]
    except (ValueError, KeyError, TypeError) as error:
        raise Unusable(f"{path} is no file that --mark wrote") from error
    now = compiled(read_log(build)[0])
    reasons = {"new": [], "other command line": [], "same command line": []}
    for one in now:
        was = before.get(one["output"])
        if was is None:
            reasons["new"].append(one)
        elif was != one["ran"]:
            reasons["other command line" if was[3] != one["ran"][3] else "same command line"].append(one)
    ran = [(one, why) for why, ones in reasons.items() for one in ones]
    count = collections.Counter(one["kind"] for one, _ in ran)
    words = [f"{count[kind]} {noun}{'' if count[kind] == 1 else 's'}" for kind, noun in
             (("CUDA compile", "CUDA source"), ("C++ compile", "C++ source"), ("header check", "header check")) if kind != "header check" or count[kind]]
    again = len(ran) - len(reasons["new"])
    print(f"{', '.join(words[:-1])} and {words[-1]} compiled, {again} of them again, of {len(now)}")
    if ran:
        print("\n" + table(["compiled", *reasons, "total"], [[kind, *(sum(one["kind"] == kind for one in ones) for ones in reasons.values()), count[kind]]
                                                            for kind in KINDS if count[kind]]))
        ran.sort(key=lambda item: -item[0]["seconds"])
        print(table(["seconds", "source", "target", "why"], [[one["seconds"], unit(build, one), one["target"], why] for one, why in ran[:top]]))
    return {"all": len(now), "ran": [{**one, "why": why} for one, why in ran]}


def test_report(build, arguments, top):
    tests, everything, others, status = measure(build, arguments)
    rows = [{"name": test.name, "labels": test.labels, "wall": test.wall, "processor": round(test.processor, 3),
             "waited": round(max(0.0, test.wall - test.processor), 3)} for test in tests]
    figures = ("wall", "processor", "waited")
    labels = {}
    for label in sorted({label for row in rows for label in row["labels"] or ["no label"]}):
        of = [row for row in rows if label in (row["labels"] or ["no label"])]
        labels[label] = {"tests": len(of), **{figure: sum(row[figure] for row in of) for figure in figures}}
    labels["all"] = {"tests": len(rows), **{figure: sum((row[figure] for row in rows), 0.0) for figure in figures}}
    seconds = [f"{figure} s" for figure in figures]
    print(f"\nSeconds by label; ctest and everything below it used {everything:.1f} processor seconds, and other work on the machine {others:.1f}:\n")
    print(table(["label", "tests", *seconds], [[label, *of.values()] for label, of in labels.items()]))
    print(f"The slowest of {len(rows)} tests:\n")
    print(table(["test", *seconds, "label"], [[row["name"], *(row[figure] for figure in figures), ", ".join(row["labels"])]
                                              for row in sorted(rows, key=lambda row: -row["wall"])[:top]]))
    print(f"What each suite waits for: the tests that wait more than {LONG_WAIT} s:\n")
    waits = [[label, row["name"], row["waited"], f"{row['waited'] / row['wall']:.0%}", f"{row['waited'] / labels[label]['waited']:.0%}"]
             for label in labels if label != "all" for row in sorted(rows, key=lambda row: -row["waited"])
             if label in (row["labels"] or ["no label"]) and row["waited"] > LONG_WAIT]
    print(table(["label", "test", "waited s", "of its wall time", "of the label's waiting"], waits) if waits else "none")
    return {"tests": rows, "labels": labels, "processor": everything, "others": others, "status": status}


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser.add_argument("build", type=pathlib.Path, metavar="BUILD")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="writes all figures there too")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="lines of the lists of what is slowest; 20")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--mark", type=pathlib.Path, metavar="FILE")
    mode.add_argument("--since", type=pathlib.Path, metavar="FILE")
    mode.add_argument("--run", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    options = parser.parse_args(arguments)
    try:
        if options.mark:
            return mark(options.build, options.mark)
        if options.run is not None:
            report = test_report(options.build, options.run, options.top)
        elif options.since:
            report = since_report(options.build, options.since, options.top)
        else:
            report = build_report(options.build, options.top)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return report.get("status", 0)
    except (Unusable, OSError, subprocess.CalledProcessError) as error:
        print(f"build_times.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
