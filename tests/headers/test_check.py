#!/usr/bin/env python3
"""Tests of check.py: which headers may share a unit, and the output and compilations for small trees of headers."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import check  # noqa: E402
import sources  # noqa: E402

# Runs the compiler and records its units.
COMPILER = """#!/bin/sh
for last; do :; done
case $last in
*/standard.h) [ "$1" = -DFLAG ] && echo standard.h >> "{log}" ;;
*/unit_*) cat "$last" >> "{log}"; echo >> "{log}" ;;
esac
exec {compiler} "$@"
"""
LOW = "#pragma once\n\n#include <cstdint>\n\nstruct Low {\n  std::int32_t value = 0;\n};\n"
MIDDLE = '#pragma once\n/// A comment.\n#include "tranche/low.h"\n\nstruct Middle {\n  Low low;\n};\n'


class Checked:
    """A tree of headers in a folder, and the result of check.py for it."""

    def __init__(self, folder, headers):
        self.root, self.build = pathlib.Path(folder) / "tree", pathlib.Path(folder) / "build"
        self.build.mkdir()
        self.log = self.build / "log"
        (self.build / "compiler").write_text(
            COMPILER.format(log=self.log, compiler=os.environ.get("CXX", "c++")), encoding="utf-8")
        (self.build / "compiler").chmod(0o755)
        for name, text in headers.items():
            self.write(name, text)
        (self.build / "headers.txt").write_text("\n".join(headers) + "\n", encoding="utf-8")
        self.flags("-Wall -Wextra -Werror")

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text, encoding="utf-8")

    def flags(self, flags):
        source = self.build / "flags.cpp"
        command = f"{self.build}/compiler -DFLAG -std=c++20 -I{self.root}/include -I{self.root} {flags} -o {source}.o -c {source}"
        (self.build / "compile_commands.json").write_text(
            json.dumps([{"directory": str(self.build), "command": command, "file": str(source)}]), encoding="utf-8")

    def run(self):
        """Returns (status, output, compiled units with their headers)."""
        self.log.write_text("", encoding="utf-8")
        done = subprocess.run([sys.executable, pathlib.Path(check.__file__), self.root, self.build, self.build / "compile_commands.json"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        units = [sorted({line.split('"')[1] for line in unit.splitlines() if '"' in line})
                 for unit in self.log.read_text(encoding="utf-8").split("\n\n") if '"' in unit]
        return done.returncode, done.stdout, units


class Compiled(unittest.TestCase):
    def checked(self, headers):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return Checked(folder.name, headers)

    def test_headers_that_compile_alone_pass_in_silence(self):
        beside = "#pragma once\n\nstruct Beside {};\n"
        status, said, units = self.checked({"include/tranche/low.h": LOW, "middle.h": MIDDLE, "beside.h": beside}).run()
        self.assertEqual((status, said), (0, ""))
        self.assertEqual(units, [["beside.h", "middle.h", "tranche/low.h"]])

    def test_a_header_that_leans_on_its_includer_is_named_with_the_text_of_the_compiler(self):
        leans = "#pragma once\n\nstruct Leans {\n  Low low;\n};\n"
        status, said, _ = self.checked({"include/tranche/low.h": LOW, "leans.h": leans, "other.h": "#pragma once\n"}).run()
        self.assertEqual(status, 1)
        self.assertTrue(said.startswith("leans.h does not compile alone:\n"), said)
        self.assertRegex(said, r"leans\.h:4:3: error: .*Low")
        self.assertEqual(said.count("does not compile alone"), 1, said)

    def test_a_header_included_twice_has_to_be_guarded(self):
        status, said, _ = self.checked({"open.h": "struct Open {};\n", "low.h": LOW}).run()
        self.assertEqual(status, 1)
        self.assertRegex(said, r"^open\.h does not compile alone:\n(.*\n)*.*redefinition")

    def test_a_broken_header_is_named_and_those_that_include_it_are_not(self):
        headers = {"include/tranche/low.h": LOW.replace("std::int32_t", "int32"), "middle.h": MIDDLE,
                   "high.h": '#pragma once\n#include "middle.h"\n', "wrong.h": "#pragma once\nint f() { return unknown; }\n"}
        status, said, _ = self.checked(headers).run()
        self.assertEqual(status, 1)
        self.assertEqual([line.split()[0] for line in said.splitlines() if "does not compile alone" in line],
                         ["include/tranche/low.h", "wrong.h"])

    def test_a_warning_fails_where_warnings_are_errors(self):
        checked = self.checked({"unused.h": "#pragma once\nstatic int unused() { return 1; }\n"})
        self.assertRegex(checked.run()[1], "^unused.h does not compile alone:\n(.*\n)*.*unused-function")
        checked.flags("-Wall")
        status, said, _ = checked.run()
        self.assertEqual(status, 0)
        self.assertIn("warning: ", said)  # scripts/test.sh treats each warning as an error

    def test_a_forgotten_include_of_the_standard_library_fails(self):
        status, said, _ = self.checked({"low.h": LOW, "a.h": "#pragma once\nstd::int32_t f();\n"}).run()
        self.assertEqual((status, said), (1, "a.h:2: std::int32_t needs #include <cstdint>\n"))

    def test_headers_that_disturb_each_other_unforeseen_pass_when_each_compiles_alone(self):
        text = "#pragma once\nstruct {} {{\n  friend void both(int) {{}}\n}};\n"
        checked = self.checked({"a.h": text.format("A"), "b.h": text.format("B")})
        status, said, units = checked.run()
        self.assertEqual((status, said), (0, ""))
        self.assertEqual(units, [["a.h", "b.h"], ["a.h"], ["b.h"]])
        self.assertEqual(checked.run(), (0, "", []))

    def test_only_units_with_what_has_changed_are_compiled_again(self):
        one = '#pragma once\nstruct Two;\nstruct One {};\n'  # each mentions the other, so they share no unit
        two = '#pragma once\n#include "tranche/low.h"\nstruct One;\nstruct Two {};\n'
        checked = self.checked({"include/tranche/low.h": LOW, "one.h": one, "two.h": two})
        self.assertEqual(checked.run(), (0, "", [["one.h", "tranche/low.h"], ["two.h"]]))
        self.assertEqual(checked.run(), (0, "", []))
        self.assertEqual(checked.log.read_text(encoding="utf-8"), "")
        checked.write("two.h", two + "// More.\n")
        self.assertEqual(checked.run(), (0, "", [["two.h"]]))
        checked.write("include/tranche/low.h", LOW + "// More.\n")  # two.h includes it
        self.assertEqual(len(checked.run()[2]), 2)
        checked.flags("-Wall")
        self.assertEqual(len(checked.run()[2]), 2)

    def test_a_failure_is_not_taken_for_proved(self):
        checked = self.checked({"a.h": "#pragma once\nUnknown f();\n"})
        self.assertEqual([checked.run()[0], checked.run()[0]], [1, 1])
        checked.write("a.h", "#pragma once\nint f();\n")
        self.assertEqual(checked.run()[:2], (0, ""))


def units(headers):
    """The units for headers with these texts."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in headers.items():
            (pathlib.Path(folder) / name).write_text(text, encoding="utf-8")
        return [unit.headers for unit in check.units_of(sources.Tree(pathlib.Path(folder), headers))]


