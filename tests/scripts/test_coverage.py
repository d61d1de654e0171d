#!/usr/bin/env python3
"""coverage.py combines the objects of one source, leaves out what does not count, and reports a drop of the totals. Tested with programs of
a few lines that are compiled here."""
import array
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "coverage.py"
sys.path.insert(0, str(SCRIPT.parent))
import coverage  # noqa: E402
CHOICE = """#pragma once
template <class Number>
Number not_negative(Number number) {
  if (number < 0)
    return 0;
  return number;
}
"""
FIRST = """#include <string>
#include "tranche/core/choice.h"
int first(int number) {
  std::string text(static_cast<unsigned>(not_negative(number)), 'x');
  return number > 3
      ? static_cast<int>(text.size())
      : 7;
}
"""
SECOND = """#include "tranche/core/choice.h"
long second(long number) {
  return not_negative(number);
}
"""
IDLE = """int idle(int number) {
  if (number > 1) return 2;
  return 3;
}
"""
MAIN = """int first(int);
long second(long);
int main(int arguments, char**) {
  return arguments > 1 ? static_cast<int>(second(-arguments)) : (first(1) == 7 ? 0 : 1);
}
"""


class Coverage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.compiled = pathlib.Path(folder.name).resolve() / "repository"
        build = cls.compiled / "build"
        for name, text in {"include/tranche/core/choice.h": CHOICE, "core/first.cpp": FIRST, "comm/second.cpp": SECOND, "comm/idle.cpp": IDLE,
                           "tests/main.cpp": MAIN, "build/list.cpp": "int list() { return 1; }\n",
                           "build/unity_0.cxx": f'#include "{cls.compiled}/core/first.cpp"\n#include "{cls.compiled}/comm/second.cpp"\n'}.items():
            (cls.compiled / name).parent.mkdir(parents=True, exist_ok=True)
            (cls.compiled / name).write_text(text)
        (build / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={cls.compiled}\n")
        # One name is relative to the build folder, as with compiler caches.
        for source in ("unity_0.cxx", "../comm/idle.cpp", cls.compiled / "tests/main.cpp", "list.cpp"):
            subprocess.run(["g++", "-std=c++20", "-O0", "--coverage", "-I", cls.compiled / "include", "-c", source, "-o",
                            pathlib.Path(source).name + ".o"], cwd=build, check=True)
        subprocess.run(["g++", "--coverage", "-o", "program", *(path.name for path in build.glob("*.o"))], cwd=build, check=True)

    def setUp(self):
        self.root = self.compiled
        self.build = self.root / "build"
        self.files = self.root.parent
        for path in self.build.glob("*.gcda"):
            path.unlink()

    def run_program(self, *arguments):
        subprocess.run([self.build / "program", *arguments], check=False)

    def run_script(self, *arguments):
        done = subprocess.run([sys.executable, SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout

    def measure(self, name, *arguments):
        status, output = self.run_script(self.build, "--json", self.files / name, *arguments)
        return status, output, json.loads((self.files / name).read_text())["files"]

    def test_a_source_is_covered_by_any_of_its_objects(self):
        self.run_program()
        status, output, files = self.measure("one.json")
        self.assertEqual(status, 0, output)
        # Neither tests/ nor generated files count; unity units and headers count for their own sources.
        self.assertEqual(sorted(files), ["comm/idle.cpp", "comm/second.cpp", "core/first.cpp", "include/tranche/core/choice.h"])
        self.assertEqual(files["core/first.cpp"]["covered_lines"], files["core/first.cpp"]["lines"])
        # The program's second half has not run.
        self.assertEqual((files["comm/second.cpp"]["lines"], files["comm/second.cpp"]["covered_lines"]), ([2, 3], []))
        # The template has two instances, one of which has run.
        self.assertEqual((files["include/tranche/core/choice.h"]["lines"], files["include/tranche/core/choice.h"]["covered_lines"]),
                         ([3, 4, 5, 6], [3, 4, 6]))
        self.assertEqual(files["include/tranche/core/choice.h"]["branches"], ["4.0", "4.1"])
        self.assertEqual(len(files["include/tranche/core/choice.h"]["covered_branches"]), 1)
        # The string's constructor may throw, but that is not a branch.
        self.assertEqual([branch.split(".")[0] for branch in files["core/first.cpp"]["branches"]], ["6", "6"])
        self.assertRegex(output, r"(?m)^comm +5 +0\.00 % +2 +0\.00 %$")
        self.assertRegex(output, r"(?m)^all ")

    def test_an_object_that_nothing_has_run_counts_as_not_covered(self):
        self.run_program()
        (self.build / "idle.cpp.gcda").unlink()
        status, _, files = self.measure("one.json")
        self.assertEqual(status, 0)
        self.assertEqual((files["comm/idle.cpp"]["lines"], files["comm/idle.cpp"]["covered_lines"]), ([1, 2, 3], []))

    def test_parts_are_put_together(self):
        self.run_program()
        _, _, one = self.measure("one.json")
        self.assertEqual(self.run_script("--reset", self.build), (0, "4 files with counts were removed.\n"))
        self.run_program("more")
        _, _, two = self.measure("two.json")
        header = "include/tranche/core/choice.h"
        self.assertEqual(two[header]["covered_lines"], [3, 4, 5])
        status, output = self.run_script("--merge", self.files / "one.json", self.files / "two.json", "--json", self.files / "both.json")
        self.assertEqual(status, 0, output)
        both = json.loads((self.files / "both.json").read_text())["files"]
        self.assertEqual(both[header]["covered_lines"], [3, 4, 5, 6])
        self.assertEqual(both[header]["covered_branches"], ["4.0", "4.1"])
        self.assertEqual((both["core/first.cpp"], both["comm/second.cpp"]), (one["core/first.cpp"], two["comm/second.cpp"]))
        # Without a reset the counts add up to the same.
        self.run_program()
        self.assertEqual(self.measure("sum.json")[2], both)

    def test_a_fall_is_told_in_points(self):
        self.run_program()
        self.run_program("more")
        self.measure("all.json")
        status, output, _ = self.measure("again.json", "--compare", self.files / "all.json", "--allow", "0", "--lost")
        self.assertEqual((status, "lost lines" in output), (0, False), output)
        self.assertRegex(output, r"(?m)^all .* \+0\.00 .* \+0\.00$")
        self.run_script("--reset", self.build)
        self.run_program()
        status, output, _ = self.measure("one.json", "--compare", self.files / "all.json", "--lost")
        self.assertEqual(status, 1, output)
        self.assertRegex(output, r"(?m)^comm +5 +0\.00 % +-40\.00 ")
        self.assertIn("comm/second.cpp: lost lines 2-3\n", output)
        self.assertIn("include/tranche/core/choice.h: lost lines 5\n", output)
        self.assertIn("include/tranche/core/choice.h: lost branches in lines 4\n", output)
        self.assertIn("coverage.py: lines have fallen by ", output)
        self.assertIn("at most 0.5 are allowed", output)
        self.assertEqual(self.run_script(self.build, "--compare", self.files / "all.json", "--allow", "60")[0], 0)

    def test_counts_of_an_earlier_object_are_refused(self):
        self.run_program()
        with tempfile.TemporaryDirectory() as other:
            copy = pathlib.Path(other) / "build"
            shutil.copytree(self.build, copy)
            (copy / "main.cpp.gcno").write_bytes((self.build / "unity_0.cxx.gcno").read_bytes())
            status, output = self.run_script(copy)
            self.assertEqual(status, 2)
            self.assertIn("stamp mismatch", output)
            self.assertIn("use --reset and run the tests again", output)

    def test_damaged_counts_are_refused(self):
        self.run_program()
        with tempfile.TemporaryDirectory() as other:
            copy = pathlib.Path(other) / "build"
            shutil.copytree(self.build, copy)
            words = array.array("I", (copy / "unity_0.cxx.gcda").read_bytes())
            words[words.index(0x01000000) + 4] ^= 1  # a function: tag, length, identity, checksum of its lines, checksum of its branches
            (copy / "unity_0.cxx.gcda").write_bytes(words.tobytes())
            status, output = self.run_script(copy)
            self.assertEqual(status, 2, output)
            self.assertIn("unity_0.cxx.gcda:profile mismatch", output)
            self.assertIn("remove a file that a killed process has damaged, and run the tests again", output)

    def test_counts_without_an_end_are_refused(self):
        self.run_program()
        with tempfile.TemporaryDirectory() as other:
            copy = pathlib.Path(other) / "build"
            shutil.copytree(self.build, copy)
            counts = (copy / "unity_0.cxx.gcda").read_bytes()
            self.assertTrue(coverage.whole(counts))
            self.assertEqual([length for length in range(len(counts)) if coverage.whole(counts[:length])], [])
            (copy / "unity_0.cxx.gcda").write_bytes(counts[:-4])
            status, output = self.run_script(copy)
            self.assertEqual(status, 2, output)
            self.assertIn("unity_0.cxx.gcda has no end: a process was killed while it wrote the file", output)

    def test_usage(self):
        def refused(text, *arguments):
            status, output = self.run_script(*arguments)
            self.assertEqual(status, 2, output)
            self.assertIn(text, output)
        refused("needs a build folder")
        refused("no test has run there", self.build)
        refused("was not compiled with --coverage", self.root / "core")
        refused("there is no folder", self.root / "none")
        refused("is no file that --json wrote", "--merge", self.build / "CMakeCache.txt")
        refused("--lost needs --compare", self.build, "--lost")
        self.run_program()
        refused("--root names the repository", self.build, "--root", self.root / "none")


if __name__ == "__main__":
    if shutil.which("gcov") is None or shutil.which("g++") is None:
        print("there is no gcov or no g++")
        sys.exit(77)
    unittest.main()
