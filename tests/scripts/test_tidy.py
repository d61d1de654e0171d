#!/usr/bin/env python3
"""tidy.sh: planted violations fail, clean files pass, --changed checks the files that the last commits changed."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CLEAN = """namespace tranche {
int* nothing() {
  return nullptr;
}
}  // namespace tranche
"""
# (contents of the file, check that must report it)
PLANTED = [
    (CLEAN.replace("nullptr", "0"), "modernize-use-nullptr"),
    (CLEAN.replace("nothing", "giveNothing"), "readability-identifier-naming"),
    ("class Counter {\n public:\n  int next() { return ++count; }\n\n private:\n  int count = 0;\n};\n", "readability-identifier-naming"),
    ("int half(int value) {\n  if (value > 0);\n  return value / 2;\n}\n", "bugprone-suspicious-semicolon"),
]


class Tidy(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        for name in ("scripts/tidy.sh", ".clang-tidy"):
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.git("init", "--quiet")
        self.commands = []

    def git(self, *arguments):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments], cwd=self.root, check=True)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        if name.endswith(".cpp"):
            self.commands.append({"directory": str(self.root), "file": str(path), "command": f"c++ -std=c++20 -c {path}"})
            (self.root / "build").mkdir(exist_ok=True)
            (self.root / "build/compile_commands.json").write_text(json.dumps(self.commands, indent=0))

    def commit(self):
        self.git("add", ".clang-tidy", "scripts", "core")
        self.git("commit", "--quiet", "--message", "a commit")

    def tidy(self, *arguments):
        done = subprocess.run([self.root / "scripts/tidy.sh", "--build", "build", *arguments], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout

    def test_planted_violations_fail(self):
        self.write("core/planted.cpp", CLEAN)
        self.commit()
        self.assertEqual(self.tidy(), (0, "tidy: 1 files, no findings\n"))
        for text, check in PLANTED:
            with self.subTest(check=check):
                (self.root / "core/planted.cpp").write_text(text)
                status, output = self.tidy("core/planted.cpp")
                self.assertEqual(status, 1, output)
                self.assertIn(check, output)
                self.assertIn("core/planted.cpp:", output)

    def test_a_finding_in_a_header_of_ours_fails(self):
        self.write("core/planted.h", "#pragma once\ninline int* nothing() {\n  return 0;\n}\n")
        self.write("core/planted.cpp", '#include "planted.h"\n')
        self.commit()
        status, output = self.tidy()
        self.assertEqual(status, 1, output)
        self.assertIn("core/planted.h:3:", output)

    def test_changed_takes_the_last_commits_and_the_working_tree(self):
        self.write("core/first.cpp", PLANTED[0][0])
        self.commit()
        # In a shallow clone the oldest commit seems to change all files.
        self.assertEqual(self.tidy("--changed"), (0, "tidy: no files to check\n"))
        self.write("core/second.cpp", CLEAN)
        self.commit()
        self.assertEqual(self.tidy("--changed"), (0, "tidy: 1 files, no findings\n"))
        self.write("core/third.cpp", PLANTED[1][0])
        self.commit()
        status, output = self.tidy("--changed", "1")
        self.assertEqual(status, 1, output)
        self.assertNotIn("second.cpp:", output)
        (self.root / "core/third.cpp").write_text(CLEAN)
        self.assertEqual(self.tidy("--changed", "1")[0], 0)
        (self.root / "core/second.cpp").write_text(PLANTED[0][0])
        self.assertEqual(self.tidy("--changed", "1")[0], 1)

    def test_usage(self):
        self.assertEqual(self.tidy("--unknown"), (2, "tidy: unknown argument '--unknown'; see --help\n"))


if __name__ == "__main__":
    found = subprocess.run([ROOT / "scripts/tidy.sh", "--build", ".", "README.md"], stdout=subprocess.PIPE, text=True, check=False).stdout
    if "is not installed" in found:
        print("clang-tidy 16 is not installed")
        sys.exit(77)
    unittest.main()
