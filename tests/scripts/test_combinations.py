#!/usr/bin/env python3
"""scripts/combinations.py: the page follows from the table, and each kind of mistake in a table is reported."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "combinations.py"
TABLE = json.loads((ROOT / "tests" / "combinations.json").read_text(encoding="utf-8"))


def run(*arguments):
    done = subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


class Combinations(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.table = json.loads(json.dumps(TABLE))

    def told(self, text):
        path = pathlib.Path(self.folder.name) / "table.json"
        path.write_text(json.dumps(self.table), encoding="utf-8")
        status, said = run("--table", path, "--page", path.with_suffix(".md"))
        self.assertEqual(status, 1, said)
        self.assertIn(text, said)

    def test_the_page_is_what_the_table_gives(self):
        status, said = run()
        self.assertEqual(status, 0, said)

    def test_a_stale_page_is_told_and_written(self):
        path = pathlib.Path(self.folder.name) / "page.md"
        path.write_text("# Something else\n", encoding="utf-8")
        status, said = run("--page", path)
        self.assertEqual(status, 1)
        self.assertIn("-# Something else", said)
        self.assertIn("--update writes it", said)
        self.assertEqual(run("--page", path, "--update")[0], 0)
        self.assertEqual(run("--page", path)[0], 0)

    def test_a_new_capability_has_empty_cells(self):
        self.table["capabilities"].append({"key": "adapters", "axis": "adapters", "name": "adapters"})
        self.told("nothing holds stage-0 and adapters")

    def test_a_test_that_is_not_there(self):
        self.table["cells"][-1]["test"] = "CombinationsOfTwo.AreNot"
        self.told("there is no test CombinationsOfTwo.AreNot")

    def test_a_refusal_that_no_test_reads(self):
        refusal = next(cell for cell in self.table["cells"] if "refused" in cell)
        refusal["text"] = "because of the weather"
        self.told("does not hold the text: because of the weather")

    def test_an_absent_key_that_is_honoured(self):
        self.table["absent"].append({"name": "clipping", "keys": ["gradient_clipping"]})
        self.told("no configuration key gradient_clipping is refused")

    def test_cells_that_say_nothing(self):
        self.table["cells"].append({"between": ["stage-0"], "and": ["bf16"], "test": "Combinations"})
        self.told("is no pair's")
        self.table["cells"][-1] = {"between": ["stage-0"], "and": ["bf16"]}
        self.told("is not one of test, refused, independent")
        self.table["cells"][-1] = {"between": ["stage-0"], "and": ["fp8"], "independent": "none"}
        self.told("there is no capability 'fp8'")


if __name__ == "__main__":
    unittest.main()
