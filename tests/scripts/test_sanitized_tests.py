#!/usr/bin/env python3
"""scripts/sanitized_tests.py: the programs that it chooses in a small history; each program's turn must come."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "sanitized_tests.py"

PROGRAMS = {
    "test_comm": {"folder": "tests/comm", "folders": ["comm", "core"], "sources": ["tests/comm/a_test.cpp"]},
    "test_core": {"folder": "tests/core", "folders": ["core"], "sources": ["tests/core/a_test.cpp"]},
    "test_data": {"folder": "tests/data", "folders": ["data", "core"], "sources": ["tests/data/a_test.cpp"]},
    "test_optim": {"folder": "tests/optim", "folders": ["optim", "core"], "sources": ["tests/optim/a_test.cpp"]},
    "test_tools": {"folder": "tests/tools", "folders": ["tools", "kernels", "data", "core"], "sources": ["tests/tools/a_test.cpp"]},
}


class Chosen(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        (self.root / "scripts").mkdir()
        for script in (SCRIPT, SCRIPT.with_name("code_changes.py")):
            shutil.copy(script, self.root / "scripts")
        self.build = self.root / "build"
        self.build.mkdir()
        (self.build / "test_programs.json").write_text(json.dumps(PROGRAMS))
        (self.build / "CTestTestfile.cmake").write_text("".join(
            f'add_test({name}{suffix} "{self.build}/tests/{name}")\n' for name in PROGRAMS for suffix in ("", ".shard1"))
            + 'add_test(script "python3" "x.py")\n')
        (self.root / ".gitignore").write_text("build/\n__pycache__/\n")
        self.write("tests/data/helper.h", "")
        self.write("tests/optim/a_test.cpp", '#include "../data/helper.h"\n')
        self.git("init", "-q", "-b", "main")
        self.commit()
        for _ in range(3):
            self.commit()

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def git(self, *arguments):
        environment = dict(os.environ, GIT_AUTHOR_NAME="a", GIT_AUTHOR_EMAIL="a@b", GIT_COMMITTER_NAME="a", GIT_COMMITTER_EMAIL="a@b")
        subprocess.run(["git", "-C", self.root, *arguments], check=True, env=environment, capture_output=True)

    def commit(self, name=None):
        if name:
            self.write(name, name)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")

    def run_script(self, *arguments):
        done = subprocess.run([sys.executable, self.root / "scripts" / SCRIPT.name, self.build, "--commits", "2", *arguments],
                              capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def chosen(self, *arguments):
        log = self.root / "build" / "log.txt"
        status, self.output, errors = self.run_script("--log", str(log), *arguments)
        self.assertEqual((status, errors), (0, ""))
        targets, tests = log.read_text().splitlines()
        self.tests = tests
        return set(targets.split()[1:])

    def test_each_program_has_its_turn(self):
        met = []
        for _ in range(3):
            met.append(self.chosen() - {"test_comm"})
            self.assertIn("test_comm", self.output.split("left out")[0])
            self.commit()
            self.commit()
        self.assertEqual(sorted(name for names in met for name in names), ["test_core", "test_data", "test_optim", "test_tools"])

    def test_what_is_left_out_is_said(self):
        chosen = self.chosen()
        self.assertIn(f"{len(chosen)} of 5 programs", self.output)
        for name in set(PROGRAMS) - chosen:
            self.assertRegex(self.output, rf"left out, third \d of 3:.* ?{name}")

    def test_a_folder_concerns_what_links_it(self):
        self.commit("data/reader.cpp")
        self.assertLessEqual({"test_data", "test_tools"}, self.chosen())
        self.assertIn("  changed: test_data test_tools", self.output)

    def test_a_public_header_does_too(self):
        self.commit("include/tranche/optim/x.h")
        self.chosen()
        self.assertIn("  changed: test_optim\n", self.output)

    def test_a_header_of_tests_concerns_what_includes_it(self):
        self.commit("tests/data/helper.h")
        self.chosen()
        self.assertIn("  changed: test_optim\n", self.output)

    def test_recorded_values_concern_the_programs_of_their_folder(self):
        self.commit("tests/data/golden.json")
        self.chosen()
        self.assertIn("  changed: test_data\n", self.output)

    def test_a_program_of_the_upper_folder_belongs_to_its_sources(self):
        PROGRAMS["test_device"] = {"folder": "tests", "folders": ["device"], "sources": ["tests/device/a_test.cpp"]}
        self.addCleanup(PROGRAMS.pop, "test_device")
        (self.build / "test_programs.json").write_text(json.dumps(PROGRAMS))
        self.commit("tests/data/golden.json")
        self.chosen()
        self.assertIn("  changed: test_data\n", self.output)
        self.commit("tests/device/golden.json")
        self.chosen()
        self.assertIn("  changed: test_data test_device\n", self.output)

    def test_build_files_concern_all(self):
        self.commit("CMakePresets.json")
        self.assertEqual(self.chosen(), set(PROGRAMS))

    def test_the_working_tree_counts_and_old_commits_do_not(self):
        self.commit("core/x.cpp")
        self.assertEqual(self.chosen(), set(PROGRAMS))
        self.commit("README.md")
        self.commit("README.md")
        self.assertNotEqual(self.chosen(), set(PROGRAMS))
        self.write("core/y.cpp", "")
        self.assertEqual(self.chosen(), set(PROGRAMS))

    def test_comments_white_space_and_pages_concern_nothing(self):
        self.write("core/x.h", "int a;")
        self.write("CMakeLists.txt", "project(a)")
        for _ in range(3):
            self.commit()
        self.write("core/x.h", "// A comment.\nint\n  a;")
        self.write("CMakeLists.txt", "# A comment.\nproject(a)")
        self.write("core/README.md", "words")
        self.write("kernels/cuda/resources.txt", "registers")
        self.commit()
        self.assertNotIn("  changed:", self.chosen() and self.output)
        self.write("core/x.h", "int b;")
        self.assertEqual(self.chosen(), set(PROGRAMS))

    def test_of_too_many_changed_programs_three_commits_run_each(self):
        sets = []
        for number in range(3):
            self.commit(f"core/x{number}.cpp")
            sets.append(self.chosen("--most", "4") - {"test_comm"})
            self.assertIn("left out, changed, for the next commits: ", self.output)
        self.assertEqual(sorted(name for names in sets for name in names), sorted(set(PROGRAMS) - {"test_comm"}))

    def test_without_a_history_all_are_run(self):
        shutil.rmtree(self.root / ".git")
        self.assertEqual(self.chosen(), set(PROGRAMS))
        self.assertIn("no history", self.output)

    def test_only(self):
        self.commit("core/x.cpp")
        self.assertEqual(self.chosen("--only", "^test_(comm|data)$"), {"test_comm", "test_data"})
        self.assertEqual(self.tests, r"tests ^(test_comm|test_comm\.shard1|test_data|test_data\.shard1)$")

    def test_an_unconfigured_folder_is_an_error(self):
        (self.build / "test_programs.json").unlink()
        status, _, errors = self.run_script()
        self.assertEqual(status, 2)
        self.assertIn("test_programs.json is missing: configure", errors)


if __name__ == "__main__":
    unittest.main()
