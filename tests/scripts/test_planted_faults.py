#!/usr/bin/env python3
"""planted_faults.py: the list fits the sources; faults are found, not found or do not compile; the tree is restored in any case."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "planted_faults.py"
SOURCE = "one\ntwo\nthree\n"


def fault(name, find, replace, file="core/a.txt", **more):
    return {"id": name, "folder": file.split("/")[0], "file": file, "find": find, "replace": replace, "wrong": "It is wrong.",
            "promise": "It is right.", "seen_by": "unit", **more}


class PlantedFaults(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.tree = self.folder / "tree"
        (self.tree / "core").mkdir(parents=True)
        self.source = self.tree / "core" / "a.txt"
        self.source.write_text(SOURCE)
        (self.tree / ".gitignore").write_text("build/\n")
        for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "a commit"]):
            subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments], cwd=self.tree, check=True)
        self.write([fault("first", "one", "1"), fault("second", "two", "2")])

    def write(self, faults):
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def arguments(self, *arguments):
        return [sys.executable, SCRIPT, "--faults", self.folder / "faults.json", "--tree", self.tree, *arguments]

    def run_script(self, *arguments):
        done = subprocess.run(self.arguments(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60)
        self.assertEqual(self.source.read_text(), SOURCE, done.stdout)
        return done.returncode, done.stdout

    def results(self, name="run.json"):
        document = json.loads((self.folder / name).read_text())
        return {record["id"]: record["result"] for record in document["faults"]}

    def test_the_list_fits_the_sources(self):
        done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        self.assertRegex(done.stdout, r"^\d+ faults fit their sources\.\n$")

    def test_check_says_what_does_not_fit(self):
        lacking = fault("lacking", "one", "1")
        del lacking["promise"]
        self.write([fault("gone", "four", "4"), fault("twice", "t", "T"), fault("same", "one", "one"), fault("same", "two", "2"), lacking,
                    fault("other", "one", "1", more="x"), fault("away", "one", "1", file="core/b.txt"),
                    {**fault("moved", "one", "1"), "folder": "comm"}])
        status, output = self.run_script("--check")
        self.assertEqual(status, 1)
        self.assertEqual(output.splitlines(), [
            "gone: its text is 0 times in core/a.txt and has to be there once; adapt the fault to the source.",
            "twice: its text is 2 times in core/a.txt and has to be there once; adapt the fault to the source.",
            "same changes nothing.",
            "same is there twice.",
            "lacking has no text in its field 'promise'.",
            "other has an unknown field 'more'.",
            "away: core/b.txt cannot be read: No such file or directory.",
            "moved says folder 'comm', but its file is core/a.txt."])

    def test_a_fault_is_found_by_the_command_that_fails(self):
        status, output = self.run_script("--run", "--json", self.folder / "run.json", "--", "grep", "-q", "one", "core/a.txt")
        self.assertEqual(status, 1, output)
        self.assertEqual(self.results(), {"first": "found", "second": "not found"})
        self.assertRegex(output, r"(?m)^first +found .* status 1$")
        self.assertRegex(output, r"(?m)^second +not found ")
        self.assertIn("1 found, 1 not found, 0 did not compile, of 2 faults", output)
        self.assertIn("$ grep -q one core/a.txt\n", (self.tree / "build/planted-faults/first.log").read_text())

    def test_one_fault_alone_and_its_environment(self):
        command = ["sh", "-c", 'echo "$FAULT_ID $FAULT_FOLDER $FAULT_FILE $FAULT_SEEN_BY"; grep -q two core/a.txt']
        status, output = self.run_script("--run", "second", "--", *command)
        self.assertEqual(status, 0, output)
        self.assertNotIn("first", output)
        self.assertIn("second core core/a.txt unit\n", (self.tree / "build/planted-faults/second.log").read_text())

    def test_a_fault_that_does_not_compile_is_not_found(self):
        for more, command in ((["--build", "grep -q one core/a.txt"], ["true"]), ([], ["sh", "-c", "grep -q one core/a.txt || exit 125"])):
            status, output = self.run_script("--run", "--json", self.folder / "run.json", *more, "--", *command)
            self.assertEqual(status, 1, output)
            self.assertEqual(self.results(), {"first": "did not compile", "second": "not found"})

    def test_a_command_that_hangs_has_found_the_fault(self):
        status, output = self.run_script("--run", "first", "--without-baseline", "--timeout", "1", "--", "sh", "-c", "grep -q one core/a.txt || sleep 50")
        self.assertEqual(status, 0, output)
        self.assertIn("timed out after 1 s", output)

    def test_the_commands_have_to_pass_without_a_fault(self):
        status, output = self.run_script("--run", "--", "false")
        self.assertEqual(status, 2)
        self.assertIn("The commands fail without any fault (status 1)", output)
        self.assertEqual(self.run_script("--run", "--without-baseline", "--", "false")[0], 0)

    def test_a_run_goes_on(self):
        run = ["--run", "--without-baseline", "--json", self.folder / "run.json", "--go-on"]
        (self.folder / "run.json").write_text(json.dumps({"faults": [{"id": "first", "folder": "core", "result": "not found", "build_seconds": 0,
                                                                      "seconds": 1, "remark": "", "log": ""}]}))
        self.assertEqual(self.run_script(*run, "--", "false")[0], 1)
        self.assertEqual(self.results(), {"first": "not found", "second": "found"})

    def test_a_tree_with_changes_is_refused(self):
        (self.tree / ".gitignore").write_text("build/\nmore/\n")
        status, output = self.run_script("--run", "--", "true")
        self.assertEqual(status, 2)
        self.assertIn("has changes; commit them, or name a clone by --tree:\n M .gitignore", output)

    def test_a_signal_puts_the_file_back_and_ends_the_command(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            mark = self.folder / "pid"
            mark.unlink(missing_ok=True)
            command = ["sh", "-c", f"echo $$ > {mark}.new; mv {mark}.new {mark}; sleep 100"]
            with subprocess.Popen(self.arguments("--run", "--without-baseline", "--", *command), stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True) as child:
                limit = time.monotonic() + 60
                while not mark.exists() and time.monotonic() < limit:
                    time.sleep(0.02)
                self.assertEqual(self.source.read_text(), SOURCE.replace("one", "1"))
                child.send_signal(number)
                _, errors = child.communicate(timeout=60)
            self.assertEqual((child.returncode, errors), (2, f"planted_faults.py: ended by {number.name}; the tree is as it was\n"))
            self.assertEqual(self.source.read_text(), SOURCE)
            with self.assertRaises(ProcessLookupError):
                os.kill(int(mark.read_text()), 0)

    def test_usage(self):
        self.assertEqual(self.run_script("--run"), (2, "planted_faults.py: --run needs the command behind --\n"))
        self.assertEqual(self.run_script("--run", "third", "--", "true"), (2, "planted_faults.py: the list has no fault third; see --list\n"))
        self.assertEqual(self.run_script()[0], 2)
        status, output = self.run_script("--list")
        self.assertEqual((status, len(output.splitlines())), (0, 2))

    def test_several_runs_together(self):
        names = ["a", "b", "c"]
        files = []
        for number, found in enumerate((["a", "b"], ["a", "c"], ["a"])):
            path = self.folder / f"{number}.json"
            path.write_text(json.dumps({"faults": [{"id": name, "result": "found" if name in found else "not found"} for name in names]}))
            files.append(path)
        status, output = self.run_script("--together", *files, "--least", "1")
        self.assertEqual(status, 0, output)
        self.assertIn("found: 2, 2, 1 by each run, 3 of 3 by all together\n", output)
        self.assertEqual(self.run_script("--together", *files, "--least", "2")[0], 1)
        self.assertEqual(self.run_script("--together", files[0], "--least", "1")[0], 1)
        self.assertEqual(self.run_script("--together", self.folder / "none.json")[0], 2)


if __name__ == "__main__":
    unittest.main()
