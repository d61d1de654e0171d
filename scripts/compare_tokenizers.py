#!/usr/bin/env python3
"""Compares the program's tokens with those of Hugging Face's tokenizers and of SentencePiece, on random strings.

usage: compare_tokenizers.py [PROGRAM] [--strings N] [--seed N] [--only NAME ...] [--golden FILE]

Trains small tokenizers on the repository's own pages, with the real pre-tokenizer patterns of GPT-2, Llama 3 and Qwen and
the normalizers of Llama 2 and Mistral, and encodes N strings (10,000 by default) with each: words, all scripts of Unicode 14,
emoji, combining marks, white space, digits, contractions and special tokens. PROGRAM is build/release/bin/tranche by default.
--golden writes the tokenizers and a few strings with their tokens for tests/training/tokenizer_golden_test.cpp; PROGRAM is not run.
Needs the Python packages tokenizers and sentencepiece, installed by hand outside of the repository.
Exit status: 0 all equal, 1 differences (the first of each tokenizer is shown), 2 a package is missing.
"""
import argparse
import io
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

ROOT = pathlib.Path(__file__).resolve().parent.parent
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIAL = {
    "gpt2": ["<|endoftext|>"], "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>user"], "llama2": ["<unk>", "<s>", "</s>"],
    "mistral": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], "sentencepiece": [],
}
SPACE = "\u2581"


def training_text():
    pages = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/**/*.md"))]
    scripts = "naïve café Ελληνικά русский язык 中文分词 日本語テキスト 한국어 עברית العربية हिन्दी ไทย 😀👍🏽 1234 ２３４ ½ don't we'll I'M\n"
    return "\n".join(pages)[:400_000] + scripts * 50


def usual(character):
    """True for characters of Unicode 14, except 98 marks whose combining class is missing in the NFC tables of `tokenizers`."""
    from tokenizers import normalizers
    if unicodedata.category(character) in ("Cn", "Cs", "Co"):
        return False
    probes = ["q\u0301" + character, "q" + character + "\u0327", character] if unicodedata.combining(character) else []
    return all(normalizers.NFC().normalize_str(probe) == unicodedata.normalize("NFC", probe) for probe in probes)


class Strings:
    """Random strings of all kinds that tokenizers split differently."""

    def __init__(self, seed, special, text):
        self.random = random.Random(seed)
        self.special = special
        self.words = text.split()
        assigned = [chr(code) for code in range(0x20, 0x110000) if usual(chr(code))]
        self.blocks = [assigned[at:at + 64] for at in range(0, len(assigned), 64)]
        self.marks = [c for c in assigned if unicodedata.combining(c)]
        self.kinds = [self.word, self.word, self.script, self.any, self.space, self.digits, self.emoji, self.contraction, self.marked,
                      self.punctuation, self.jamo] + ([self.name] if special else [])

    def some(self, characters, most):
        return "".join(self.random.choice(characters) for _ in range(self.random.randint(1, most)))

    def word(self):
        return self.random.choice(["", " "]) + self.random.choice(self.words)

    def script(self):
        return self.some(self.random.choice(self.blocks), 8)

    def any(self):
        return "".join(self.random.choice(self.random.choice(self.blocks)) for _ in range(self.random.randint(1, 4)))

    def space(self):
        return self.some(" \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u180e\u2003\u2028\u202f\u200b\u3000  \n", 5)

    def digits(self):
        return self.some("0123456789٣४½Ⅷ²", 7)

    def emoji(self):
        return self.some(["😀", "👩\u200d💻", "🇩🇪", "👍🏽", "❤️", "1️⃣"], 3)

    def contraction(self):
        return self.random.choice(["'", "’"]) + self.random.choice(
            ["s", "S", "t", "re", "RE", "ve", "m", "ll", "Ll", "d", "ſ", "x"]) + self.random.choice(["", " ", "a"])

    def marked(self):
        return self.random.choice("aeoAEO가ㄱक") + self.some(self.marks, 3)

    def punctuation(self):
        return self.some("!?.,;:-_()[]{}<>|/\\\"#@&*~^+=$%€", 4) + self.random.choice(["", "\n", "\r\n"])

    def jamo(self):
        return self.some([chr(code) for code in (*range(0x1100, 0x1113), *range(0x1161, 0x1176), *range(0x11a8, 0x11c3))], 4)

    def name(self):
        whole = self.random.choice(self.special)
        return self.random.choice([whole, whole, whole[:-1], whole + "x"])

    def draw(self):
        return "".join(self.random.choice(self.kinds)() for _ in range(self.random.randint(1, 12)))


