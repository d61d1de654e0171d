#!/usr/bin/env python3
"""Tests of chains.py: what stands before a header in its unit is what the header itself includes, and nothing else."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

CHAINS = pathlib.Path(__file__).parent / "chains.py"
HEADERS = {
    "include/tranche/low.h": "#pragma once\n\n#include <vector>\n",
    "middle.h": '#pragma once\n/// A comment.\n#include "tranche/low.h"\n',
    "high.h": '#pragma once\n#include <map>\n#include "middle.h"\n',
    "beside.h": '#pragma once\n// #include "high.h"\n/*\n#include "tranche/low.h"\n*/\n',
    # These include it too late for their own first lines, or not at all: it may not stand before them.
    "late.h": '#pragma once\nusing Numbers = std::vector<int>;\n#include "tranche/low.h"\n',
    "sometimes.h": '#pragma once\n#if 0\n#include "tranche/low.h"\n#endif\n',
}


def chains(headers):
    """The chains of the units that chains.py writes for headers with these texts."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in headers.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        (root / "units").mkdir()
        (root / "units" / "gone_h.cpp").write_text("of a header that is no more", encoding="utf-8")
        done = subprocess.run([sys.executable, CHAINS, root, root / "units", *headers], capture_output=True, text=True, check=True)
        units = [pathlib.Path(path) for path in done.stdout.split(";")]
        assert set(units) == set((root / "units").iterdir()), units
        found = []
        for unit in units:
            lines = unit.read_text(encoding="utf-8").splitlines()
            assert all(f"{first}  // guarded" == second for first, second in zip(lines[::2], lines[1::2])), lines
            found.append([line.split('"')[1].replace("tranche/", "include/tranche/") for line in lines[::2]])
        return sorted(found)


class Chains(unittest.TestCase):
    def test_every_header_is_in_one_unit_after_those_it_includes(self):
        self.assertEqual(chains(HEADERS), [["beside.h"], ["include/tranche/low.h", "middle.h", "high.h"], ["late.h"], ["sometimes.h"]])

    def test_as_few_units_as_there_are_headers_of_which_none_includes_another(self):
        knot = {"a.h": "", "b.h": "", "c.h": '#include "a.h"\n#include "b.h"\n',
                "d.h": '#include "c.h"\n', "e.h": '#include "c.h"\n'}
        found = chains(knot)  # one of a.h and b.h goes before d.h or e.h, which include it by way of c.h
        self.assertEqual(len(found), 2, found)
        self.assertEqual(sorted(sum(found, [])), sorted(knot))


if __name__ == "__main__":
    unittest.main()
