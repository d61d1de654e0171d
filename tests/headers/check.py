#!/usr/bin/env python3
"""Checks that each header compiles alone, that it may be included twice, and that it includes what it uses of the standard library.

usage: check.py ROOT FOLDER COMMANDS [--jobs N]
  ROOT      the sources
  FOLDER    a folder for what is made here. FOLDER/headers.txt lists the headers, a path below ROOT on each line
  COMMANDS  a compile_commands.json that has the command of FOLDER/flags.cpp: headers are compiled as that source is
  --jobs N  how many compilers may run at once; 1 by default

A compiler that is run for each header spends its time on the standard library. So that is compiled once, in front of all of them
(standard.h), and standard.py finds the includes of it that a header has forgotten. Headers of ours are compiled in few units, one
behind the other. A header is put behind others only where they do not help it: where it mentions no name that they, or the
headers that they include, declare, but for headers that it includes itself.

If a unit does not compile, its headers are compiled alone, and that decides. Units that have compiled are noted in
FOLDER/proved.json. They are compiled again when the command or a header in them, or one that these include, has changed.
Exit status: 0 when all is well, and then nothing but warnings is printed, 1 otherwise: what is wrong with which header, with the compiler's text.
"""
import argparse
import concurrent.futures
import hashlib
import json
import pathlib
import re
import shlex
import subprocess
import sys

sys.dont_write_bytecode = True  # a build writes no files beside the sources
import sources  # noqa: E402
import standard  # noqa: E402


def outside(tree, name):
    """The headers of other libraries that a header of ours includes, directly or not, before everything else."""
    lead = ("lead",)
    files = [name, *tree.below(name, lead)]
    return {path for one in files for path in tree.headers[one].included(False, lead)} - set(standard.TABLE)


class Unit:
    """Headers that are compiled in one compiler run."""

    def __init__(self):
        self.headers, self.seen = [], set()

    def add(self, tree, name):
        self.headers.append(name)
        self.seen |= {name} | tree.below(name)

    def takes(self, tree, name):
        """True if a header would compile no better here than alone."""
        if name in self.seen:
            return False  # it would not be read again
        header, below = tree.headers[name], [tree.headers[path] for path in tree.below(name)]
        lead = tree.below(name, ("lead",))
        # A class that is only declared here may be defined by another header; a macro or an operator may affect an included header.
        named = header.mentioned.union(header.forward, *(one.forward for one in below))
        unknown = header.mentioned.difference(*(one.forward | one.names for one in map(tree.headers.get, lead)))
        spaces = header.spaces.union(*(one.spaces for one in below))
        read = header.mentioned.union(*(one.mentioned for one in below))
        libraries = outside(tree, name) | set(standard.TABLE)
        return not any(one.names & named or one.forward & unknown or (one.spaces - spaces) & named or (one.macros | one.others) & read or
                       set(one.included(False)) - libraries for one in map(tree.headers.get, self.seen - lead))


def units_of(tree):
    """A small number of units that contain all headers to check."""
    units = []
    for name in sorted(tree.checked, key=lambda name: (len(tree.below(name)), name)):
        unit = next((unit for unit in units if unit.takes(tree, name)), None)
        if not unit:
            units.append(Unit())
            unit = units[-1]
        unit.add(tree, name)
    return units


def included_twice(headers):
    names = [header.removeprefix("include/") for header in headers]
    return "".join(f'#include "{name}"\n#include "{name}"  // guarded\n' for name in names)


