#!/usr/bin/env python3
"""Twelve faults of a GPU host, injected one at a time into the whole flow of scripts/gpu/run.sh with fake programs.

Each fault may affect only what it must, and the summary must name it.
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import test_gpu_scripts as pretend  # noqa: E402
from test_gpu_scripts import GPU, run, write_gtest, write_program  # noqa: E402

TORCH = """
class device_type: pass
__version__ = "2.11"
class cuda:
    @staticmethod
    def is_available(): return True
class backends:
    class cuda:
        class matmul: allow_tf32 = True
"""


class Faults(pretend.Folder):
    def setUp(self):
        super().setUp()
        self.bundle = self.folder / "bundle"
        self.results = self.folder / "results"
        scripts = self.bundle / "scripts" / "gpu"
        shutil.copytree(GPU, scripts, ignore=shutil.ignore_patterns("__pycache__"))
        for script in ("check.sh", "env.sh"):
            shutil.copy(GPU / script, self.bundle)
        (self.bundle / "MANIFEST").write_text("commit: abc\ndate: today\nneeds-glibc: 2.2\nmpi: Open MPI\n")
        (self.bundle / "SHA256SUMS").write_text("")
        (self.bundle / "deps").mkdir()
        self.trains = pretend.TRANCHE.replace("%s", pretend.GPU_JSON).replace(
            "[ \"$model\" = gpt2 ] && { echo 'error: no such kernel'; exit 1; }", "")
        write_program(self.bundle / "bin" / "tranche", self.trains)
        write_program(self.bundle / "bin" / "bench_some_gpu", pretend.BENCH.replace("%s", "]}").replace(
            '{"name": "broken", "error_occurred": true, "error_message": "no memory"}', '{"name": "rope", "of_copy": 0.9}'))
        write_program(self.bundle / "tests" / "gpu_probe", pretend.PROBE + "echo 'probe copy: ok'; echo 'probe graph: ok'")
        write_program(self.bundle / "tests" / "test_core", "echo '[  PASSED  ] 53 tests.'")
        write_program(self.bundle / "tests" / "comm_mpi_failing", "true")
        write_program(self.bundle / "scripts" / "run_mpi.sh", """
case "$*" in *comm_mpi_failing*) echo rank 0 is done; echo rank 1 is done ;; *) shift; exec "$@" ;; esac""")
        write_program(self.folder / "host bin" / "nvidia-smi", "echo 'Pretended, 1980 MHz, 2619 MHz, 99.0 W, 40'")
        # A module folder without torch comes first, whatever the host's Python contains.
        self.write_module("raise ImportError(\"No module named 'torch'\")")
        self.entries = []
        for name, names in {"test_device_gpu": "S.a S.b", "test_kernels_gpu": "S.a S.b", "test_engine_gpu": "S.a",
                            "test_comm_gpu": "S.a S.b"}.items():
            self.program(name, names)
        self.program("test_comm_mpi", "", googletest=False, command=["@SOURCE@/scripts/run_mpi.sh", "2", "@BUILD@/tests/test_comm_mpi"])

    def write_module(self, text):
        (self.folder / "site").mkdir(exist_ok=True)
        (self.folder / "site" / "torch.py").write_text(text)

    def program(self, name, names, **more):
        write_gtest(self.bundle / "tests" / name, names)
        self.entries = [entry for entry in self.entries if entry["name"] != name]
        self.entries.append({"name": name, "labels": ["gpu"], "timeout": 60, "environment": ["TRANCHE_TEST_CASE_SECONDS=2"],
                             "googletest": True, "filter": "*", "command": [f"@BUILD@/tests/{name}"], **more})
        (self.bundle / "gpu_tests.json").write_text(json.dumps(self.entries))

    def environment(self):
        return {**os.environ, "PATH": f"{self.folder}/host bin:{os.environ['PATH']}", "CUDA_HOME": "", "PYTHONPATH": str(self.folder / "site"),
                "STARTED": str(self.folder / "started")}

    def command(self, *arguments, limit=60):
        return [str(word) for word in (self.bundle / "scripts" / "gpu" / "run.sh", "--results", self.results, "--limit", limit, *arguments)]

    def flow(self, status, *arguments, limit=60, folder=None):
        result = run(*self.command(*arguments, limit=limit), env=self.environment())
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        self.read(folder or self.results)
        return result

    def read(self, folder):
        self.results_read = json.loads((folder / "results.json").read_text())
        self.records = {record["item"]: record for record in self.results_read["records"]}
        self.summary = (folder / "summary.md").read_text()

    def bad(self):
        """Items that neither passed nor were measured. Skipped items are included only if no missing tool on the machine explains them."""
        tools = ("compute-sanitizer is not installed", "ncu is not installed")
        return {item: record["status"] for item, record in self.records.items()
                if record["status"] not in ("passed", "measured") and record.get("detail") not in tools}

    torch_is_missing = {"PyTorch": "skipped"}

    def test_no_fault(self):
        self.flow(0)
        self.assertEqual(self.bad(), self.torch_is_missing)
        self.assertIn("Pretended, 1980 MHz", self.records["training gpt2-xl"].get("card", "") or self.summary)

    def test_a_missing_onednn(self):
        text = "a library that Tranche multiplies matrices with is not there; install oneDNN 2"
        write_program(self.bundle / "bin" / "tranche", f"""
