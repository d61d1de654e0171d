#!/usr/bin/env python3
"""Makes the table of bench/results/README.md from the heads of the files there.

    scripts/results_table.py [REPOSITORY]    says which head is incomplete and whether the table is stale; exit status 1 then
    scripts/results_table.py --update        writes the table

A file of results begins with a heading that ends in its day, "# WHAT, 21 November 2026", and behind that has a list with the items
`Figure` (what was found), `Bar` (what it was held against, or "-"), `Commit` and `Command`.
"""
import pathlib
import re
import sys

ITEMS = ("Figure", "Bar", "Commit", "Command")
INTRODUCTION = """# Results

What was measured, by `scripts/results_table.py` from the heads of the files. [How we measure](../../docs/results/how-we-measure.md); [current figures](../../docs/results/current.md) has those that count.

| day | what | figure | bar | commit | command |
|---|---|---|---|---|---|
"""


def head_of(text):
    """({item: value}, what is wrong)"""
    heading = re.match(r"# (.*), (\d{1,2} \w+ \d{4})\n", text.replace("\r", ""))
    items = dict(re.findall(r"^- (\w+): (.+)$", text.split("\n## ")[0], re.M))
    wrong = [] if heading else ["its heading does not end with a day"]
    wrong += [f"its head has no '- {item}: ...'" for item in ITEMS if item not in items]
    return {"What": heading.group(1) if heading else "", "Day": heading.group(2) if heading else "", **items}, wrong


def table(root):
    """(the page, what is wrong)"""
    folder, rows, wrong = root / "bench" / "results", [], []
    for path in sorted(folder.rglob("*.md")):
        name = path.relative_to(folder).as_posix()
        if name == "README.md" or path.name == "table.md":  # this page, and a table that `tranche scale` wrote
            continue
        head, problems = head_of(path.read_text(encoding="utf-8"))
        wrong += [f"bench/results/{name}: {problem}" for problem in problems]
        cells = [head["Day"], f"[{head['What']}]({name})", *(head.get(item, "").replace("\\|", "|").replace("|", "\\|") for item in ITEMS)]
        rows.append("| " + " | ".join(cells) + " |\n")
    return INTRODUCTION + "".join(rows), wrong


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--update"]
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).resolve().parent.parent)
    page = root / "bench" / "results" / "README.md"
    text, wrong = table(root)
    if wrong:
        sys.exit("\n".join(wrong))
    if "--update" in sys.argv:
        page.write_text(text, encoding="utf-8")
    elif not page.is_file() or page.read_text(encoding="utf-8") != text:
        sys.exit("bench/results/README.md is stale: scripts/results_table.py --update writes it")
    print(f"{text.count(chr(10)) - INTRODUCTION.count(chr(10))} files of results")


if __name__ == "__main__":
    main()
