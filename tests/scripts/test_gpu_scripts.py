#!/usr/bin/env python3
"""scripts/gpu/: arguments, budget, self-check, test lists, time limits and the summary, with fake programs."""
import json
import os
import pathlib
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

GPU = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "gpu"
sys.dont_write_bytecode = True
sys.path.insert(0, str(GPU))
import cases  # noqa: E402
import kernel_times  # noqa: E402
import plan  # noqa: E402
import processes  # noqa: E402
import suite as gpu_suite  # noqa: E402
import summary  # noqa: E402
import test_list  # noqa: E402


def run(*command, **options):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          check=False, timeout=180, **options)


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)


class Arguments(Folder):
    def refused(self, status, text, *command):
        result = run(*command)
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        self.assertIn(text, result.stderr)

    def test_usage_is_printed(self):
        for script in ("bundle.sh", "run.sh", "check.sh"):
            result = run(GPU / script, "--help")
            self.assertEqual(result.returncode, 0, script)
            self.assertIn("Exit status", result.stdout)
            self.assertNotIn("set -e", result.stdout)

    def test_bundle(self):
        bundle = GPU / "bundle.sh"
        self.refused(2, "unknown argument '--nonsense'", bundle, "--nonsense")
        self.refused(2, "--out needs a value", bundle, "--out")
        self.refused(2, "--budget '6O' is not a number", bundle, "--budget", "6O")
        self.refused(2, "--gpu '9.0' is not a compute capability without its dot", bundle, "--gpu", "9.0")
        self.refused(2, "--gpu is for the build", bundle, "--gpu", "90", "--no-build")
        self.refused(2, "build first, or leave out --no-build", bundle, "--no-build", "--build", self.folder)

    def test_files_that_are_not_tracked_travel_too(self):
        script = self.folder / "scripts" / "gpu" / "bundle.sh"
        shutil.copytree(GPU, script.parent)
        run("git", "init", self.folder)
        with open(self.folder / "large", "wb") as file:
            file.truncate(70 << 20)
        self.refused(2, "the files that git tracks or does not ignore are 70 MiB: nothing can travel", script, "--no-build")
        (self.folder / ".gitignore").write_text("large\n")
        self.refused(2, "build first, or leave out --no-build", script, "--no-build")

    def test_run(self):
        # Uses a copy, because the sources' own build/ may contain a bundle.
        script = self.folder / "scripts" / "gpu" / "run.sh"
        shutil.copytree(GPU, script.parent)
        self.refused(2, "unknown argument 'tests'", script, "tests")
        self.refused(2, "--only 'bench' is neither", script, "--only", "bench")
        self.refused(2, "--limit '0' is not", script, "--limit", "0")
        self.refused(2, "--results needs a value", script, "--results")
        self.refused(2, "neither --bundle nor --build goes with it", script, "--from", self.folder, "--build")
        self.refused(2, "does not exist", script, "--bundle", self.folder / "none.tar.xz")
        self.refused(2, "nothing to run", script)
        self.refused(2, "bin/tranche is missing", script, "--from", self.folder)

    def test_check_outside_of_a_bundle(self):
        self.refused(2, "holds no MANIFEST", GPU / "check.sh")
        self.refused(2, "unknown argument '--gpu'", GPU / "check.sh", "--gpu")


class Pack(Folder):
    def setUp(self):
        super().setUp()
        self.top = self.folder / "bundle"
        (self.top / "bin").mkdir(parents=True)
        (self.top / "bin" / "random").write_bytes(os.urandom(3 << 19))
        (self.top / "small").write_text("text")
        self.out = self.folder / "out.tar.xz"

    def test_over_the_budget(self):
        result = run(GPU / "pack.sh", self.top, self.out, 1)
        self.assertEqual(result.returncode, 3)
        self.assertIn("1.5 MiB, and the budget is 1", result.stderr)
        self.assertIn("1.5 MiB  bin/random", result.stderr)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["bundle"], "nothing is left")

    def test_what_programs_share_is_packed_once(self):
        (self.top / "bin" / "random-between").write_bytes(bytes(9 << 20))
        shutil.copy(self.top / "bin" / "random", self.top / "bin" / "random-too")
        result = run(GPU / "pack.sh", self.top, self.out, 2)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_within_it_equal_contents_give_equal_archives(self):
        sums = []
        for _ in range(2):
            self.assertEqual(run(GPU / "pack.sh", self.top, self.out, 2).returncode, 0)
            sums.append(pathlib.Path(f"{self.out}.sha256").read_text())
            (self.top / "small").touch()
        self.assertEqual(sums[0], sums[1])
        self.assertEqual(run("sha256sum", "-c", f"{self.out}.sha256", cwd=self.folder).returncode, 0)
        shutil.rmtree(self.top)
        run("tar", "-C", self.folder, "-xJf", self.out)
        self.assertEqual(run("sha256sum", "-c", "SHA256SUMS", cwd=self.top).returncode, 0)


