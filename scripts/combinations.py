#!/usr/bin/env python3
"""Makes docs/combinations.md of tests/combinations.json: what holds any two capabilities together.

    scripts/combinations.py            says what is wrong with the table or stale in the page; exit status 1 then
    scripts/combinations.py --update   writes the page
    scripts/combinations.py --matrix   every pair with the test that holds it, for reading

The table has capabilities and cells. Each capability is a value of an axis, and a training has one value of each axis. A cell lists capabilities
on two sides, where "@name" stands for a group of them. It belongs to every pair with one capability on each side, unless an earlier cell does.
A cell has one of
  test         "Suite.Case" of a GoogleTest program, or "file.py suite" of a test in Python
  refused      the same, and `text`, which that file's literals hold word for word
  independent  why the two share no code path
and may have a `note`.
A pair without a cell, a cell that is no pair's and a test or a text that is not there are errors.
"""
import argparse
import difflib
import itertools
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
KINDS = ("test", "refused", "independent")
MARKS = {"test": "abcdefghijklmnopqrstuvwxyz", "refused": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "independent": "123456789"}


def pair(a, b):
    return tuple(sorted((a, b)))


def expanded(table, side):
    return [key for name in side for key in (table["groups"][name[1:]] if name.startswith("@") else [name])]


def settle(table):
    """Returns ({pair: cell}, problems)."""
    wrong = []
    axis = {capability["key"]: capability["axis"] for capability in table["capabilities"]}
    if len(axis) != len(table["capabilities"]):
        wrong.append("two capabilities have the same key")
    settled = {}
    for number, cell in enumerate(table["cells"]):
        if sum(kind in cell for kind in KINDS) != 1 or ("refused" in cell) != ("text" in cell):
            wrong.append(f"cell {number} is not one of {', '.join(KINDS)}: {cell}")
        before = len(settled)
        for a, b in itertools.product(expanded(table, cell["between"]), expanded(table, cell["and"])):
            if a not in axis or b not in axis:
                wrong.append(f"cell {number}: there is no capability '{b if a in axis else a}'")
            elif axis[a] != axis[b]:
                settled.setdefault(pair(a, b), cell)
        if len(settled) == before:
            wrong.append(f"cell {number} is no pair's, or earlier ones have all of its: {cell}")
    for a, b in itertools.combinations(axis, 2):
        if axis[a] != axis[b] and pair(a, b) not in settled:
            wrong.append(f"nothing holds {a} and {b}")
    return settled, wrong


def literals(source):
    """The string literals of a source, with adjacent ones joined."""
    return re.sub(r'"\s*\n\s*"', "", source.replace('\\"', "'"))


class Tests:
    """The repository's tests by name, with the files that contain them."""

    def __init__(self, root):
        self.root = root
        self.cases = {}
        for path in sorted((root / "tests").rglob("*.cpp")):
            source = path.read_text(encoding="utf-8")
            for suite, case in re.findall(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", source, re.M):
                self.cases[f"{suite}.{case}"] = source
        for path in sorted((root / "tests").rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            for suite in re.findall(r"^def suite_(\w+)\(", source, re.M):
                self.cases[f"{path.name} {suite}"] = source

    def check(self, name, text=None):
        if name not in self.cases:
            return [f"there is no test {name}"]
        if text is not None and text.replace('"', "'") not in literals(self.cases[name]):
            return [f"the file of {name} does not hold the text: {text}"]
        return []


def check_lists(table, tests):
    wrong = [line for entry in table["behind"] for test in entry["tests"] for line in tests.check(test)]
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "config").glob("keys*.cpp")))
    for entry in table["absent"]:
        if "test" in entry:
            wrong += tests.check(entry["test"])
        wrong += [f"no configuration key {key} is refused" for key in entry.get("keys", ()) if f'refused("{key}"' not in sources]
    return wrong


def marked(table):
    """Returns ({test, refusal or reason: its mark}, {test, refusal or reason: its note}, {kind: tests, refusals or reasons, in order})."""
    marks, notes, legend = {}, {}, {kind: [] for kind in KINDS}
    for cell in table["cells"]:
        kind = next(kind for kind in KINDS if kind in cell)
        text = (kind, cell[kind], cell.get("text"))
        if text not in marks:
            marks[text] = MARKS[kind][len(legend[kind])]
            legend[kind].append(text)
        if "note" in cell:
            notes[text] = cell["note"]
    return marks, notes, legend


