#!/usr/bin/env python3
"""test.sh and .ci/run: the suites that they run, their exit statuses and their last lines. cmake and ctest are fakes."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CMAKE = """#!/bin/sh
echo "cmake $*" >> "$CALLS"
case $* in
  --preset*)
    mkdir -p "build/$2"
    case $* in *-DTRANCHE_CUDA=*) words=${*#*-DTRANCHE_CUDA=}; echo "TRANCHE_CUDA:STRING=${words%% *}" > "build/$2/CMakeCache.txt" ;; esac ;;
  *) case $* in
       *"--preset $BROKEN "*) echo "undefined symbol"; exit 1 ;;
       *"--preset $WARNING "*) echo "x.cpp:3:4: warning: unused variable" ;;
     esac ;;
esac
"""
CTEST = """#!/bin/sh
echo "ctest $*" >> "$CALLS"
mkdir -p "build/$2/Testing/Temporary"
printf '1/1 Testing: a\\nx.cpp:3: Skipped\\nno device\\ny.cpp:4: Skipped\\nno device\\n' > "build/$2/Testing/Temporary/LastTest.log"
case $2 in "$FAILING") echo "50% tests passed, 1 tests failed out of 2"; exit 8 ;; esac
echo "100% tests passed, 0 tests failed out of 2 in $2"
"""
TIMES = """#!/bin/sh
echo "times $*" >> "$CALLS"
case $2 in --since) echo "41 CUDA sources and 12 C++ sources compiled, 9 of them again, of 400" ;; esac
"""
CHOICE = """#!/bin/sh
while [ "$1" != --log ]; do shift; done
echo "targets due_$(basename "$2" .txt)" > "$2"
echo "tests ^(due)$" >> "$2"
"""
RELEASE = ["build release", "test release"]
CUDA = ["build release", "test release"]
SANITIZERS = ["build asan", "test asan", "build tsan", "test tsan"]
FULL_SANITIZERS = ["build asan", "test asan", "build asan", "test emulation", "build tsan", "test tsan"]


class TestScript(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in (("bin/cmake", CMAKE), ("bin/ctest", CTEST), ("scripts/setup.sh", "#!/bin/sh\n"),
                           ("scripts/check_includes.py", "#!/bin/sh\n"), ("scripts/tidy.sh", "#!/bin/sh\n"),
                           ("scripts/build_times.py", TIMES), ("scripts/sanitized_tests.py", CHOICE), ("cuda/bin/nvcc", "#!/bin/sh\n")):
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        for name in ("scripts/test.sh", "scripts/build_settings.sh", ".ci/run"):
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    def run_script(self, *arguments, cuda=False, failing="", broken="none", warning="none"):
        """Returns (status, output, what was built and tested)."""
        calls = self.root / "calls"
        calls.write_text("")
        # Hides the machine's own toolkit: CUDA_HOME and CUDA_PATH name the places that are searched.
        path = os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if not (pathlib.Path(folder) / "nvcc").exists())
        toolkit = self.root / ("cuda" if cuda else "none")
        environment = dict(os.environ, PATH=f"{self.root}/bin:{path}", CALLS=str(calls), CUDA_HOME=str(toolkit), CUDA_PATH=str(toolkit),
                           FAILING=failing, BROKEN=broken, WARNING=warning)
        for name in ("CUDACXX", "TRANCHE_TEST_PART"):
            environment.pop(name, None)
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
        self.assertEqual(output.splitlines()[-1], "100% tests passed, 0 tests failed out of 2 in release")
        self.assertIn("-LE ^slow$", self.calls)
        self.assertIn("--preset release -DTRANCHE_WHOLE_TESTS=ON -DTRANCHE_CUDA=OFF", self.calls)
        self.assertEqual(output.count("skipped a: no device"), 1)
        self.assertIn("part 0/3 of the drawn sweeps", output)

    def test_with_a_toolkit_the_cuda_libraries_are_added(self):
        status, output, steps = self.run_script("scripts/test.sh", cuda=True)
        self.assertEqual((status, steps), (0, RELEASE + CUDA))
        self.assertIn("-DTRANCHE_CUDA=AUTO -DCMAKE_CUDA_ARCHITECTURES=90-real", self.calls)
        self.assertIn("-L ^(gpu|cuda)$", self.calls)
        self.assertIn("41 CUDA sources and 12 C++ sources compiled, 9 of them again, of 400", output)
        # A folder that is configured so continues to be used.
        self.assertEqual(self.run_script("scripts/test.sh", cuda=True)[2], RELEASE)
        self.assertIn("-DTRANCHE_CUDA=AUTO", self.calls)

    def test_sanitizers(self):
        status, output, steps = self.run_script("scripts/test.sh", "--sanitizers")
        self.assertEqual((status, steps), (0, SANITIZERS))
        self.assertEqual(output.splitlines()[-1], "100% tests passed, 0 tests failed out of 2 in tsan")
        for preset in ("asan", "tsan"):
            self.assertIn(f"--build --preset {preset} --target due_chosen-{preset} ", self.calls)
        self.assertEqual(self.calls.count("-R ^(due)$"), 2)

    def test_under_sanitizers_a_program_of_every_third_commit_meets_all_parts(self):
        git = self.root / "bin/git"
        parts = {}
        for commits in (1003, 1004, *range(1002, 1023, 3)):
            git.write_text(f"#!/bin/sh\necho {commits}\n")
            git.chmod(0o755)
            output = self.run_script("scripts/test.sh", "--sanitizers")[1]
            parts[commits] = int(re.search(r"part (\d+)/420 of the drawn sweeps", output)[1])
        for stride in (3, 4):
            self.assertEqual(len({parts[commits] % stride for commits in (1002, 1003, 1004)}), 3, stride)
        for stride in (2, 3, 4, 5, 6, 7):
            self.assertEqual({part % stride for commits, part in parts.items() if commits % 3 == 0}, set(range(stride)), stride)

    def test_full_adds_slow_tests_all_programs_and_sources_alone(self):
        status, output, steps = self.run_script("scripts/test.sh", "--full")
        self.assertEqual((status, steps), (0, RELEASE + ["build alone"]))
        self.assertNotIn("-LE", self.calls)
        self.assertIn("part 0/1 of the drawn sweeps", output)
        self.assertEqual(self.run_script("scripts/test.sh", "--full", "--sanitizers")[2], FULL_SANITIZERS)
        self.assertNotIn("-LE", self.calls)
        self.assertIn("--preset asan --target unit_tests gpu_tests ", self.calls)

    def test_filter(self):
        status, _, steps = self.run_script("scripts/test.sh", "--filter", "optim")
        self.assertEqual((status, steps), (0, RELEASE))
        self.assertEqual(self.calls.count("-R optim --no-tests=ignore"), 1)
        self.assertIn("-DTRANCHE_WHOLE_TESTS=OFF", self.calls)
        for arguments, text in ((["--filter"], "--filter needs"), (["--sanitizer"], "unknown argument '--sanitizer'")):
            status, output, steps = self.run_script("scripts/test.sh", *arguments)
            self.assertEqual((status, steps), (2, []))
            self.assertIn(text, output)

    def test_the_first_failure_ends_it_with_the_table(self):
        for how, ran in (("broken", RELEASE[:1]), ("warning", RELEASE[:1]), ("failing", RELEASE)):
            status, output, steps = self.run_script("scripts/test.sh", **{how: "release"})
            self.assertEqual((status, steps), (1, ran))
            self.assertRegex(output, r"\ntotal +[0-9.]+  FAILED")
            if how == "warning":
                self.assertIn("warnings are errors here", output)
        self.assertEqual(output.splitlines()[-1], "50% tests passed, 1 tests failed out of 2")

    def test_continuous_integration_runs_both_and_tidy(self):
        status, output, steps = self.run_script(".ci/run")
        self.assertEqual((status, steps), (0, RELEASE + SANITIZERS))
        self.assertEqual(output.count("\nsuite "), 2)
        self.assertEqual(output.splitlines()[-1], "100% tests passed, 0 tests failed out of 2 in tsan")
        for preset, ran in (("release", RELEASE), ("tsan", RELEASE + SANITIZERS)):
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