class Check(Folder):
    """A bundle of fake programs."""

    def setUp(self):
        super().setUp()
        for script in ("check.sh", "env.sh"):
            shutil.copy(GPU / script, self.folder)
        (self.folder / "MANIFEST").write_text("commit: abc\ndate: today\nneeds-glibc: 2.2\nmpi: Open MPI\n"
                                              "needs-cuda-library: libpretended.so.1\n")
        write_program(self.folder / "bin" / "tranche", "echo 'CUDA      compiled; no driver'")
        write_program(self.folder / "tests" / "test_core", "echo '[  PASSED  ] 53 tests.'")
        write_program(self.folder / "tests" / "comm_mpi_failing", "true")
        write_program(self.folder / "scripts" / "run_mpi.sh", "echo rank 0 is done; echo rank 1 is done")
        (self.folder / "deps").mkdir()
        (self.folder / "toolkit" / "lib64").mkdir(parents=True)
        (self.folder / "toolkit" / "lib64" / "libpretended.so.1").touch()
        sums = run("bash", "-c", "find bin tests -type f | xargs sha256sum > SHA256SUMS", cwd=self.folder)
        self.assertEqual(sums.returncode, 0)

    def check(self, *arguments, **environment):
        return run(self.folder / "check.sh", "--allow-no-gpu", *arguments,
                   env={**os.environ, "CUDA_HOME": str(self.folder / "toolkit"), **environment})

    def test_no_gaps(self):
        result = self.check()
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("no gaps", result.stdout)
        self.assertIn("commit abc, today", result.stdout)
        self.assertIn("53 tests passed", result.stdout)
        self.assertRegex(result.stdout, r"ok +libpretended.so.1 +\S+/toolkit/lib64")

    def test_libraries_of_python_packages(self):
        packages = self.folder / "site" / "nvidia" / "pretended" / "lib"
        packages.mkdir(parents=True)
        (packages / "libpretended.so.1").touch()
        result = self.check(CUDA_HOME="", PYTHONPATH=str(self.folder / "site"))
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertRegex(result.stdout, r"ok +libpretended.so.1 +\S+/site/nvidia/pretended/lib")
        # The toolkit's libraries come first, and programs are started with the folder that was found.
        result = run("bash", "-c", f'. {self.folder}/env.sh; echo "$TRANCHE_CUDA_LIBRARIES $LD_LIBRARY_PATH"',
                     env={**os.environ, "CUDA_HOME": str(self.folder / "toolkit"), "LD_LIBRARY_PATH": "/driver",
                          "PYTHONPATH": str(self.folder / "site")})
        found, path = result.stdout.split()
        self.assertEqual(found, str(self.folder / "toolkit" / "lib64"))
        self.assertTrue(path.endswith(f":{found}:/driver"), path)

    def says(self, status, counted, text, **environment):
        result = self.check(**environment)
        self.assertEqual(result.returncode, status, result.stdout)
        self.assertRegex(result.stdout, text)
        self.assertIn(counted, result.stdout)

    def test_each_gap(self):
        self.says(1, "1 gaps", "gap +libpretended.so.1 +in no CUDA toolkit", CUDA_HOME="")
        manifest = self.folder / "MANIFEST"
        good = manifest.read_text()
        manifest.write_text(good.replace("2.2", "2.99"))
        self.says(1, "1 gaps", r"gap +glibc .*; 2.99 is needed")
        manifest.write_text(good)
        write_program(self.folder / "bin" / "tranche", "echo no loader; exit 1")
        self.says(1, "1 gaps", "gap +tranche info +failed: no loader")

    def test_what_costs_some_tests_is_no_gap(self):
        write_program(self.folder / "scripts" / "run_mpi.sh", "echo no launcher; exit 1")
        self.says(0, "1 warnings", "warn +mpirun -n 2 +failed, .*: no launcher")
        # Open MPI frames its messages.
        write_program(self.folder / "scripts" / "run_mpi.sh", "echo '-----'; echo 'no listener'; echo '-----'; exit 1")
        self.says(0, "1 warnings", "warn +mpirun -n 2 +failed, .*: no listener")
        write_program(self.folder / "scripts" / "run_mpi.sh", "echo rank 0 is done; echo rank 1 is done")
        write_program(self.folder / "tests" / "test_core", "echo '1 FAILED TEST'; exit 1")
        self.says(0, "1 warnings", "warn +a test program +test_core failed: 1 FAILED TEST")
        self.assertRegex(self.check("--full").stdout, "warn +files +damaged: tests/test_core: FAILED")
        self.assertNotIn("damaged", self.check().stdout, "looked for on demand")

    def test_what_a_host_says_of_its_gpu(self):
        def smi(text):
            write_program(self.folder / "host bin" / "nvidia-smi", text)
        path = f"{self.folder}/host bin:{os.environ['PATH']}"
        write_program(self.folder / "bin" / "tranche", "echo 'CUDA      Pretended, compute capability 8.0, 40 GiB'")
        smi("echo 'nvidia-smi has failed'; exit 9")
        self.says(0, "1 warnings", "warn +GPU and driver +nvidia-smi does not answer.*: nvidia-smi has failed", PATH=path)
        for mode, text in (("Exclusive_Process", "admits one program at a time"), ("Prohibited", "admits no program")):
            smi(f"echo 'Pretended, 580.1, 40 GiB, {mode}, Disabled'")
            self.says(0, "1 warnings", f"warn +compute mode +the GPU {text}", PATH=path)
        smi("echo 'Pretended, 580.1, 40 GiB, Default, Disabled'")
        self.says(0, "no gaps", "ok +GPU and driver +Pretended, 580.1", PATH=path)
        manifest = self.folder / "MANIFEST"
        manifest.write_text(manifest.read_text() + "needs-compute-capability: 9.0\ncompute-capabilities: 9.0 and newer\n")
        self.says(1, "1 gaps", "gap +compute capability +8.0; the archive's kernels are for 9.0 and newer: make it without --gpu", PATH=path)
        write_program(self.folder / "bin" / "tranche", "echo 'CUDA      Pretended, compute capability 10.0, 180 GiB'")
        self.says(0, "no gaps", "ok +compute capability +10.0", PATH=path)

    def test_what_a_host_has_set_for_others(self):
        self.says(0, "1 warnings", "warn +environment +CUDA_LAUNCH_BLOCKING is '1', which changes", CUDA_LAUNCH_BLOCKING="1")
        result = run("bash", "-c", f"ulimit -v 50000000; '{self.folder}/check.sh' --allow-no-gpu",
                     env={**os.environ, "CUDA_HOME": str(self.folder / "toolkit")})
        self.assertIn("address space", result.stdout)
        # Images of frameworks contain another Open MPI and set variables for it.
        result = run("bash", "-c", f'. {self.folder}/env.sh; echo "$OPAL_PREFIX ${{OMPI_MCA_coll_hcoll_enable-unset}} ${{PMIX_RANK-unset}}"',
                     env={**os.environ, "OPAL_PREFIX": "/opt/hpcx", "OMPI_MCA_coll_hcoll_enable": "0", "PMIX_RANK": "0"})
        self.assertEqual(result.stdout, f"{self.folder}/deps/usr unset unset\n")

    def test_a_loopback_that_is_down(self):
        if run("unshare", "-rn", "true").returncode != 0:
            self.skipTest("this user may not make a network of its own")
        result = run("unshare", "-rn", self.folder / "check.sh", "--allow-no-gpu",
                     env={**os.environ, "CUDA_HOME": str(self.folder / "toolkit")})
        self.assertRegex(result.stdout, "warn +loopback +the network interface lo is down, .*: ip link set lo up")
        self.assertRegex(self.check().stdout, "ok +loopback +up")

    def test_a_temporary_folder_that_is_not_there(self):
        result = run(GPU.parent / "run_mpi.sh", "2", "true", env={**os.environ, "TMPDIR": "/not/there"})
        self.assertEqual(result.returncode, 2)
        self.assertIn("nothing can be written to the temporary folder /not/there: set TMPDIR to another", result.stderr)

    def test_programs_of_the_host_keep_its_libraries(self):
        write_program(self.folder / "host bin" / "nvidia-smi", 'echo "GPU of ${LD_LIBRARY_PATH:-none}"')
        path = f"{self.folder}/host bin:{os.environ['PATH']}"
        self.says(0, "no gaps", "ok +GPU and driver +GPU of /driver\n", PATH=path, LD_LIBRARY_PATH="/driver")
        self.says(0, "no gaps", "ok +GPU and driver +GPU of none\n", PATH=path, LD_LIBRARY_PATH="")
        # A user may have sourced env.sh before.
        result = run("bash", "-c", f". {self.folder}/env.sh; . {self.folder}/env.sh; tranche_host nvidia-smi",
                     env={**os.environ, "PATH": path, "LD_LIBRARY_PATH": "/driver"})
        self.assertEqual(result.stdout, "GPU of /driver\n")

    def test_the_newer_libstdcxx_is_taken(self):
        for name in ("libstdc++.so.6", "libgcc_s.so.1", "libz.so.1"):
            (self.folder / "host" / name).mkdir(parents=True)
        theirs = self.folder / "theirs" / "libstdc++.so.6"
        theirs.parent.mkdir()
        theirs.write_bytes(b"\x7fELF\0GLIBCXX_3.4.9\0GLIBCXX_3.4.28\0")
        write_program(self.folder / "host bin" / "ldconfig", "".join(
            f"echo '{name} (libc6,x86-64) => {theirs.parent}/{name}'\n" for name in ("libstdc++.so.6", "libgcc_s.so.1")))
        manifest = self.folder / "MANIFEST"
        good = manifest.read_text()
        environment = {**os.environ, "PATH": f"{self.folder}/host bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": ""}

        def taken(**more):
            result = run("bash", "-c", f'. {self.folder}/env.sh; echo "$LD_LIBRARY_PATH"', env={**environment, **more})
            return [name for name in ("libstdc++.so.6", "libgcc_s.so.1", "libz.so.1") if f"/host/{name}" in result.stdout]

        manifest.write_text(good + "needs-glibcxx: 3.4.28\n")
        self.assertEqual(taken(), ["libz.so.1"], "what the host lacks")
        manifest.write_text(good + "needs-glibcxx: 3.4.30\n")
        self.assertEqual(taken(), ["libstdc++.so.6", "libgcc_s.so.1", "libz.so.1"])
        newer = self.folder / "conda" / "libstdc++.so.6"
        newer.parent.mkdir()
        newer.write_bytes(b"\x7fELF\0GLIBCXX_3.4.31\0")
        self.assertEqual(taken(LD_LIBRARY_PATH=f"/none:{newer.parent}"), ["libz.so.1"], "the first that would be loaded")


