#!/usr/bin/env python3
"""bare_check.sh takes its commands from the README of the given commit, and refuses requests that it cannot fulfil."""
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class BareCheck(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.repository = pathlib.Path(self.folder.name)
        (self.repository / "scripts").mkdir()
        shutil.copy(ROOT / "scripts/bare_check.sh", self.repository / "scripts")
        self.git("init", "--quiet")
        self.commit(ROOT.joinpath("README.md").read_text(encoding="utf-8"))

    def git(self, *arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=self.repository, check=True)

    def commit(self, readme):
        (self.repository / "README.md").write_text(readme, encoding="utf-8")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a")

    def bare_check(self, *arguments):
        done = subprocess.run([self.repository / "scripts/bare_check.sh", *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def test_the_commands_are_the_readmes(self):
        status, out, _ = self.bare_check("--commands")
        self.assertEqual(status, 0)
        scripts = [line.split()[0] for line in out.splitlines()]
        self.assertEqual(scripts, ["scripts/quickstart.sh", "scripts/test.sh"])
        for script in scripts:
            self.assertTrue((ROOT / script).is_file(), script)

    def test_they_are_those_of_the_commit(self):
        self.commit("## One command\n```\nno\n```\n## Two commands\ntext\n\n```\none  # a\ntwo --b\n```\n\n```\nthree\n```\n")
        self.assertEqual(self.bare_check("--commands"), (0, "one  # a\ntwo --b\n", ""))
        self.assertIn("scripts/test.sh", self.bare_check("--commands", "HEAD~1")[1])

    def test_a_readme_without_two_commands_is_refused(self):
        self.commit("## Two commands\n```\none\n```\n")
        status, _, error = self.bare_check("HEAD")
        self.assertEqual((status, error), (1, "bare_check: README.md has 1 commands under 'Two commands', not two\n"))

    def test_another_command_takes_the_place_of_the_readmes(self):
        self.assertEqual(self.bare_check("--commands", "--run", "one --two"), (0, "one --two\n", ""))

    def test_usage(self):
        for arguments, text in ((["--folders", "a"], "unknown argument '--folders'"), (["--folder"], "--folder needs a folder"),
                                (["--put"], "--put needs a file"), (["--run"], "--run needs a command"), (["--put", "no.deb"], "no file 'no.deb'"),
                                (["no-such-commit"], "no commit 'no-such-commit'"), (["HEAD", "HEAD"], "one commit, not 'HEAD' and 'HEAD'")):
            status, out, error = self.bare_check(*arguments)
            self.assertEqual((status, out, error), (2, "", f"bare_check: {text}; see --help\n"))
        status, out, _ = self.bare_check("--help")
        self.assertEqual(status, 0)
        self.assertIn("--folder DIR", out)
        self.assertIn("Exit status: 0", out)

    def test_the_check_of_the_package_takes_one_package(self):
        done = subprocess.run([ROOT / "scripts/package_check.sh", "a.deb", "b.deb"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (2, "usage: scripts/package_check.sh [PACKAGE.deb]\n"))
        done = subprocess.run([ROOT / "scripts/package_check.sh", "a.deb"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (2, "bare_check: no file 'a.deb'; see --help\n"))


if __name__ == "__main__":
    unittest.main()
