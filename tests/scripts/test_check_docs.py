#!/usr/bin/env python3
"""scripts/check_docs.py finds wrong links, citations, C++ blocks and READMEs of folders; scripts/sentences.py counts words."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


class Pages(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        subprocess.run(["git", "init", "--quiet"], cwd=self.root, check=True)
        self.write("docs/a.md", "# A page\n\n## Two `words`, here\n")
        self.write("examples/one.cpp", "int main() {\n  int a = 1;\n  a += 1;\n  return a;\n}\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def run_script(self, name, *arguments):
        done = subprocess.run([sys.executable, SCRIPTS / name, *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def holds(self, page):
        self.write("README.md", page + "\n[A page](docs/a.md)\n")
        status, said = self.run_script("check_docs.py", self.root)
        self.assertEqual(status, 0, said)

    def finds(self, page, problem, count=1):
        self.write("README.md", page + "\n[A page](docs/a.md)\n")
        status, said = self.run_script("check_docs.py", self.root)
        self.assertEqual(status, 1, said)
        self.assertIn(problem, said)
        self.assertIn(f"{count} problems", said)

    def test_links(self):
        self.holds("[a](docs/a.md) [b](docs/a.md#two-words-here) [c](docs) [d](#e) [f](https://x.org/y)\n# E\n`[no](link)`\n")
        self.holds("```\n[no](link.md)\n```\n")
        self.finds("[a](docs/b.md)", "README.md:1: the link to docs/b.md leads nowhere", 2)
        self.finds("\n![p](docs/p.svg)", "README.md:2: the link to docs/p.svg leads nowhere")
        self.finds("[a](docs/a.md#three)", "docs/a.md has no heading #three")
        self.finds('<img src="p.svg">', "p.svg leads nowhere")

    def test_pages_that_nobody_finds(self):
        self.write("docs/b.md", "# Alone\n[itself](b.md)\n")
        self.finds("text", "docs/b.md: no page links it")

    def test_citations(self):
        self.write("examples/one.cpp", "// See docs/a.md.\nint main() {}\n")
        self.holds("text")
        self.write("examples/one.cpp", "// See docs/old.md.\nint main() {}\n")
        self.finds("text", "examples/one.cpp:1: there is no docs/old.md")

    def test_code(self):
        self.holds("<!-- examples/one.cpp -->\n```cpp\nint a = 1;\na += 1;\n```\n")
        self.holds("<!-- examples/one.cpp -->\n```cpp\nint main() {\n  // ...\n  return a;\n}\n```\n")
        self.finds("<!-- examples/one.cpp -->\n```cpp\nint a = 2;\n```\n", "README.md:2: these are not lines of examples/one.cpp")
        self.finds("<!-- examples/one.cpp -->\n```cpp\nreturn a;\n// ...\nint a = 1;\n```\n", "these are not lines of")
        self.finds("```cpp\nint a = 1;\n```\n", "nothing says which file this C++ is of")
        self.finds("<!-- docs/a.md -->\n```cpp\nint a = 1;\n```\n", "docs/a.md is no example or test")

    def test_json(self):
        self.holds('```json\n{"a": [1]}\n```\n')
        self.finds('\n```json\n{"a": 1,}\n```\n', "README.md:2: this is not JSON")

    def test_files_of_a_folder(self):
        for file in ["core/a_b.h", "core/a_b.cpp", "core/deep/c.cpp", "core/deeper/d.cpp", "core/deeper/README.md", "include/tranche/core/e.h"]:
            self.write(file, "`d.cpp`" if file.endswith(".md") else "")
        self.write("core/README.md", "`a_b`, `deep/`, `e.h`")
        self.holds("text")
        self.write("core/README.md", "`_b`, `d*p/`, ```` ```x ````, `*`")
        self.holds("text")
        self.write("core/README.md", "a_b, `a`, `deep`")
        self.finds("text", "core/README.md: it does not name `a_b`\ncore/README.md: it does not name `deep/`\ncore/README.md: it does not name `e`\n", 3)

    def test_sentences(self):
        short, long = "One two three. " * 9, "word " * 26 + "end.\n"
        self.write("a.md", f"# {long}\n{short}{long}\n```\n{long}```\n| {long}")
        status, said = self.run_script("sentences.py", self.root / "a.md")
        self.assertEqual((status, said), (0, "10 sentences on 1 pages, 90th percentile 3 words\n"))
        self.write("a.md", f"{short}{long}\n- {long}- [{long.strip()}](a.md)\n")
        status, said = self.run_script("sentences.py", self.root / "a.md")
        self.assertEqual(status, 1, said)
        self.assertIn("12 sentences on 1 pages, 90th percentile 27 words", said)
        self.assertIn("27 a.md: word word", said)
        for rows, status in ((440, 0), (460, 1)):
            self.write("README.md", "One.\n" + "| two words |\n" * rows)
            self.assertEqual(self.run_script("sentences.py", self.root / "README.md")[0], status)
        self.write("a.md", "# Nothing\n")
        self.assertIn("no sentence was found", self.run_script("sentences.py", self.root / "a.md")[1])


if __name__ == "__main__":
    unittest.main()
