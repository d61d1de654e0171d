#!/usr/bin/env python3
"""build_times.py adds up artificial Ninja logs, reports compilations after a mark, and measures small tests that ctest runs."""
import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import signal
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"))
import build_times  # noqa: E402
import process_times  # noqa: E402

if len(sys.argv) > 1:  # CMake passes the path of ctest, which need not be in PATH.
    os.environ["PATH"] = os.path.dirname(sys.argv.pop(1)) + os.pathsep + os.environ["PATH"]

CORE, UNIT, CUDA = ("core/CMakeFiles/tranche_core.dir/a.cpp.o", "tools/CMakeFiles/tranche_tools.dir/Unity/unity_0_cxx.cxx.o",
                    "kernels/CMakeFiles/tranche_kernels.dir/cuda/norm.cu.o")
HEADER, TEST = "tests/headers/CMakeFiles/header_check.dir/core_csv_h.cpp.o", "tests/engine/CMakeFiles/test_engine.dir/__/rounds.cpp.o"
# Each entry is (start, end, mtime, output, hash of the command).
LOG = [(0, 9000, 1, CORE, "a1"),  # A later entry replaces it.
       (0, 1000, 7, CORE, "a2"), (5, 2505, 3, UNIT, "b"), (0, 4000, 3, CUDA, "c"), (10, 510, 3, HEADER, "d"), (20, 320, 3, TEST, "e"),
       (1000, 1100, 4, "core/libtranche_core.a", "f"), (1100, 1300, 4, "bin/tranche", "g"), (1100, 1400, 4, "tests/test_engine", "h"),
       (0, 700, 5, "CMakeFiles/name_check", "i"), (0, 700, 5, "BUILD/CMakeFiles/name_check", "i"),
       (0, 60000, 5, "core/CMakeFiles/tranche_core.dir/gone.cpp.o", "j")]
NINJA = f"""cmake_ninja_workdir = BUILD/
build {CORE}: CXX_COMPILER__tranche_core_unscanned_Release SOURCE/core/a.cpp || x
  OBJECT_DIR = core/CMakeFiles/tranche_core.dir
build {UNIT}: CXX_COMPILER__tranche_tools_Release x.cxx
build {CUDA}: CUDA_COMPILER__tranche_kernels_Release norm.cu
build {HEADER}: CXX_COMPILER__header_check_Release x.cpp
build {TEST}: CXX_COMPILER__test_engine_Release x.cpp
build core/libtranche_core.a: CXX_STATIC_LIBRARY_LINKER__tranche_core_Release {CORE}
  OBJECT_DIR = core/CMakeFiles/tranche_core.dir
build bin/tranche: CXX_EXECUTABLE_LINKER__tranche_program_Release x.o
  OBJECT_DIR = tools/CMakeFiles/tranche_program.dir
build tests/test_engine: CXX_EXECUTABLE_LINKER__test_engine_Release x.o
  OBJECT_DIR = tests/engine/CMakeFiles/test_engine.dir
build CMakeFiles/name_check | ${{cmake_ninja_workdir}}CMakeFiles/name_check: CUSTOM_COMMAND
"""


def row(output, name):
    """Returns the cells after the name of a row of a table."""
    lines = [line for line in output.splitlines() if line.startswith(f"| {name} ")]
    assert len(lines) == 1, f"{name} in {output}"
    return [cell.strip() for cell in lines[0].strip("|").split("|")[1:]]


