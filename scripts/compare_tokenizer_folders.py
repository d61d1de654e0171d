#!/usr/bin/env python3
"""Compares the program's tokens with those of transformers' AutoTokenizer, for folders of every layout that it loads.

usage: compare_tokenizer_folders.py [PROGRAM] [--strings N] [--seed N] [--random N] [--only NAME ...] [--keep FOLDER]

Makes small tokenizers as compare_tokenizers.py does, writes each with the files that published models have beside it
(tokenizer_config.json, special_tokens_map.json, added_tokens.json, config.json), and encodes N strings (200 by default) with
each folder, without and with the tokens around a text. PROGRAM is build/release/bin/tranche by default. --random N draws N
folders of any vocabulary with any of these files, most of them unlike published ones: the program may refuse such a folder,
but may not give other tokens; folders that transformers cannot load are passed over.
Needs the Python packages transformers (5.24.0), tokenizers (0.23.3), sentencepiece (0.2.3) and protobuf (7.36.2), installed by
hand outside of the repository. Exit status: 0 all equal, 1 differences (the first of each folder is shown), 2 a package is missing.
"""
import argparse
import io
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile

import compare_tokenizers as small

ROOT = pathlib.Path(__file__).resolve().parent.parent
INST = ["[INST]", "[/INST]"]


def token(content, special=True, **flags):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": not special, "special": special, **flags}


class Maker:
    """Creates the files of small tokenizers, each once."""

    def __init__(self, text):
        self.text, self.made = text, {}

    def json(self, name):
        if name not in self.made:
            import tokenizers
            make = small.byte_level if name in ("gpt2", "llama3", "qwen") else small.character_level
            self.made[name] = make(tokenizers, name, self.text, 4000)
        return self.made[name]

    def two_files(self, name, left_out=()):
        """Writes vocab.json and merges.txt without the tokens in `left_out`, which such a folder has in added_tokens.json."""
        model = json.loads(self.json(name))["model"]
        kept = sorted((number, word) for word, number in model["vocab"].items() if word not in left_out)
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return {"vocab.json": json.dumps({word: number for number, (_, word) in enumerate(kept)}, ensure_ascii=False),
                "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n"}

    def model(self, **options):
        key = json.dumps(options, sort_keys=True)
        if key not in self.made:
            import sentencepiece
            written = io.BytesIO()
            plain = {"model_type": "bpe", "byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity",
                     "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "character_coverage": 0.99}
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(self.text.splitlines()), model_writer=written, vocab_size=2000, hard_vocab_limit=False,
                minloglevel=2, **{**plain, **options})
            self.made[key] = written.getvalue()
        return {"tokenizer.model": self.made[key]}


def size_of(model):
    import sentencepiece
    return sentencepiece.SentencePieceProcessor(model_proto=model["tokenizer.model"]).get_piece_size()


