#!/usr/bin/env python3
"""check_names.py names two sources of one library that both define a name with internal linkage, and no others."""
import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"))
import check_names  # noqa: E402


def anonymous(text, namespace="tranche"):
    return f'#include "tranche/a.h"\n\nnamespace {namespace} {{\n\nnamespace {{\n\n{text}\n\n}}  // namespace\n\n}}  // namespace {namespace}\n'


class CheckNames(unittest.TestCase):
    def check(self, one, other, units=(("a.cpp", "b.cpp"),), compiled=None):
        """Returns (status, output) for two sources in the units of one library; the first `compiled` units are built."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "a.cpp").write_text(one)
            (root / "b.cpp").write_text(other)
            unity = root / "CMakeFiles/tranche_x.dir/Unity"
            unity.mkdir(parents=True)
            for number, unit in enumerate(units):
                (unity / f"unity_{number}_cxx.cxx").write_text("".join(f'#include "{root}/{name}"\n' for name in unit))
            if compiled is not None:
                files = [{"file": str(unity / f"unity_{number}_cxx.cxx")} for number in range(compiled)]
                (root / "compile_commands.json").write_text(json.dumps(files))
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
                status = check_names.main([str(root)])
            return status, out.getvalue()

    def test_units_of_an_earlier_configuration_do_not_count(self):
        gone = (("a.cpp",), ("b.cpp", "gone.cpp"))
        self.assertEqual(self.check(anonymous("int x() { return 1; }"), anonymous("int x() { return 2; }"), units=gone, compiled=1), (0, ""))

    def clash(self, one, other, name, **units):
        status, output = self.check(one, other, **units)
        self.assertEqual(status, 1, output)
        self.assertIn(f"b.cpp:7: '{name}' is defined in ", output)
        self.assertIn("a.cpp:7 too, and in large units the two sources of tranche_x clash: rename one, or list a source under ALONE", output)
        self.assertEqual(output.count("\n"), 1)

    def test_clashes(self):
        for text, name in (("int twice(int number) {\n  return 2 * number;\n}", "twice()"),
                           ("struct Place {\n  int x = 0;\n};", "Place"),
                           ("class Place final : public Base<int> {\n};", "Place"),
                           ("enum class Kind { a, b };", "Kind"),
                           ("constexpr std::int64_t most = std::int64_t{1} << 20;", "most"),
                           ("const std::map<int, std::string> names = {{1, \"a;}\"}};", "names"),
                           ("std::atomic<int> count{0};", "count"),
                           ("template <typename T>\nT largest(const std::vector<T>& all) {\n  return all[0];\n}", "largest()"),
                           ("[[noreturn]] void fail(const std::string& what = \"(\") {\n}", "fail()")):
            self.clash(anonymous(text), anonymous(text), name)
            self.clash(anonymous(text), anonymous(text), name, units=(("a.cpp",), ("b.cpp",)))  # another added source may put both into one unit
        static = "\n\n\n\n\nnamespace tranche {\nstatic int twice(int number) {\n  return number;\n}\n}\n"
        self.clash(static, static, "twice()")
        self.clash(anonymous("int twice(int number) {\n}"), anonymous("int twice(const int n) {\n}".replace("const ", "")), "twice()")

    def test_no_clash(self):
        function = "int twice(int number) {\n  return 2 * number;\n}"
        for one, other in ((anonymous(function), anonymous(function, "tranche::comm")),
                           (anonymous(function), anonymous("int twice(const Shape& shape, int number) {\n}")),
                           (anonymous(function), anonymous(f"/*\n{function}\n*/  // {function}")),
                           (anonymous(function), anonymous("struct Own {\n  int twice(int number) { return number; }\n};")),
                           (anonymous(function), anonymous("int twice(int number);")),
                           (anonymous("struct Place;"), anonymous("struct Place {\n};")),
                           (anonymous("using json = nlohmann::json;"), anonymous("using json = nlohmann::json;")),
                           (anonymous("void A::twice(int n) {\n}"), anonymous("void B::twice(int n) {\n}")),
                           (anonymous("TEST(A, B) {\n}"), anonymous("TEST(A, B) {\n}")),
                           (anonymous("int a() {\n  const int most = 1;\n}"), anonymous("int b() {\n  const int most = 1;\n}"))):
            self.assertEqual(self.check(one, other), (0, ""))

    def test_a_source_alone_is_no_part_of_it(self):
        function = anonymous("int twice(int number) {\n}")
        self.assertEqual(self.check(function, function, units=(("a.cpp",),)), (0, ""))

    def test_a_build_without_large_units(self):
        status, output = self.check("", "", units=())
        self.assertEqual(status, 2)
        self.assertIn("no large units in ", output)
        self.assertIn("CMAKE_UNITY_BUILD=ON", output)


if __name__ == "__main__":
    unittest.main()
