#!/usr/bin/env python3
"""Checks the pages: links lead somewhere, pages that sources name are there, blocks of C++ are compiled, JSON is JSON.

    scripts/check_docs.py [REPOSITORY]       says what is wrong, a line each; exit status 1 then

  - A relative link in a Markdown file names a file or folder of the repository; its #anchor is a heading of that page. Some page
    links every page of docs/.
  - `docs/` and a name that ends in `.md`, in any text of the repository, comments and messages of the program included, names a page.
  - A block fenced as ```cpp follows a comment `<!-- FILE -->` and consists of lines of FILE, in order, indented alike: a line
    `// ...` stands for lines that are left out. FILE is an example or a test, so the build compiles it. C++ is fenced, never
    only indented.
  - A block fenced as ```json is JSON.
  - A folder's README.md names, in backticks, each group of its source files: those that differ in their suffix alone (`*` stands
    for any text, and `_text` for any name that ends so), and each subfolder without a README of its own (`NAME/`). A folder
    include/tranche/NAME/ is part of NAME/.
"""
import fnmatch
import json
import pathlib
import posixpath
import re
import subprocess
import sys

LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|(?:src|href)=\"([^\"]+)\"")
CITATION = re.compile(r"(?<![\w/.-])((?:docs|bench/results)/[\w./-]+\.md)\b")
COMPILED = ("examples/", "tests/")
SOURCES = {".h", ".hpp", ".cpp", ".inl", ".cu", ".cuh", ".cmake", ".py", ".sh"}


def slug(heading):
    """The anchor that GitHub generates for a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def lines_of(text):
    """(number, line, info string of the fence around the line or None); the fence lines themselves are left out."""
    fence = None
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("```"):
            fence = None if fence is not None else line[3:].strip()
            continue
        yield number, line, fence


def anchors(text):
    found, seen = set(), {}
    for _, line, fence in lines_of(text):
        heading = re.match(r"#{1,6} (.*)", line) if fence is None else None
        if heading:
            name = slug(heading.group(1))
            found.add(f"{name}-{seen[name]}" if name in seen else name)
            seen[name] = seen.get(name, 0) + 1
    return found | set(re.findall(r"<a id=\"([^\"]+)\"", text))


def blocks(text, language):
    """(line number, preceding comment or None, lines) of each block in a language."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line != f"```{language}":
            continue
        end = next(at for at in range(number + 1, len(lines)) if lines[at].startswith("```"))
        comment = re.fullmatch(r"<!-- (\S+) -->", lines[number - 1]) if number > 0 else None
        yield number + 1, comment.group(1) if comment else None, lines[number + 1:end]


def strip_indentation(lines):
    least = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[least:] for line in lines]


def is_of(block, source):
    """Whether the parts of the block, which lines `// ...` separate, occur in the source one after the other."""
    parts = [[]]
    for line in block:
        if line.strip() == "// ...":
            parts.append([])
        else:
            parts[-1].append(line.rstrip())
    at = 0
    for part in (strip_indentation(part) for part in parts if part):
        for begin in range(at, len(source) - len(part) + 1):
            if strip_indentation(source[begin:begin + len(part)]) == part:
                at = begin + len(part)
                break
        else:
            return False
    return True


def names_in(readme):
    """The names in backticks in a README, without file suffixes."""
    words = re.findall(r"[\w*+.-]+/?", " ".join(re.findall(r"`([^`]+)`", re.sub("``+", "", readme))))
    return {word[:-len(pathlib.PurePosixPath(word).suffix)] if pathlib.PurePosixPath(word).suffix in SOURCES else word for word in words}


def is_named(name, names):
    return any(name == word or (word.startswith("_") and name.endswith(word)) or ("*" in word and fnmatch.fnmatchcase(name, word)) for word in names)


class Check:
    def __init__(self, root):
        self.root = root
        listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
        self.files = [file for file in listed if (root / file).is_file()]
        self.known = set(self.files) | {str(parent) for file in self.files for parent in pathlib.PurePosixPath(file).parents}
        self.problems = []
        self.linked = set()

    def text(self, file):
        return (self.root / file).read_text(encoding="utf-8", errors="replace")

    def links(self, page, text):
        for number, line, fence in lines_of(text):
            if fence is not None:
                continue
            for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
                target = match.group(1) or match.group(2)
                if re.match(r"[a-z]+:", target):
                    continue
                path, _, anchor = target.partition("#")
                full = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
                if full != page:
                    self.linked.add(full)
                if full not in self.known:
                    self.problems.append(f"{page}:{number}: the link to {target} leads nowhere")
                elif anchor and full.endswith(".md") and anchor not in anchors(self.text(full)):
                    self.problems.append(f"{page}:{number}: {full} has no heading #{anchor}")

    def citations(self, file, text):
        for number, line in enumerate(text.split("\n"), 1):
            for cited in CITATION.findall(line):
                if cited not in self.known:
                    self.problems.append(f"{file}:{number}: there is no {cited}")

    def code(self, page, text):
        for number, source, lines in blocks(text, "cpp"):
            if source is None:
                self.problems.append(f"{page}:{number}: nothing says which file this C++ is of: <!-- FILE --> in the line before")
            elif source not in self.known or not source.startswith(COMPILED):
                self.problems.append(f"{page}:{number}: {source} is no example or test")
            elif not is_of(lines, [line.rstrip() for line in self.text(source).split("\n")]):
                self.problems.append(f"{page}:{number}: these are not lines of {source}")

    def data(self, page, text):
        for number, _, lines in blocks(text, "json"):
            try:
                json.loads("\n".join(lines))
            except json.JSONDecodeError as error:
                self.problems.append(f"{page}:{number}: this is not JSON: {error}")

    def groups(self):
        """Reports the groups of files that a folder's README leaves out."""
        readmes = {posixpath.dirname(file): names_in(self.text(file)) for file in self.files if file.endswith("/README.md")}
        missing = set()
        for file in self.files:
            path = pathlib.PurePosixPath(re.sub("^include/tranche/(?=[^/]+/)", "", file))
            home = next((folder for folder in path.parents if str(folder) in readmes), None)
            if home is None or path.suffix not in SOURCES:
                continue
            inside = path.relative_to(home)
            name = f"{inside.parts[0]}/" if len(inside.parts) > 1 else path.stem
            if not is_named(name, readmes[str(home)]):
                missing.add(f"{home}/README.md: it does not name `{name}`")
        self.problems += sorted(missing)

    def run(self):
        for file in self.files:
            path = self.root / file
            if path.is_symlink() or path.stat().st_size > 4 << 20 or b"\0" in path.read_bytes()[:4096]:
                continue
            text = self.text(file)
            if not file.endswith("test_check_docs.py"):
                self.citations(file, text)
            if file.endswith(".md"):
                self.links(file, text)
                self.code(file, text)
                self.data(file, text)
        self.groups()
        self.problems += [f"{file}: no page links it" for file in self.files
                          if file.startswith("docs/") and file.endswith(".md") and file not in self.linked]
        return self.problems


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent)
    check = Check(root)
    problems = check.run()
    print("\n".join(problems), end="\n" if problems else "")
    if not any(file.endswith(".md") for file in check.files):
        sys.exit("no page was found")
    if problems:
        sys.exit(f"{len(problems)} problems")
    print(f"{sum(file.endswith('.md') for file in check.files)} pages, nothing wrong")


if __name__ == "__main__":
    main()
