#!/usr/bin/env python3
"""scripts/bench.py: the figures that it collects, and its reports about benches that fail, with fake programs."""
import json
import pathlib
import stat
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "bench.py"

GOOGLE = """for word in "$@"; do case $word in --benchmark_out=*) out=${word#*=};; esac; done
cat > "$out" <<'JSON'
{"benchmarks": [
 {"name": "copy/threads:1/iterations:1/manual_time", "real_time": 2.0, "cpu_time": 1.0, "time_unit": "ms", "iterations": 1, "of_copy": 0.75},
 {"name": "add/threads:1", "real_time": 4.0, "cpu_time": 1.0, "time_unit": "s", "iterations": 7, "of_copy": 0.5, "bytes": 4096.0}]}
JSON
"""


class Lot(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.out = self.folder / "out"
        self.program("memory_bound", GOOGLE)
        self.program("block_io", "echo 'a table first'; echo 'engine=threads write_of_raw=0.91 read_of_raw=1.20'\n")

    def program(self, name, text):
        path = self.folder / "bin" / f"bench_{name}"
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/usr/bin/env bash\n" + text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPT, "--build", self.folder, "--out", self.out, *arguments],
                              capture_output=True, text=True, check=False, timeout=60)

    def results(self):
        return json.loads((self.out / "results.json").read_text(encoding="utf-8"))

    def test_keeps_every_figure_with_its_command_and_machine(self):
        result = self.run_script("--only", "memory_bound|block_io")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("2 of 2 benches measured", result.stdout)
        results = self.results()
        self.assertFalse(results["smoke"])
        self.assertRegex(results["machine"]["memory"], r"^[\d.]+ GiB$")
        bound, block = results["benches"]
        self.assertEqual(bound["figures"]["copy/threads:1"], {"of_copy": 0.75, "seconds": 0.002})
        self.assertEqual(bound["figures"]["add/threads:1"], {"of_copy": 0.5, "bytes": 4096.0, "seconds": 4.0})
        self.assertEqual(block["figures"], {"engine=threads": {"write_of_raw": 0.91, "read_of_raw": 1.2}})
        self.assertEqual(block["command"], "bench_block_io --dir DIR")
        text = (self.out / "summary.md").read_text(encoding="utf-8")
        self.assertIn("| add/threads:1 | 0.500 | of_copy |", text)
        self.assertIn("`of_copy`: of bandwidth of the same threads' copy.", text)
        self.assertIn("| engine=threads | 0.910 | write_of_raw |", text)
        self.assertIn("a table first", (self.out / "raw" / "block_io.txt").read_text(encoding="utf-8"))
        self.assertFalse((self.out / "disk").exists())

    def test_a_failing_bench_is_said_and_the_others_go_on(self):
        self.program("memory_bound", "echo 'no such device' >&2; exit 7\n")
        result = self.run_script("--only", "memory_bound|block_io")
        self.assertEqual(result.returncode, 1)
        self.assertIn("bench.py: bench_memory_bound failed: exit status 7: no such device", result.stderr)
        self.assertIn("1 of 2 benches measured", result.stdout)
        self.assertEqual([record["status"] for record in self.results()["benches"]], ["failed", "measured"])
        self.assertIn("**Failed**: exit status 7", (self.out / "summary.md").read_text(encoding="utf-8"))

    def test_a_bench_without_its_figures_fails(self):
        self.program("block_io", "echo 'engine=threads write_of_raw=0.91'\n")
        result = self.run_script("--only", "block_io")
        self.assertEqual(result.returncode, 1)
        self.assertIn("bench_block_io failed: printed no read_of_raw", result.stderr)

    def test_a_case_that_reports_an_error_fails(self):
        self.program("memory_bound", GOOGLE.replace('"of_copy": 0.75', '"error_occurred": true, "error_message": "no memory"'))
        result = self.run_script("--only", "memory_bound")
        self.assertEqual(result.returncode, 1)
        self.assertIn("unreadable figures: copy/threads:1/iterations:1/manual_time: no memory", result.stderr)

    def test_a_program_that_is_not_built_is_named(self):
        result = self.run_script("--only", "nvme_step")
        self.assertEqual(result.returncode, 1)
        self.assertIn("no program bench_nvme_step; build with TRANCHE_BENCHES=ON", result.stderr)

    def test_results_are_never_written_over(self):
        self.out.mkdir()
        result = self.run_script("--only", "block_io")
        self.assertEqual(result.returncode, 2)
        self.assertIn("exists; results are added, not written over: name another with --out", result.stderr)

    def test_an_unknown_bench_is_refused_with_the_known_ones(self):
        result = self.run_script("--only", "nothing_like_it")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--only nothing_like_it: none of kernels, memory_bound, host_optimizer", result.stderr)


if __name__ == "__main__":
    unittest.main()
