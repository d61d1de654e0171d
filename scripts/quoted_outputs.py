#!/usr/bin/env python3
"""Holds what the pages quote of the program to what the program prints.

    scripts/quoted_outputs.py PROGRAM [PAGE ...]            says what differs; exit status 1 then
    scripts/quoted_outputs.py PROGRAM [PAGE ...] --update   writes what the program prints into the pages
    scripts/quoted_outputs.py PROGRAM [PAGE ...] --renew    the same, and where only masked numbers differ, too

PROGRAM is a built `tranche`. The pages are README.md and all of docs/ unless given. In a page there are two kinds of quotation:

  - a block fenced as ```console (indented blocks are not read). Lines that begin with "$ " are commands, a "\\" at their
    end continues them; what follows a command is all of its standard output and error. A line "..." stands for any lines.
  - any other block below a comment `<!-- $ COMMAND -->`: a table, which ends at an empty line, or a fence with what it
    holds. Readers do not see the command.

Where figures depend on the machine (```console numbers, or `<!-- $ numbers: COMMAND -->`) all words have to be the same, while
every number, with its unit, is as good as every other, and blanks do not count.

Commands run by bash, those of a page in one empty folder, in which `scripts` is this repository's; `tranche` is PROGRAM.
A command that ends with another status than 0 says so itself: `... || echo "status $?"`.
"""
import argparse
import difflib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
ANY = "..."
SECONDS = 120  # of a command


NUMBER = re.compile(r"\b[0-9a-f]{16,}\b|(?<![A-Za-z_])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?: ?(?:[KMGT]i?B|B|us|ms|s|min|h)\b)?")


class Quotation:
    """lines[begin:end] of a page quote the output of `command`; `masked`: numbers may differ."""

    def __init__(self, line, command, begin, end, masked=False):
        self.line, self.command, self.begin, self.end, self.masked = line, command, begin, end, masked

    def compared(self, lines):
        """`lines` in the form in which they are compared."""
        if not self.masked:
            return lines
        return [re.sub(r"#(?: #)+", "#", " ".join(NUMBER.sub("#", line).split())) for line in lines]


def of_console(lines, begin, end, masked):
    """The quotations in lines[begin:end], the contents of a fence."""
    found = []
    number = begin
    while number < end:
        if not lines[number].startswith("$ "):
            raise SystemExit(f"line {number + 1}: a console block begins with a command, '$ ...'")
        first = number
        command = lines[number][2:]
        while command.endswith("\\") and number + 1 < end:
            number += 1
            command += "\n" + lines[number]
        number += 1
        output = number
        while number < end and not lines[number].startswith("$ "):
            number += 1
        found.append(Quotation(first + 1, command, output, number, masked))
    return found


def quotations(lines):
    found = []
    number = 0
    fence = None  # first line of the fence around this line
    while number < len(lines):
        line = lines[number]
        comment = re.fullmatch(r"<!-- \$ (numbers: )?(.*) -->", line)
        if fence is not None and line.startswith("```"):
            if lines[fence].startswith("```console"):
                found += of_console(lines, fence + 1, number, lines[fence] == "```console numbers")
            fence = None
        elif fence is None and line.startswith("```"):
            fence = number
        elif fence is None and comment:
            begin = end = number + 1
            if end < len(lines) and lines[end].startswith("```"):
                begin = end = end + 1
                while end < len(lines) and not lines[end].startswith("```"):
                    end += 1
            else:
                while end < len(lines) and lines[end] != "":
                    end += 1
            found.append(Quotation(number + 1, comment.group(2), begin, end, comment.group(1) is not None))
            number = end
        number += 1
    if fence is not None:
        raise SystemExit(f"line {fence + 1}: a fence without an end")
    return found


def run(command, folder, program):
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "120"}
    result = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    if result.returncode != 0:
        lines.append(f"(ended with status {result.returncode})")
    return lines


def matches(quoted, printed):
    """True if `printed` matches `quoted`, in which ANY stands for any lines."""
    pieces = [[]]
    for line in quoted:
        if line == ANY:
            pieces.append([])
        else:
            pieces[-1].append(line)
    if len(pieces) == 1:
        return printed == quoted
    first, *middle, last = pieces
    if len(printed) < len(first) + len(last) or printed[:len(first)] != first:
        return False
    if last and printed[-len(last):] != last:
        return False
    at, end = len(first), len(printed) - len(last)
    for piece in middle:
        while at + len(piece) <= end and printed[at:at + len(piece)] != piece:
            at += 1
        if at + len(piece) > end:
            return False
        at += len(piece)
    return True


def renewed(quoted, printed):
    """`printed` with as many lines before and after ANY as were quoted."""
    if ANY not in quoted:
        return printed
    if quoted.count(ANY) > 1:
        raise SystemExit("a quotation with more than one '...' is not updated: write it by hand")
    before = quoted.index(ANY)
    behind = len(quoted) - before - 1
    if before + behind >= len(printed):
        return printed
    return printed[:before] + [ANY] + printed[len(printed) - behind:]


def check_page(page, program, update, renew):
    """Returns the number of quotations, and the differences."""
    lines = page.read_text(encoding="utf-8").split("\n")
    found, problems = quotations(lines), []
    replacements = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "scripts").symlink_to(ROOT / "scripts")
        (folder / "bin").mkdir()
        (folder / "bin" / "tranche").symlink_to(program)
        for quotation in found:
            quoted = lines[quotation.begin:quotation.end]
            printed = run(quotation.command, folder, program)
            if matches(quotation.compared(quoted), quotation.compared(printed)):
                if renew and quotation.masked:
                    replacements.append((quotation, renewed(quoted, printed)))
                continue
            difference = "\n".join(difflib.unified_diff(quotation.compared(quoted), quotation.compared(printed),
                                                        "quoted", "printed", lineterm=""))
            problems.append(f"{page}:{quotation.line}: $ {quotation.command}\n{difference}")
            if update:
                replacements.append((quotation, renewed(quoted, printed)))
    for quotation, text in reversed(replacements):
        lines[quotation.begin:quotation.end] = text
    if replacements:
        page.write_text("\n".join(lines), encoding="utf-8")
    return len(found), problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("pages", nargs="*", type=pathlib.Path)
    parser.add_argument("--update", action="store_true", help="write what the program prints into the pages")
    parser.add_argument("--renew", action="store_true", help="as --update, and masked numbers as they are now")
    arguments = parser.parse_args()
    program = arguments.program.resolve()
    if not os.access(program, os.X_OK):
        sys.exit(f"{arguments.program} is no program")
    pages = arguments.pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    arguments.update |= arguments.renew
    count, problems = 0, []
    for page in pages:
        quoted, differ = check_page(page, program, arguments.update, arguments.renew)
        count += quoted
        problems += differ
    print("\n\n".join(problems), end="\n\n" if problems else "")
    if count == 0:
        sys.exit("no quotation was found")
    if problems and not arguments.update:
        sys.exit(f"{len(problems)} of {count} quotations differ from what the program prints; look whether that is meant, "
                 "then: scripts/quoted_outputs.py PROGRAM --update")
    print(f"{count} quotations, {len(problems)} {'updated' if arguments.update else 'differ'}")


if __name__ == "__main__":
    main()