class TestList(unittest.TestCase):
    @staticmethod
    def case(program, name, labels):
        return {"name": f"{program}.{name}", "command": [f"/s/build/x/tests/{program}", f"--gtest_filter={name}"],
                "properties": [{"name": "LABELS", "value": labels}, {"name": "TIMEOUT", "value": 240.0}]}

    def test_cases_become_programs(self):
        entries = test_list.gathered(
            [self.case("test_gpu", "A.a", ["gpu"]), self.case("test_cpu", "A.a", ["unit"]),
             self.case("test_gpu", "B.b", ["gpu", "slow"]), self.case("test_mixed", "A.a", ["unit"]),
             self.case("test_mixed", "G.g", ["gpu"]), self.case("test_mixed", "G.h", ["gpu"]),
             {"name": "ranks", "command": ["/s/scripts/run_mpi.sh", "2", "/s/build/x/tests/p"],
              "properties": [{"name": "LABELS", "value": ["gpu"]}]},
             {"name": "script", "command": ["/usr/bin/python3.11", "/s/tests/t.py"],
              "properties": [{"name": "LABELS", "value": ["gpu"]}, {"name": "ENVIRONMENT", "value": ["A=b"]}]},
             {"name": "test_unbuilt_NOT_BUILT", "properties": []},
             self.case("test_libtorch_gpu", "A.a", ["gpu", "libtorch"])],  # the bundle has no LibTorch
            ["gpu"], "/s/build/x", "/s")
        self.assertEqual([entry["name"] for entry in entries], ["test_gpu", "test_mixed", "ranks", "script"])
        self.assertEqual([entry.get("filter") for entry in entries], ["*", "G.g:G.h", None, None])
        self.assertEqual(entries[0]["command"], ["@BUILD@/tests/test_gpu"])
        self.assertEqual(entries[0]["count"], 2)
        self.assertEqual(entries[0]["timeout"], 240)
        self.assertEqual(entries[2]["command"], ["@SOURCE@/scripts/run_mpi.sh", "2", "@BUILD@/tests/p"])
        self.assertEqual(entries[3]["command"], ["python3", "@SOURCE@/tests/t.py"])
        self.assertEqual(entries[3]["environment"], ["A=b"])

    def test_programs_that_are_one_test(self):
        def whole(program, label, shard, *more):
            return {"name": f"{program}.shard{shard}", "command": [f"/s/build/x/tests/{program}", "--gtest_brief=1", *more],
                    "properties": [{"name": "LABELS", "value": [label]}, {"name": "TIMEOUT", "value": 900.0},
                                   {"name": "ENVIRONMENT", "value": ["GTEST_TOTAL_SHARDS=2", f"GTEST_SHARD_INDEX={shard}"]}]}
        as_on_gpu = {"name": "test_gpu.as_on_gpu", "command": ["/s/build/x/tests/test_gpu", "--gtest_brief=1"],
                     "properties": [{"name": "LABELS", "value": ["gpu"]}, {"name": "ENVIRONMENT", "value":
                                    ["TRANCHE_TEST_AS_ON_GPU=1", "GTEST_FILTER=Some.*"]}]}
        lazy = {"name": "test_gpu.lazy_loading", "command": ["/s/build/x/tests/test_gpu", "--gtest_brief=1"],
                "properties": [{"name": "LABELS", "value": ["gpu"]}, {"name": "ENVIRONMENT", "value": ["TRANCHE_EMULATION_LAZY=1"]}]}
        entries = test_list.gathered(
            [as_on_gpu, lazy, whole("test_gpu", "gpu", 0), whole("test_gpu", "gpu", 1), whole("test_more", "slow", 0, "--gtest_filter=*Slow.*"),
             whole("test_more", "gpu", 0, "--gtest_filter=-*Slow.*")], ["gpu"], "/s/build/x", "/s")
        self.assertEqual([entry["name"] for entry in entries], ["test_gpu", "test_more"])
        self.assertEqual([entry["filter"] for entry in entries], ["*", "-*Slow.*"])
        self.assertEqual([entry["environment"] for entry in entries], [[], []])
        self.assertEqual([entry["command"] for entry in entries], [["@BUILD@/tests/test_gpu"], ["@BUILD@/tests/test_more"]])
        # A shard of the remaining cases would be a different one.
        self.assertEqual([entry["environment"] for entry in entries], [[], []])
        self.assertTrue(all(entry["whole"] and entry["googletest"] for entry in entries))


# A GoogleTest program as suite.py sees it. Each case does what the last word of its name says. Like the gpu programs, it ends after a case
# with a sticky CUDA error (97) and in a case that takes too long (98).
GTEST = r"""
import fnmatch, json, os, signal, sys, time
wanted, out = os.environ.get("GTEST_FILTER", "*"), None
for word in sys.argv[1:]:
    key, _, value = word.partition("=")
    if key == "--gtest_flagfile":
        key, _, value = open(value).read().strip().partition("=")
    if key == "--gtest_filter":
        wanted = value
    if key == "--gtest_output":
        out = value.split(":", 1)[1]
positive, _, negative = wanted.partition("-")
positive, negative = set((positive or "*").split(":")), set(negative.split(":"))
def fits(case, patterns):
    return case in patterns or any(fnmatch.fnmatchcase(case, pattern) for pattern in patterns if "*" in pattern)
cases = [case for case in CASES.split() if fits(case, positive) and not fits(case, negative)]
def say(kind, rest):
    print(f"[{kind}] {rest}", flush=True)
say("==========", f"Running {len(cases)} tests from 1 test suite.")
if os.environ.get("STARTED"):
    open(os.environ["STARTED"], "a").write(" ".join(cases) + "\n")
failed = []
for case in cases:
    say(" RUN      ", case)
    does = case.rsplit("_", 1)[-1]
    if does == "faults":
        print(f"\nA case left a CUDA error that stays: {case}: cudaErrorIllegalAddress; every later case would fail, so "
              "this program ends here", flush=True)
        say("  FAILED  ", case + " (1 ms)")
        os._exit(97)
    if does == "breaks":
        print("x.cpp:7: Failure", flush=True)
        os._exit(97)
    if does == "hangs":
        time.sleep(0.1 * float(os.environ["TRANCHE_TEST_CASE_SECONDS"]))  # long before its supervisor loses patience
        print(f"\nA case hangs: {case} has taken more than 1.0 seconds; this program ends here", flush=True)
        say("  FAILED  ", case + " (1000 ms)")
        os._exit(98)
    if does == "sticks":
        time.sleep(100)
    if does == "lasts":
        time.sleep(float(os.environ.get("LASTS", "8")))
    if does == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if does == "fails":
        failed.append(case)
    if does == "skips":
        print("x.cpp:3: Skipped\nno driver here\n")
    say({"fails": "  FAILED  ", "skips": "  SKIPPED "}.get(does, "       OK "), case + ", where GetParam() = 3" * (does == "fails") + " (1 ms)")
    if does == "stops":
        os.kill(os.getpid(), signal.SIGSEGV)
if out:
    figures = [{"name": case.split(".")[1], "classname": case.split(".")[0], "time": "0s", "copy_fraction_note": "text",
                "AdamW_weights": "2e-05"} for case in cases if case == "S.figure"]
    json.dump({"testsuites": [{"testsuite": figures}]}, open(out, "w"))
for case in failed:
    say("  FAILED  ", case + ", where GetParam() = 3")
if failed:
    print(f"\n {len(failed)} FAILED TEST")
sys.exit(bool(failed))
"""
BENCH = r"""
for word in "$@"; do case $word in --benchmark_out=*)
  echo '{"context": {"caches": [{"level": 1}]}, "benchmarks": [{"name": "adamw/1024/real_time", "of_copy": 0.93},
         {"name": "layer_norm/7", "of_copy": 0.5},
         {"name": "matmul_peak/iterations:1/manual_time", "peak_TFLOP/s": 788.5},
         {"name": "broken", "error_occurred": true, "error_message": "no memory"}%s' > "${word#*=}";; esac; done
"""
TRANCHE = r"""
case $1 in
  info) echo '{"cuda": {"devices": [%s], "problem": "no driver", "runtime_version": 13000}}' ;;
  train)
    loss=3.0
    while [ $# -gt 0 ]; do
      case $1 in --report) report=$2 ;; --trace) trace=$2 ;; --micro-batch) micro=$2 ;; --device) device=$2 ;; --model) model=$2 ;; esac
      shift
    done
    [ "$model" = gpt2-xl ] && [ "$micro" -gt 4 ] && exit 3
    [ "$model" = gpt2 ] && { echo 'error: no such kernel'; exit 1; }
    [ "$device" = cuda ] && loss=3.00001
    [ -z "$trace" ] || echo '{"traceEvents": [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "compute"}},
      {"ph": "X", "name": "matmul", "pid": 0, "tid": 1, "ts": 90, "dur": 5}, {"ph": "X", "name": "matmul", "pid": 0, "tid": 1, "ts": 100, "dur": 6},
      {"ph": "X", "name": "add", "pid": 0, "tid": 1, "ts": 108, "dur": 2}]}' > "$trace"
    echo '{"steps": [{"loss": '$loss'}], "tokens_per_second": 61000, "matmul_peak_share": 0.5, "matmul_peak_flops": 7e14}' > "$report" ;;
esac
"""
PROBE = r"""
case $1 in
  --start) echo 'start 1.250 s'; exit 0 ;;
  --hold) echo 'start 0.500 s'; sleep 60 ;;
esac
"""
GPU_JSON = '{"name": "Pretended", "compute_capability": "9.0", "memory_bytes": 1073741824}'


