#!/usr/bin/env python3
"""scripts/code_changes.py: comments and white space of C++ and CMake do not count, what merely looks like one does, and each kind of file has its state in a commit."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import code_changes  # noqa: E402

# (the file, two texts of it)
EQUAL = [
    ("a.cpp", "int a;  // one\n", "/* two,\n   longer */ int\na;\n"),
    ("a.h", "f(b,\n  c);", "f( b, c ) ;"),
    ("a.cu", "int a = 1'000'0;  // it's\nint b;", "int a = 1'000'0;\nint b;"),
    ("a.cpp", "char c = '\"';  // x\nchar d = '\\'';  // y", "char c = '\"'; char d = '\\'';"),
    ("a.cpp", "// a comment that continues \\\nint a;\nint b;", "int b;"),
    ("a.cpp", "#include <a.h>  // why\n#if A /* or\n B */\n#endif\nint a;", "#include <a.h>\n\n#if A\n#endif\nint a;"),
    ("a.cpp", "#define A 1  \\\n  + 2\nint a;", "#define A 1 + 2\nint a;"),
    ("a.cpp", "auto a = R\"(x)\" /* b */ \"c\";", "auto a = R\"(x)\"  \"c\";"),
    ("a.cpp", "int a = b+//c\nd;", "int a = b+d;"),
    ("CMakeLists.txt", "set(a b)  # why\n", "# an opening\nset(a\n  b)"),
    ("x/CMakeLists.txt", "set(a b)\n#[==[ a ]]\nlong one ]==]\nset(c d)", "set(a b)\nset(c d)"),
    ("a.cmake", 'set(a "b # c")# d', 'set(a "b # c")'),
]
DIFFERENT = [
    ("a.cpp", 'auto a = "// b";', 'auto a = "// c";'),
    ("a.cpp", 'auto a = "b  c";', 'auto a = "b c";'),
    ("a.cpp", 'auto a = R"x(1 // )" one)x";', 'auto a = R"x(1 // )" two)x";'),
    ("a.cpp", 'auto a = u8R"(// b\n)";', 'auto a = u8R"(\n)";'),
    ("a.cpp", "char a = '\"'; int b; char c = '\"';", "char a = '\"'; int d; char c = '\"';"),
    ("a.cpp", "int a = 1'0; int b = 2'0;", "int a = 1'0; int c = 2'0;"),
    ("a.cpp", "int a = b + +c;", "int a = b ++c;"),
    ("a.cpp", "int a = b / *c; int d; /* e */", "int a = b /*c; int d; /* e */"),
    ("a.cpp", "#define A\nb", "#define A b"),
    ("a.cpp", "#if A\nint b;\n#endif", "#if A int b;\n#endif"),
    ("a.cpp", "#define A \"//\" b", "#define A \"//\" c"),
    ("a.cpp", "int ab;", "int a b;"),
    ("a.cpp", "auto a = \"b\"sv;", "auto a = \"b\"s;"),
    ("CMakeLists.txt", 'set(a "b # c")', 'set(a "b # d")'),
    ("CMakeLists.txt", "set(a [[b # c]])", "set(a [[b # d]])"),
    ("CMakeLists.txt", r"set(a b\#c)", r"set(a b\#d)"),
    ("CMakeLists.txt", 'set(a b"c")', 'set(a b "c")'),
    ("CMakeLists.txt", "set(a b c)", "set(a bc)"),
    ("a.json", "[1]", "[ 1]"),
    ("a.py", "a  # b", "a  # c"),
]


class CodeChanges(unittest.TestCase):
    def test_comments_and_white_space_do_not_count(self):
        for name, one, other in EQUAL:
            self.assertEqual(code_changes.code_of(name, one), code_changes.code_of(name, other), (one, other))

    def test_all_else_does(self):
        for name, one, other in DIFFERENT:
            self.assertNotEqual(code_changes.code_of(name, one), code_changes.code_of(name, other), (one, other))

    def test_files_of_a_commit_and_of_the_working_tree(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            texts = {"comment.cpp": "int a;", "code.cpp": "int a;", "gone.cpp": "int a;", "empty.h": "", "same.json": "{}"}
            for name, text in texts.items():
                (root / name).write_text(text)
            for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x"]):
                subprocess.run(["git", "-C", folder, *command], check=True)
            (root / "comment.cpp").write_text("int a;  // caf\u00e9 \u2014\n", encoding="utf-8")
            (root / "code.cpp").write_text("int b;")
            (root / "gone.cpp").unlink()
            (root / "new.cpp").write_text("")
            names = [*texts, "new.cpp"]
            self.assertEqual(code_changes.changed_in_code(root, "HEAD", names), {"code.cpp", "gone.cpp", "new.cpp"})
            self.assertEqual(code_changes.changed_in_code(root, "HEAD", []), set())


if __name__ == "__main__":
    unittest.main()
