#!/usr/bin/env python3
"""Counts the words of sentences: the 90th percentile of the pages is at most 25.

    scripts/sentences.py [PAGE ...]     README.md and docs/start/*.md unless given; exit status 1 beyond that

Paragraphs and list items count. Headings, tables, code, comments and pictures do not; of a link its text does.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST = 25


def paragraphs(text):
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    current = []
    for line in [*text.split("\n"), ""]:
        item = re.match(r"\s*(?:[-*]|\d+\.) +(.*)", line)
        if item or not line.strip() or line.startswith(("#", "|", "    ", "<")):
            if current:
                yield " ".join(current)
            current = [item.group(1)] if item else []
        else:
            current.append(line.strip())


def sentences(text):
    for paragraph in paragraphs(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph).replace("**", "")
        for sentence in re.split(r"(?<=[.!?])[\"')]?\s+", plain):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if words:
                yield len(words), sentence


def percentile(lengths):
    return sorted(lengths)[max(0, -(-9 * len(lengths) // 10) - 1)]


def main():
    pages = [pathlib.Path(page) for page in sys.argv[1:]] or [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]
    found = [(length, sentence, page.name) for page in pages for length, sentence in sentences(page.read_text(encoding="utf-8"))]
    if not found:
        sys.exit("no sentence was found")
    reached = percentile([length for length, _, _ in found])
    print(f"{len(found)} sentences on {len(pages)} pages, 90th percentile {reached} words")
    if reached > MOST:
        longest = sorted(found, reverse=True)[:10]
        sys.exit(f"at most {MOST} are wanted; the longest:\n" + "\n".join(f"  {length} {page}: {text}" for length, text, page in longest))


if __name__ == "__main__":
    main()