class Base(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = pathlib.Path(folder.name).resolve() / "build"
        self.build.mkdir()

    def write(self, log, ninja=NINJA, version="# ninja log v5"):
        lines = ["\t".join(map(str, entry)) for entry in log]
        (self.build / ".ninja_log").write_text("\n".join([version, *lines]).replace("BUILD", str(self.build)) + "\n")
        if ninja:
            (self.build / "build.ninja").write_text(ninja.replace("BUILD", str(self.build)))

    def call(self, *arguments):
        """Returns (status, output) of the script."""
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            status = build_times.main([str(self.build), *map(str, arguments)])
        return status or 0, out.getvalue()


class Build(Base):
    def test_seconds_by_folder_and_kind(self):
        self.write(LOG)
        status, output = self.call("--json", self.build / "x.json")
        self.assertEqual(status, 0)
        for name, cells in (("core", [1.0, 0.0, 0.0, 0.1, 0.0, 1.1]), ("tools", [2.5, 0.0, 0.0, 0.2, 0.0, 2.7]), ("kernels", [0.0, 4.0, 0.0, 0.0, 0.0, 4.0]),
                            ("tests/headers", [0.0, 0.0, 0.5, 0.0, 0.0, 0.5]), ("tests/engine", [0.3, 0.0, 0.0, 0.3, 0.0, 0.6]),
                            (".", [0.0, 0.0, 0.0, 0.0, 0.7, 0.7]), ("all", [3.8, 4.0, 0.5, 0.6, 0.7, 9.6]), ("number of commands", [3, 1, 1, 3, 1, 9])):
            self.assertEqual(row(output, name), [str(cell) for cell in cells], name)
        self.assertEqual(output.splitlines()[2:4], ["| folder             | C++ compile | CUDA compile | header check | link | other steps | total |",
                                                    "| ------------------ | ----------: | -----------: | -----------: | ---: | ----------: | ----: |"])
        self.assertIn("no longer has them: 1 commands", output)
        figures = json.loads((self.build / "x.json").read_text())
        self.assertAlmostEqual(figures["seconds"], 9.6)
        self.assertAlmostEqual(figures["folders"]["core"]["C++ compile"], 1.0)

    def test_the_slowest_sources_and_links(self):
        unit = self.build / UNIT[:-2]
        unit.parent.mkdir(parents=True)
        unit.write_text("".join(f'#include "/x/tools/{name}.cpp"\n' for name in "abcde"))
        self.write(LOG)
        output = self.call()[1]
        places = [output.index(text) for text in ("| kernels/cuda/norm.cu ", "| tools/unity_0_cxx.cxx (a.cpp, b.cpp, c.cpp and 2 more) | tranche_tools ",
                                                  "| core/a.cpp ", "| tests/headers/core_csv_h.cpp ", "| tests/rounds.cpp ", "of 3 links",
                                                  "| tests/test_engine ", "| bin/tranche ", "| core/libtranche_core.a ")]
        self.assertEqual(places, sorted(places))
        self.assertNotIn("core/a.cpp", self.call("--top", 2)[1])

    def test_shared_libraries_and_one_header_check_without_build_ninja(self):
        self.write([(0, 1000, 1, CORE, "a"), (0, 200, 1, "core/libtranche_core.so.0.1.0", "b"), (0, 100, 1, "kernels/cmake_device_link.o", "c"),
                    (0, 300, 1, "bin/tranche", "d"), (0, 400, 1, "tests/headers/checked.stamp", "e"), (0, 500, 1, "data/table.h", "f")], ninja=None,
                   version="# ninja log v6")
        output = self.call()[1]
        for name, cells in (("core", [1.0, 0.0, 0.0, 0.2, 0.0, 1.2]), ("kernels", [0.0, 0.0, 0.0, 0.1, 0.0, 0.1]), ("bin", [0.0, 0.0, 0.0, 0.3, 0.0, 0.3]),
                            ("tests/headers", [0.0, 0.0, 0.4, 0.0, 0.0, 0.4]), ("data", [0.0, 0.0, 0.0, 0.0, 0.5, 0.5])):
            self.assertEqual(row(output, name), [str(cell) for cell in cells], name)
        rule = "build core/table: CUSTOM_COMMAND\nbuild core/libx.so | core/y: CXX_SHARED_LIBRARY_LINKER__x_Release a.o\n"
        self.write([(0, 500, 1, "core/table", "f"), (0, 200, 1, "core/libx.so", "g")], ninja=rule)
        self.assertEqual(row(self.call()[1], "core"), ["0.0", "0.0", "0.0", "0.2", "0.5", "0.7"])  # The rule says that a table is no program.

    def test_what_ran_after_a_mark(self):
        self.write(LOG)
        mark = self.build / "mark.json"
        self.assertEqual(self.call("--mark", mark), (0, ""))
        self.assertEqual(self.call("--since", mark), (0, "0 CUDA sources and 0 C++ sources compiled, 0 of them again, of 5\n"))
        new = "kernels/CMakeFiles/tranche_kernels.dir/cuda/rope.cu.o"
        again = [(0, 3000, 9, CORE, "other"), (5, 2505, 8, UNIT, "b"), (0, 100, 8, HEADER, "d"),
                 (0, 100, 8, "core/libtranche_core.a", "f"), (0, 50, 8, new, "k")]
        self.write(LOG + again, NINJA + f"build {new}: CUDA_COMPILER__tranche_kernels_Release rope.cu\n")
        status, output = self.call("--since", mark, "--json", self.build / "x.json")
        self.assertEqual(status, 0)
        self.assertEqual(output.splitlines()[0], "1 CUDA source, 2 C++ sources and 1 header check compiled, 3 of them again, of 6")
        self.assertEqual(output.splitlines()[2], "| compiled     | new | other command line | same command line | total |")
        for name, cells in (("C++ compile", "0112"), ("CUDA compile", "1001"), ("header check", "0011")):
            self.assertEqual(row(output, name), list(cells))
        self.assertEqual(row(output, " 3.0".rjust(7)), ["core/a.cpp", "tranche_core", "other command line"])
        self.assertEqual({one["output"]: one["why"] for one in json.loads((self.build / "x.json").read_text())["ran"]},
                         {CORE: "other command line", UNIT: "same command line", HEADER: "same command line", new: "new"})
        self.assertIn("core/a.cpp", self.call("--since", mark, "--top", 1)[1])
        self.assertNotIn("unity_0", self.call("--since", mark, "--top", 1)[1])

    def test_bad_input(self):
        for arguments in ([], ["--mark", self.build / "m"], ["--since", self.build / "m"]):
            (self.build / "m").write_text('{"compilations": {}}')
            status, output = self.call(*arguments)
            self.assertEqual((status, output), (2, f"build_times.py: there is no .ninja_log in {self.build}: build it with Ninja first\n"))
        self.assertEqual(self.call("--run"), (2, f"build_times.py: there is no CTestTestfile.cmake in {self.build}: configure it with CMake first\n"))
        for version in ("# ninja log v4", "# ninja log v8", "nonsense"):
            self.write(LOG, version=version)
            status, output = self.call()
            self.assertEqual(status, 2)
            self.assertIn(f"begins with '{version}'; only '# ninja log v5' to v7 can be read", output)
        self.write(LOG)
        for text in ("nonsense", "[]", "{}"):
            (self.build / "m").write_text(text)
            self.assertEqual(self.call("--since", self.build / "m"), (2, f"build_times.py: {self.build / 'm'} is no file that --mark wrote\n"))
        self.assertEqual(self.call("--since", self.build / "none")[0], 2)
        self.assertEqual(self.call("--json", self.build / "none" / "x.json")[0], 2)
        (self.build / ".ninja_log").write_text("")
        self.assertIn("begins with ''", self.call()[1])
        self.build = self.build / "none"
        for arguments in ([], ["--run"]):
            self.assertEqual(self.call(*arguments), (2, f"build_times.py: there is no folder {self.build}\n"))


class Processes(unittest.TestCase):
    def test_nothing_counts_twice(self):
        top = process_times.Process(1, 0, None, 0)
        root = process_times.Process(2, 0, top, 0)
        child = process_times.Process(3, 0, root, 0)
        top.children, root.children = [root], [child]
        root.own, child.own = 1.0, 5.0
        self.assertEqual(root.seconds(), 6.0)
        child.end = 1.0  # It has ended and nobody has waited for it yet.
        self.assertEqual(root.seconds(), 6.0)
        root.waited = 5.25  # Its parent has now waited for it, and it used a little more after the last look.
        self.assertEqual(root.seconds(), 6.25)
        root.children, root.orphans = [], [child]
        root.waited = 0.0
        self.assertEqual(root.seconds(), 6.0)

    def test_seconds_after_the_last_look_go_to_the_tests_that_ended(self):
        sampler = process_times.Sampler(os.getpid(), ["a test has started"])
        one, other = (process_times.Process(pid, 0, sampler.top, 0) for pid in (-1, -2))
        one.own, other.own = 1.0, 2.0
        sampler.ended = [one, other]
        sampler.settle(2.5)  # ctest's figure was read before the second had ended.
        sampler.settle(3.5)
        self.assertEqual((one.seconds(), other.seconds(), sampler.unseen), (1.25, 2.25, 0.0))
        sampler.settle(3.75)
        self.assertEqual(sampler.unseen, 0.25)

    def test_tests_that_share_a_command_line_go_by_the_order_of_their_starts(self):
        tests = [process_times.Test(name, command, [], begin) for name, command, begin in
                 (("a", ["/x/p", "-1"], 1.0), ("q", ["/x/q"], 1.05), ("b", ["/x/p", "-1"], 1.1),
                  ("c", ["run.sh"], 1.2), ("late", ["/x/p", "-1"], 9.0), ("never run", [], 1.0))]
        for test in tests:
            test.end = test.begin + 3
        processes = []
        for pid, seen, command in ((10, 0.1, ["/x/p", "--list"]), (11, 1.08, ["/x/q"]), (13, 1.2, ["/x/p", "-1"]),
                                   (12, 1.1, ["/x/p", "-1"]), (14, 1.25, ["mpirun"]),
                                   (15, 9.1, ["/bin/sh", "/x/p", "-1"])):
            process = process_times.Process(pid, pid, None, seen)
            process.commands.add(tuple(command))
            processes.append(process)
        process_times.assign(processes, tests)
        self.assertEqual({test.name: test.process and test.process.pid for test in tests}, {"a": 12, "q": 11, "b": 13, "c": 14, "late": 15, "never run": None})


# Programs stop themselves where a look at /proc has to see them, and look_and_continue() continues them. So no result depends on the time
# between two looks, which is long on a busy machine.
STOP = "kill -STOP $$"
BUSY = f"{shlex.quote(sys.executable)} -ISc 'import os, time\nwhile time.process_time() < 0.4: pass\nos.kill(os.getpid(), {signal.SIGSTOP:d})'"
LEAVE_ORPHAN = f"{{ {BUSY}; : > orphan_ended; }} & {STOP}"
COMMANDS = {"busy": BUSY, "child": f"{BUSY} & {BUSY} & wait",
            "orphan": f"/bin/sh -c {shlex.quote(LEAVE_ORPHAN)}; until [ -e orphan_ended ]; do sleep 0.1; done; {STOP}", "sleeps": f"{STOP}; sleep 0.6",
            "short": ":", "shared_1": f"{STOP}; [ -z $SHARED ] || {BUSY}", "shared_2": f"{STOP}; [ -z $SHARED ] || {BUSY}",
            "fails": "echo 'never ends' >&2; false"}


def look_and_continue(sampler, now, look=process_times.Sampler.sample):
    """Takes a look at /proc, then continues the processes that had stopped before it, so that the look has all seconds that they have used."""
    stopped = []
    for pid in sampler.alive:
        with contextlib.suppress(OSError):  # It may have ended.
            if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                stopped.append(pid)
    look(sampler, now)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)


