#!/usr/bin/env python3
"""dictionary_text.py INPUT.dict.dz OUTPUT.txt: one plain ASCII text of a dictionary in dictd's format.

Entries begin at the left margin; what is indented belongs to them. Wrapped lines are joined to paragraphs, the marks of
sources ("[1913 Webster]"), of links (braces) and of pronunciation (backslashes, "(l[a^]r)") are left out, accents written as
"[=a]" become their letter. Entries are put in the order of their SHA-256, so that every part of the text, its held-out
tail too, is a fair sample of the whole instead of a stretch of the alphabet. The same input gives the same bytes.
"""

import gzip
import hashlib
import os
import re
import sys

SOURCES = re.compile(
    r"\[(?:1913 Webster|Webster 1913 Suppl\.|WordNet 1\.5|PJC|Century Dict\.(?: 1906)?|RP|AS|RDH|Stedman"
    r"|Stedman 24|a?\.? ?k\. ?a\.|[^\[\]]*\+PJC|[^\[\]]*1913 Webster[^\[\]]*)\]")
PRONUNCIATION = re.compile(r"\\[^\\]*\\")
ACCENT = re.compile(r"\[[^\[\]\w ]{0,2}([a-z]{1,2})[^\[\]\w ]{0,2}\]", re.IGNORECASE)
SPOKEN = re.compile(r" \((?:[^() ]*\[[^()]*)\)")  # "(l[a^]r"[i^]*[a^]t)": a bracket inside a word
SPACES = re.compile(r" +")


def paragraphs(lines):
    """Consecutive lines between blank lines, joined."""
    run = []
    for line in lines + [""]:
        if line.strip():
            run.append(line.strip())
        elif run:
            yield " ".join(run)
            run = []


def clean(text):
    text = SPOKEN.sub("", SOURCES.sub("", text))
    text = PRONUNCIATION.sub("", text)
    text = ACCENT.sub(r"\1", text)
    text = text.replace("{", "").replace("}", "").replace("\\", "")
    text = "".join(c if " " <= c <= "~" else " " for c in text)
    return SPACES.sub(" ", text).replace(" ,", ",").replace(" .", ".").strip().lstrip(", ")


def entries(text):
    """The cleaned entries; each has one or more paragraphs."""
    lines = []
    for line in text.split("\n") + ["end"]:
        if line and not line.startswith(" ") and lines:
            if not lines[0].startswith("00-database"):
                parts = [part for part in map(clean, paragraphs(lines)) if len(part) > 1]
                if sum(map(len, parts)) >= 40:  # shorter entries only refer to others
                    yield "\n".join(parts) + "\n"
            lines = []
        lines.append(line)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: dictionary_text.py INPUT.dict.dz OUTPUT.txt")
    with gzip.open(sys.argv[1], "rb") as source:
        text = source.read().decode("utf-8", errors="replace")
    found = sorted(set(entries(text)), key=lambda entry: hashlib.sha256(entry.encode("ascii")).digest())
    if not found:
        sys.exit(f"{sys.argv[1]}: no dictionary entries found")
    temporary = sys.argv[2] + ".part"
    with open(temporary, "wb") as output:
        output.write("\n".join(found).encode("ascii"))
    os.replace(temporary, sys.argv[2])
    print(f"{len(found)} entries, {os.path.getsize(sys.argv[2])} bytes: {sys.argv[2]}")


if __name__ == "__main__":
    main()
