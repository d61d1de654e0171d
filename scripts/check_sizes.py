#!/usr/bin/env python3
"""Holds engine/ to its sizes: no function is longer than 80 lines, no class has more than 35 data members (those of classes inside
it included), and the façade (engine/engine_impl.h and engine/engine*.cpp) has at most 1,400 lines together. It reads sources as
clang-format leaves them.

usage: check_sizes.py [ROOT] [--largest]     ROOT is the source tree, this script's own by default; --largest lists what comes
closest to each limit
Exit status: 0 within the limits, 1 something is too large (one line each on stdout), 2 there is nothing to check.
"""
import pathlib
import re
import sys

FUNCTION_LINES, DATA_MEMBERS, FACADE_LINES = 80, 35, 1400
CLASS = re.compile(r"^( *)(?:template <.*> )?(?:class|struct) ([\w:]+)(?: final)?(?: : .*)?\s*{$")
NO_DATA = re.compile(r"^(?:using|typedef|friend|static|constexpr static|template|enum|class|struct|public|private|protected|return)\b")


def code_of(text):
    """The text without comments and with empty strings; lines stay lines."""
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"[ \t]*//[^\n]*", "", text)


def functions(lines):
    """(first line, name, number of lines) of every function body with more than one line. In clang-format's layout a body ends with a brace
    in the same column as the beginning of its head."""
    at = 0
    while at < len(lines):
        head = re.match(r"^( {0,4})(?! )[^#}/ ].*", lines[at])
        if not head or re.match(r" *(?:namespace|enum|class|struct|extern|using|public|private|if|for|while|return)\b", lines[at]):
            at += 1
            continue
        end_of_head = at
        while end_of_head < len(lines) and not re.search(r"[;{}]$|^$", lines[end_of_head]):
            end_of_head += 1
        text = " ".join(lines[at:end_of_head + 1])
        if end_of_head == len(lines) or not text.endswith("{") or "(" not in text or re.match(r" *template <.*(?:class|struct) \w+ {", text):
            at += 1
            continue
        end = next((i for i in range(end_of_head + 1, len(lines)) if re.match(rf"^{head[1]}}}", lines[i])), None)
        if end is None:
            at += 1
            continue
        name = re.search(r"([\w:~]+)\s*\(", text)
        yield at + 1, name[1] if name else text.strip(), end - at + 1
        at = end + 1


def classes(text):
    """(name, number of data members) of every outermost class, including the members of classes inside it."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        head = CLASS.match(lines[at])
        if not head:
            at += 1
            continue
        end = next(i for i in range(at, len(lines)) if re.match(rf"^{head[1]}}}", lines[i]))
        yield head[2], data_members("\n".join(lines[at + 1:end]))
        at = end + 1


def data_members(body):
    inside = 0
    # Bodies of functions and initializers are removed, innermost first; members of class bodies are counted.
    while True:
        block = re.search(r"{[^{}]*}", body)
        if not block:
            break
        before = body[:block.start()].rstrip()
        head = re.split(r"[;}]|\b(?:public|private|protected):", before)[-1]
        if re.search(r"\b(?:class|struct)\s+\w+(?:\s*:[^()]*)?$", head) and not re.search(r"\benum\b", head):
            inside += data_members(block[0][1:-1])
            body = before[:len(before) - len(head)] + ";" + body[block.end():].lstrip(" ")
        elif "(" in re.sub(r"<[^<>]*(?:<[^<>]*>[^<>]*)*>", "", head) and "=" not in head.split("(")[0]:
            body = before + ";" + body[block.end():]
        else:
            body = before + body[block.end():]
    count = inside
    for statement in body.split(";"):
        statement = re.sub(r"\b(?:public|private|protected):", "", statement).strip()
        if not statement or NO_DATA.match(statement):
            continue
        plain = statement
        while re.search(r"<[^<>]*>", plain):
            plain = re.sub(r"<[^<>]*>", "", plain)
        if "operator" not in plain:  # without initial values
            plain = re.sub(r"=(?:[^,(]|\([^()]*\))*", "", plain)
        if "(" in plain or not re.search(r"\w\s+[&*]?\s*\w|[&*]\s*\w", plain):
            continue
        count += 1 + plain.count(",")
    return count


def main(arguments):
    root = pathlib.Path(next((a for a in arguments if not a.startswith("-")), pathlib.Path(__file__).resolve().parent.parent))
    files = sorted(file for file in (root / "engine").glob("*") if file.suffix in (".h", ".cpp"))
    if not files:
        print(f"no sources of engine/ in {root}")
        return 2
    long, large, facade, problems = [], [], 0, []
    for file in files:
        text = code_of(file.read_text())
        name = f"engine/{file.name}"
        long += [(size, f"{name}:{line}: {function}()") for line, function, size in functions(text.split("\n"))]
        large += [(count, f"{name}: {of}") for of, count in classes(text)]
        if file.name == "engine_impl.h" or re.fullmatch(r"engine.*\.cpp", file.name):
            facade += text.count("\n")
    problems += [f"{what} has {size} lines, more than {FUNCTION_LINES}: divide it" for size, what in long if size > FUNCTION_LINES]
    problems += [f"{what} has {count} data members, more than {DATA_MEMBERS}: make parts of it" for count, what in large
                 if count > DATA_MEMBERS]
    if facade > FACADE_LINES:
        problems.append(f"engine/engine_impl.h and engine/engine*.cpp have {facade} lines, more than {FACADE_LINES}: make parts of them")
    if "--largest" in arguments:
        for size, what in sorted(long, reverse=True)[:12]:
            print(f"{size:4} lines         {what}")
        for count, what in sorted(large, reverse=True)[:12]:
            print(f"{count:4} data members  {what}")
        print(f"{facade:4} lines         the façade")
    print("\n".join(problems) if problems else "", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
