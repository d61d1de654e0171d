#!/usr/bin/env python3
"""scripts/check_sizes.py must find each part of engine/ that is too large, with its message, and accept what is within the limits."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "check_sizes.py"
CODE = "  f();\n"


def function(lines):
    """A function with `lines` lines: the head takes two of them, and a block begins in the first column."""
    return "int Some::thing(int first,\n                int second) const {\n" + CODE * (lines - 3) + "}\n"


def members(count):
    """A class with `count` data members: some are in a class inside it, the types of some have brackets; there are other declarations too.
    """
    return ("class Some : public Other {\n public:\n  Some(const Config& config, int other = 3)\n      : config_(config), other_{other} {\n"
            "    f();\n  }\n  void call(const std::function<void(int)>& work);\n  bool set() const { return a_; }\n  using Counts = std::map<int, int>;\n"
            "  enum class State { idle, busy };\n  static constexpr int most = 3;\n\n private:\n  struct Inside {\n    int a = 0, b = 0;\n  };\n"
            "  std::function<void(int)> hook_;\n  const Config& config_;\n  std::array<int, 3> many_{};\n" +
            "".join(f"  int of_{i} = 0;  ///< a comment; with (brackets)\n" for i in range(count - 5)) + "};\n")


class CheckSizes(unittest.TestCase):
    def check(self, files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = pathlib.Path(folder) / "engine" / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            run = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)
        self.assertEqual(run.stderr, "")
        return run.returncode, run.stdout

    def test_what_is_within_the_limits_passes(self):
        files = {"part.cpp": function(80), "part.h": members(35), "engine.cpp": "int a;\n" * 700, "engine_impl.h": "int a;\n" * 700,
                 "other.h": "int a;\n" * 700}
        self.assertEqual(self.check(files), (0, ""))

    def test_a_long_function_is_found(self):
        status, output = self.check({"part.cpp": "\n" + function(81)})
        self.assertEqual((status, output), (1, "engine/part.cpp:2: Some::thing() has 81 lines, more than 80: divide it\n"))
        inline = "struct Some {\n  int thing() const {\n" + CODE * 79 + "  }\n};\n"
        self.assertIn("engine/part.h:2: thing() has 81 lines", self.check({"part.h": inline})[1])

    def test_a_large_class_is_found(self):
        status, output = self.check({"part.h": members(36)})
        self.assertEqual((status, output), (1, "engine/part.h: Some has 36 data members, more than 35: make parts of it\n"))

    def test_a_large_facade_is_found(self):
        status, output = self.check({"engine_impl.h": "int a;\n" * 700, "engine_step.cpp": "int a;\n" * 701})
        self.assertEqual(status, 1)
        self.assertIn("have 1401 lines, more than 1400", output)

    def test_nothing_to_check_is_an_error(self):
        self.assertEqual(self.check({})[0], 2)


if __name__ == "__main__":
    unittest.main()