def write_gtest(path, names):
    write_program(path, "")
    path.write_text(f"#!{sys.executable}\nCASES = {names!r}\n{GTEST}", encoding="utf-8")


class Suite(Folder):
    def setUp(self):
        super().setUp()
        self.build, self.results = self.folder / "build", self.folder / "results"
        self.started = self.folder / "started"
        self.set_gpu(GPU_JSON)
        for name, names in {"good": "S.a S.figure", "bad": "S.a S.wrong_fails", "skips": "S.a_skips",
                            "faults": "S.a S.b_faults S.c S.d_skips", "hangs": "S.a S.b_hangs S.c"}.items():
            write_gtest(self.build / "tests" / name, names)
        write_program(self.build / "bin" / "bench_some_gpu", BENCH.replace("%s", "]}"))
        write_program(self.folder / "scripts" / "run_mpi.sh", 'shift; exec "$@"')

    def set_gpu(self, devices):
        write_program(self.build / "bin" / "tranche", TRANCHE.replace("%s", devices))

    def entry(self, name, **more):
        return {"name": name, "labels": ["gpu"], "timeout": 60, "googletest": True, "filter": "*",
                "environment": ["TRANCHE_TEST_CASE_SECONDS=1", f"STARTED={self.started}"],
                "command": [f"@BUILD@/tests/{name}"], **more}

    def command(self, *programs, arguments=(), limit=150):
        tests = self.folder / "tests.json"
        tests.write_text(json.dumps([self.entry(entry) if isinstance(entry, str) else entry for entry in programs]))
        return [str(word) for word in (
            sys.executable, GPU / "suite.py", "--source", self.folder, "--build", self.build, "--tests", tests,
            "--results", self.results, "--limit", limit, "--commit", "abc", *arguments)]

    def read(self):
        self.records = {}
        if (self.results / "results.json").exists():
            records = json.loads((self.results / "results.json").read_text())["records"]
            self.records = {record["item"]: record for record in records}

    def suite(self, *programs, **more):
        result = run(*self.command(*programs, **more))
        self.read()
        return result

    def statuses(self):
        return {item: record["status"] for item, record in self.records.items()
                if record["part"] != "sanitizer" and item != "gpu_probe"}

    def test_every_outcome_of_a_test(self):
        result = self.suite("good", "bad", "skips", "missing", arguments=["--only", "tests"])
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertEqual(self.statuses(), {"good": "passed", "bad": "failed", "skips": "skipped", "missing": "failed",
                                           "S.figure AdamW_weights": "measured"})
        self.assertIn("1 failed (S.wrong_fails), 1 passed", self.records["bad"]["detail"])
        self.assertIn("no driver here", self.records["skips"]["detail"])
        self.assertIn("could not be started", self.records["missing"]["detail"])
        self.assertEqual(self.records["S.figure AdamW_weights"]["target"], 1e-4)
        self.assertTrue(self.records["S.figure AdamW_weights"]["met"])

    def test_a_case_that_ends_its_program_is_all_that_is_lost(self):
        write_gtest(self.build / "tests" / "many", "S.a S.b_faults S.c_breaks S.d S.e_crashes S.f_fails S.g_hangs S.h")
        result = self.suite("many", arguments=["--only", "tests"])
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertEqual(self.statuses(), {
            "many": "failed", "many S.b_faults": "faulted", "many S.c_breaks": "faulted", "many S.e_crashes": "faulted",
            "many S.g_hangs": "hung"})
        self.assertEqual(self.records["many"]["detail"], "3 faulted (S.b_faults, S.c_breaks, S.e_crashes), 1 hung (S.g_hangs), "
                         "1 failed (S.f_fails), 3 passed; 5 processes")
        self.assertEqual(self.records["many S.b_faults"]["detail"],
                         "a CUDA error that stays: cudaErrorIllegalAddress")
        self.assertEqual(self.records["many S.c_breaks"]["detail"], "a CUDA error that stays: x.cpp:7: Failure")
        self.assertEqual(self.records["many S.b_faults"]["command"], "tests/many --gtest_filter=S.b_faults")
        self.assertEqual(self.records["many S.e_crashes"]["detail"], "ended by signal 11")
        self.assertEqual(self.records["many S.g_hangs"]["detail"], "more than 1 s in one case")
        text = (self.results / "summary.md").read_text()
        self.assertIn("3 faulted, 1 hung, 1 failed", text)
        self.assertLess(text.index("many S.b_faults"), text.index("| tests | many | failed"))
        # Each case began once, except those that a dead process had not reached.
        self.assertEqual([line.split()[0] for line in self.started.read_text().splitlines()],
                         ["S.a", "S.c_breaks", "S.d", "S.f_fails", "S.h"])

    def test_cases_left_out_stay_left_out_and_long_lists_go_through_a_file(self):
        write_gtest(self.build / "tests" / "filtered", "S.a S.b_faults S.c Slow.a")
        self.suite(self.entry("filtered", filter="-Slow.*"), arguments=["--only", "tests"])
        self.assertEqual(self.started.read_text(), "S.a S.b_faults S.c\nS.c\n")
        self.started.unlink()
        names = [f"Suite.case_{'long' * 20}{index}" for index in range(1500)] + ["S.b_faults", "S.c"]
        write_gtest(self.build / "tests" / "filtered", " ".join(names))
        self.suite("filtered", arguments=["--only", "tests"])
        self.assertEqual(self.records["filtered"]["detail"], "1 faulted (S.b_faults), 1501 passed; 2 processes")
        self.assertEqual(self.started.read_text().splitlines()[1], "S.c")

    def test_a_program_that_cannot_end_itself(self):
        write_gtest(self.build / "tests" / "sticks", "S.a S.b_sticks S.c")
        self.suite("sticks", arguments=["--only", "tests"])
        self.assertEqual(self.statuses(), {"sticks": "failed", "sticks S.b_sticks": "hung"})
        self.assertEqual(self.records["sticks"]["detail"], "1 hung (S.b_sticks), 2 passed; 2 processes")
        self.assertIn("stopped after 1 s in one case", self.records["sticks S.b_sticks"]["detail"])

    def test_a_program_that_ends_outside_of_its_cases(self):
        write_gtest(self.build / "tests" / "stops", "S.a_stops S.b")
        write_program(self.build / "tests" / "never", "echo cannot load; exit 127")
        self.suite("stops", "never", arguments=["--only", "tests"])
        self.assertEqual(self.records["stops"]["detail"],
                         "ended by signal 11 after S.a_stops: [       OK ] S.a_stops (1 ms); 2 passed; 2 processes")
        self.assertEqual(self.records["never"]["detail"], "status 127 before any case: cannot load; no case ended")

    def test_time_ends(self):
        # The first program gets twice an equal share, the last one the rest, with which the first is also resumed. The limit is derived
        # from the duration of the others on this machine at its present load.
        write_gtest(self.build / "tests" / "lasts", "S.a S.b_lasts S.c_lasts S.d_lasts")
        begin = time.time()
        self.suite("good", "good", "good", "good", "good", arguments=["--only", "tests"])
        limit = max(20.0, 8 * (time.time() - begin))
        shutil.rmtree(self.results)
        result = self.suite(self.entry("lasts", environment=["LASTS=1000"]), "good", "good", "good", "good", "good",
                            arguments=["--only", "tests"], limit=limit)
        self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
        self.assertEqual(self.records["lasts"]["status"], "not finished")
        self.assertRegex(self.records["lasts"]["detail"], r"not finished: \d left, stopped in S.\w_lasts; 2 processes$")
        self.assertEqual(self.records["good"]["status"], "passed")

    def test_order(self):
        names = ["test_comm_nccl.ranks2", "test_comm_gpu", "test_models_gpu", "test_device_gpu", "test_kernels_matrix_gpu",
                 "test_offload_gpu", "test_kernels_layers_gpu", "other", "test_engine_gpu", "test_kernels_gpu"]
        for name in names:
            write_gtest(self.build / "tests" / name, "S.a")
        ranks = self.entry(names[0], googletest=False, command=["@SOURCE@/scripts/run_mpi.sh", "2", "p"])
        self.suite(ranks, *names[1:], arguments=["--only", "tests", "--no-mpi", "no launcher"])
        # The first four run at the same time, so their records are in any order.
        self.assertEqual(sorted(list(self.statuses())[:5]), [
            "test_device_gpu", "test_kernels_gpu", "test_kernels_layers_gpu", "test_kernels_matrix_gpu", "test_models_gpu"])
        self.assertEqual(list(self.statuses())[5:], [
            "test_engine_gpu", "test_offload_gpu", "other", "test_comm_gpu", "test_comm_nccl.ranks2"])
        self.assertEqual(self.records["test_comm_nccl.ranks2"]["detail"], "no launcher")
        self.assertEqual(self.records["test_comm_nccl.ranks2"]["status"], "skipped")

    def test_probe(self):
        write_program(self.build / "tests" / "gpu_probe", PROBE +
                      "echo 'probe copy: ok 3 GB/s'; echo 'probe graph launch: FAILED no such graph'; exit 1")
        result = self.suite("good", arguments=["--only", "tests"])
        self.assertEqual(result.returncode, 1)
        self.assertEqual(list(self.records)[:3], ["CUDA start, no other process on the GPU",
                                                  "CUDA start, beside a process that holds the GPU", "probe: copy"])
        self.assertEqual(self.records["CUDA start, no other process on the GPU"]["figure"], 1.25)
        self.assertEqual(self.records["probe: copy"]["detail"], "3 GB/s")
        self.assertEqual(self.records["probe: graph launch"]["status"], "failed")
        self.assertEqual(self.records["probe: graph launch"]["detail"], "no such graph")
        self.assertNotIn("gpu_probe", self.records)
        self.assertFalse([words for _, words in processes.files("cmdline") if b"gpu_probe\0--hold" in words and str(self.folder).encode() in words],
                         "nothing holds the GPU")
        write_program(self.build / "tests" / "gpu_probe", PROBE + "echo 'probe copy: ok'; kill -SEGV $$")
        self.suite("good", arguments=["--only", "tests"])
        self.assertEqual(self.records["gpu_probe"]["status"], "failed")
        self.assertIn("signal 11", self.records["gpu_probe"]["detail"])
        self.assertEqual(self.records["good"]["status"], "passed")

    def test_a_gpu_that_admits_one_process(self):
        """In exclusive compute mode the process that holds the context would exclude all others."""
        held = self.folder / "held"
        write_program(self.build / "tests" / "gpu_probe", f"""
exec 9> '{held}'
flock -n 9 || {{ echo 'start FAILED cudaErrorDevicesUnavailable, another process uses the GPU'; exit 1; }}
""" + PROBE + "echo \"probe copy: ok $*\"")
        both = self.folder / "both"
        for name in ("good_device_gpu", "more_kernels_gpu"):
            write_gtest(self.build / "tests" / name, "S.a")
            program = self.build / "tests" / name
            program.write_text(program.read_text().replace(
                "import fnmatch", f"import fcntl; held = open({str(both)!r}, 'w'); fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
                "import time; time.sleep(1)\nimport fnmatch"))
        ranks = self.entry("ranks", googletest=False, command=["@SOURCE@/scripts/run_mpi.sh", "2", "x"])
        self.suite("good_device_gpu", "more_kernels_gpu", ranks, arguments=["--only", "tests"])
        self.assertEqual(self.records["probe: copy"]["detail"], "--one-by-one")
        self.assertNotIn("CUDA start, beside a process that holds the GPU", self.records)
        self.assertIn("admits one process at a time (status 1: start FAILED cudaErrorDevicesUnavailable",
                      self.records["programs side by side"]["detail"])
        self.assertEqual(self.records["good_device_gpu"]["status"], "passed")
        self.assertEqual(self.records["more_kernels_gpu"]["status"], "passed")
        self.assertEqual(self.records["ranks"]["detail"], "the GPU admits one process at a time")

    def test_the_multi_process_service(self):
        (self.folder / "mps").mkdir()
        (self.folder / "mps" / "control").touch()
        write_program(self.build / "tests" / "gpu_probe", PROBE + "echo 'probe copy: ok'")
        with mock.patch.dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=str(self.folder / "mps")):
            self.suite("good", arguments=["--only", "tests"])
        self.assertIn("the Multi-Process Service runs here", self.records["programs side by side"]["detail"])
        self.assertEqual(self.records["good"]["status"], "passed")

    def test_a_suite_that_is_killed_leaves_what_it_knows(self):
        for number in (signal.SIGKILL, signal.SIGTERM):
            shutil.rmtree(self.results, ignore_errors=True)
            write_gtest(self.build / "tests" / "sticks", "S.a S.b_sticks S.c")
            sticks = self.entry("sticks", environment=["TRANCHE_TEST_CASE_SECONDS=60"])
            process = subprocess.Popen(self.command("good", sticks, arguments=["--only", "tests"], limit=100),
                                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.stderr.close)
            while process.poll() is None and "S.b_sticks" not in self.log():
                time.sleep(0.1)
            process.send_signal(number)
            process.wait(30)
            self.read()
            self.assertEqual(self.records["good"]["status"], "passed")
            self.assertIn("| tests | good | passed |", (self.results / "summary.md").read_text())
            if number == signal.SIGTERM:
                self.assertEqual(process.returncode, 4)
                self.assertIn("suite: ended by SIGTERM", process.stderr.read())
                self.assertEqual(self.records["sticks"]["detail"], "1 passed; the suite was ended in S.b_sticks")
            else:
                run("bash", "-c", f"pgrep -f {self.folder}/build/tests/sticks | xargs -r kill -9")

    def test_an_end_reaches_programs_that_run_side_by_side(self):
        names = [f"device_{number}_gpu" for number in range(plan.AT_ONCE + 2)]
        for name in names:
            write_gtest(self.build / "tests" / name, "S.a S.b_sticks S.c")
        entries = [self.entry(name, environment=["TRANCHE_TEST_CASE_SECONDS=900"]) for name in names]
        process = subprocess.Popen(self.command(*entries, arguments=["--only", "tests"], limit=900), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.kill)
        end = time.time() + 60
        while time.time() < end and self.log().count("[ RUN      ] S.b_sticks") < plan.AT_ONCE:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(60), 4)
        self.assertIn("suite: ended by SIGTERM", process.stderr.read())
        self.read()
        self.assertEqual([self.records[name]["detail"] for name in names if name in self.records],
                         ["1 passed; the suite was ended in S.b_sticks"] * plan.AT_ONCE)

    def log(self):
        try:
            return (self.results / "log.txt").read_text()
        except OSError:
            return ""

    def test_a_case_that_faults_is_repeated_under_memcheck(self):
        write_program(self.folder / "toolkit" / "bin" / "compute-sanitizer", r"""
case "$*" in
  *memcheck*S.b_faults) echo '========= Invalid __global__ write of size 4 bytes'; echo '=========     at kernel in a.cu:12'; exit 99 ;;
esac""")
        with mock.patch.dict(os.environ, CUDA_HOME=str(self.folder / "toolkit")):
            self.suite("faults", arguments=["--only", "tests"])
        self.assertEqual(self.records["faults S.b_faults under memcheck"]["detail"],
                         "Invalid __global__ write of size 4 bytes; at kernel in a.cu:12")
        self.assertEqual(self.records["faults"]["detail"], "1 faulted (S.b_faults), 2 passed, 1 skipped; 2 processes")

    def test_memcheck_must_find_what_is_wrong(self):
        # memcheck sees each tensor as an allocation; tensors in one mapping would all be one allocation to it.
        write_program(self.folder / "toolkit" / "bin" / "compute-sanitizer", r"""
[ "$TRANCHE_PLAIN_DEVICE_MEMORY" = 1 ] || { echo 'no plain memory'; exit 99; }
case "$*" in *kernel_bounds*) ;; *) exit 0 ;; esac
for tensor in 'add, tensor 0' 'add, tensor 1'; do echo "kernel_bounds: $tensor"; [ "$tensor" = "$MISSED" ] || echo '========= Invalid __global__ read'; done
""")
        write_gtest(self.build / "tests" / "test_kernels_gpu", "S.a")
        item = "kernel_bounds under memcheck"
        with mock.patch.dict(os.environ, CUDA_HOME=str(self.folder / "toolkit")):
            self.suite("test_kernels_gpu", arguments=["--only", "tests"])
            self.assertEqual(self.records[item]["detail"], "an access one byte beyond each of 2 tensors was found")
            self.assertEqual(self.records["test_kernels_gpu under compute-sanitizer memcheck"]["status"], "passed")
            with mock.patch.dict(os.environ, MISSED="add, tensor 1"):
                self.suite("test_kernels_gpu", arguments=["--only", "tests"])
            self.assertEqual(self.records[item]["status"], "failed")
            self.assertIn("of 2 accesses one byte beyond a tensor 1 were not found: add, tensor 1", self.records[item]["detail"])

    def test_benches_stopped_at_their_time_keep_their_figures(self):
        write_program(self.build / "bin" / "bench_some_gpu",
                      BENCH.replace("%s", ', {"name": "cut", "of_copy": 0.') + "sleep 100")
        write_program(self.build / "bin" / "bench_zz_gpu", BENCH.replace("%s", "]}"))
        result = self.suite(arguments=["--only", "benches"], limit=30)
        self.assertEqual(self.records["bench_zz_gpu/adamw/1024"]["figure"], 0.93, "behind one that hangs")
        self.assertEqual(self.records["bench_some_gpu/adamw/1024"]["figure"], 0.93, result.stdout)
        self.assertEqual(self.records["bench_some_gpu/matmul_peak"]["figure"], 788.5)
        self.assertEqual(self.records["bench_some_gpu"]["status"], "not finished")
        self.assertIn("3 figures", self.records["bench_some_gpu"]["detail"])
        self.assertIn("adamw", (self.results / "benches.json").read_text())

    def test_benches_and_trainings(self):
        result = self.suite("good", arguments=["--only", "benches"])
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertNotIn("good", self.records)
        self.assertTrue(self.records["bench_some_gpu/adamw/1024"]["met"])
        self.assertEqual(self.records["bench_some_gpu/adamw/1024"]["target"], 0.92)
        self.assertFalse(self.records["bench_some_gpu/layer_norm/7"]["met"])
        self.assertEqual(self.records["bench_some_gpu/matmul_peak"]["figure"], 788.5)
        self.assertEqual(self.records["bench_some_gpu/broken"]["detail"], "no memory")
        self.assertIn("no such kernel", self.records["training gpt2, traced"]["detail"])
        self.assertEqual(self.records["training gpt2-xl"]["status"], "passed", "at a micro-batch that fits")
        self.assertIn("matmul 75.0 %; add 25.0 %",
                      self.records["training gpt2-xl, traced: device time by kernel"]["detail"])
        losses = self.records["agreement of CPU and GPU, SGD, losses of 1 steps"]
        self.assertTrue(losses["met"])
        self.assertAlmostEqual(losses["figure"], 1e-5 / 3)
        text = (self.results / "summary.md").read_text()
        self.assertIn("| bench_some_gpu/layer_norm/7 | 0.5 | of_copy | 0.85 | NO |", text)
        self.assertRegex(text, r"training gpt2-xl \| 61,000 \| tokens_per_second \| 46800 \| yes")
        self.assertIn("- GPU: Pretended (compute capability 9.0, 1 GiB)", text)
        self.assertIn("- commit: abc", text)
        self.assertLessEqual(len(list(self.results.iterdir())), 8)

    def test_other_ways_to_train(self):
        """State elsewhere and meshes of two processes have the losses of one process on the GPU."""
        items = {way.name: plan.item_of(way) for way in plan.WAYS}
        self.suite(arguments=["--only", "benches"])
        self.assertEqual({self.records[item]["status"] for item in items.values()}, {"passed"})
        self.assertEqual(self.records[items["state on NVMe"] + ", losses of 1 steps"]["target"], 0)
        self.assertEqual(self.records[items["tensor=2"] + ", losses of 1 steps"]["target"], 1e-5)
        self.assertIn("scripts/run_mpi.sh 2 bin/tranche train", self.records[items["context=2"]]["command"])
        self.assertIn("--nvme-path", self.records[items["state on NVMe"]]["command"])
        write_program(self.build / "bin" / "tranche", """
case "$*" in
  *tensor=2*) own=3.1 ;;
  *'--offload-optimizer cpu'*) own=3.0000101 ;;
  *context=2*) exit 0 ;;
  *pipeline=2*) echo 'error: no peer'; exit 5 ;;
esac
""" + TRANCHE.replace("%s", GPU_JSON).replace("&& loss=3.00001", "&& loss=${own:-3.00001}"))
        self.suite(arguments=["--only", "benches"])
        details = {name: (self.records[item]["status"], self.records[item]["detail"]) for name, item in items.items()}
        self.assertEqual(details, {
            "state in host memory": ("failed", "losses differ by 3.33e-08"), "state on NVMe": ("passed", "losses of 1 steps"),
            "shard=2": ("passed", "losses of 1 steps"), "pipeline=2": ("failed", "status 5: error: no peer"),
            "tensor=2": ("failed", "losses differ by 0.0333"), "context=2": ("failed", "it wrote no report")})
        self.suite(arguments=["--only", "benches", "--no-mpi", "no launcher", "--resume"])
        self.assertEqual(self.records[items["pipeline=2"]]["detail"], "no launcher")
        self.assertEqual(self.records[items["shard=2"]]["status"], "passed", "kept from the call before")
        self.assertEqual(self.records[items["state in host memory"]]["tries"], 2)

    def test_without_a_gpu(self):
        self.set_gpu("")
        result = self.suite("skips")
        self.assertEqual(result.returncode, 2)
        self.assertIn("no driver. Nothing was run", result.stderr)
        result = self.suite("skips", arguments=["--allow-no-gpu"])
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual({record["status"] for record in self.records.values()}, {"skipped"})
        self.assertEqual(self.records["bench_some_gpu"]["detail"], "no driver")
        self.assertIn("No GPU was there", (self.results / "summary.md").read_text())


