#!/usr/bin/env python3
"""Finds names that two sources of one library or program both define with internal linkage (in an anonymous namespace, or static). Each
source compiles alone, but in unity builds (CMAKE_UNITY_BUILD, CMake's generated unity_*.cxx) they clash. The compiler reports that only if
a unit happens to contain both, and each added source changes the units.

usage: check_names.py BUILD     BUILD is a configured build folder; every folder Unity below it is one library or program
Exit status: 0 clean, and nothing printed, 1 clashes (a line each: the two places, the name, what to do), 2 usage or no large units there.
"""
import json
import os
import pathlib
import re
import sys

sys.dont_write_bytecode = True  # a build writes no files beside the sources
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from check_includes import code_lines  # noqa: E402

INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)
NAMESPACE = re.compile(r"^(?:inline )?namespace\s*([\w:]*)$")
TYPE = re.compile(r"\b(?:struct|class|union|enum(?: class| struct)?)\s+(\w+)(?:\s+final)?\s*(?::[^:].*)?$")
VALUE = re.compile(r"^[A-Za-z_][\w:&* ]* [&*]*([A-Za-z_]\w*)(?:\[[^\]]*\])*\s*(?:=.*)?$")
FUNCTION = re.compile(r"(~?\w+|operator\s*\S{1,3})\s*\(")


def without_arguments(text):
    """The text without the contents of angle brackets."""
    before = None
    while before != text:
        before, text = text, re.sub(r"<[^<>]*>", "", text)
    return text


def parameters(text):
    """The types of a parameter list, as far as they can be found without compiling: `(const Shape& shape, int n = 3)` gives `const
    Shape&,int`."""
    types, depth, one = [], 0, ""
    for letter in text + ",":
        if letter == "," and depth == 0:
            one = re.sub(r"=.*", "", one).strip()
            one = re.sub(r"(?<=[\s&*>])\w+((?:\[\w*\])*)$", r"\1", one) if re.search(r"[\s&*>]\w+(\[\w*\])*$", one) else one
            types.append(re.sub(r"\s+", "", one))
            one = ""
            continue
        depth += {"<": 1, "(": 1, "{": 1, "[": 1, ">": -1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        one += letter
    return ",".join(types)


def closing(text, begin):
    depth = 0
    for place in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return len(text)


def named(declaration, body):
    """(kind, key) of a declaration at namespace scope, or None if two such declarations do not clash. body: braces follow it."""
    text = re.sub(r"\[\[.*?\]\]|\balignas\s*\([^)]*\)", "", declaration)
    text = re.sub(r"^\s*template\s*<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>\s*", "", text).strip()
    if not text or re.match(r"(using|typedef|extern|friend|static_assert|namespace|return)\b", text) or text.startswith(("TEST", "INSTANTIATE", "MATCHER", "HWY_")):
        return None
    head = without_arguments(text)
    found = TYPE.search(head)
    if found and body and "(" not in head:
        return found[1], found[1]
    assigned = re.search(r"(?<![=!<>])=(?!=)", head)
    call = FUNCTION.search(head)
    if call and (not assigned or call.start() < assigned.start()) and not re.match(r"(struct|class|enum)\b", head):
        if not body:
            return None  # a declaration
        whole = FUNCTION.search(text[text.find(call[1]):])
        if not whole:
            return None
        begin = text.find(call[1]) + whole.end() - 1
        if text[:begin].rstrip().endswith("::" + call[1]) or re.search(r"::\s*" + re.escape(call[1]) + r"$", text[:begin].rstrip()):
            return None  # a member of a class that is defined elsewhere
        return call[1] + "()", f"{call[1]}({parameters(text[begin + 1:closing(text, begin)])})"
    if re.match(r"(struct|class|enum|union)\b", head) and not body:
        return None
    head = re.sub(r"\s*=.*", "", head, flags=re.DOTALL).strip()
    found = VALUE.search(head)
    return (found[1], found[1]) if found else None


def definitions(text):
    """{key: (kind, line)} of the definitions with internal linkage in a source; keys are namespace and name."""
    found = {}
    scopes = []  # for each open brace the namespace's name ("" anonymous), or None if it opens no namespace
    code = "\n".join("" if line.lstrip().startswith("#") else line for line in code_lines(text))
    code = re.sub(r"\\\n", " \n", code)
    statement, begin, line = "", 1, 1

    def note(body):
        if any(scope is None for scope in scopes):
            return
        static = re.match(r"\s*(?:inline\s+)?static\b", statement)
        if "" not in scopes and not static:
            return
        one = named(" ".join(statement.split()), body)
        if one:
            found.setdefault("::".join(scope or "{}" for scope in scopes) + "::" + one[1], (one[0], begin))

    for letter in code:
        if letter == "\n":
            line += 1
        if letter == "{":
            joined = " ".join(statement.split())
            space = NAMESPACE.match(joined)
            if space:
                scopes.append(space[1])
            else:
                note(True)
                scopes.append(None)
            statement = ""
        elif letter == "}":
            if scopes:
                scopes.pop()
            statement = ""
        elif letter == ";":
            note(False)
            statement = ""
        else:
            if not statement.strip():
                begin = line
            statement += letter
    return found


def programs(build):
    """(name, sources) of each library and program."""
    # CMake does not remove the units of an earlier configuration, so only units that are compiled count.
    commands = pathlib.Path(build, "compile_commands.json")
    compiled = {os.path.realpath(one["file"]) for one in json.loads(commands.read_text(encoding="utf-8"))} if commands.exists() else None
    for folder, _, files in sorted(os.walk(build)):
        if os.path.basename(folder) != "Unity":
            continue
        sources = []
        for unit in sorted(files):
            if compiled is not None and os.path.realpath(os.path.join(folder, unit)) not in compiled:
                continue
            if unit.startswith("unity_") and unit.endswith(".cxx"):
                sources += INCLUDE.findall(pathlib.Path(folder, unit).read_text(encoding="utf-8"))
        if sources:
            yield pathlib.Path(folder).parent.name.removesuffix(".dir"), sources


def clashes(sources, known):
    first, result = {}, []
    for source in sources:
        if source not in known:
            known[source] = definitions(pathlib.Path(source).read_text(encoding="utf-8"))
        for key, (what, line) in known[source].items():
            if key in first:
                result.append((what, first[key], (source, line)))
            else:
                first[key] = (source, line)
    return result


def main(arguments):
    if len(arguments) != 1 or not os.path.isdir(arguments[0]):
        print(__doc__, file=sys.stderr)
        return 2
    root = pathlib.Path(__file__).resolve().parent.parent
    count, wrong, known = 0, 0, {}
    for name, sources in programs(arguments[0]):
        count += 1
        for what, (one, line), (other, other_line) in clashes(sources, known):
            wrong += 1
            one, other = (os.path.relpath(path, root) for path in (one, other))
            print(f"{other}:{other_line}: '{what}' is defined in {one}:{line} too, and in large units the two sources of {name} clash: "
                  "rename one, or list a source under ALONE in its CMakeLists.txt")
    if count == 0:
        print(f"check_names: no large units in {arguments[0]}: configure it with CMAKE_UNITY_BUILD=ON", file=sys.stderr)
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
