"""This module finds the files that commits changed in more than comments and white space. It knows the comments of C++ and of CMake; of other files every change counts."""
import re
import subprocess

# These are the tokens of C++. A directive is one, with its comments and continued lines, because its end is the only place where a new line counts.
# Operators that stand together are one, and so are a literal, its prefix and its suffix.
RAW = r'(?<!\w)(?:u8|[uUL])?R"(?P<{0}>[^()\\\s]{{0,16}})\(.*?\)(?P={0})"\w*'
TEXT = r"""(?:(?<!\w)(?:u8|[uUL]))?(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')\w*"""
COMMENT = r"//(?:\\\r?\n|[^\n])*|/\*.*?\*/"
CPP = re.compile("|".join((rf"^[ \t]*#(?:{RAW.format('a')}|{TEXT}|{COMMENT}|\\\r?\n|[^\n])*", RAW.format("b"), TEXT, COMMENT,
                           r"\.?\d(?:[eEpP][+-]|'?[\w.])*", r"\w+", r"\\\r?\n", r"(?:(?!//|/\*)[-+*/%&|^<>=!:.~])+", r"\S")), re.MULTILINE | re.DOTALL)
CMAKE = re.compile(r"""\#?\[(?P<a>=*)\[.*?\](?P=a)\] | (?:\\.|[^\s()\#"\\]|"(?:\\.|[^"\\])*")+ | \#[^\n]* | \S""", re.VERBOSE | re.DOTALL)


def cpp_tokens(text):
    """Returns the tokens of C++ without comments."""
    tokens = []
    for found in CPP.finditer(text):
        token = found[0].lstrip(" \t")
        if token.startswith("#"):
            tokens.append(("#", *cpp_tokens(token[1:])))
        elif not token.startswith(("//", "/*", "\\\n", "\\\r\n")):
            tokens.append(token)
    return tokens


def code_of(name, text):
    """Returns what counts of a file: the tokens of C++ and CMake without comments, and the text of other files."""
    if re.search(r"\.(cpp|h|cu)$", name):
        return cpp_tokens(text)
    if re.search(r"(^|/)CMakeLists\.txt$|\.cmake$", name):
        return [found[0] for found in CMAKE.finditer(text) if not found[0].startswith("#")]
    return text


def texts_of(root, commit, names):
    """Returns the texts of these files in a commit; None stands for a file that the commit does not have."""
    asked = "".join(f"{commit}:{name}\n" for name in names)
    listed = subprocess.run(["git", "-C", str(root), "cat-file", "--batch"], input=asked.encode(), capture_output=True, check=True).stdout
    texts, begin = [], 0
    for _ in names:
        end = listed.index(b"\n", begin)
        size = listed[begin:end].split(b" ")[-1]
        begin = end + 1
        if size == b"missing":
            texts.append(None)
        else:
            texts.append(listed[begin:begin + int(size)].decode("utf-8", errors="replace"))
            begin += int(size) + 1
    return texts


def changed_in_code(root, commit, names):
    """Returns the files among `names` whose code in the working tree is not that of the commit. A file that only one of them has is changed."""
    changed = set()
    for name, before in zip(names, texts_of(root, commit, names)):
        path = root / name
        if before is None or not path.is_file() or code_of(name, before) != code_of(name, path.read_bytes().decode("utf-8", errors="replace")):
            changed.add(name)
    return changed