class Resume(Suite):
    """A second call continues where the first ended. (It inherits setUp and helpers; load_tests prevents tests from running twice.)"""

    def again(self, *programs, **more):
        return self.suite(*programs, arguments=["--only", "tests", "--resume"], **more)

    def test_what_passed_runs_no_more_and_what_failed_runs_once_more(self):
        write_gtest(self.build / "tests" / "mixed", "S.a S.b_fails S.c_hangs S.d")
        self.suite("good", "mixed", "skips", arguments=["--only", "tests"])
        self.assertEqual(self.records["mixed"]["detail"], "1 hung (S.c_hangs), 1 failed (S.b_fails), 2 passed; 2 processes")
        self.started.unlink()
        result = self.again("good", "mixed", "skips")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(self.started.read_text(), "S.b_fails S.c_hangs\n", "good, skips and what passed are left alone")
        self.assertIn("good: kept from an earlier call", result.stdout)
        self.assertEqual(self.records["good"]["status"], "passed")
        self.assertEqual(self.records["mixed"]["detail"], "1 hung (S.c_hangs), 1 failed (S.b_fails), 2 passed")
        self.assertEqual(self.records["mixed"]["tries"], 2)
        self.assertEqual(len([record for record in self.records.values() if record["item"] == "mixed S.c_hangs"]), 1)
        self.assertIn("Merged from 2 calls", (self.results / "summary.md").read_text())
        self.started.unlink()
        self.again("good", "mixed", "skips")
        self.assertFalse(self.started.exists(), "nothing runs a third time")

    def test_one_that_was_mended_passes(self):
        write_gtest(self.build / "tests" / "mended", "S.a S.b_fails")
        self.suite("mended", arguments=["--only", "tests"])
        text = (self.build / "tests" / "mended").read_text().replace('does == "fails"', "False").replace('"fails":', '"none":')
        (self.build / "tests" / "mended").write_text(text)
        self.again("mended")
        self.assertEqual(self.records["mended"]["status"], "passed")

    def test_another_commit_begins_anew_and_says_so(self):
        self.suite("good", arguments=["--only", "tests"])
        self.started.unlink()
        command = self.command("good", arguments=["--only", "tests", "--resume"])
        command[command.index("abc")] = "def"
        result = run(*command)
        self.assertIn("are of commit abc, not def: all runs anew", result.stdout)
        self.assertEqual(self.started.read_text(), "S.a S.figure\n")

    def test_benches_and_trainings_are_kept(self):
        write_program(self.build / "bin" / "bench_some_gpu", f"echo bench >> {self.started}\n" + BENCH.replace("%s", "]}"))
        self.suite(arguments=["--only", "benches"])
        figures = {item for item, record in self.records.items() if record["status"] == "measured"}
        self.assertIn("bench_some_gpu/adamw/1024", figures)
        self.suite(arguments=["--only", "benches", "--resume"])
        self.assertEqual(self.started.read_text(), "bench\n")
        self.assertEqual({item for item, record in self.records.items() if record["status"] == "measured"}, figures)
        self.assertEqual(self.records["training gpt2, traced"]["tries"], 2)

    def test_the_copy_serves_where_the_results_folder_was_emptied(self):
        keep = self.folder / "keep"
        self.suite("good", arguments=["--only", "tests", "--keep", keep])
        self.started.unlink()
        shutil.rmtree(self.results)
        self.suite("good", arguments=["--only", "tests", "--keep", keep, "--resume"])
        self.assertFalse(self.started.exists())
        self.assertEqual(self.records["good"]["status"], "passed")


