#!/usr/bin/env python3
"""scripts/answers.py finds an answer that is gone or too far away; scripts/word_count.py finds pages with too many words."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


class Answers(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        subprocess.run(["git", "init", "--quiet"], cwd=self.root, check=True)
        self.write("README.md", "[first](docs/README.md#there)\n")
        self.write("docs/README.md", "[second](guides/train.md)\n")
        self.write("docs/guides/train.md", "Save it,\nthen resume.\n")
        self.ask(2)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def ask(self, links, count=25, **other):
        answer = {"question": "How do I resume?", "page": "docs/guides/train.md", "phrase": "Save it, then resume.", "links": links} | other
        self.write("docs/answers.json", json.dumps([answer] * count))

    def run_script(self, name):
        done = subprocess.run([sys.executable, SCRIPTS / name, self.root], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def told(self, name, text):
        status, said = self.run_script(name)
        self.assertEqual(status, 1, said)
        self.assertIn(text, said)

    def test_answers_that_are_there(self):
        status, said = self.run_script("answers.py")
        self.assertEqual(status, 0, said)

    def test_an_answer_that_is_further_away(self):
        self.ask(1)
        self.told("answers.py", "How do I resume? docs/guides/train.md is 2 links away from README.md, and at most 1 are wanted")
        self.write("docs/README.md", "```\n[second](guides/train.md)\n```\n")
        self.told("answers.py", "No links lead from README.md to docs/guides/train.md")

    def test_an_answer_that_is_gone(self):
        self.ask(2, phrase="Save it twice.")
        self.told("answers.py", "docs/guides/train.md does not say: Save it twice.")
        self.ask(2, page="docs/c" ".md")
        self.told("answers.py", "There is no docs/c")

    def test_too_few_questions(self):
        self.ask(2, count=24)
        self.told("answers.py", "there are 24 questions, and at least 25 are wanted")

    def test_words(self):
        bar = int(re.search(r'^BARS = .*READMEs": (\d+)', (SCRIPTS / "word_count.py").read_text(encoding="utf-8"), re.M).group(1))
        self.write("docs/guides/train.md", "word - | " * (bar - 2))  # README.md and docs/README.md have one each
        status, said = self.run_script("word_count.py")
        self.assertEqual(status, 0, said)
        self.assertIn(f"docs/ and READMEs: {bar} words", said)
        self.write("core/README.md", "word\n")
        self.told("word_count.py", f"docs/ and READMEs: {bar + 1} words, and at most {bar} are wanted")

    def test_words_of_results(self):
        self.write("bench/results/2026-11-28-context.md", "word " * 20001)
        self.told("word_count.py", "bench/results: 20001 words, and at most 20000 are wanted")


if __name__ == "__main__":
    unittest.main()
