#!/usr/bin/env python3
"""scripts/compare_pytorch_adam.py: its message without PyTorch, and its table with fake modules and programs."""
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "compare_pytorch_adam.py"

# Supports plain and foreach; a step takes 40 ms and 20 ms, a copy 10 ms, on a clock that only these advance.
TORCH = """import time
import contextlib
clock = [0.0]
time.perf_counter = lambda: clock[0]
def take(seconds): clock[0] += seconds
__version__ = "0.pretended"
bfloat16 = "bfloat16"
class Tensor:
    grad = None
    def copy_(self, other): take(0.01)
def zeros(size, **rest): return Tensor()
def full(size, value, **rest): return Tensor()
def full_like(tensor, value): return Tensor()
def set_num_threads(count): pass
no_grad = contextlib.nullcontext
class backends: pass
class optim:
    class AdamW:
        def __init__(self, tensors, lr, weight_decay, foreach):
            self.seconds, self.state = 0.02 if foreach else 0.04, {}
        def step(self): take(self.seconds)
"""


class Comparison(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.program("echo instruction_set=X; echo 'rule=adamw parameters=1 threads=1 update_gb_s=1.00 ms=5.000'\n")

    def program(self, text):
        path = self.folder / "bench"
        path.write_text("#!/usr/bin/env bash\necho \"$@\" >> '" + str(self.folder / "calls") + "'\n" + text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_script(self, torch, *arguments):
        (self.folder / "torch.py").write_text(torch, encoding="utf-8")
        return subprocess.run([sys.executable, SCRIPT, self.folder / "bench", *arguments], capture_output=True, text=True, check=False,
                              timeout=60, env={**os.environ, "PYTHONPATH": str(self.folder)})

    def test_says_that_there_is_no_pytorch(self):
        result = self.run_script("raise ImportError('No module named torch')")
        self.assertEqual(result.returncode, 3)
        self.assertIn("has no PyTorch (No module named torch)", result.stderr)
        self.assertIn("apt-get install --no-install-recommends python3-torch", result.stderr)
        self.assertIn("Nothing was measured.", result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertFalse((self.folder / "calls").exists())

    def test_compares_the_fastest_form(self):
        out = self.folder / "out.json"
        result = self.run_script(TORCH, "--sizes", "2K,1M", "--threads", "2", "--rounds", "2", "--seconds", "0.01", "--json", str(out))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("PyTorch plain ms | PyTorch foreach ms | 16-bit", result.stdout)
        self.assertNotIn("fused ms", result.stdout)
        rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
        self.assertEqual([(row["parameters"], row["threads"], row["fastest"]) for row in rows], [(2000, 2, "foreach"), (1000000, 2, "foreach")])
        for row in rows:
            self.assertEqual(row["ms"]["ours"], 5)
            self.assertAlmostEqual(row["ms"]["plain"], 40)
            self.assertAlmostEqual(row["ms"]["foreach"], 20)
            self.assertAlmostEqual(row["pytorch_over_ours"], 4)
            self.assertAlmostEqual(row["pytorch_and_copy_over_ours"], 6)
        calls = (self.folder / "calls").read_text(encoding="utf-8").splitlines()
        self.assertEqual(len(calls), 4)
        self.assertIn("--sizes 2000 --threads 2 --rules adamw --gradients fp32", calls[0])

    def test_a_failing_bench_ends_it(self):
        self.program("echo 'no memory' >&2; exit 2\n")
        result = self.run_script(TORCH, "--sizes", "1M", "--threads", "1", "--rounds", "1")
        self.assertEqual(result.returncode, 1)
        self.assertIn("ended with 2: no memory", result.stderr)


unittest.main()
