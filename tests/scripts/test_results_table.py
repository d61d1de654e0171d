#!/usr/bin/env python3
"""scripts/results_table.py makes a row of each file's head, and finds heads that are incomplete and tables that are stale."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "results_table.py"
HEAD = "# A step, 3 November 2026\n\n- Figure: 0.9 of it\n- Bar: 0.8\n- Commit: abc\n- Command: `bench_step --clock wall|processor`\n\n## More\n\n- Other: 1\n"


class Table(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        self.folder = self.root / "bench" / "results"
        (self.folder / "archive").mkdir(parents=True)
        (self.folder / "archive" / "step.md").write_text(HEAD, encoding="utf-8")

    def run_script(self, *arguments):
        done = subprocess.run([sys.executable, SCRIPT, self.root, *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def test_a_row_for_each_file(self):
        status, said = self.run_script()
        self.assertEqual(status, 1, said)
        self.assertIn("bench/results/README.md is stale", said)
        self.assertEqual(self.run_script("--update"), (0, "1 files of results\n"))
        row = "| 3 November 2026 | [A step](archive/step.md) | 0.9 of it | 0.8 | abc | `bench_step --clock wall\\|processor` |\n"
        self.assertIn(row, (self.folder / "README.md").read_text(encoding="utf-8"))
        self.assertEqual(self.run_script()[0], 0)

    def test_heads_that_are_incomplete(self):
        (self.folder / "step.md").write_text(HEAD.replace("- Bar: 0.8\n", "").replace(", 3 November 2026", ""), encoding="utf-8")
        status, said = self.run_script("--update")
        self.assertEqual(status, 1, said)
        self.assertIn("bench/results/" "step.md: its heading does not end with a day", said)
        self.assertIn("bench/results/" "step.md: its head has no '- Bar: ...'", said)
        self.assertFalse((self.folder / "README.md").exists())


if __name__ == "__main__":
    unittest.main()