case "$*" in *'--device cpu'*) echo 'error: {text}' >&2; exit 2 ;; esac
""" + self.trains.replace('"problem"', f'"libraries": "unavailable: {text}", "problem"'))
        self.flow(1)
        self.assertEqual(self.bad(), {**self.torch_is_missing, "agreement of CPU and GPU, SGD, cpu": "failed",
                                      "agreement of CPU and GPU, AdamW, cpu": "failed"})
        self.assertIn(text, self.summary)

    def test_a_moved_source_tree(self):
        """Programs find their data beside themselves."""
        self.program("test_combinations_gpu", "S.a")
        program = self.bundle / "tests" / "test_combinations_gpu"
        program.write_text(program.read_text().replace("import fnmatch", "open(__file__.rsplit('/', 1)[0] + '/combinations.json')\nimport fnmatch"))
        (self.bundle / "tests" / "combinations.json").write_text("{}")
        moved = self.folder / "another place"
        self.bundle.rename(moved)
        self.bundle = moved
        self.flow(0)
        self.assertEqual(self.bad(), self.torch_is_missing)
        self.assertEqual(self.records["test_combinations_gpu"]["status"], "passed")

    def test_five_seconds_for_the_start_of_a_process(self):
        slow = "sleep 5\n"
        write_program(self.bundle / "tests" / "gpu_probe", slow + pretend.PROBE.replace("1.250", "5.000") + "echo 'probe copy: ok'")
        for name in ("test_device_gpu", "test_kernels_gpu"):
            program = self.bundle / "tests" / name
            program.write_text(program.read_text().replace("import fnmatch", "import time; time.sleep(5)\nimport fnmatch"))
        self.flow(0, "--only", "tests", limit=120)
        self.assertEqual(self.bad(), {})
        self.assertRegex(self.summary, r"CUDA start, no other process on the GPU \| 5 \| seconds")

    def test_a_hang_in_comm(self):
        self.program("test_comm_gpu", "S.a S.b_hangs S.c")
        self.flow(1)
        self.assertEqual(self.bad(), {**self.torch_is_missing, "test_comm_gpu": "failed", "test_comm_gpu S.b_hangs": "hung"})
        self.assertIn("test_comm_gpu S.b_hangs | hung | more than 2 s in one case", self.summary)
        self.assertIn("2 passed", self.records["test_comm_gpu"]["detail"])

    def test_a_fault_in_a_kernel_program(self):
        self.program("test_kernels_gpu", "S.a S.b_faults S.c")
        self.flow(1)
        self.assertEqual(self.bad(), {**self.torch_is_missing, "test_kernels_gpu": "failed", "test_kernels_gpu S.b_faults": "faulted"})
        self.assertIn("test_kernels_gpu S.b_faults | faulted | a CUDA error that stays: cudaErrorIllegalAddress", self.summary)

    def test_a_killed_command(self):
        self.program("test_engine_gpu", "S.a S.b_sticks")
        process = subprocess.Popen(self.command(limit=200), env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, start_new_session=True)
        self.addCleanup(process.stdout.close)
        log = self.results / "log.txt"
        end = time.time() + 50
        while time.time() < end and not (log.exists() and "S.b_sticks" in log.read_text()):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        left = run("pgrep", "-f", self.bundle / "tests" / "test_engine_gpu").stdout.split()
        self.assertEqual(len(left), 1, "a program in a session of its own outlives the suite")
        self.read(self.results)
        self.assertEqual(self.records["test_kernels_gpu"]["status"], "passed")
        (self.folder / "started").unlink()
        self.program("test_engine_gpu", "S.a S.b")
        self.flow(0, "--resume")
        self.assertEqual(self.bad(), self.torch_is_missing)
        self.assertFalse(os.path.exists(f"/proc/{left[0]}/exe"), "it has ended, though its new parent may not have waited for it")
        self.assertIn("1 processes that an earlier call, which was killed, had left", self.summary)
        # Engine, comm and the program under mpirun; device and kernels had run before.
        self.assertEqual(len((self.folder / "started").read_text().splitlines()), 3)
        self.assertIn("Merged from 2 calls", self.summary)

    def test_a_second_command(self):
        (self.bundle / "build").mkdir(exist_ok=True)
        with open(self.bundle / "build" / "gpu-run.lock", "w", encoding="utf-8") as lock:
            import fcntl
            fcntl.flock(lock, fcntl.LOCK_EX)
            result = run(*self.command(), env=self.environment())
            self.assertEqual(result.returncode, 2)
            self.assertIn("another run.sh runs here", result.stderr)
        self.flow(0)

    def test_a_full_results_folder(self):
        tiny = "mount -t tmpfs -o size=12k none \"$1\" && shift && exec \"$@\""
        if run("unshare", "-rm", "bash", "-c", "mount -t tmpfs none /mnt").returncode != 0:
            self.skipTest("this user may not mount a small file system")
        self.results.mkdir()
        result = run("unshare", "-rm", "bash", "-c", tiny, "x", self.results, *self.command(), env=self.environment())
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.read(self.bundle / "build" / "gpu-results")
        self.assertEqual(self.bad(), {**self.torch_is_missing, f"results folder {self.results}": "failed"})
        self.assertIn("cannot be written: No space left on device; all of it is in", self.summary)
        self.assertIn("No space left on device", result.stderr)

    def test_no_mpirun(self):
        write_program(self.bundle / "scripts" / "run_mpi.sh", "echo 'orted: cannot open shared object file'; exit 1")
        self.flow(0)
        self.assertEqual(self.bad(), {**self.torch_is_missing, "test_comm_mpi": "skipped",
                                      **{pretend.plan.item_of(way): "skipped" for way in pretend.plan.WAYS if way.ranks > 1}})
        self.assertIn("mpirun does not work here: orted: cannot open shared object file", self.summary)

    def test_no_torch(self):
        self.flow(0)
        self.assertEqual(self.records["PyTorch"]["status"], "skipped")
        self.assertIn("this Python has no PyTorch: No module named 'torch'", self.summary)

    def test_a_torch_without_cudnn(self):
        self.write_module(TORCH + """
