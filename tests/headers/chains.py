#!/usr/bin/env python3
"""chains.py ROOT FOLDER HEADER...: writes the fewest translation units into FOLDER that prove of each header (given
relative to ROOT) that it compiles alone, and prints their paths.

A unit includes a chain of headers, each of which is included, directly or not, by the next. So what stands before a
header in its unit is what the header itself includes: it sees nothing there that it would not see alone. (It does hide
that a file which it includes leans on another; that file is proved in its own place.) Only includes in front of everything
else in a header count, since its own lines see no others from the start, and only those outside of #if.
"""
import pathlib
import re
import sys

INCLUDE = re.compile(r'#\s*include\s*"([^"]+)"')
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def includes(path):
    """Those that a header includes in front of everything else, as paths relative to the root."""
    found = []
    for line in COMMENT.sub("", path.read_text(encoding="utf-8")).splitlines():
        line = line.strip()
        if re.match(r"#\s*include", line):
            found += [f"include/{name}" if name.startswith("tranche/") else name for name in INCLUDE.findall(line)]
        elif line and not re.match(r"#\s*pragma\s+once$", line):
            break
    return found


def closures(root, headers):
    """For each header those that it includes, directly or not."""
    found = {}

    def close(header):
        if header not in found:
            found[header] = set()  # headers do not include each other in a circle; if they did, this ends it
            direct = [name for name in includes(root / header) if (root / name).exists()]  # CMake writes the others
            found[header] = set(direct).union(*map(close, direct))
        return found[header]

    return {header: close(header) for header in headers}


def chains(headers, below):
    """The fewest chains, lowest header first: pairs of neighbours are a maximum matching."""
    after, before = {}, {}

    def place(header, seen):
        for higher in headers:
            if header not in below[higher] or higher in seen:
                continue
            seen.add(higher)
            if higher not in before or place(before[higher], seen):
                after[header], before[higher] = higher, header
                return True
        return False

    for header in headers:
        place(header, set())
    result = []
    for header in headers:
        if header in before:
            continue
        chain = [header]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        result.append(chain)
    return result


def main():
    root, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    headers = sorted(sys.argv[3:])
    units = {}
    for chain in chains(headers, closures(root, headers)):
        name = re.sub(r"[/.]", "_", chain[-1])
        units[folder / f"{name}.cpp"] = "".join(f'#include "{name}"\n#include "{name}"  // guarded\n'
                                                for name in (header.removeprefix("include/") for header in chain))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.cpp"):
        if old not in units:
            old.unlink()
    for path, text in units.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # else it would be compiled again
            path.write_text(text, encoding="utf-8")
    print(";".join(map(str, units)), end="")


if __name__ == "__main__":
    main()