def matrix(table, settled):
    """All pairs as lines of marks, and what each mark means."""
    capabilities = table["capabilities"]
    marks, _, legend = marked(table)

    def mark(a, b):
        if a["axis"] == b["axis"]:
            return "."
        cell = settled[pair(a["key"], b["key"])]
        kind = next(kind for kind in KINDS if kind in cell)
        return marks[kind, cell[kind], cell.get("text")]

    width = max(len(c["name"]) for c in capabilities)
    lines = []
    for number, row in enumerate(capabilities):
        cells = "".join(mark(row, column) for column in capabilities[:number])
        lines.append(f"{number + 1:>2} {row['name']:<{width}} {cells}".rstrip())
    tens = "".join(str((n + 1) // 10 % 10 or " ") for n in range(len(capabilities)))
    ones = "".join(str((n + 1) % 10) for n in range(len(capabilities)))
    lines += [" " * (width + 4) + tens.rstrip(), " " * (width + 4) + ones, ""]
    return lines + [f"{marks[text]} {text[0]}: {text[1]}" for kind in KINDS for text in legend[kind]]


def page(table, settled):
    capabilities = table["capabilities"]
    names = {capability["key"]: capability["name"] for capability in capabilities}
    _, notes, legend = marked(table)
    counts = {kind: 0 for kind in KINDS}
    refused = {}
    for (a, b), cell in settled.items():
        kind = next(kind for kind in KINDS if kind in cell)
        counts[kind] += 1
        if kind == "refused":
            refused.setdefault((kind, cell[kind], cell["text"]), []).append((a, b))
    lines = [
        "<!-- Written by scripts/combinations.py from tests/combinations.json. -->",
        "# Any two capabilities at once", "",
        f"{len(capabilities)} capabilities make {len(settled)} pairs. {counts['test']} are held by a test, {counts['refused']} are refused "
        f"before the first step, and {counts['independent']} share no code. `scripts/combinations.py --matrix` prints all of them, with the tests.", "",
        "`tests/models/combinations_test.cpp` trains a small model with the rows of a covering array: any two values of two axes stand together in at least",
        "one of them. Weights, optimizer state, losses, norms, evaluations and logits have to be equal, to the last bit, to those of the same arithmetic at",
        "stage 0 without pipeline, offload, overlap and memory plan.", "",
        "## What is refused", "",
        "A program ends with status 2, an engine's constructor with `ConfigurationError`, before the first step. A refused call throws when the program makes it.", "",
        "| each of | with each of | text |", "|---|---|---|"]
    for text in legend["refused"]:
        sides, alike = {}, {}
        for a, b in refused[text]:
            sides.setdefault(a, []).append(b)
        for a, bs in sides.items():
            alike.setdefault(tuple(bs), []).append(a)
        for bs, ones in alike.items():
            lines.append(f"| {'; '.join(names[a] for a in ones)} | {'; '.join(names[b] for b in bs)} | \"{text[2]}\"" + (f"; {notes[text]}" if text in notes else "") + " |")
    lines += ["", "## Behind one interface", "",
              "Users of these see only the interface, so tests of the interface cover them with every row.", ""]
    lines += [f"- {entry['name']}: {entry['interface']}" for entry in table["behind"]]
    lines += ["", "Features that do not exist are listed under [the refused keys](reference/configuration.md#refused-keys)."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the page")
    parser.add_argument("--matrix", action="store_true", help="print every pair")
    parser.add_argument("--table", type=pathlib.Path, default=ROOT / "tests" / "combinations.json")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs" / "combinations.md")
    options = parser.parse_args()
    table = json.loads(options.table.read_text(encoding="utf-8"))
    tests = Tests(ROOT)
    settled, wrong = settle(table)
    for cell in table["cells"]:
        name = cell.get("test") or cell.get("refused")
        if name:
            wrong += tests.check(name, cell.get("text"))
    wrong += check_lists(table, tests)
    if wrong:
        sys.exit("\n".join(f"combinations: {line}" for line in wrong))
    if options.matrix:
        print("\n".join(matrix(table, settled)))
        return
    text = page(table, settled)
    if options.update:
        options.page.write_text(text, encoding="utf-8")
        return
    now = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    if now != text:
        sys.stdout.writelines(difflib.unified_diff(now.splitlines(True), text.splitlines(True), str(options.page), "what the table gives"))
        sys.exit("combinations: the page is stale: scripts/combinations.py --update writes it")
    print(f"combinations: {len(settled)} pairs")


if __name__ == "__main__":
    main()
