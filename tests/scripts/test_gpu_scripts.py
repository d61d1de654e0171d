#!/usr/bin/env python3
"""scripts/gpu/: arguments, budget, self-check, test lists, time limits and the summary, with programs that only pretend."""
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

GPU = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "gpu"
sys.dont_write_bytecode = True
sys.path.insert(0, str(GPU))
import summary  # noqa: E402
import test_list  # noqa: E402


def run(*command, **options):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          check=False, timeout=60, **options)


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
        self.refused(2, "build first, or leave out --no-build", bundle, "--no-build", "--build", self.folder)

    def test_run(self):
        # A copy: the sources' own build/ may hold a bundle.
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
    """A bundle of programs that pretend."""

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
        # The toolkit's go first, and programs are started with the folder that was found.
        result = run("bash", "-c", f'. {self.folder}/env.sh; echo "$TRANCHE_CUDA_LIBRARIES $LD_LIBRARY_PATH"',
                     env={**os.environ, "CUDA_HOME": str(self.folder / "toolkit"), "LD_LIBRARY_PATH": "/driver",
                          "PYTHONPATH": str(self.folder / "site")})
        found, path = result.stdout.split()
        self.assertEqual(found, str(self.folder / "toolkit" / "lib64"))
        self.assertTrue(path.endswith(f":{found}:/driver"), path)

    def test_each_gap(self):
        def gap(text, **environment):
            result = self.check(**environment)
            self.assertEqual(result.returncode, 1, result.stdout)
            self.assertRegex(result.stdout, text)
            self.assertIn("1 gaps", result.stdout)

        gap("gap +libpretended.so.1 +in no CUDA toolkit", CUDA_HOME="")
        manifest = self.folder / "MANIFEST"
        good = manifest.read_text()
        manifest.write_text(good.replace("2.2", "2.99"))
        gap(r"gap +glibc .*; 2.99 is needed")
        manifest.write_text(good)
        write_program(self.folder / "scripts" / "run_mpi.sh", "echo no launcher; exit 1")
        gap("gap +mpirun -n 2 +failed: no launcher")
        write_program(self.folder / "scripts" / "run_mpi.sh", "echo rank 0 is done; echo rank 1 is done")
        write_program(self.folder / "bin" / "tranche", "echo 'CUDA      changed'")
        gap("gap +files +damaged: bin/tranche: FAILED")
        self.assertEqual(self.check("--no-sums").returncode, 0)


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
             {"name": "test_unbuilt_NOT_BUILT", "properties": []}],
            ["gpu"], "/s/build/x", "/s")
        self.assertEqual([entry["name"] for entry in entries], ["test_gpu", "test_mixed", "ranks", "script"])
        self.assertEqual([entry.get("filter") for entry in entries], ["*", "G.g:G.h", None, None])
        self.assertEqual(entries[0]["command"], ["@BUILD@/tests/test_gpu"])
        self.assertEqual(entries[0]["count"], 2)
        self.assertEqual(entries[0]["timeout"], 240)
        self.assertEqual(entries[2]["command"], ["@SOURCE@/scripts/run_mpi.sh", "2", "@BUILD@/tests/p"])
        self.assertEqual(entries[3]["command"], ["python3", "@SOURCE@/tests/t.py"])
        self.assertEqual(entries[3]["environment"], ["A=b"])


GTEST_OK = r"""
printf '[ RUN      ] S.a\n[       OK ] S.a (1 ms)\n'
for word in "$@"; do case $word in --gtest_output=json:*)
  echo '{"testsuites": [{"testsuite": [{"name": "a", "classname": "S", "time": "0s", "copy_fraction_note": "text",
         "AdamW_weights": "2e-05"}]}]}' > "${word#*json:}";; esac; done
"""
TRANCHE = r"""
case $1 in
  info) echo '{"cuda": {"devices": [%s], "problem": "no driver", "runtime_version": 13000}}' ;;
  train)
    loss=3.0
    while [ $# -gt 0 ]; do
      case $1 in --report) report=$2 ;; --micro-batch) micro=$2 ;; --device) device=$2 ;; --model) model=$2 ;; esac
      shift
    done
    [ "$model" = gpt2-xl ] && [ "$micro" -gt 4 ] && exit 3
    [ "$model" = gpt2 ] && { echo 'error: no such kernel'; exit 1; }
    [ "$device" = cuda ] && loss=3.00001
    echo '{"steps": [{"loss": '$loss'}], "tokens_per_second": 61000, "matmul_peak_share": 0.5, "matmul_peak_flops": 7e14}' > "$report" ;;
esac
"""
GPU_JSON = '{"name": "Pretended", "compute_capability": "9.0", "memory_bytes": 1073741824}'


