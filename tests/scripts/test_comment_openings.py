#!/usr/bin/env python3
"""scripts/comment_openings.py finds comments that open with one of its words, wherever they stand, and nothing in code and literals."""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "comment_openings.py"
PLAIN = '''/// Often a comment opens well.
int a;  // the first
// A comment of two lines
// As long as its first line opens well.
const char* text = "// Of a literal", *raw = R"(
// From a raw literal
)";
char quote = '"';  // a quote
/* Whatever stands here. */
'''


class CommentOpenings(unittest.TestCase):
    def check(self, files, *arguments):
        """Returns (status, standard output, standard error) of the script in a repository with these files."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            (root / "scripts").mkdir()
            shutil.copy(SCRIPT, root / "scripts")
            subprocess.run(["git", "init", "-q", folder], check=True)
            subprocess.run(["git", "-C", folder, "add", "."], check=True)
            run = subprocess.run([sys.executable, root / "scripts" / SCRIPT.name, *arguments], capture_output=True, text=True)
        return run.returncode, run.stdout, run.stderr

    def test_plain_comments_pass(self):
        status, output, errors = self.check({"core/a.cpp": PLAIN, "docs/README.md": "// Of a page\n"})
        self.assertEqual((status, errors), (0, ""))
        self.assertIn("0 of 5 comments open with one of Of, As,", output)

    def test_each_kind_of_comment_is_found(self):
        for name, text, found in (("core/a.h", "/// Of a class.", "Of a class."), ("core/a.cpp", "int a;  // As before", "As before"),
                                  ("core/a.h", "int a;  ///< From it", "From it"), ("kernels/a.cu", "/* What it was */", "What it was */"),
                                  ("tests/core/a.cpp", "\n// Where it is", "Where it is")):
            for source in (PLAIN + text, text + "\n\n" + PLAIN):
                status, output, errors = self.check({name: source, "core/b.cpp": PLAIN})
                self.assertEqual((status, errors), (1, "at most 0 are wanted: let each begin with its subject\n"), text)
                line = source[:source.index(found)].count("\n") + 1
                self.assertEqual(output.splitlines()[0], f"{name}:{line}: {found}")
                self.assertIn("1 of 11 comments open", output)

    def test_paths_and_lists_have_no_limit(self):
        files = {"core/a.h": "// Of a class.\n", "comm/a.h": "// By name\n"}
        status, output, _ = self.check(files, "core")
        self.assertEqual((status, output.splitlines()[0][:19], output.splitlines()[1]), (0, "1 of 1 comments ope", "  core: 1"))
        self.assertIn("comm/a.h:1: By name\n", self.check(files, "--list", "comm")[1])
        status, _, errors = self.check(files, "nothing")
        self.assertEqual((status, errors), (1, "there are no sources to look at\n"))


if __name__ == "__main__":
    unittest.main()
