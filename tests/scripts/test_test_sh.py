#!/usr/bin/env python3
"""test.sh and .ci/run: which suites they run, how they end, and what they print last. cmake and ctest only pretend."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CMAKE = """#!/bin/sh
echo "cmake $*" >> "$CALLS"
case $* in
  --preset*) echo "-- Tranche: CUDA $CUDA" ;;
  *) case $* in *"--preset $BROKEN "*) echo "undefined symbol"; exit 1 ;; esac ;;
esac
"""
CTEST = """#!/bin/sh
echo "ctest $*" >> "$CALLS"
mkdir -p "build/$2/Testing/Temporary"
printf '1/1 Testing: a\\nx.cpp:3: Skipped\\nno device\\ny.cpp:4: Skipped\\nno device\\n' > "build/$2/Testing/Temporary/LastTest.log"
case $2 in "$FAILING") echo "50% tests passed, 1 tests failed out of 2"; exit 8 ;; esac
echo "100% tests passed, 0 tests failed out of 2 in $2"
"""
RELEASE = ["build ci", "build ci-no-cuda", "test ci-no-cuda", "test ci"]
SANITIZERS = ["build asan", "test asan", "build tsan", "test tsan"]


class TestScript(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in (("bin/cmake", CMAKE), ("bin/ctest", CTEST), ("scripts/setup.sh", "#!/bin/sh\n"),
                           ("scripts/check_includes.py", "#!/bin/sh\n"), ("scripts/tidy.sh", "#!/bin/sh\n")):
            path = self.root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        for name in ("scripts/test.sh", ".ci/run"):
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    def run_script(self, *arguments, cuda="ON", failing="", broken="none"):
        """(status, output, what was built and tested)"""
        calls = self.root / "calls"
        calls.write_text("")
        environment = dict(os.environ, PATH=f"{self.root}/bin:{os.environ['PATH']}", CALLS=str(calls), CUDA=cuda, FAILING=failing, BROKEN=broken)
        done = subprocess.run([self.root / arguments[0], *arguments[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, env=environment, check=False)
        self.calls = calls.read_text()
        steps = []
        for line in self.calls.splitlines():
            words = line.split()
            if words[0] == "ctest":
                steps.append("test " + words[2])
            elif words[1] == "--build":
                steps.append("build " + words[3])
        return done.returncode, done.stdout, steps

    def test_release_by_default(self):
        status, output, steps = self.run_script("scripts/test.sh")
        self.assertEqual((status, steps), (0, RELEASE))
        self.assertEqual(output.splitlines()[-1], "100% tests passed, 0 tests failed out of 2 in ci")
        for line in self.calls.splitlines():
            if line.startswith("ctest"):
                self.assertIn("-LE ^slow$", line)
        self.assertEqual(output.count("skipped a: no device"), 2, "once a suite")

    def test_without_a_toolkit_there_is_one_build(self):
        self.assertEqual(self.run_script("scripts/test.sh", cuda="OFF")[2], ["build ci", "test ci"])

    def test_sanitizers(self):
        status, output, steps = self.run_script("scripts/test.sh", "--sanitizers")
        self.assertEqual((status, steps), (0, SANITIZERS))
        self.assertEqual(output.splitlines()[-1], "100% tests passed, 0 tests failed out of 2 in tsan")

    def test_full_adds_slow_tests_and_sources_alone(self):
        self.assertEqual(self.run_script("scripts/test.sh", "--full")[2], RELEASE + ["build release"])
        self.assertNotIn("-LE", self.calls)
        self.assertEqual(self.run_script("scripts/test.sh", "--full", "--sanitizers")[2], SANITIZERS)
        self.assertNotIn("-LE", self.calls)

    def test_filter(self):
        status, _, steps = self.run_script("scripts/test.sh", "--filter", "optim")
        self.assertEqual((status, steps), (0, RELEASE))
        self.assertEqual(self.calls.count("-R optim --no-tests=ignore"), 2)
        self.assertIn("-DTRANCHE_WHOLE_TESTS=OFF", self.calls)
        for arguments, text in ((["--filter"], "--filter needs"), (["--sanitizer"], "unknown argument '--sanitizer'")):
            status, output, steps = self.run_script("scripts/test.sh", *arguments)
            self.assertEqual((status, steps), (2, []))
            self.assertIn(text, output)

    def test_the_first_failure_ends_it_with_the_table(self):
        for preset, build in (("ci-no-cuda", True), ("ci", False)):
            status, output, steps = self.run_script("scripts/test.sh", **{"broken" if build else "failing": preset})
            self.assertEqual(status, 1)
            self.assertEqual(steps, RELEASE[:2] if build else RELEASE)
            self.assertRegex(output, r"\ntotal +[0-9.]+  FAILED")
        self.assertEqual(output.splitlines()[-1], "50% tests passed, 1 tests failed out of 2")

    def test_continuous_integration_runs_both_and_tidy(self):
        status, output, steps = self.run_script(".ci/run")
        self.assertEqual((status, steps), (0, RELEASE + SANITIZERS))
        self.assertEqual(output.count("\nsuite "), 2)
        self.assertEqual(output.splitlines()[-1], "100% tests passed, 0 tests failed out of 2 in tsan")
        for preset, ran in (("ci", RELEASE), ("tsan", RELEASE + SANITIZERS)):
            status, output, steps = self.run_script(".ci/run", failing=preset)
            self.assertEqual((status, steps), (1, ran))
            self.assertEqual(output.splitlines()[-1], "50% tests passed, 1 tests failed out of 2")
        for script, arguments in (("tidy", "--changed"), ("setup", "--checks")):
            path = self.root / f"scripts/{script}.sh"
            path.write_text(f'#!/bin/sh\n[ "$*" != {arguments} ] || {{ echo {script} fails; exit 1; }}\n')
            status, output, steps = self.run_script(".ci/run")
            self.assertEqual((status, steps, output.splitlines()[-1]), (1, RELEASE, f"{script} fails"))


if __name__ == "__main__":
    unittest.main()
