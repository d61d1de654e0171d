#!/usr/bin/env python3
"""scripts/sweep_part.py: all parts together are the whole, each part contains every value, and an invalid text ends the test."""
import contextlib
import io
import os
import pathlib
import subprocess
import sys
import unittest
from unittest import mock

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
sys.dont_write_bytecode = True
sys.path.insert(0, str(SCRIPTS))
import sweep_part  # noqa: E402


def run(text, items, *arguments, **more):
    """Returns (chosen items, output)."""
    out = io.StringIO()
    with mock.patch.dict(os.environ, {} if text is None else {sweep_part.VARIABLE: text}), contextlib.redirect_stdout(out):
        if text is None:
            os.environ.pop(sweep_part.VARIABLE, None)
        return sweep_part.part(items, *arguments, **more), out.getvalue()


class SweepPart(unittest.TestCase):
    def test_without_the_variable_everything_runs(self):
        self.assertEqual(run(None, range(5)), ([0, 1, 2, 3, 4], ""))
        self.assertEqual(run("0/1", range(5)), ([0, 1, 2, 3, 4], ""))

    def test_parts_are_everything_once(self):
        for count in (1, 2, 3, 7, 24):
            for n in (2, 3, 5):
                taken = [run(f"{k}/{n}", range(count))[0] for k in range(n)]
                self.assertEqual(sorted({item for items in taken for item in items}), list(range(count)))
                self.assertTrue(all(taken), "no part is empty")
                if count >= n:
                    self.assertEqual(sum(map(len, taken)), count)

    def test_each_part_meets_each_value(self):
        items = [(ranks, stage, number) for ranks in (1, 2, 4) for stage in range(4) for number in range(2)]
        for k in range(3):
            taken, _ = run(f"{k}/3", items, lambda item: item[:2])
            self.assertEqual({item[0] for item in taken}, {1, 2, 4})
            self.assertEqual({item[1] for item in taken}, {0, 1, 2, 3})
            self.assertLess(len(taken), 12)
        # Equal values of two axes count as two values.
        self.assertEqual(len(run("0/3", [(0, 1), (1, 0), (1, 1)], lambda item: item)[0]), 2)

    def test_what_is_left_out_is_printed(self):
        self.assertEqual(run("1/3", "abcdefg", name=lambda item: f"<{item}>")[1],
                         "part 1/3 of 7 configurations: 2 run (TRANCHE_TEST_PART); left out: <a>, <c>, <d>, <f>, <g>\n")
        self.assertIn("of 1 studies: 1 run (TRANCHE_TEST_PART); left out: none", run("1/3", "a", what="studies")[1])

    def test_counts(self):
        def share(text, count):
            with mock.patch.dict(os.environ, {sweep_part.VARIABLE: text}), contextlib.redirect_stdout(io.StringIO()) as out:
                return sweep_part.part_of_count(count, "kills"), out.getvalue()
        self.assertEqual([share(f"{k}/3", 10)[0] for k in range(3)], [4, 3, 3])
        self.assertEqual(share("2/3", 1)[0], 1)
        self.assertEqual(share("2/3", 0)[0], 0)
        self.assertEqual(share("2/3", 9)[1], "part 2/3 of 9 kills: 3 run (TRANCHE_TEST_PART)\n")

    def test_what_cannot_be_understood_ends_the_test(self):
        for text in ("", "1", "3/3", "0/0", "-1/3", "1/3/2", "a/b", " 1/3"):
            done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import sweep_part; sweep_part.part([1])"],
                                  env={**os.environ, sweep_part.VARIABLE: text, "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 1)
            self.assertEqual(done.stderr, f"TRANCHE_TEST_PART is '{text}'; it has the form k/n with 0 <= k < n, such as 1/3, or is not set, and then "
                             "everything runs\n")

    def test_a_command_runs_in_its_part(self):
        def command(text, *words):
            done = subprocess.run([sys.executable, SCRIPTS / "sweep_part.py", *words], capture_output=True, text=True, check=False,
                                  env=dict(os.environ, **{sweep_part.VARIABLE: text}))
            return done.returncode, done.stdout + done.stderr
        for number in range(5):
            statuses = [command(f"{k}/3", str(number), "sh", "-c", "exit 5")[0] for k in range(3)]
            self.assertEqual(statuses, [5 if k == number % 3 else 77 for k in range(3)])
        self.assertEqual(command("1/3", "3", "echo", "a b"), (77, "part 1/3 (TRANCHE_TEST_PART) leaves number 3 of its sweep out: echo a b\n"))
        self.assertEqual(command("0/1", "3", "echo", "a b"), (0, "a b\n"))
        status, text = command("3/3", "3", "echo")
        self.assertEqual(status, 1)
        self.assertIn("TRANCHE_TEST_PART is '3/3'", text)
        for words in ([], ["3"], ["x", "echo"]):
            status, text = command("0/3", *words)
            self.assertEqual(status, 2)
            self.assertIn("sweep_part.py NUMBER COMMAND...: runs a command", text)


if __name__ == "__main__":
    unittest.main()