class Run(Base):
    def test_processor_seconds_of_tests(self):
        text = "".join(f"add_test({name} /bin/sh -c [==[{command}]==])\n"
                       f"set_tests_properties({name} PROPERTIES TIMEOUT 100 LABELS \"{'scripts;' * (name == 'busy')}unit\")\n"
                       for name, command in COMMANDS.items())
        (self.build / "CTestTestfile.cmake").write_text(text + "set_tests_properties(shared_2 PROPERTIES ENVIRONMENT SHARED=1)\n")
        for module, name, value in ((build_times, "LONG_WAIT", 0.4), (process_times, "SLACK", 60.0), (process_times.Sampler, "sample", look_and_continue)):
            self.addCleanup(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        status, output = self.call("--json", self.build / "x.json", "--run", "-E", "^never$", "--output-on-failure")
        self.assertEqual(status, 8, output)
        self.assertIn("1/8 Test #1: busy ", output)
        self.assertIn("never ends", output)
        figures = json.loads((self.build / "x.json").read_text())
        tests = {one["name"]: one for one in figures["tests"]}
        self.assertEqual(list(tests), list(COMMANDS))
        for name, least, most in (("busy", 0.35, 0.7), ("child", 0.7, 1.4), ("orphan", 0.35, 0.7), ("sleeps", 0, 0.15), ("short", 0, 0.15),
                                  ("shared_1", 0, 0.15), ("shared_2", 0.35, 0.7), ("fails", 0, 0.15)):
            self.assertTrue(least <= tests[name]["processor"] <= most, f"{name}: {tests[name]}\n{output}")
            self.assertAlmostEqual(tests[name]["waited"], max(0, tests[name]["wall"] - tests[name]["processor"]), delta=0.002)
        self.assertGreater(tests["sleeps"]["waited"], 0.4)
        self.assertGreater(figures["others"], -0.001)
        self.assertLess(figures["processor"], 1.5 * sum(one["processor"] for one in tests.values()))
        self.assertEqual([(label, figures["labels"][label]["tests"]) for label in figures["labels"]], [("scripts", 1), ("unit", 8), ("all", 8)])
        tables = output[output.index("Seconds by label"):]
        self.assertEqual(row(tables, "all   ")[0], "8")
        waits = tables[tables.index("What each suite waits for"):]
        self.assertRegex(waits, r"\| unit +\| sleeps +\| +\d+\.\d \| +\d+% \| +\d+% \|")
        for name, test in tests.items():  # on a busy machine any of them may wait
            self.assertEqual(re.search(rf"\| unit +\| {name} ", waits) is not None, test["waited"] > build_times.LONG_WAIT, waits)


if __name__ == "__main__":
    unittest.main()
