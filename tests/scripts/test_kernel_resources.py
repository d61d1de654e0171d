#!/usr/bin/env python3
"""scripts/gpu/kernel_resources.py: the values that it reads from PTX and ptxas, its rules, and its file."""
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts" / "gpu"))
import kernel_resources as resources  # noqa: E402

PTX = """
.visible .entry _Z3addPf(
	.param .u64 _Z3addPf_param_0
)
.maxntid 256, 2, 1
.minnctapersm 2
{
	ret;
}
	// .globl	_Z5plainv
.visible .entry _Z5plainv()
{
	ret;
}
"""
TOLD = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3addPf' for 'sm_90'
ptxas info    : Function properties for _Z3addPf
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 1.0 ms
ptxas info    : Compiling entry function '_Z5plainv' for 'sm_90'
ptxas info    : Function properties for _Z5plainv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
"""


class Reading(unittest.TestCase):
    def test_ptx_and_what_ptxas_says(self):
        self.assertEqual(resources.entries_of_ptx(PTX), {"_Z3addPf": 512, "_Z5plainv": 1024})
        self.assertEqual(resources.rows_of("a", PTX, TOLD), [("a", 512, 40, 16, 12, 1024, "_Z3addPf"), ("a", 1024, 4, 0, 0, 0, "_Z5plainv")])

    def test_rules(self):
        good = {("adam", "update<float, true>(int)"): (256, 64, 0, 0, 0)}
        self.assertEqual(resources.broken_rules(good), [])
        self.assertEqual(resources.broken_rules({("a", "k"): (256, 64, 0, 12, 0)}), ["a: k spills 12 bytes"])
        self.assertEqual(resources.broken_rules({("a", "k"): (512, 129, 0, 0, 0)}),
                         ["a: k needs 129 registers of each of 512 threads: more than 65,536"])
        self.assertEqual(resources.differences(good, good, {"adam"}), [])
        framed = {("adam", "update<float, true>(int)"): (256, 64, 32, 0, 0)}
        self.assertIn("has a new stack frame of 32 bytes", resources.differences(good, framed, {"adam"})[0])
        self.assertIn("has 256 64 32 0 0, not 256 64 0 0 0", resources.differences(good, framed, set())[0])
        self.assertIn("is gone", resources.differences(good, {}, set())[0])

    def test_lines(self):
        lines = resources.lines_of(resources.rows_of("a", PTX, TOLD))
        self.assertEqual(lines, ["a 1024 4 0 0 0 plain()", "a 512 40 16 12 1024 add(float*)"])
        self.assertEqual(resources.parsed(["# comment", *lines])["a", "add(float*)"], (512, 40, 16, 12, 1024))


class Kept(unittest.TestCase):
    def test_the_file(self):
        kernels = resources.parsed(resources.FILE.read_text(encoding="utf-8").splitlines())
        self.assertGreater(len(kernels), 50)
        self.assertEqual(resources.broken_rules(kernels), [])
        sources = {path.stem for path in resources.FILE.parent.glob("*.cu")} | {
            path.stem for path in (resources.ROOT / "kernels" / "rules").glob("*.h")}
        without = {"launch", "copy_columns"}  # they have no kernels
        self.assertEqual({source for source, _ in kernels}, sources - without, "each source of kernels is in the file")


if __name__ == "__main__":
    unittest.main()