def layouts(make):
    """Yields the name and the files of each folder."""
    gpt2, qwen, llama3 = make.json("gpt2"), make.json("qwen"), make.json("llama3")
    llama2, mistral = make.json("llama2"), make.json("mistral")
    spm, inst = make.model(), make.model(control_symbols=INST)
    chat = ["<|im_start|>", "<|im_end|>"]
    qwen_files = make.two_files("qwen", small.SPECIAL["qwen"])
    size = len(json.loads(qwen_files["vocab.json"]))
    pieces = size_of(spm)
    plain = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    llama = {"tokenizer_class": "LlamaTokenizer", **plain}
    chat_decoder = {str(pieces + i): token(name) for i, name in enumerate(chat)}
    return {
        "gpt2-json": {"tokenizer.json": gpt2, "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "pad_token": "<|pad|>"}},
        "gpt2-json-alone": {"tokenizer.json": gpt2},
        "gpt2-json-added": {"tokenizer.json": gpt2, "added_tokens.json": {name: 4000 + i for i, name in enumerate(chat)},
                            "special_tokens_map.json": {"pad_token": token("<|im_end|>")}},
        "gpt2-two-files": {**make.two_files("gpt2"), "config.json": {"model_type": "gpt2"}, "added_tokens.json": {"<|pad|>": 4000}},
        "gpt2-two-files-prefix": {**make.two_files("gpt2"), "special_tokens_map.json": {"pad_token": "<|endoftext|>"}, "tokenizer_config.json": {
            "tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True, "add_bos_token": True}},
        "qwen2-two-files": {**qwen_files, "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
            "additional_special_tokens": chat, "added_tokens_decoder": {
                str(size + i): token(name) for i, name in enumerate(["<|endoftext|>", *chat])}}},
        "qwen3-json": {"tokenizer.json": qwen, "config.json": {"model_type": "qwen3"}, "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "additional_special_tokens": chat}},
        "qwen2-json-other-class": {"tokenizer.json": gpt2, "config.json": {"model_type": "qwen2"}, "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizerFast", "eos_token": "<|endoftext|>"}},
        "llama3-json": {"tokenizer.json": llama3, "config.json": {"model_type": "llama"}, "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
            "added_tokens_decoder": {str(i): token(name) for i, name in enumerate(small.SPECIAL["llama3"])}}},
        "llama3-json-llama-class": {"tokenizer.json": llama3, "special_tokens_map.json": {"eos_token": token("<|eot_id|>"), "pad_token": "<|pad|>"},
                                    "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}},
        "llama2-json": {"tokenizer.json": llama2, "tokenizer_config.json": {**llama, "legacy": None, "add_bos_token": True}},
        "llama2-json-legacy": {"tokenizer.json": llama2, "config.json": {"model_type": "llama"}, "tokenizer_config.json": {
            **llama, "legacy": True, "added_tokens_decoder": {str(i): token(name) for i, name in enumerate(["<unk>", "<s>", "</s>"])}}},
        "llama2-model-alone": {**spm},
        "llama2-model": {**spm, "config.json": {"model_type": "llama"}, "special_tokens_map.json": {k: token(v) for k, v in plain.items()},
                         "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}},
        "llama2-model-decoder": {**spm, "tokenizer_config.json": {
            **llama, "add_bos_token": True, "add_eos_token": True, "legacy": False, "added_tokens_decoder": {
                **{str(i): token(name, normalized=True) for i, name in enumerate(["<unk>", "<s>", "</s>"])}, **chat_decoder}}},
        "llama2-model-no-prefix": {**inst, "tokenizer_config.json": {**llama, "add_prefix_space": False}},
        "llama2-model-added": {**spm, "added_tokens.json": {name: pieces + i for i, name in enumerate(chat)}, "tokenizer_config.json": {
            **llama, "legacy": True, "additional_special_tokens": ["<|im_end|>"]}},
        "llama2-model-user-pieces": {**make.model(user_defined_symbols=["##", "hello"], control_symbols=INST), "tokenizer_config.json": llama},
        "mistral-model": {**inst, "config.json": {"model_type": "mistral"}, "tokenizer_config.json": {**llama, "legacy": True, "add_bos_token": True}},
        "mistral-model-not-legacy": {**inst, "config.json": {"model_type": "mistral"}, "tokenizer_config.json": {
            **llama, "legacy": False, "add_bos_token": True}},
        "mistral-model-chat": {**spm, "config.json": {"model_type": "mistral"}, "tokenizer_config.json": {
            **plain, "added_tokens_decoder": chat_decoder, "eos_token": "<|im_end|>"}},
        "mistral-json": {"tokenizer.json": mistral, "config.json": {"model_type": "mistral"}, "tokenizer_config.json": {
            **llama, "add_bos_token": True, "add_prefix_space": None}},
        "model-without-bytes": {**make.model(byte_fallback=False, character_coverage=0.98)},
        "model-user-pieces": {**make.model(user_defined_symbols=["##", "hello"], control_symbols=INST)},
    }


def drawn(make, random):
    """The files of a randomly composed folder."""
    some = lambda *values: random.choice(values)  # noqa: E731
    kind = some("gpt2", "qwen", "llama3", "llama2", "mistral", "two", "two-without", "spm", "inst", "user")
    if kind == "two":
        files = make.two_files("gpt2")
    elif kind == "two-without":
        files = make.two_files("qwen", small.SPECIAL["qwen"])
    elif kind in ("spm", "inst", "user"):
        files = dict(make.model(**{"spm": {}, "inst": {"control_symbols": INST},
                                   "user": {"user_defined_symbols": ["##", "hello"], "control_symbols": INST}}[kind]))
    else:
        files = {"tokenizer.json": make.json(kind)}
    size = size_of(files) if "tokenizer.model" in files else len(json.loads(files["vocab.json"])) if "vocab.json" in files else 4000
    names = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "hello"]
    config = {}
    for key, values in {"legacy": (True, False, None), "add_prefix_space": (True, False, None), "add_bos_token": (True, False),
                        "add_eos_token": (True, False), "eos_token": ("</s>", "<|im_end|>", "<|endoftext|>"), "bos_token": ("<s>", None, "<|endoftext|>"),
                        "unk_token": ("<unk>", None), "pad_token": (None, "<|pad|>", {"__type": "AddedToken", **token("<|pad|>", normalized=True)}),
                        "additional_special_tokens": ([], ["<|im_end|>"], ["<|x|>", "[INST]"]), "extra_special_tokens": (["<|x|>"], {"image_token": "<|y|>"}),
                        "tokenizer_class": ("LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast")}.items():
        if random.random() < (0.7 if key == "tokenizer_class" else 0.3):
            config[key] = random.choice(values)
    listed = random.sample(names, 3)
    if random.random() < 0.4:
        config["added_tokens_decoder"] = {str(size + i): token(name, some(True, False)) for i, name in enumerate(listed)}
    if config or random.random() < 0.5:
        files["tokenizer_config.json"] = config
    if random.random() < 0.3:
        files["added_tokens.json"] = {name: size + i for i, name in enumerate(random.sample(names, 2))}
    if random.random() < 0.3:
        files["special_tokens_map.json"] = {some("pad_token", "eos_token", "mask_token"): some("<|pad|>", "<|im_end|>", token("<|pad|>")),
                                            **some({}, {"additional_special_tokens": ["<|z|>", "<|im_start|>"]})}
    if random.random() < 0.6:
        files["config.json"] = {"model_type": some("gpt2", "llama", "mistral", "qwen2", "qwen3")}
    return files


def compare_drawn(program, count, make, random, strings, folder):
    from transformers import AutoTokenizer
    equal, refused, passed_over, wrong = 0, {}, 0, 0
    for number in range(count):
        files = drawn(make, random)
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, files)
        try:
            AutoTokenizer.from_pretrained(folder).encode("a")
        except Exception:  # noqa: BLE001
            passed_over += 1
            continue
        try:
            documents = [{"text": "a"}]
            small.documents_of(program, folder, documents)
        except Exception as problem:  # noqa: BLE001
            why = problem.stderr.decode().strip().replace(str(folder), "") if getattr(problem, "stderr", None) else str(problem)[:60]
            refused[why] = refused.get(why, 0) + 1
            continue
        differ = compare(program, f"drawn {number}", folder, strings, quiet=True)
        if differ:
            wrong += 1
            print({name: content for name, content in files.items() if isinstance(content, dict)}, sorted(files))
        equal += not differ
    print(f"{count} drawn folders: {equal} equal, {wrong} differ, {sum(refused.values())} refused, {passed_over} that transformers cannot load")
    return wrong


def write(folder, files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, dict):
            content = json.dumps(content)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def compare(program, name, folder, strings, quiet=False):
    from transformers import AutoTokenizer
    theirs = AutoTokenizer.from_pretrained(folder)
    strings = [string for string in strings if theirs.encode(string, add_special_tokens=False)]  # other strings are not documents
    documents = [{"text": string} for string in strings]
    ends = [theirs.eos_token_id] if theirs.eos_token_id is not None else [
        theirs.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|end_of_text|>", "</s>")]
    count, wrong = 0, []
    for special, flags in ((False, ["--no-special"]), (True, [])):
        ours = [tokens for tokens, _ in small.documents_of(program, folder, documents, *flags)]
        assert len(ours) == len(strings), f"{len(ours)} documents for {len(strings)} strings"
        for string, own in zip(strings, ours):
            right = theirs.encode(string, add_special_tokens=special)
            # A document ends with an end token; transformers adds it only on request.
            if special and own[-1:] and own[-1] in ends and not theirs.add_eos_token:
                own = own[:-1]
            count += len(own)
            if own != right:
                wrong.append((string, special, own, right))
    if quiet and not wrong:
        return 0
    print(f"{name}: {type(theirs).__name__}, {len(strings)} strings twice, {count} tokens, {len(wrong)} differ", flush=True)
    for string, special, own, right in wrong[:1]:
        at = next((i for i, pair in enumerate(zip(own, right)) if pair[0] != pair[1]), min(len(own), len(right)))
        print(f"  {string!r}, special {special}, from token {at}\n  tranche: {own[at:at + 20]}\n  library: {right[at:at + 20]}")
    return len(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", type=pathlib.Path, default=ROOT / "build/release/bin/tranche")
    parser.add_argument("--strings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import sentencepiece  # noqa: F401
        import tokenizers
        import transformers
    except ImportError as problem:
        print(f"compare_tokenizer_folders: {problem}; install it in an environment outside of the repository", file=sys.stderr)
        return 2
    print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}, sentencepiece {sentencepiece.__version__}")
    text, differences, refused = small.training_text(), 0, 0
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<s>", "</s>", "<unk>", *INST, "hello", "##", "<|begin_of_text|>",
             "<|eot_id|>", "<0x0A>", small.SPACE, "  "]
    draw = small.Strings(options.seed, names, text)
    strings = [draw.draw() for _ in range(options.strings)]
    with tempfile.TemporaryDirectory() as work:
        make = Maker(text)
        if options.random:
            folder = (options.keep or pathlib.Path(work)) / "drawn"
            return 1 if compare_drawn(options.program, options.random, make, random.Random(options.seed), strings, folder) else 0
        for name, files in layouts(make).items():
            if options.only and name not in options.only:
                continue
            folder = (options.keep or pathlib.Path(work)) / name
            shutil.rmtree(folder, ignore_errors=True)
            write(folder, files)
            try:
                differences += compare(options.program, name, folder, strings)
            except Exception as problem:  # noqa: BLE001
                refused += 1
                print(f"{name}: {problem}")
    print(f"{differences} differ, {refused} folders refused")
    return 1 if differences or refused else 0


if __name__ == "__main__":
    sys.exit(main())