class Suite(Folder):
    def setUp(self):
        super().setUp()
        self.build, self.results = self.folder / "build", self.folder / "results"
        self.set_gpu(GPU_JSON)
        write_program(self.build / "tests" / "good", GTEST_OK)
        write_program(self.build / "tests" / "bad", "printf '[  FAILED  ] S.wrong (2 ms)\\n'; exit 1")
        write_program(self.build / "tests" / "crash", "echo begins; kill -SEGV $$")
        write_program(self.build / "tests" / "skips",
                      "printf 'x.cpp:3: Skipped\\nno driver here\\n[  SKIPPED ] S.a (0 ms)\\n'")
        write_program(self.build / "tests" / "hangs", "printf '[       OK ] S.a (1 ms)\\n'; sleep 100")
        write_program(self.build / "bin" / "bench_some_gpu", r"""
for word in "$@"; do case $word in --benchmark_out=*)
  echo '{"benchmarks": [{"name": "adamw/1024/real_time", "of_copy": 0.93}, {"name": "layer_norm/7", "of_copy": 0.5},
         {"name": "matmul_peak/iterations:1/manual_time", "peak_TFLOP/s": 788.5},
         {"name": "broken", "error_occurred": true, "error_message": "no memory"}]}' > "${word#*=}";; esac; done""")

    def set_gpu(self, devices):
        write_program(self.build / "bin" / "tranche", TRANCHE.replace("%s", devices))

    def suite(self, *programs, arguments=(), limit=30):
        tests = self.folder / "tests.json"
        tests.write_text(json.dumps([{"name": name, "labels": ["gpu"], "timeout": 60, "environment": [], "googletest": True,
                                      "filter": "*", "command": [f"@BUILD@/tests/{name}"]} for name in programs]))
        result = run(sys.executable, GPU / "suite.py", "--source", self.folder, "--build", self.build, "--tests", tests,
                     "--results", self.results, "--limit", limit, "--commit", "abc", *arguments)
        self.records = {}
        if (self.results / "results.json").exists():
            records = json.loads((self.results / "results.json").read_text())["records"]
            self.records = {record["item"]: record for record in records}
        return result

    def test_every_outcome_of_a_test(self):
        result = self.suite("good", "bad", "crash", "skips", "missing", arguments=["--only", "tests"])
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        status = {item: record["status"] for item, record in self.records.items()}
        self.assertEqual(status, {"good": "passed", "bad": "failed", "crash": "failed", "skips": "skipped",
                                  "missing": "failed", "S.a AdamW_weights": "measured"})
        self.assertIn("S.wrong", self.records["bad"]["detail"])
        self.assertIn("ended by signal 11", self.records["crash"]["detail"])
        self.assertIn("no driver here", self.records["skips"]["detail"])
        self.assertEqual(self.records["S.a AdamW_weights"]["target"], 1e-4)
        self.assertTrue(self.records["S.a AdamW_weights"]["met"])

    def test_time_ends(self):
        # 0.4 of the limit is for tests: the one that hangs takes all of that.
        result = self.suite("hangs", "good", arguments=["--only", "tests"], limit=10)
        self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
        self.assertEqual(self.records["hangs"]["status"], "not finished")
        self.assertIn("1 cases had passed", self.records["hangs"]["detail"])
        self.assertEqual(self.records["good"]["status"], "not run")

    def test_benches_and_trainings(self):
        result = self.suite("good", arguments=["--only", "benches"])
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertNotIn("good", self.records)
        self.assertTrue(self.records["bench_some_gpu/adamw/1024"]["met"])
        self.assertEqual(self.records["bench_some_gpu/adamw/1024"]["target"], 0.92)
        self.assertFalse(self.records["bench_some_gpu/layer_norm/7"]["met"])
        self.assertEqual(self.records["bench_some_gpu/matmul_peak"]["figure"], 788.5)
        self.assertEqual(self.records["bench_some_gpu/broken"]["detail"], "no memory")
        self.assertIn("no such kernel", self.records["training gpt2"]["detail"])
        self.assertEqual(self.records["training gpt2-xl"]["status"], "measured", "at a micro-batch that fits")
        losses = self.records["agreement of CPU and GPU, SGD, losses of 1 steps"]
        self.assertTrue(losses["met"])
        self.assertAlmostEqual(losses["figure"], 1e-5 / 3)
        text = (self.results / "summary.md").read_text()
        self.assertIn("| bench_some_gpu/layer_norm/7 | 0.5 | of_copy | 0.85 | NO |", text)
        self.assertRegex(text, r"training gpt2-xl \| 61,000 \| tokens_per_second \| 59000 \| yes")
        self.assertIn("- GPU: Pretended (compute capability 9.0, 1 GiB)", text)
        self.assertIn("- commit: abc", text)
        self.assertLessEqual(len(list(self.results.iterdir())), 8)

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


if __name__ == "__main__":
    unittest.main()
