#!/usr/bin/env python3
"""kernel_resources.py BUILD [--write] [--only REGEX] [--lock FILE]: the resources that ptxas assigns to each kernel on compute capability
9.0: registers, stack frame, spills, static shared memory.

BUILD is a configured folder of the preset cuda, whose compile_commands.json has the compile commands; nothing needs to be built in it.
Compares with kernels/cuda/resources.txt, or with --write writes it. Exit status: 0 equal, 1 it differs or a kernel breaks a rule, 2 usage,
77 there is no nvcc.

Rules: no kernel spills; registers times threads of its launch bound are at most 65,536; a kernel of an optimizer's rule has no stack frame,
except those in the file.
"""
import argparse
import concurrent.futures
import fcntl
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = ROOT / "kernels" / "cuda" / "resources.txt"
HEAD = ("# What ptxas gives each kernel on compute capability 9.0. Made and compared by scripts/gpu/kernel_resources.py.\n"
        "# threads: the launch bound, 1024 where there is none. stack, spill and shared are bytes.\n"
        "# source threads registers stack spill shared kernel\n")
ENTRY = re.compile(r"\.entry (\w+)\(.*?\)\s*((?:\.\w+ [\d, ]+\s*)*)\{", re.DOTALL)
TOLD = re.compile(r"Compiling entry function '(\w+)'.*?\n.*?\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
                  r"\n.*?Used (\d+) registers(.*)")


def entries_of_ptx(text):
    """{mangled name: threads of the launch bound}."""
    found = {}
    for name, directives in ENTRY.findall(text):
        bound = re.search(r"\.maxntid ([\d, ]+)", directives)
        threads = 1024
        if bound:
            threads = 1
            for number in bound.group(1).split(","):
                threads *= int(number)
        found[name] = threads
    return found


def rows_of(source, ptx, told):
    """[(source, threads, registers, stack, spill, shared, mangled name)]."""
    bounds, rows = entries_of_ptx(ptx), []
    for name, stack, stores, loads, registers, rest in TOLD.findall(told):
        shared = re.search(r"(\d+) bytes smem", rest)
        rows.append((source, bounds.get(name, 1024), int(registers), int(stack), int(stores) + int(loads),
                     int(shared.group(1)) if shared else 0, name))
    return rows


def demangled(names):
    """Demangles names and removes the parts that depend on the sources' paths."""
    text = subprocess.run(["c++filt"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True).stdout
    return [re.sub(r"\s+", " ", line.replace("(anonymous namespace)::", "").replace("tranche::kernels::cuda::", "")).strip()
            for line in text.splitlines()]


def compile_one(command, lock):
    words = shlex.split(command["command"])
    kept, skip = [], False
    for word in words[next(index for index, word in enumerate(words) if word.endswith("nvcc")):]:
        if skip:
            skip = False
        elif word in ("-o", "-c", "-x"):
            skip = word != "-c"
        elif not word.startswith(("--generate-code", "-Xptxas", "-lineinfo")):
            kept.append(word)
    # With a lock only one builder runs at a time.
    with open(lock, "w", encoding="utf-8") as held, tempfile.NamedTemporaryFile(suffix=".ptx") as ptx:
        fcntl.flock(held, fcntl.LOCK_EX)
        made = subprocess.run([*kept, "-x", "cu", "-ptx", "-arch=compute_90", "-o", ptx.name], cwd=command["directory"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"{command['file']}: nvcc failed:\n{made.stdout[-2000:]}")
        ptxas = str(pathlib.Path(kept[0]).with_name("ptxas"))
        told = subprocess.run([ptxas, "-v", "-arch=sm_90", ptx.name, "-o", "/dev/null"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
        if told.returncode:
            raise RuntimeError(f"{command['file']}: ptxas failed:\n{told.stdout[-2000:]}")
        text = pathlib.Path(ptx.name).read_text(encoding="utf-8", errors="replace")
    return rows_of(pathlib.Path(command["file"]).stem, text, told.stdout)


def lines_of(rows):
    names = demangled([row[-1] for row in rows])
    return sorted(" ".join(map(str, (*row[:-1], name))) for row, name in zip(rows, names) if "kernel_of_this_source" not in name)


def parsed(lines):
    """{(source, kernel): (threads, registers, stack, spill, shared)}."""
    found = {}
    for line in lines:
        if line.strip() and not line.startswith("#"):
            source, *numbers, name = line.strip().split(" ", 6)
            found[source, name] = tuple(map(int, numbers))
    return found


def broken_rules(kernels):
    """Violations of the rules, independent of the file."""
    problems = []
    for (source, name), (threads, registers, _, spill, _) in sorted(kernels.items()):
        if spill > 0:
            problems.append(f"{source}: {name} spills {spill} bytes")
        # A warp's registers are allocated in units of 256, 8 per thread.
        if (registers + 7) // 8 * 8 * threads > 65536 and threads < 1024:
            problems.append(f"{source}: {name} needs {registers} registers of each of {threads} threads: more than 65,536")
    return problems


def differences(old, new, rules):
    """The differences; a stack frame in a rule's kernel that is not in the file comes first."""
    problems = []
    for key in sorted(new.keys() - old.keys()):
        problems.append(f"{key[0]}: {key[1]} is new: {' '.join(map(str, new[key]))}")
    for key in sorted(old.keys() - new.keys()):
        problems.append(f"{key[0]}: {key[1]} is gone")
    for key in sorted(old.keys() & new.keys()):
        if old[key] != new[key]:
            problems.append(f"{key[0]}: {key[1]} has {' '.join(map(str, new[key]))}, not {' '.join(map(str, old[key]))}")
    frames = [f"{key[0]}: {key[1]} has a new stack frame of {its[2]} bytes" for key, its in sorted(new.items())
              if key[0] in rules and its[2] > old.get(key, (0, 0, 0))[2]]
    return frames + problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="sources whose names match; others are as the file has them")
    parser.add_argument("--lock", default=os.devnull)
    options = parser.parse_args()
    listing = options.build / "compile_commands.json"
    if not listing.exists():
        parser.error(f"{listing} does not exist: configure the folder with the preset cuda")
    commands = [command for command in json.loads(listing.read_text(encoding="utf-8"))
                if command["file"].endswith(".cu") and "tranche_kernels" in command["command"]
                and re.search(options.only, pathlib.Path(command["file"]).stem)]
    if not any("nvcc" in command["command"] for command in commands):
        print("kernel_resources.py: skipped: this build has no nvcc")
        return 77
    rows = []
    with concurrent.futures.ThreadPoolExecutor(1 if options.lock != os.devnull else os.cpu_count()) as pool:
        for found in pool.map(lambda command: compile_one(command, options.lock), commands):
            rows += found
    lines = lines_of(rows)
    rules = {path.stem for path in (ROOT / "kernels" / "rules").glob("*.h")}
    known = parsed(FILE.read_text(encoding="utf-8").splitlines()) if FILE.exists() else {}
    new = parsed(lines)
    compiled = {pathlib.Path(command["file"]).stem for command in commands}
    problems = broken_rules(new)
    if options.write:
        merged = {**{key: its for key, its in known.items() if key[0] not in compiled}, **new}
        FILE.write_text(HEAD + "".join(f"{source} {' '.join(map(str, its))} {name}\n" for (source, name), its in sorted(merged.items())),
                        encoding="utf-8")
    else:
        problems += differences({key: its for key, its in known.items() if key[0] in compiled}, new, rules)
    print("\n".join(problems) or f"{len(new)} kernels as kernels/cuda/resources.txt has them")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