def load_tests(loader, standard, _):
    """Resume has the helpers of Suite but not its tests."""
    chosen = unittest.TestSuite()
    for suite in standard:
        for test in suite:
            if not (isinstance(test, Resume) and test._testMethodName in vars(Suite)):
                chosen.addTest(test)
    return chosen


class Tables(unittest.TestCase):
    def test_shares_of_time(self):
        untils = [part.until for part in plan.PLAN]
        self.assertEqual(untils, sorted(untils))
        self.assertEqual(untils[-1], 1.0)
        self.assertLessEqual(570 * dict((part.name, part.until) for part in plan.PLAN)["first look"], 160)
        self.assertEqual(set().union(*plan.PARTS_OF.values()), {part.name for part in plan.PLAN})
        self.assertIn("  160 s  first look", plan.table(570))

    def test_limits_of_cases(self):
        self.assertEqual(plan.case_seconds("test_unknown"), 40)
        for part, seconds in plan.EMULATED_SECONDS:
            self.assertGreaterEqual(plan.case_seconds(part), 4 * seconds)
        self.assertEqual(plan.case_seconds("test_combinations_gpu"), 120)

    def test_profiled_kernels_are_those_of_the_sources(self):
        kernels = (GPU.parents[1] / "kernels" / "cuda" / "resources.txt").read_text(encoding="utf-8")
        for kernel, _, _ in plan.PROFILED:
            self.assertRegex(kernels, rf"\b{kernel}\b")

    def test_times_of_cases(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "tests.json"
            file.write_text(json.dumps({"p": [{"testsuites": [{"testsuite": [
                {"classname": "S", "name": "a", "time": "12.5s"}, {"classname": "S", "name": "b", "time": "0.1s"}]}]}]}))
            result = run(GPU / "case_times.py", file)
        self.assertEqual(result.stdout, "   12.50 s  p  S.a\n    0.10 s  p  S.b\nEMULATED_SECONDS = [('p', 12.5)]\n")
        self.assertIn("is no report of GoogleTest", run(GPU / "case_times.py", "/dev/null").stderr)

    def test_kernel_times(self):
        def span(name, begin, end, track=1):
            return {"ph": "X", "name": name, "pid": 0, "tid": track, "ts": begin, "dur": end - begin}
        events = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": name}}
                  for track, name in ((1, "compute"), (2, "communication"), (3, "step"))]
        events += [span("early", 0, 10), span("outer", 100, 140), span("inner", 110, 120), span("sum", 130, 150, 2), span("step", 0, 300, 3),
                   span("outer", 200, 240), {"ph": "C", "name": "in use", "pid": 0, "ts": 5, "args": {"x": 1}}]
        found = kernel_times.summary(json.dumps({"traceEvents": events}))
        self.assertEqual([row[:3] for row in found["kernels"]], [["outer", 2, 70.0], ["sum", 1, 20.0], ["inner", 1, 10.0]])
        self.assertAlmostEqual(found["idle"], 1 - 90 / 140)
        self.assertIsNone(kernel_times.summary('{"traceEvents": []}'))
        result = run(GPU / "kernel_times.py", "/dev/null")
        self.assertEqual(result.returncode, 1)
        self.assertIn("is no trace of 'tranche train --trace'", result.stderr)

    def test_figures_of_nsight_compute(self):
        text = ('peak\n"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
                '"0","flash","GPU Speed Of Light Throughput","DRAM Throughput","%","61.5"\n'
                '"0","flash","GPU Speed Of Light Throughput","Duration","us","1,234.5"\n"0","flash","x","Note","","text"\n==PROF== done\n')
        self.assertEqual(gpu_suite.ncu_figures(text), [("DRAM Throughput", 61.5, "%"), ("Duration", 1234.5, "us")])
        self.assertEqual(gpu_suite.ncu_figures("==ERROR== no permission"), [])