class Units(unittest.TestCase):
    def test_headers_are_behind_those_that_they_include(self):
        headers = {"a.h": '#include "b.h"\nstruct A : B {};\n', "b.h": '#include "c.h"\nstruct B : C {};\n', "c.h": "struct C {};\n"}
        self.assertEqual(units(headers), [["c.h", "b.h", "a.h"]])

    def apart(self, first, second, **more):
        """True if b.h, with the text `second`, is not placed after a.h."""
        return len([unit for unit in units({"a.h": first, "b.h": second, **more}) if {"a.h", "b.h"} & set(unit)]) == 2

    def test_a_header_is_behind_no_other_whose_names_it_mentions(self):
        user = "struct User { void use() { name(); } };\n"
        for text in ("struct name {};", "class name final : public Base {};", "enum class name { a };", "enum { name };", "void name();",
                     "template <class T = int> auto name(T t) -> T;", "namespace n {\nint name = 3;\n}", "extern const int other, name;",
                     "using name = int;", "using n::name;", "typedef int name;", "int (*name)(int);", "#define name 3", "namespace name {}",
                     "template <>\nstruct hash<name> {};", "bool operator==(const name& a, const name& b);",
                     "template <class T>\nconcept name = true;"):
            self.assertTrue(self.apart(text + "\n", user), text)

    def test_other_names_do_not_part_headers(self):
        user = "struct User { int name(); std::list<int> f() { return other.call(); } };\n"
        for text in ("struct Name { int name; };", "void g(int name);", "void g() { int name; }", "enum class E { name };",
                     "template <class name>\nstruct T {};", "// name", "std::name g();", "struct list {};", "void call();"):
            self.assertFalse(self.apart(text + "\n", user), text)

    def test_a_class_is_neither_declared_nor_defined_in_front_of_who_knows_less_of_it(self):
        declares = {"declares.h": "struct Part;\nPart& part();\n"}
        self.assertTrue(self.apart("struct Part;\n", "struct B { Part* part; };\n"))
        self.assertFalse(self.apart("struct Part;\n", '#include "declares.h"\nstruct B { Part* part; };\n', **declares))
        user = '#include "declares.h"\ninline int f() { return part().size; }\n'
        self.assertTrue(self.apart("struct Part { int size; };\n", user, **declares))

    def test_an_operator_is_not_in_front_of_those_who_include_its_types(self):
        low = {"low.h": "struct Box {};\nstruct Pair { Box first, second; };\n"}
        compares = '#include "low.h"\nbool operator==(const Box& a, const Box& b);\n'
        self.assertTrue(self.apart(compares, '#include "low.h"\ninline bool f(const Pair& p) { return p.first == p.second; }\n', **low))
        self.assertFalse(self.apart(compares, "struct Other {};\n", **low))

    def test_an_include_behind_other_lines_or_within_if_is_none(self):
        low = {"low.h": "struct Low {};\n"}
        for late in ('using Mine = Low;\n#include "low.h"\n', '#if 0\n#include "low.h"\n#endif\nusing Mine = Low;\n'):
            found = units({**low, "late.h": late})
            self.assertNotIn(["low.h", "late.h"], found)

    def test_the_header_of_another_library_is_in_front_of_those_that_include_it(self):
        self.assertTrue(self.apart("#include <mpi.h>\nstruct A {};\n", "struct B {};\n"))
        self.assertFalse(self.apart("#include <mpi.h>\nstruct A {};\n", "#include <mpi.h>\nstruct B {};\n"))

    def test_a_macro_is_in_front_of_no_header_that_includes_what_mentions_it(self):
        self.assertTrue(self.apart("#define LIMIT 3\n", '#include "low.h"\nstruct B {};\n', **{"low.h": "const int limit = LIMIT;\n"}))


if __name__ == "__main__":
    unittest.main()
