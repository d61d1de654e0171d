#!/usr/bin/env python3
"""Tests of standard.py: a name of the standard library is missed where nothing above it includes what declares it."""
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import sources  # noqa: E402
import standard  # noqa: E402


def complaints(macros=(), **headers):
    """The complaints about headers with these texts; low="..." is low.h."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in headers.items():
            (root / f"{name}.h").write_text(text, encoding="utf-8")
        return standard.complaints(sources.Tree(root, [f"{name}.h" for name in headers]), set(macros))


class Standard(unittest.TestCase):
    def test_a_forgotten_include_is_named_with_its_line(self):
        self.assertEqual(complaints(a="#pragma once\n\nstd::vector<int> f();\nstd::vector<int> g();\n"),
                         ["a.h:3: std::vector needs #include <vector>"])

    def test_any_header_that_declares_the_name_will_do(self):
        for header in ("cstddef", "cstring", "cstdio", "stddef.h"):
            self.assertEqual(complaints(a=f"#include <{header}>\nstd::size_t f();\n"), [])
        self.assertEqual(complaints(a="#include <string>\nvoid f(std::initializer_list<int>);\n"), [])
        self.assertEqual(complaints(a="#include <cmath>\nstd::size_t f();\n"), ["a.h:2: std::size_t needs #include <cstddef>"])

    def test_includes_of_our_headers_count_at_any_depth(self):
        low, middle = "#include <vector>\n", '#include "low.h"\n'
        self.assertEqual(complaints(low=low, middle=middle, high='#include "middle.h"\nstd::vector<int> f();\n'), [])
        self.assertEqual(complaints(low=low, middle=middle, high='// #include "middle.h"\nstd::vector<int> f();\n'),
                         ["high.h:2: std::vector needs #include <vector>"])

    def test_an_include_below_the_name_or_within_if_does_not_count(self):
        self.assertEqual(complaints(a="using Numbers = std::vector<int>;\n#include <vector>\n"),
                         ["a.h:1: std::vector needs #include <vector>"])
        self.assertEqual(complaints(a="#ifdef LISTS\n#include <vector>\n#endif\nstd::vector<int> f();\n"),
                         ["a.h:4: std::vector needs #include <vector>"])

    def test_comments_and_literals_name_nothing(self):
        text = '/// std::vector\n/* std::map\n   std::set */\nconst char* text = "std::list";  // memcpy(\nint f(int a = \'"\');\n'
        self.assertEqual(complaints(a=text), [])

    def test_an_unknown_name_is_an_error_since_nobody_would_miss_its_include(self):
        said = complaints(a="#include <vector>\nstd::vectors<int> f();\n")
        self.assertEqual(len(said), 1)
        self.assertRegex(said[0], r"^a\.h:2: std::vectors is in no row of tests/headers/standard\.py: add it there")
        self.assertEqual(len(complaints(a="using namespace std;\n")), 1)
        self.assertEqual(len(complaints(a="inline int f() { return ::open(0, 0); }\n")), 1)

    def test_macros_are_names_too(self):
        self.assertEqual(complaints(a="#include <vector>\nconst auto most = INT64_MAX;\n"),
                         ["a.h:2: INT64_MAX needs #include <cstdint>"])
        self.assertEqual(complaints(a="#include <cstdint>\nconst auto most = INT64_MAX;\n"), [])
        self.assertRegex("\n".join(complaints({"PATH_MAX"}, a="const int most = PATH_MAX;\n")), "^a.h:1: PATH_MAX is in no row")
        self.assertEqual(complaints({"PATH_MAX"}, low="#define PATH_MAX 9\n", a='#include "low.h"\nconst int most = PATH_MAX;\n'), [])

    def test_names_of_c_without_std(self):
        self.assertEqual(complaints(a="#include <string>\nuint8_t f(size_t n);\n"),
                         ["a.h:2: uint8_t needs #include <cstdint>", "a.h:2: size_t needs #include <cstddef>"])
        self.assertEqual(complaints(a="inline void f(char* to) { memcpy(to, to, 1); }\n"), ["a.h:1: memcpy needs #include <cstring>"])
        ours = "struct Placer {\n  void free(int block);\n  void reset() { free(0); }\n};\n"
        self.assertEqual(complaints(a=ours + "inline void all(Placer& placer) { placer.free(1); }\n"), [])

    def test_code_that_names_nothing_of_its_header(self):
        self.assertEqual(complaints(a="#include <typeindex>\ninline std::type_index f() { return typeid(int); }\n"),
                         ["a.h:2: typeid needs #include <typeinfo>"])
        self.assertEqual(complaints(a="inline auto f(int a, int b) { return a <=> b; }\n"), ["a.h:1: <=> needs #include <compare>"])

    def test_iosfwd_serves_those_who_only_pass_a_stream_on(self):
        self.assertEqual(complaints(a="#include <iosfwd>\nvoid print(std::ostream& out);\n"), [])
        self.assertEqual(complaints(a="#include <iosfwd>\nstruct Log {\n  std::ostringstream text;\n};\n"),
                         ["a.h:3: std::ostringstream needs #include <sstream>"])
        self.assertEqual(complaints(a="#include <iosfwd>\ninline void print(std::ostream& out) { out << 1; }\n"),
                         ["a.h:2: std::ostream needs #include <ostream>"])


if __name__ == "__main__":
    unittest.main()
