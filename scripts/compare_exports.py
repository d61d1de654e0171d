#!/usr/bin/env python3
"""Compares exported folders with the imported ones in Hugging Face's transformers. Six tiny random models of five
architectures, each with a tokenizer, a chat template and generation settings of its own, pass through
`checkpoint import`, no or one step of training at a learning rate of 0, and `checkpoint export`. Then
  tokens     AutoTokenizer gives the same ids for 200 strings, and the same text for a conversation by the chat template
  files      the tokenizer's files, the template and the generation settings are equal byte for byte, config.json but for the dtype
  generate() writes the same 50 greedy tokens behind three prompts, and ends at the same end tokens

usage: compare_exports.py [PROGRAM]      PROGRAM is build/release/bin/tranche by default

Run by hand, by a Python that has torch (for CPUs is enough), transformers and tokenizers:
    python3 -m venv ~/transformers && ~/transformers/bin/pip install torch transformers tokenizers jinja2
Takes a minute; uses no network. Exit status: 0 nothing differs, 1 something does, 2 a module is missing.
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

if "-h" in sys.argv or "--help" in sys.argv:
    sys.exit(__doc__)
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import tokenizers
    import torch
    import transformers
except ImportError as missing:
    print(f"{missing}\n{__doc__}", file=sys.stderr)
    sys.exit(2)

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "build/release/bin/tranche")
TEXT = "".join(f"It was the {i}. of {i * i % 97} mornings, and the cat sat on mat {i * 7 % 31}. Grüße, 東京!\n" for i in range(300))
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2}
GPT2 = {"n_positions": 128, "n_embd": 24, "n_layer": 2, "n_head": 4, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
        "initializer_range": 0.2}
MODELS = [  # name, architecture, shape, dtype of the weights
    ("gpt2", "GPT2", GPT2, torch.float32),
    ("llama", "Llama", LLAMA, torch.bfloat16),
    ("llama-tied", "Llama", {**LLAMA, "tie_word_embeddings": True}, torch.float32),
    ("mistral", "Mistral", {**LLAMA, "sliding_window": 40}, torch.bfloat16),
    ("qwen2", "Qwen2", {**LLAMA, "tie_word_embeddings": True}, torch.float32),
    ("qwen3", "Qwen3", {**LLAMA, "head_dim": 8}, torch.bfloat16),
]
FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
         "generation_config.json", "vocab.json", "merges.txt"]
different = compared = 0


def check(good, what):
    global different, compared
    compared += 1
    if not good:
        different += 1
        print("DIFFERENT " + what, flush=True)


def tranche(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        sys.exit(f"tranche {' '.join(map(str, arguments))}\nended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def tokenizer_for(number):
    """Byte-level BPE with a few special tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(
        vocab_size=330 + number, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", bos_token="<|endoftext|>",
                                                pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def made(folder, number, architecture, shape, dtype):
    torch.manual_seed(number)
    tokenizer = tokenizer_for(number)
    config = getattr(transformers, architecture + "Config")(
        vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, **shape)
    model = getattr(transformers, architecture + ("LMHeadModel" if architecture == "GPT2" else "ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    # There are several end tokens, and the model will generate some of them.
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, pad_token_id=0, eos_token_id=[tokenizer.eos_token_id, *random.Random(number).sample(range(3, 300), 3)])
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["somebodys_key"] = {"list": [1, 2.5, None], "text": "ü"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def strings():
    draw = random.Random(1)
    for number in range(200):
        words = TEXT.split(" ")
        text = " ".join(draw.choice(words) for _ in range(draw.randrange(1, 12)))
        yield text + draw.choice(["", "<|im_end|>", " <|endoftext|> x", "\n\n", "\u00e9\u0301", "  "]) + str(number)


def compare(name, before, after, dtype):
    for file in FILES:
        one, other = before / file, after / file
        check(one.exists() == other.exists() and (not one.exists() or one.read_bytes() == other.read_bytes()), f"{name}: {file}")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (before, after)]
    for config in configs:
        for key in ("dtype", "torch_dtype"):
            config.pop(key, None)
    check(configs[0] == configs[1], f"{name}: config.json")
    check(sorted(p.name for p in before.iterdir()) == sorted(p.name for p in after.iterdir()), f"{name}: names of files")
    old, new = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (before, after))
    check(len(old) == len(new) > 300 and type(old) is type(new), f"{name}: tokenizer")
    for text in strings():
        check(old.encode(text) == new.encode(text) != [], f"{name}: ids of {text!r}")
    chat = [{"role": "user", "content": "What is on the mat?"}, {"role": "assistant", "content": "The cat."}]
    check(old.apply_chat_template(chat, tokenize=False) == new.apply_chat_template(chat, tokenize=False) != "", f"{name}: chat")
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for folder in (before, after)]
    check(models[0].generation_config.to_dict() == models[1].generation_config.to_dict(), f"{name}: generation settings")
    for prompt in ("It was the 3.", "the cat sat", "Gr"):
        ids = torch.tensor([old.encode(prompt)])
        texts = [m.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=50)[0].tolist() for m in models]
        endless = [m.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=50, min_new_tokens=50)[0].tolist()
                   for m in models]
        check(texts[0] == texts[1] and len(texts[0]) > len(ids[0]), f"{name}: text behind {prompt!r}")
        check(endless[0] == endless[1] and len(endless[0]) == len(ids[0]) + 50, f"{name}: 50 tokens behind {prompt!r}")


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as place:
        home = pathlib.Path(place)
        (home / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
        for number, (name, architecture, shape, dtype) in enumerate(MODELS):
            before = home / name
            made(before, number, architecture, shape, dtype)
            kind = "bf16" if dtype == torch.bfloat16 else "fp32"
            tranche("checkpoint", "import", before, "--to", home / f"{name}-base")
            tranche("tokenize", "--data", home / "corpus.jsonl", "--tokenizer", before, "--out", home / f"{name}.safetensors")
            # A step with a learning rate of 0 does not change the weights.
            tranche("train", "--model", before / "config.json", "--data", home / f"{name}.safetensors", "--sequence", 32,
                    "--micro-batch", 1, "--eval-batches", 1, "--steps", 1, "--lr", 0, "--threads", 1, "--debug-peak-seconds", "0.01",
                    "--dtype", "fp32", "--resume-weights-only", home / f"{name}-base", "--checkpoint-dir", home / f"{name}-run")
            for steps, run in ((0, "base"), (1, "run")):
                after = home / f"{name}-{steps}"
                tranche("checkpoint", "export", home / f"{name}-{run}", "--to", after, "--dtype", kind)
                compare(f"{name}, {steps} steps", before, after, dtype)
            print(f"{name}: compared", flush=True)
    print(f"{compared} comparisons, {different} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
