"""Reads headers as text: what each includes, mentions and declares. check.py builds its units with it, standard.py its check of names.

The text is not parsed as C++. In doubtful cases a header counts as declaring or mentioning more than it does, which costs more units but
never a wrong proof.
"""
import pathlib
import re
import sys

sys.dont_write_bytecode = True  # a build writes no files beside the sources
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
from check_includes import code_lines  # noqa: E402

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
INCLUDE = re.compile(r'#\s*include\s*([<"])([^>"]+)[>"]')
ATTRIBUTE = re.compile(r"\[\[.*?\]\]", re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\\\n]|\\.|\\\n)*", re.MULTILINE)
MACRO = re.compile(r"^[ \t]*#[ \t]*(?:define|undef)[ \t]+(\w+)", re.MULTILINE)
WORD = re.compile(r"(?<!\w)(?<!\.)(?<!->)(?<!std::)[A-Za-z_]\w*")  # without members of an object and names of the standard library
FORWARD = re.compile(r"\b(?:class|struct|union|enum(?:\s+(?:class|struct))?)\s+(\w+)\s*(?::[\s\w:]+)?[;&*]")
TOKEN = re.compile(r"[A-Za-z_]\w*|->|\S")
KEYWORDS = set("""alignas alignof asm auto bool break case catch char char8_t char16_t char32_t class concept const const_cast consteval
    constexpr constinit continue decltype default define defined delete do double dynamic_cast elif else endif enum explicit export
    extern false final float for friend goto if ifdef ifndef inline int long mutable namespace new noexcept nullptr operator override
    private protected public register reinterpret_cast requires return short signed sizeof static static_assert static_cast std struct
    switch template this thread_local throw true try typedef typeid typename undef union unsigned using virtual void volatile wchar_t
    while""".split())


def words(tokens):
    return {token for token in tokens if re.match(r"[A-Za-z_]", token)} - KEYWORDS


def without_template_lists(tokens):
    """The tokens of a declaration without `template <...>`."""
    found, depth, before = [], 0, None
    for token in tokens:
        if depth or (token == "<" and before == "template"):
            depth += {"<": 1, ">": -1}.get(token, 0)
        elif token != "template":
            found.append(token)
        before = token
    return found


def nameless(declaration):
    """True if a declaration, given as tokens, may affect code that does not name it, for example an operator."""
    return "".join(declaration).startswith("template<>") or "operator" in declaration or declaration[:2] == ["using", "namespace"]


def names_of(declaration):
    """The names that a declaration at namespace scope may declare. It is given as tokens without the contents of braces."""
    tokens = without_template_lists(declaration)
    found, depth = set(re.findall(r"\( \* (\w+) \)", " ".join(tokens))), 0  # a pointer to a function
    kind = next((place for place, token in enumerate(tokens) if token in ("class", "struct", "union", "enum")), None)
    if kind is not None:
        if tokens[-1] == "}":  # without braces it is in Header.forward
            found |= set([token for token in tokens[kind:] if words([token])][:1])
        if "(" not in tokens and "=" not in tokens:
            return found
    for token, after in zip(tokens, tokens[1:] + [";"]):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth == 0 and after in "(={[;,":
            found |= words([token])
    return found


def declared(code):
    """Returns (names at namespace scope, namespaces, words of declarations without a name) of a header's code."""
    names, spaces, others, braces, statement = set(), set(), set(), [], []
    for token in [*TOKEN.findall(DIRECTIVE.sub("", code)), ";"]:
        inside = "body" in braces
        if token == "{":
            space = not inside and (statement == ["extern"] or "namespace" in statement[:2])
            braces.append("namespace" if space else "body")
            if space:
                spaces |= words(statement)
                statement = []
        elif inside and token != "}":
            if statement[:1] == ["enum"] and not {"class", "struct"} & set(statement[1:2]):
                names |= words([token])
        elif token == ";" or (token == "}" and inside and braces.count("body") == 1):
            whole = statement + ["{", "}"] * (token == "}")
            if nameless(whole):
                others |= words(whole)
            elif whole:
                names |= names_of(whole)
            statement = []
        elif not inside and token != "}":
            statement.append(token)
        if token == "}" and braces:
            braces.pop()
    return names, spaces, others


class Header:
    """One header of ours. Other headers of ours are given by their paths below the root, headers of libraries as they are written."""

    def __init__(self, root, name):
        self.name, self.text = name, (root / name).read_text(encoding="utf-8")
        self.lines = [line.rstrip() for line in code_lines(self.text)]
        code = ATTRIBUTE.sub(" ", re.sub(r" ?(::|->|\.)\s*", r"\1", "\n".join(filter(None, self.lines))))
        self.names, self.spaces, self.others = declared(code)
        self.macros = set(MACRO.findall(code))
        self.mentioned = set(WORD.findall(code)) - KEYWORDS
        self.forward = set(FORWARD.findall(code))
        self.includes = []  # (line, header, whether it is one of ours, kind)
        kind, depth = "lead", 0  # lead: before everything else; plain: not within #if; sometimes: within #if
        for number, line in enumerate(COMMENT.sub(lambda found: "\n" * found[0].count("\n"), self.text).splitlines()):
            include = INCLUDE.match(line.strip())
            if include:
                path = f"include/{include[2]}" if include[2].startswith("tranche/") else include[2]
                ours = include[1] == '"' and (root / path).is_file()
                self.includes.append((number, path if ours else include[2], ours, "sometimes" if depth else kind))
            elif line.strip() and not re.match(r"\s*#\s*pragma\s+once\s*$", line):
                kind = "plain"
            depth += bool(re.match(r"\s*#\s*if", line)) - bool(re.match(r"\s*#\s*endif", line))

    def included(self, ours, kinds=("lead", "plain", "sometimes")):
        return [path for _, path, own, kind in self.includes if own == ours and kind in kinds]


class Tree:
    """The headers that are checked, and those that they include."""

    def __init__(self, root, checked):
        self.checked, self.headers, self.known = sorted(checked), {}, {}
        left = list(self.checked)
        while left:
            name = left.pop()
            if name not in self.headers:
                self.headers[name] = Header(root, name)
                left += self.headers[name].included(ours=True)

    def below(self, name, kinds=("lead", "plain", "sometimes")):
        """The headers of ours that a header includes by includes of these kinds, directly or not."""
        key = name, kinds
        if key not in self.known:
            self.known[key] = set()  # ends the recursion if headers include each other in a circle
            direct = self.headers[name].included(True, kinds)
            self.known[key] = set(direct).union(*(self.below(path, kinds) for path in direct))
        return self.known[key]
