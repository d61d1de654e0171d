#!/usr/bin/env python3
"""Counts words. The 90th percentile of the sentences of README and docs/start must be at most 25, README must have at most 900 words in
all, and no sentence of docs/internals may have more than 35.

    scripts/sentences.py            checks these pages; exit status 1 if one exceeds its limit
    scripts/sentences.py PAGE ...   prints the percentile of these pages

Sentences are counted in paragraphs and list items; the words of README include headings and tables. Code, comments and pictures do not
count; the text of a link does.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST = 25
README_WORDS = 900
INTERNALS_MOST = 35  # of one sentence


def prose(text):
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")


def words(text):
    return [word for word in text.split() if re.search(r"\w", word)]


def paragraphs(text):
    current = []
    for line in [*prose(text).split("\n"), ""]:
        item = re.match(r"\s*(?:[-*]|\d+\.) +(.*)", line)
        if item or not line.strip() or line.startswith(("#", "|", "    ", "<")):
            if current:
                yield " ".join(current)
            current = [item.group(1)] if item else []
        else:
            current.append(line.strip())


def sentences(text):
    for paragraph in paragraphs(text):
        for sentence in re.split(r"(?<=[.!?])[\"')]?\s+", paragraph):
            if words(sentence):
                yield len(words(sentence)), sentence


def percentile(lengths):
    return sorted(lengths)[max(0, -(-9 * len(lengths) // 10) - 1)]


def lengths(pages):
    return [(length, sentence, page.name) for page in pages for length, sentence in sentences(page.read_text(encoding="utf-8"))]


def listed(found):
    return "\n".join(f"  {length} {page}: {text}" for length, text, page in found)


def main():
    pages = [pathlib.Path(page) for page in sys.argv[1:]] or [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]
    found = lengths(pages)
    if not found:
        sys.exit("no sentence was found")
    reached = percentile([length for length, _, _ in found])
    print(f"{len(found)} sentences on {len(pages)} pages, 90th percentile {reached} words")
    for page in pages:
        count = len(words(prose(page.read_text(encoding="utf-8"))))
        if page.name == "README.md" and count > README_WORDS:
            sys.exit(f"{page} has {count} words, and at most {README_WORDS} are wanted: what is more belongs to docs/")
    if reached > MOST:
        sys.exit(f"at most {MOST} are wanted; the longest:\n" + listed(sorted(found, reverse=True)[:10]))
    if len(sys.argv) == 1:
        of_internals = lengths(sorted((ROOT / "docs" / "internals").glob("*.md")))
        long = [entry for entry in of_internals if entry[0] > INTERNALS_MOST]
        print(f"{len(of_internals)} sentences in docs/internals, {len(long)} of more than {INTERNALS_MOST} words")
        if long or not of_internals:
            sys.exit(f"at most {INTERNALS_MOST} words a sentence are wanted:\n" + listed(long))


if __name__ == "__main__":
    main()
