#!/usr/bin/env python3
"""Counts the words of the documentation, and holds them to a bar: docs/ and the READMEs of all folders; bench/results.

    scripts/word_count.py [REPOSITORY]    the counts; exit status 1 beyond a bar
    scripts/word_count.py --pages         the words of each page, the longest last

A word stands between blanks and has a letter or a digit, in prose, tables and quotations alike.
"""
import pathlib
import re
import subprocess
import sys

BARS = {"docs/ and READMEs": 45000, "bench/results": 20000}


def words(text):
    return sum(re.search(r"\w", word) is not None for word in text.split())


def pages(root):
    """(group, page, words) of each page that git does not ignore."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=root, check=True, capture_output=True, text=True)
    for page in sorted(set(listed.stdout.split("\n"))):
        group = "bench/results" if page.startswith("bench/results/") else "docs/ and READMEs"
        if (page.startswith(("docs/", "bench/results/")) or pathlib.PurePosixPath(page).name == "README.md") and (root / page).is_file():
            yield group, page, words((root / page).read_text(encoding="utf-8"))


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--pages"]
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).resolve().parent.parent)
    counted = list(pages(root))
    if len(arguments) < len(sys.argv) - 1:
        print("\n".join(f"{count:6} {page}" for _, page, count in sorted(counted, key=lambda entry: entry[2])))
    beyond = False
    for group, most in BARS.items():
        total = sum(count for of, _, count in counted if of == group)
        beyond |= total > most
        print(f"{group}: {total} words, and at most {most} are wanted")
    if not counted or beyond:
        sys.exit(1)


if __name__ == "__main__":
    main()
