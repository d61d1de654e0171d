#!/usr/bin/env python3
"""compare_commits.py draws every value, finds a program equal to itself, and finds a single different digest, byte or exit status.

usage: test_compare_commits.py PROGRAM RANKS
"""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import drawn_configurations as drawing  # noqa: E402

PROGRAM, RANKS = str(pathlib.Path(sys.argv[1]).absolute()), sys.argv[2]
# Runs the program and then makes a difference: `digest` and `byte` change its JSON, `status` refuses everything.
WRAPPER = """#!/usr/bin/env python3
import json, os, subprocess, sys
arguments = sys.argv[1:]
if "{what}" == "status":
    sys.exit("a refusal" and 2)
done = subprocess.run(["{program}", *arguments], stdout=subprocess.PIPE)
text = done.stdout.decode()
if "{what}" == "byte" and arguments[0] == "plan" and done.returncode == 0:
    plan = json.loads(text)
    plan["memory"]["device"]["peak_bytes"] += 1
    plan["new_key"] = 1
    text = json.dumps(plan)
if "{what}" == "digest" and "--report" in arguments and done.returncode == 0 and os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
    path = arguments[arguments.index("--report") + 1]
    report = json.load(open(path))
    if len(report["steps"]) > 2:  # not the run that resumes
        report["steps"][2]["state_digest"] = "0" * 32
    json.dump(report, open(path, "w"))
print(text, end="")
sys.exit(done.returncode)
"""


class Drawing(unittest.TestCase):
    def test_every_value_is_drawn_twice(self):
        for seed in range(6):
            self.assertEqual(drawing.scarce(drawing.draw(40, seed)), [], seed)
        self.assertIn(("stage", 3), drawing.scarce(drawing.draw(4, 1)))

    def test_a_seed_is_a_draw(self):
        self.assertEqual(drawing.draw(40, 5), drawing.draw(40, 5))
        self.assertNotEqual(drawing.draw(40, 5), drawing.draw(40, 6))

    def test_a_value_is_drawn_where_it_says_something(self):
        for drawn in drawing.draw(40, 1, {"tensor_sums"}, [2]):
            self.assertEqual("parameter_tier" in drawn, drawn["stage"] == 3)
            self.assertEqual("loss_scale" in drawn, drawn["dtype"] == "fp16")
            self.assertNotIn("tensor_sums", drawn)
            self.assertNotIn("progress", drawn)
            self.assertEqual(drawn["ranks"], 2)

    def test_a_file_has_every_key(self):
        keys = [set(self.paths(drawing.configuration(drawn))) for drawn in drawing.draw(40, 1)]
        always = set.intersection(*keys)
        self.assertTrue({"zero_optimization.offload_param.device", "tranche.reduction", "bf16.enabled", "gradient_clipping"} <= always)
        for key in set.union(*keys) - always:
            self.assertRegex(key, r"^(optimizer|scheduler)\.params")

    def paths(self, block, place=""):
        for key, value in block.items():
            if isinstance(value, dict) and value:
                yield from self.paths(value, f"{place}{key}.")
            else:
                self.assertTrue(value is not None or key in ("device_memory", "host_memory", "nvme_space"), place + key)
                yield place + key


class Comparing(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def compare(self, *arguments, script=ROOT / "scripts/compare_commits.py"):
        done = subprocess.run([sys.executable, "-B", script, "--folder", self.folder / "work", *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def against(self, what, *arguments):
        wrapper = self.folder / "wrapper"
        wrapper.write_text(WRAPPER.format(what=what, program=PROGRAM), encoding="utf-8")
        wrapper.chmod(0o755)
        return self.compare("--old-program", PROGRAM, "--new-program", wrapper, "--only", "2", "--configurations", "2", "--seed", "305", "--ranks", "1", *arguments)

    def test_a_program_is_equal_to_itself(self):
        report = self.folder / "report.json"
        status, out, error = self.compare("--old-program", PROGRAM, "--new-program", PROGRAM, "--configurations", "1", "--seed", "167", "--ranks", RANKS, "--report", report)
        self.assertEqual((status, error), (0, ""), out)
        self.assertIn("\nconfigurations: 1 equal\n4 plans and 6 refusals: 4 equal, 6 refused by both\n", out)
        self.assertNotIn("leave to its default", out)
        result = json.loads(report.read_text(encoding="utf-8"))
        self.assertTrue(result["equal"])
        self.assertEqual(len(result["cases"]), 11)
        self.assertEqual(list((self.folder / "work").rglob("*.json")), [])

    def test_another_digest(self):
        status, out, _ = self.against("digest", "--bits")
        self.assertEqual(status, 1, out)
        self.assertRegex(out, r"2 \| BITS DIFFER .*ranks=1 ")
        self.assertRegex(out, r"report of run: step 3: state_digest: [0-9a-f]{32} -> 0{32}")
        folder = pathlib.Path(out.split("files and commands: ")[1].splitlines()[0])
        self.assertEqual(out.count(" -> "), 1)
        self.assertIn("--resume old", (folder / "repeat.sh").read_text(encoding="utf-8"))
        self.assertTrue((folder / "config.json").exists())

    def test_another_byte(self):
        status, out, _ = self.against("byte")
        self.assertEqual(status, 1, out)
        self.assertRegex(out, r"plan of this run: memory.device.peak_bytes: \d+ -> \d+\n")
        self.assertIn("note: NEW alone has new_key in a plan", out)
        status, out, _ = self.against("byte", "--bits")
        self.assertEqual(status, 0, out)
        self.assertIn("note: bytes differ in memory.device.peak_bytes, 2 times", out)
        self.assertIn("configurations: 1 only bytes differ", out)

    def test_one_that_refuses_what_the_other_runs(self):
        status, out, _ = self.against("status")
        self.assertEqual(status, 1, out)
        self.assertIn("run: NEW ended with status 2: ", out)

    def test_usage(self):
        for arguments, text in ((["no-such-commit"], "compare_commits: no commit 'no-such-commit'\n"),
                                (["--old-program", self.folder, "--new-program", PROGRAM], f"compare_commits: {self.folder} is no program\n"),
                                (["--ranks", "0"], "--configurations, --jobs, --only and --ranks are 1 or more\n"), (["--configuration"], "expected one argument\n")):
            status, out, error = self.compare(*arguments)
            self.assertEqual((status, out), (2, ""))
            self.assertTrue(error.endswith(text), error)

    def test_a_commit_that_does_not_build(self):
        repository = self.folder / "repository"
        (repository / "scripts").mkdir(parents=True)
        for name in ("compare_commits.py", "drawn_configurations.py"):
            shutil.copy(ROOT / "scripts" / name, repository / "scripts")
        for arguments in (["init", "--quiet"], ["add", "--all"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "a"]):
            subprocess.run(["git", *arguments], cwd=repository, check=True)
        status, _, error = self.compare("HEAD", "--new-program", PROGRAM, script=repository / "scripts/compare_commits.py")
        self.assertEqual(status, 2)
        self.assertRegex(error, r"^compare_commits: cmake -S .* failed; the end of .*configure.log:\n")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
