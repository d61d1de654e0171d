#!/usr/bin/env python3
"""Counts comments that open with a word after which a sentence seldom has its subject: Of, As, By, From, What, That, Those, Where, Whether.
A comment is a run of `//` lines above code, or the text behind code on its line.

    scripts/comment_openings.py             all C++ and CUDA sources, by folder; exit status 1 above the limit, and then names these comments
    scripts/comment_openings.py --list      names the comments, one a line
    scripts/comment_openings.py PATH ...    files and folders of the tree, without a limit
"""
import argparse
import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST = 0
WORDS = ("Of", "As", "By", "From", "What", "That", "Those", "Where", "Whether")
SOURCES = (".h", ".cpp", ".cu", ".cpp.in", ".cu.in")
TOKEN = re.compile(r'R"([^()\\ ]{0,16})\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Za-z_])\'(?:\\[^\'\n]*|[^\'\\\n])\''
                   r"|//[^\n]*|/\*(?:.|\n)*?\*/")


def comments(text):
    """Yields (line from 1, text) of every comment; consecutive lines of `//` without code are one comment."""
    previous = -1
    for match in TOKEN.finditer(text):
        comment = match.group(0)
        if not comment.startswith(("//", "/*")):
            continue
        line = text.count("\n", 0, match.start()) + 1
        alone = not text[text.rfind("\n", 0, match.start()) + 1:match.start()].strip()
        if not (alone and previous == line - 1):
            yield line, re.sub(r"^(?://[/!]?<?|/\*[*!]?<?)\s*", "", comment)
        previous = line if alone and comment.startswith("//") else -1


def tracked(paths):
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--", *paths], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.endswith(SOURCES)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("paths", nargs="*")
    options = parser.parse_args()
    names = tracked(options.paths)
    if not names:
        sys.exit("there are no sources to look at")
    opening = re.compile(rf"(?:{'|'.join(WORDS)})\b")
    found, of_folder, total = [], collections.Counter(), 0
    for name in names:
        for line, text in comments((ROOT / name).read_text(encoding="utf-8")):
            total += 1
            if opening.match(text):
                of_folder[name.split("/")[0]] += 1
                found.append(f"{name}:{line}: {text}")
    too_many = not options.paths and len(found) > MOST
    if options.list or too_many:
        print("\n".join(found))
    print(f"{len(found)} of {total} comments open with one of {', '.join(WORDS)}" +
          "".join(f"\n  {folder}: {count}" for folder, count in sorted(of_folder.items())))
    if too_many:
        sys.exit(f"at most {MOST} are wanted: let each begin with its subject")


if __name__ == "__main__":
    main()
