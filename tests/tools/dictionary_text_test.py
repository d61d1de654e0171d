#!/usr/bin/env python3
"""Tests scripts/dictionary_text.py on a small dictionary: what it keeps, what it leaves out, and that it is deterministic."""

import gzip
import os
import subprocess
import sys
import tempfile

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "dictionary_text.py")
DICTIONARY = b"""

00-database-short
   A dictionary of one page whose name is not to be read

Lariat \\Lar"i*at\\ (l[a^]r"[i^]*[a^]t), n. [Sp. la reata the
   rope.]
   A long, slender rope made of hemp. See {Rope}, and
   d[=e]partment. [Obs.]
   [1913 Webster]

   2. Another sense of it, for a test. --Shak.

Larine \\La"rine\\, a. (Zool.)
   Of or pertaining to the Gull family, \xc3\xa9 they say.
   [WordNet 1.5]

Short \\Short\\
   See.
"""


def convert(folder, name):
    output = os.path.join(folder, name)
    done = subprocess.run([sys.executable, SCRIPT, os.path.join(folder, "in.dz"), output], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    with open(output, "rb") as file:
        return file.read()


with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, "in.dz"), "wb") as file:
        file.write(gzip.compress(DICTIONARY))
    text = convert(folder, "a.txt").decode("ascii")
    assert sorted(part.strip() for part in text.split("\n\n")) == sorted([
        "Lariat, n. [Sp. la reata the rope.] A long, slender rope made of hemp. See Rope, and department. [Obs.]\n"
        "2. Another sense of it, for a test. --Shak.",
        "Larine, a. (Zool.) Of or pertaining to the Gull family, they say.",
    ]), text
    assert convert(folder, "b.txt").decode("ascii") == text
    assert sorted(os.listdir(folder)) == ["a.txt", "b.txt", "in.dz"]
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "usage" in done.stderr
    with open(os.path.join(folder, "in.dz"), "wb") as file:
        file.write(gzip.compress(b"nothing"))
    done = subprocess.run([sys.executable, SCRIPT, os.path.join(folder, "in.dz"), os.path.join(folder, "c.txt")],
                          capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "no dictionary entries" in done.stderr, done.stderr
print("dictionary_text: passed")