import sys, types
nn = types.ModuleType("torch.nn"); attention = types.ModuleType("torch.nn.attention")
class SDPBackend: FLASH_ATTENTION = 1
attention.SDPBackend = SDPBackend
def sdpa_kernel(backend): raise RuntimeError("no kernel of FLASH is there")
attention.sdpa_kernel = sdpa_kernel
nn.attention = attention
sys.modules["torch.nn"], sys.modules["torch.nn.attention"] = nn, attention
bfloat16 = "bf16"
class Tensor:
    def __mul__(self, other): return self
    def __sub__(self, other): return self
    def requires_grad_(self): return self
    shape = (2, 2)
    def __matmul__(self, other): return self
def rand(*shape, **more): return Tensor()
class Event:
    def __init__(self, **more): pass
    def record(self): pass
    def synchronize(self): pass
    def elapsed_time(self, other): return 4.0
cuda.Event = Event
""")
        self.flow(0)
        self.assertEqual(self.records["torch attention head 64 time 1024, cudnn"]["detail"], "this PyTorch has no such backend")
        self.assertEqual(self.records["torch attention head 64 time 1024, flash"]["detail"], "no kernel of FLASH is there")
        self.assertEqual(self.records["torch product tokens 8192 inputs 8192 outputs 8192"]["status"], "measured")
        self.assertEqual(self.records["PyTorch"]["status"], "passed")
        self.assertEqual({status for item, status in self.bad().items()}, {"skipped"})

    def test_a_clock_that_runs_out(self):
        self.program("test_engine_gpu", "S.a S.b_lasts S.c_lasts S.d_lasts", environment=[])
        begin = time.time()
        self.flow(4, "--only", "tests", limit=30)
        self.assertLess(time.time() - begin, 45)
        self.assertEqual(self.records["test_engine_gpu"]["status"], "not finished")
        self.assertEqual(self.records["test_kernels_gpu"]["status"], "passed")
        self.assertRegex(self.summary, r"test_engine_gpu \| not finished \| .*left, stopped in S\.\w_lasts")
        self.flow(0, "--only", "tests", "--resume", limit=90)
        self.assertEqual(self.records["test_engine_gpu"]["status"], "passed")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        unittest.main()
    names = [name for name in dir(Faults) if name.startswith("test_")]
    groups = [names[part::4] for part in range(4)]  # they mostly wait
    processes = [subprocess.Popen([sys.executable, __file__, *(f"Faults.{name}" for name in group)]) for group in groups]
    sys.exit(sum(process.wait() != 0 for process in processes))