def digest(*parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class Compiler:
    """Compiles like a source of the build, after the standard library."""

    def __init__(self, folder, commands):
        source = folder / "flags.cpp"
        entry = next((entry for entry in json.loads(commands.read_text(encoding="utf-8")) if pathlib.Path(entry["file"]) == source), None)
        if not entry:
            sys.exit(f"{commands} has no command of {source}: configure the build anew")
        words = shlex.split(entry["command"])
        self.command = words[:words.index("-o")]
        self.folder, self.directory = folder, entry["directory"]
        self.version = self.run("--version")[1]
        self.macros, self.digest = set(), ""

    def run(self, *arguments):
        done = subprocess.run([*self.command, *arguments], cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode == 0, done.stdout

    def precompile(self, headers, proved):
        """Compiles these headers of the standard library, unless `proved` has the result."""
        text = "".join(f"#include <{name}>\n" for name in sorted(headers))
        path = self.folder / "standard.h"
        self.digest = digest(self.version, *self.command, text)
        if proved.get("standard") != self.digest or not path.with_suffix(".h.gch").exists():
            proved.clear()
            path.write_text(text, encoding="utf-8")
            made, said = self.run("-x", "c++-header", "-o", f"{path}.gch", path)
            if not made:
                sys.exit(f"the headers of the standard library do not compile:\n{said}")
            (self.folder / "empty.h").write_text("", encoding="utf-8")
            macros = [set(re.findall(r"#define ([A-Za-z]\w*)", self.run("-dM", "-E", "-x", "c++", self.folder / name)[1]))
                      for name in ("standard.h", "empty.h")]
            proved.update(standard=self.digest, macros=sorted(macros[0] - macros[1]), units=[])
        self.macros = set(proved["macros"])

    def compile(self, name, headers):
        """Returns (whether they compile one after the other, the compiler's output)."""
        unit = self.folder / f"{name}.cpp"
        unit.write_text(included_twice(headers), encoding="utf-8")
        # -fsyntax-only is not used, because it does not warn about unused functions. An output at /dev/null would have the same effect.
        compiles, said = self.run("-include", self.folder / "standard.h", "-S", "-o", unit.with_suffix(".s"), unit)
        for made in [unit, unit.with_suffix(".s")] if compiles else []:
            made.unlink()
        return compiles, said


class Check:
    """Compiles units, and finds the headers of a unit that does not compile."""

    def __init__(self, tree, compiler):
        self.tree, self.compiler, self.failed = tree, compiler, {}

    def digest(self, unit):
        return digest(self.compiler.digest, *unit.headers, *(f"{name}\n{self.tree.headers[name].text}" for name in sorted(unit.seen)))

    def explained(self, header):
        return header in self.failed or bool(self.failed.keys() & self.tree.below(header))

    def prove(self, number, unit):
        """Returns True if all headers of a unit compile alone."""
        name, left = f"unit_{number:02}", [header for header in unit.headers if not self.explained(header)]
        while left:
            compiles, said = self.compiler.compile(name, left)
            if compiles and said:
                print(said, end="")  # warnings, which scripts/test.sh treats as errors
            if compiles or not self.find(f"{name}_alone", left, said):
                break
            left = [header for header in left if not self.explained(header)]
        return left == unit.headers

    def find(self, name, headers, said):
        """Looks for a header that does not compile alone, first among those in the compiler's output, lowest first. Returns False if all
        compile."""
        said_of = {header for header in self.tree.checked if re.search(rf"(^|[/\s]){re.escape(header)}:\d", said, re.MULTILINE)}
        for header in sorted(said_of.union(headers), key=lambda header: (header not in said_of, len(self.tree.below(header)), header)):
            if not self.explained(header):
                compiles, why = self.compiler.compile(name, [header])
                if not compiles:
                    self.failed[header] = why
                    return True
        return any(map(self.explained, headers))


def main():
    parser = argparse.ArgumentParser()
    for name in ("root", "folder", "commands"):
        parser.add_argument(name, type=lambda text: pathlib.Path(text).absolute())
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    tree = sources.Tree(given.root, (given.folder / "headers.txt").read_text(encoding="utf-8").split())
    compiler = Compiler(given.folder, given.commands)
    record = given.folder / "proved.json"
    proved = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    compiler.precompile({path for one in tree.headers.values() for path in one.included(False)} & set(standard.TABLE), proved)
    wrong = standard.complaints(tree, compiler.macros)

    units, check = units_of(tree), Check(tree, compiler)
    digests = [check.digest(unit) for unit in units]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(lambda number: digests[number] in proved["units"] or check.prove(number, units[number]), range(len(units))))
    proved["units"] = [one for one, proven in zip(digests, results) if proven]
    record.write_text(json.dumps(proved), encoding="utf-8")
    for header, why in check.failed.items():
        wrong.append(f"{header} does not compile alone:\n{why}")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong or not all(results) else 0


if __name__ == "__main__":
    sys.exit(main())