def byte_level(library, name, text, size):
    from tokenizers import Regex, normalizers, pre_tokenizers, processors, trainers
    tokenizer = library.Tokenizer(library.models.BPE(ignore_merges=name == "llama3"))
    if name == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(LLAMA3 if name == "llama3" else QWEN), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if name == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL[name],
                                  show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if name == "llama3":
        start = SPECIAL[name][0]
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokenizer.token_to_id(start))])])
    tree = json.loads(tokenizer.to_str())
    if name == "llama3":  # makes some tokens reachable through "ignore_merges" only
        del tree["model"]["merges"][size // 2::7]
        alive = {left + right for left, right in tree["model"]["merges"]}
        tree["model"]["merges"] = [pair for pair in tree["model"]["merges"] if all(len(half) == 1 or half in alive for half in pair)]
    if name == "gpt2":  # the format of tokenizers until 0.20
        tree["model"]["merges"] = [" ".join(pair) for pair in tree["model"]["merges"]]
    return json.dumps(tree, ensure_ascii=False)


def character_level(library, name, text, size):
    from tokenizers import pre_tokenizers, trainers
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = library.Tokenizer(library.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL[name] + bytes_of, limit_alphabet=120, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] not in bytes_of]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    tree["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}] + strip}
    if name == "llama2":
        tree["pre_tokenizer"] = None
        tree["normalizer"] = {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}
    else:
        tree["pre_tokenizer"] = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    return json.dumps(tree, ensure_ascii=False)


def sentencepiece_model(text, size):
    import sentencepiece
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=model, vocab_size=size, model_type="bpe", byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        hard_vocab_limit=False, character_coverage=0.99, minloglevel=2)
    return model.getvalue()


class Tokenizer:
    """A tokenizer in a folder, with the results of its own library."""

    def __init__(self, name, text, size, folder):
        self.folder = folder
        folder.mkdir()
        if name == "sentencepiece":
            import sentencepiece
            model = sentencepiece_model(text, size)
            (folder / "tokenizer.model").write_bytes(model)
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.encode, self.decode = processor.encode, processor.decode
            return
        import tokenizers
        self.json = (byte_level if name in ("gpt2", "llama3", "qwen") else character_level)(tokenizers, name, text, size)
        (folder / "tokenizer.json").write_text(self.json, encoding="utf-8")
        tokenizer = tokenizers.Tokenizer.from_str(self.json)
        self.encode = lambda string: tokenizer.encode(string, add_special_tokens=False).ids
        self.decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


def documents_of(program, folder, documents, *flags):
    """Returns the program's tokens of each document (one JSON object per line), and for each token 1 if it is learned."""
    lines = folder / "documents.jsonl"
    lines.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    out = folder / "tokens.safetensors"
    subprocess.run([program, "tokenize", "--data", lines, "--tokenizer", folder, "--out", out, *flags], check=True,
                   stdout=subprocess.DEVNULL)
    content = out.read_bytes()
    out.unlink()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8:8 + length]), content[8 + length:]

    def tensor(name, letter):
        begin, end = header[name]["data_offsets"]
        return struct.unpack(f"<{(end - begin) // struct.calcsize(letter)}{letter}", data[begin:end])

    tokens = tensor("tokens", "H" if header["tokens"]["dtype"] == "U16" else "I")
    learned = tensor("targets", "B") if "targets" in header else (1,) * len(tokens)
    ends = tensor("document_ends", "q")
    return [(list(tokens[begin:end]), list(learned[begin:end])) for begin, end in zip((0, *ends), ends)]


def compare(program, name, tokenizer, strings):
    documents = [{"text": string} for string in strings]
    ours = [tokens for tokens, _ in documents_of(program, tokenizer.folder, documents, "--no-special")]
    assert len(ours) == len(strings), f"{len(ours)} documents for {len(strings)} strings"
    wrong = [(string, own, tokenizer.encode(string)) for string, own in zip(strings, ours) if own != tokenizer.encode(string)]
    print(f"{name}: {len(strings)} strings, {sum(map(len, ours))} tokens, {len(wrong)} differ", flush=True)
    for string, own, theirs in wrong[:1]:
        print(f"  {string!r}\n  tranche: {own}\n  library: {theirs}")
    return len(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", type=pathlib.Path, default=ROOT / "build/release/bin/tranche")
    parser.add_argument("--strings", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=SPECIAL, default=list(SPECIAL))
    parser.add_argument("--golden", type=pathlib.Path)
    options = parser.parse_args()
    try:
        import sentencepiece  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as problem:
        print(f"compare_tokenizers: {problem}; install tokenizers and sentencepiece in an environment outside of the repository",
              file=sys.stderr)
        return 2
    text, differences, golden = training_text(), 0, {}
    with tempfile.TemporaryDirectory() as work:
        for name in options.only:
            small = options.golden is not None
            tokenizer = Tokenizer(name, text, 600 if small else 4000, pathlib.Path(work) / name)
            draw = Strings(options.seed, SPECIAL[name], text)
            strings = [draw.draw() for _ in range(60 if small else options.strings)]
            if not small:
                differences += compare(options.program, name, tokenizer, strings)
            elif not name == "sentencepiece":
                golden[name] = {"tokenizer": json.loads(tokenizer.json),
                                "strings": [[string, tokenizer.encode(string), tokenizer.decode(tokenizer.encode(string))]
                                            for string in strings]}
    if options.golden:
        options.golden.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