class Parts(unittest.TestCase):
    def test_documents_that_were_cut(self):
        whole = '{"context": {"caches": [{"level": 1}]},\n"benchmarks": [\n{"name": "a", "x": 1},\n{"name": "b", "y": "}"}\n]\n}'
        counts = []
        for length in range(len(whole) + 1):
            report = gpu_suite.mended(whole[:length])
            counts.append(len(report["benchmarks"]) if report else 0)
        self.assertEqual(sorted(set(counts)), [0, 1, 2])
        self.assertEqual(counts, sorted(counts), "more text never has fewer figures")

    def test_filters(self):
        for pattern, expected in [("*", "*-A.a:B.b"), ("", "-A.a:B.b"), ("-*Slow.*", "-*Slow.*:A.a:B.b"),
                                  ("A.*:B.*", "A.*:B.*-A.a:B.b"), ("A.*:-C.c", "A.*-C.c:A.a:B.b")]:
            self.assertEqual(cases.without(pattern, ["A.a", "B.b"]), expected)

    def test_streams_in_pieces(self):
        text = ("[==========] Running 3 tests from 1 test suite.\n[ RUN      ] P/S.a/0\nsome[       OK ] P/S.a/0 (3 ms)\n"
                "[ RUN      ] P/S.a/1\n[  FAILED  ] P/S.b/9\n[  FAILED  ] P/S.a/1, where GetParam() = (1, 2) (3 ms)\n"
                "[ RUN      ] P/S.a/2")
        for size in (1, 7, len(text)):
            progress = cases.Progress()
            for begin in range(0, len(text), size):
                progress.feed(text[begin:begin + size])
            self.assertEqual(progress.left(), 1)
            self.assertEqual(progress.death(-11), ("P/S.a/2", "faulted"))
            self.assertEqual(progress.results, {"P/S.a/0": "passed", "P/S.a/1": "failed", "P/S.a/2": "faulted"})

    def test_ranks_in_groups_of_their_own_are_ended(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            program = ("import os, time\nends = os.pipe()\nif os.fork() == 0:\n  os.setpgid(0, 0)\n  print(os.getpid(), flush=True)\n"
                       "  os.write(ends[1], b'x')\n  time.sleep(100)\nos.read(ends[0], 1)")
            command = processes.Command([sys.executable, "-c", program], folder, dict(os.environ), folder / "output")
            self.assertEqual(command.wait(20), 0)
            rank = int(command.news())
            self.assertEqual(processes.members(command.process.pid), [rank])
            self.assertEqual(command.end(), [])
            command.close()
            self.assertEqual(processes.members(command.process.pid), [])

    def test_processes_that_end_while_they_are_listed_are_skipped(self):
        read = pathlib.Path.read_bytes

        def ends(path):
            if path.parent.name in ("1", "2"):
                raise (FileNotFoundError if path.parent.name == "1" else ProcessLookupError)(str(path))
            return read(path)

        with mock.patch.object(pathlib.Path, "read_bytes", ends):
            with mock.patch.object(processes.os, "listdir", return_value=["1", "2", "self", str(os.getpid())]):
                self.assertEqual([pid for pid, _ in processes.files("stat")], [os.getpid()])
                self.assertEqual(processes.members(os.getsid(0)), [os.getpid()])

    def test_what_a_killed_suite_left_is_ended(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            program = "import time\nprint('runs', flush=True)\ntime.sleep(100)"
            left, other = (processes.Command([sys.executable, "-c", program], folder, {**os.environ, processes.MARK: str(folder / mark)}, folder / mark)
                           for mark in ("results", "others"))
            for command in (left, other):  # The kernel shows no environment of a process that is about to start its program.
                while not command.news():
                    self.assertIsNone(command.wait(0.01))
            self.assertEqual(processes.end_marked(folder / "result"), 0)
            self.assertEqual(processes.end_marked(folder / "results"), 1)
            self.assertEqual(left.wait(5), -signal.SIGKILL)
            self.assertIsNone(other.wait(0.1))
            other.end()
            for command in (left, other):
                command.close()

    def test_a_process_that_cannot_be_ended_is_left(self):
        with mock.patch.object(processes, "members", return_value=[1 << 30]):
            begin = time.time()
            self.assertEqual(processes.end_session(1 << 30, 0.2), [1 << 30])
            self.assertLess(time.time() - begin, 60)


class Flow(Folder):
    """run.sh in an unpacked bundle of fake programs, with one fault of each kind."""

    def test_each_fault_costs_only_itself(self):
        scripts = self.folder / "scripts" / "gpu"
        shutil.copytree(GPU, scripts, ignore=shutil.ignore_patterns("__pycache__"))
        for script in ("check.sh", "env.sh"):
            shutil.copy(GPU / script, self.folder)
        (self.folder / "MANIFEST").write_text("commit: abc\ndate: today\nneeds-glibc: 2.2\nmpi: Open MPI\n")
        (self.folder / "SHA256SUMS").write_text("")
        (self.folder / "deps").mkdir()
        write_program(self.folder / "bin" / "tranche", TRANCHE.replace("%s", GPU_JSON))
        write_program(self.folder / "bin" / "bench_some_gpu",
                      BENCH.replace("%s", ', {"name": "cut", "of_copy": 0.') + "sleep 100")
        write_program(self.folder / "tests" / "gpu_probe", PROBE + "echo 'probe copy: ok'")
        write_program(self.folder / "tests" / "test_core", "echo '[  PASSED  ] 53 tests.'")
        write_program(self.folder / "scripts" / "run_mpi.sh", "echo 'mca_btl_vader.so: cannot open shared object file'; exit 1")
        write_program(self.folder / "host bin" / "nvidia-smi", 'echo "smi with ${LD_LIBRARY_PATH}, $(ulimit -n) files, cores of $(ulimit -c)"')
        entries = []
        for name, names in {"test_device_gpu": "S.a S.b", "test_kernels_gpu": "S.a S.b_faults S.c",
                            "test_comm_gpu": "S.a S.b_hangs S.c", "test_comm_mpi": ""}.items():
            write_gtest(self.folder / "tests" / name, names)
            entries.append({"name": name, "labels": ["gpu"], "timeout": 60, "environment": ["TRANCHE_TEST_CASE_SECONDS=1"],
                            "googletest": name != "test_comm_mpi", "filter": "*", "command": [f"@BUILD@/tests/{name}"]})
        entries[-1]["command"].insert(0, "@SOURCE@/scripts/run_mpi.sh")
        (self.folder / "gpu_tests.json").write_text(json.dumps(entries))
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        result = run(scripts / "run.sh", "--results", self.folder / "results", "--limit", "75",
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, files)),
                     env={**os.environ, "PATH": f"{self.folder}/host bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": "/driver",
                          "CUDA_HOME": ""})
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        results = json.loads((self.folder / "results" / "results.json").read_text())
        records = {record["item"]: record for record in results["records"]}
        status = {item: record["status"] for item, record in records.items() if record["part"] == "tests"}
        self.assertEqual(status, {"test_device_gpu": "passed", "test_kernels_gpu": "failed",
                                  "test_kernels_gpu S.b_faults": "faulted", "test_comm_gpu": "failed",
                                  "test_comm_gpu S.b_hangs": "hung", "test_comm_mpi": "skipped"})
        self.assertEqual(records["probe: copy"]["status"], "passed")
        self.assertIn("2 passed", records["test_kernels_gpu"]["detail"])
        self.assertIn("2 passed", records["test_comm_gpu"]["detail"])
        self.assertEqual(records["test_comm_mpi"]["detail"],
                         "mpirun does not work here: mca_btl_vader.so: cannot open shared object file")
        self.assertEqual(records["bench_some_gpu/adamw/1024"]["figure"], 0.93)
        self.assertEqual(records["bench_some_gpu"]["status"], "not finished")
        self.assertEqual(records["training gpt2-xl"]["status"], "passed")
        self.assertEqual(results["machine"]["driver"], f"smi with /driver, {files} files, cores of 0")


    def test_scripts_that_are_not_the_archives(self):
        bundle = self.folder / "tranche-gpu-bundle"
        for folder in (self.folder, bundle):
            shutil.copytree(GPU, folder / "scripts" / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
        for script in ("check.sh", "env.sh"):
            shutil.copy(GPU / script, bundle)
        (bundle / "MANIFEST").write_text("commit: abc\nneeds-glibc: 2.2\n")
        (bundle / "deps").mkdir()
        write_program(bundle / "bin" / "tranche", TRANCHE.replace("%s", ""))
        write_program(bundle / "tests" / "test_core", "echo '[  PASSED  ] 53 tests.'")
        archive = self.folder / "archive.tar.xz"
        run("tar", "-C", self.folder, "-cJf", archive, "tranche-gpu-bundle")
        note = "plan.py is another than the archive's, whose programs are of commit abc: this one is taken"
        for change, noted in (("", False), ("# changed\n", True)):
            with open(self.folder / "scripts" / "gpu" / "plan.py", "a", encoding="utf-8") as file:
                file.write(change)
            result = run(self.folder / "scripts" / "gpu" / "run.sh", "--bundle", archive)
            self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
            self.assertIn("no driver. Nothing was run", result.stderr)
            self.assertEqual(note in result.stdout, noted, result.stdout)
            self.assertNotIn("suite.py is another", result.stdout)
        if run("unshare", "-rn", "true").returncode == 0:
            result = run("unshare", "-rn", self.folder / "scripts" / "gpu" / "run.sh", "--bundle", archive)
            self.assertIn("the network interface lo was down; it is up now", result.stdout)
            self.assertRegex(result.stdout, "ok +loopback +up")


class Targets(unittest.TestCase):
    def test_figures_of_the_issue(self):
        for item, unit, figure, expected in [
                ("bench_kernels_gpu/adamw/elements:1024", "of_copy", 0.919, (0.92, False)),
                ("bench_matrix_gpu/attention_forward/head:64/time:1024", "of_peak", 0.28, (0.28, True)),
                ("bench_matrix_gpu/attention_forward/head:64/time:4096", "of_peak", 0.28, (0.35, False)),
                ("bench_matrix_gpu/attention_forward/head:128/time:4096", "of_peak", 0.42, (0.42, True)),
                ("bench_matrix_gpu/attention_backward/head:128/time:4096", "of_forward", 0.79, (0.8, False)),
                ("bench_matrix_gpu/attention_backward/head:128/time:4096", "of_peak", 0.3, (None, None)),
                ("bench_kernels_gpu/layer_norm_forward/8192", "of_copy", 0.86, (0.85, True)),
                ("training gpt2-xl", "of_peak", 0.55, (0.55, True)),
                ("training gpt2", "of_peak", 0.3, (None, None)),
                ("agreement of CPU and GPU, SGD, losses of 20 steps", "relative", 2e-5, (1e-5, False)),
                ("unheard of", "furlongs", 1, (None, None))]:
            self.assertEqual(summary.judge(item, unit, figure), expected, item)


def names_of(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from names_of(test)
        else:
            yield test.id().removeprefix("__main__.")


def side_by_side():
    """Runs all tests in five processes, because they mostly wait for hangs: tests that wait for a limit of 20 seconds or more run beside
    two halves of the others. Returns the number of processes in which a test failed."""
    longest = ["Flow.test_each_fault_costs_only_itself", "Suite.test_benches_stopped_at_their_time_keep_their_figures", "Suite.test_time_ends"]
    others = [name for name in names_of(unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])) if name not in longest]
    groups = [[name] for name in longest] + [others[::2], others[1::2]]
    results = {}

    def start(number):
        results[number] = subprocess.run([sys.executable, __file__, *groups[number]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                         check=False)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in sorted(results.items()):
        print(result.stdout, end="", flush=True)
    return sum(result.returncode != 0 for result in results.values())


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(side_by_side())
    unittest.main()
