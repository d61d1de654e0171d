#!/usr/bin/env python3
"""Compares exports and imports with Hugging Face transformers: weights, losses and generated tokens, both ways.

usage: check_hugging_face.py [PROGRAM]     PROGRAM is build/release/bin/tranche by default

Run by hand, by a Python that has torch (for CPUs is enough), transformers and safetensors, for example
    python3 -m venv ~/hugging-face && ~/hugging-face/bin/pip install torch transformers safetensors
    ~/hugging-face/bin/python scripts/check_hugging_face.py
Takes a minute; uses no network. Exit status: 0 all agree, 1 something does not (it says what), 2 a module is missing.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

if "-h" in sys.argv or "--help" in sys.argv:
    sys.exit(__doc__)
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
    from safetensors.torch import load_file
    from tokenizers import ByteLevelBPETokenizer
except ImportError as missing:
    print(f"{missing}\n{__doc__}", file=sys.stderr)
    sys.exit(2)

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "build/release/bin/tranche")
SEQUENCE, WINDOWS, TOKENS = 48, 12, 50
TEXT = b"".join(b"It was the %d. of %d mornings, and the cat sat on mat %d.\n" % (i, i * i % 97, i * 7 % 31) for i in range(400))
failures = []


def check(good, what):
    print(("ok      " if good else "FAILED  ") + what, flush=True)
    if not good:
        failures.append(what)


def tranche(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        sys.exit(f"tranche {' '.join(map(str, arguments))}\nended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def loss_of(folder, source, config, windows):
    """The mean loss over the windows of a file, computed by tranche in fp32."""
    report = folder / "evaluation.json"
    tranche("evaluate", "--from", source, "--model", config, "--data", windows, "--validation-data", windows, "--sequence",
            SEQUENCE, "--dtype", "fp32", "--report", report)
    return json.loads(report.read_text())["validation_loss"]


def their_loss(model, data):
    rows = torch.tensor([list(data[w * SEQUENCE : w * SEQUENCE + SEQUENCE + 1]) for w in range(WINDOWS)])
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def their_tokens(model, prompt, positions):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens[-positions:]])).logits[0, -1].argmax()))
    return tokens


def our_tokens(source, prompt):
    text = tranche("generate", "--from", source, "--prompt-tokens", ",".join(map(str, prompt)), "--tokens", TOKENS, "--greedy")
    return [int(token) for token in text.split()]


def compare(name, folder, model, ours, config, windows, context):
    """Compares a transformers model with a checkpoint or folder of ours."""
    data = windows.read_bytes()
    mine, theirs = loss_of(folder, ours, config, windows), their_loss(model, data)
    check(abs(mine - theirs) < 1e-5, f"{name}: loss {mine:.7f} here, {theirs:.7f} there, apart {abs(mine - theirs):.1e}")
    prompt = list(data[:9])
    check(our_tokens(ours, prompt) == their_tokens(model, prompt, context), f"{name}: the same {TOKENS} likeliest tokens")


def exported(folder):
    """Checks that transformers can open a checkpoint that was trained here."""
    config = folder / "model.json"
    config.write_text(json.dumps({
        "model_type": "gpt2", "n_layer": 3, "n_head": 3, "n_embd": 48, "n_inner": 80, "vocab_size": 256, "n_positions": 64,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "layer_norm_epsilon": 1e-4}))
    text, windows = folder / "text.txt", folder / "windows.txt"
    text.write_bytes(TEXT)
    windows.write_bytes(TEXT[: SEQUENCE * WINDOWS + 1])
    tranche("train", "--model", config, "--data", text, "--sequence", SEQUENCE, "--steps", 60, "--micro-batch", 8, "--dtype",
            "fp32", "--eval-batches", 1, "--checkpoint-dir", folder / "run")
    for dtype in ("fp32", "bf16"):
        tranche("checkpoint", "export", folder / "run", "--to", folder / dtype, "--dtype", dtype)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "fp32")
    check(next(model.parameters()).dtype == torch.float32, "fp32: opens as fp32")
    check(model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr(), "fp32: the head is the embedding")
    compare("exported fp32", folder, model.eval(), folder / "run", config, windows, SEQUENCE)
    whole, half = load_file(folder / "fp32" / "model.safetensors"), load_file(folder / "bf16" / "model.safetensors")
    check(set(whole) == set(half) and all(torch.equal(whole[name].bfloat16(), half[name]) for name in whole),
          "bf16: every weight is the fp32 one as torch rounds it")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "bf16", dtype=torch.float32)
    tranche("checkpoint", "import", folder / "bf16", "--to", folder / "bf16-run")
    compare("exported bf16, read back", folder, model.eval(), folder / "bf16-run", config, windows, 64)


def imported(folder):
    """Checks a transformers model with random weights, imported here and exported again."""
    torch.manual_seed(7)
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=36, vocab_size=256, n_positions=64, initializer_range=0.2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(folder / "theirs")
    windows = folder / "windows.txt"
    windows.write_bytes(TEXT[: SEQUENCE * WINDOWS + 1])
    tranche("checkpoint", "import", folder / "theirs", "--to", folder / "run")
    compare("imported", folder, theirs, folder / "run", folder / "theirs" / "config.json", windows, 64)
    check(our_tokens(folder / "theirs", [1, 2, 3]) == their_tokens(theirs, [1, 2, 3], 64), "their folder, opened as it is")
    tranche("checkpoint", "export", folder / "run", "--to", folder / "back")
    before, after = load_file(folder / "theirs" / "model.safetensors"), load_file(folder / "back" / "model.safetensors")
    check(set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before),
          "imported and exported: the same weights to the bit")


def tokenized(folder):
    """Checks a folder with a transformers tokenizer, from text to text."""
    words = TEXT.decode() + "na\u00efve caf\u00e9s, isn't it?  They've 12\u00bd \u4e2d\u6587 \U0001f600\n" * 50
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=False)
    tokenizer.train_from_iterator(words.splitlines(True), vocab_size=700, min_frequency=2, special_tokens=["<|endoftext|>"])
    size = tokenizer.get_vocab_size()
    torch.manual_seed(8)
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=36, vocab_size=size, n_positions=160, initializer_range=0.2,
                                     bos_token_id=0, eos_token_id=0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(folder)
    tokenizer.save_model(str(folder))
    for prompt in ("It was", "  the  caf\u00e9's \n\n 12\u00bd\u4e2d", "mat<|endoftext|>The mats", "\U0001f600 isn't\t"):
        text = tranche("generate", "--from", folder, "--prompt", prompt, "--tokens", TOKENS, "--greedy")
        tokens = their_tokens(theirs, tokenizer.encode(prompt).ids, 160)
        check(text == tokenizer.decode(tokens, skip_special_tokens=False) + "\n", f"tokenizer of {size}: the same text after {prompt!r}")


with tempfile.TemporaryDirectory(prefix="tranche-hugging-face-") as name:
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for way in (exported, imported, tokenized):
        (pathlib.Path(name) / way.__name__).mkdir()
        way(pathlib.Path(name) / way.__name__)
print(f"{len(failures)} of the checks FAILED" if failures else "all agree")
sys.exit(1 if failures else 0)
