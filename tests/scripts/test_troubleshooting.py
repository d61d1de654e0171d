#!/usr/bin/env python3
"""Compares docs/reference/troubleshooting.md with the program: texts in quotation marks that the page attributes to the program must be in
the sources, word for word; "..." stands for any text.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ["core", "device", "partition", "kernels", "comm", "optim", "offload", "checkpoint", "config", "engine", "pipeline", "report", "models", "training", "planner", "tools"]


def literals():
    """The text of all string literals in the sources: adjacent ones are joined, and values that are filled in at run time are gaps."""
    text = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.cpp")):
            source = path.read_text(encoding="utf-8").replace('\\"', "'")
            source = re.sub(r'"\s*\n\s*"', "", source)
            text.append(re.sub(r"\{[^{}\s]*\}", "\0", source))
    return "\n".join(text)


def main():
    sources = literals()
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted, missing = 0, []
    for line in page.splitlines():
        cells = line.split(" | ")
        if not line.startswith("| ") or len(cells) < 2 or cells[0].startswith(("| Open MPI", "| killed", "| every rank")):
            continue
        for quotation in re.findall(r'"([^"]+)"', cells[0]):
            for piece in quotation.split("..."):
                piece = piece.strip(" ,()")
                quoted += len(piece) > 3
                if len(piece) > 3 and piece not in sources:
                    missing.append(f'"{piece}" of: {line[:100]}')
    if missing or quoted < 20:
        sys.exit(f"{quoted} quotations; not in any source:\n  " + "\n  ".join(missing))
    print(f"{quoted} quotations are in the sources")


main()
