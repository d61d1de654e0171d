#!/usr/bin/env python3
"""sanitized_tests.py BUILD [--log FILE] [--only REGEX] [--commits N] [--most N]: which test programs a run under a sanitizer builds and runs now.

It chooses the programs whose sources, or the folders of the library that they link, the last N (20) commits or the working
tree changed in more than comments, white space and pages; those of tests/comm, tests/offload and tests/pipeline always; and a
third of the others, which moves on with every N commits, so that 3 N commits have run each program. Where that is more than --most (24) programs, as after a change
to a header that all of them include, it takes a third of the changed programs, so that three commits in a row have run
each of them. It says what it leaves out. BUILD is a folder that CMake has configured: it wrote test_programs.json
there.

FILE gets two lines for scripts/test.sh, 'targets NAME...' and 'tests REGEX'. Exit status: 0 chosen, 2 usage.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys

import code_changes

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALWAYS = ("tests/comm", "tests/offload", "tests/pipeline")
THIRDS = 3
# Changes of these files concern every program: how everything is compiled, and inputs of several tests.
EVERYTHING = re.compile(r"^(CMakeLists\.txt|CMakePresets\.json|cmake/Tranche(Options|Dependencies|Targets|Cuda|Testing|Rules)\.cmake"
                        r"|tests/CMakeLists\.txt|tests/configs/.*|tests/combinations\.json)$")
# No program is compiled from these files, and none reads them.
NOTHING = re.compile(r"\.md$|^kernels/cuda/resources\.txt$")
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def git(root, *arguments):
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def changed_files(root, commits):
    """The files whose code, or data, the last commits or the working tree changed; None without the necessary history."""
    count = int(git(root, "rev-list", "--count", "HEAD") or 0)
    if count <= commits:
        return None, count
    names = git(root, "diff", "--name-only", f"HEAD~{commits}") + git(root, "ls-files", "--others", "--exclude-standard")
    names = sorted(name for name in set(names.split("\n")) - {""} if not NOTHING.search(name))
    return code_changes.changed_in_code(root, f"HEAD~{commits}", names), count


def with_includes(root, sources):
    """The sources, and the files of tests/ that they include, directly or not."""
    found, open_files = set(), [pathlib.PurePosixPath(source) for source in sources]
    while open_files:
        file = open_files.pop()
        if str(file) in found or not (root / file).is_file():
            continue
        found.add(str(file))
        for name in INCLUDE.findall((root / file).read_text(encoding="utf-8", errors="replace")):
            for place in (file.parent / name, pathlib.PurePosixPath("tests") / name, pathlib.PurePosixPath(name)):
                if str(place).startswith("tests/"):
                    parts = []
                    for part in place.parts:
                        parts = parts[:-1] if part == ".." else parts + [part]
                    open_files.append(pathlib.PurePosixPath(*parts))
    return found


def concerned(root, program, changed):
    """Whether a changed file is a source of the program or belongs to a folder that it links."""
    sources = with_includes(root, program["sources"])
    # What tests/CMakeLists.txt includes from a folder belongs to that folder.
    home = program["folder"] if program["folder"] != "tests" else str(pathlib.PurePosixPath(program["sources"][0]).parent)
    for file in changed:
        if file in sources or EVERYTHING.match(file):
            return True
        if any(file.startswith((f"{folder}/", f"include/tranche/{folder}/")) for folder in program["folders"]):
            return True
        # Files that are not compiled, such as build files and recorded values, concern the programs of their folder.
        if file.startswith(home + "/") and not re.search(r"\.(cpp|h|cu)$", file):
            return True
    return False


def choose(root, programs, commits, most):
    """Returns (chosen, left out): dictionaries of names and reasons."""
    changed, count = changed_files(root, commits)
    third = count // commits % THIRDS
    chosen, left_out = {}, {}
    for position, (name, program) in enumerate(sorted(programs.items())):
        if changed is None:
            chosen[name] = "no history"
        elif program["folder"] in ALWAYS:
            chosen[name] = "always"
        elif concerned(root, program, changed):
            chosen[name] = "changed"
        elif position % THIRDS == third:
            chosen[name] = f"third {third + 1} of {THIRDS}"
        else:
            left_out[name] = f"third {position % THIRDS + 1} of {THIRDS}"
    if len(chosen) > most and count > 0:
        changed_ones = [name for name, why in chosen.items() if why == "changed"]
        for position, name in enumerate(changed_ones):
            if position % THIRDS != count % THIRDS:
                del chosen[name]
                left_out[name] = "changed, for the next commits"
    return chosen, left_out


def tests_of(build):
    """The words of the command of each test of the build."""
    listed = subprocess.run(["ctest", "--test-dir", str(build), "--show-only=json-v1"], capture_output=True, text=True, check=True)
    return {test["name"]: test.get("command", []) for test in json.loads(listed.stdout)["tests"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--log", type=pathlib.Path)
    parser.add_argument("--only", default="", metavar="REGEX", help="no other programs")
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--most", type=int, default=24, metavar="N", help="of more programs only a third of the changed ones")
    options = parser.parse_args()
    listing = options.build / "test_programs.json"
    if not listing.is_file() or options.commits < 1:
        print(f"sanitized_tests: {listing} is missing: configure {options.build} first" if options.commits > 0
              else f"sanitized_tests: --commits {options.commits} is not a number of commits", file=sys.stderr)
        return 2
    programs = json.loads(listing.read_text(encoding="utf-8"))
    programs = {name: program for name, program in programs.items() if re.search(options.only, name)}
    chosen, left_out = choose(ROOT, programs, options.commits, options.most)
    print(f"{len(chosen)} of {len(programs)} programs of {options.build} (the last {options.commits} commits; --full takes all):")
    for reason in sorted(set(chosen.values())):
        print(f"  {reason}: {' '.join(name for name, why in chosen.items() if why == reason)}")
    for reason in sorted(set(left_out.values())):
        print(f"  left out, {reason}: {' '.join(name for name, why in left_out.items() if why == reason)}")
    if options.log:
        names = []
        for test, command in tests_of(options.build).items():
            # ctest has no command for a program that is not built yet; its tests carry the program's name.
            program = test.split(".")[0].replace("fuzz", "fuzz_readers")
            if program not in programs:
                program = next((name for name in programs if re.search(rf"/{re.escape(name)}(?![\w./])", " ".join(command))), "")
            if program in chosen:
                names.append(re.escape(test))
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text(f"targets {' '.join(chosen)}\ntests ^({'|'.join(names)})$\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
