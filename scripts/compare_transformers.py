#!/usr/bin/env python3
"""Compares the Llama family with Hugging Face transformers: logits, loss, every gradient, 50 tokens of greedy generation and the losses of
20 AdamW steps of tiny random models, 8 of each architecture (grouped heads, odd sizes, kinds of rotary positions, windows, tied heads and
not), in fp32 on the CPU. Each is imported and exported, too: the weights have to come back bit for bit.

usage: compare_transformers.py [BUILD]           BUILD is build/release by default: build its targets compare_with_golden and tranche first
       compare_transformers.py --write FOLDER    only writes one small model of each architecture with its golden vectors into
                                                 FOLDER/ARCHITECTURE, as tests/models/golden has them

Run by hand, by a Python that has torch (for CPUs is enough), transformers and safetensors:
    python3 -m venv ~/transformers && ~/transformers/bin/pip install torch transformers safetensors
Takes a minute; uses no network. Each model is a folder with config.json, model.safetensors and golden.safetensors; the program reads it,
computes the same and prints the differences. Exit status: 0 all agree, 1 something does not, 2 a module is missing.
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
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print(f"{missing}\n{__doc__}", file=sys.stderr)
    sys.exit(2)

ROOT = pathlib.Path(__file__).resolve().parents[1]
BATCH, TIME, STEPS = 3, 23, 20
PROMPT, GENERATED = 8, 50
# Relative tolerance: of logits to the largest logit, of the loss, of each gradient in the 2-norm, of the worst loss of the 20 steps.
TOLERANCE = 1e-5
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SMALL = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}


def small(**changes):
    return {**SMALL, **changes}


# Long contexts have frequencies above 1 / theta, so that positions matter in short sequences too.
MODELS = {
    "Llama": [
        small(),
        small(num_key_value_heads=1, tie_word_embeddings=True),
        small(num_key_value_heads=4, rope_scaling=LINEAR, rms_norm_eps=1e-5),
        small(rope_scaling=LLAMA3, rope_theta=100.0, tie_word_embeddings=True),
        small(attention_bias=True, mlp_bias=True, rope_theta=500.0),
        small(head_dim=14, vocab_size=97, intermediate_size=37),
        small(hidden_size=42, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=3),
        small(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=96, rope_scaling=LLAMA3),
    ],
    "Mistral": [
        small(sliding_window=5),
        small(sliding_window=1, num_key_value_heads=1),
        small(sliding_window=None, num_key_value_heads=4),
        small(sliding_window=22, tie_word_embeddings=True),
        small(sliding_window=64, head_dim=10),
        small(sliding_window=7, rope_scaling=LINEAR, num_hidden_layers=3),
        small(sliding_window=8, rope_theta=1000.0, hidden_size=48, num_attention_heads=6, num_key_value_heads=3),
        small(sliding_window=16, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, rope_scaling=LLAMA3),
    ],
    "Qwen2": [
        small(),
        small(tie_word_embeddings=True, num_key_value_heads=1),
        small(use_sliding_window=True, sliding_window=6, max_window_layers=1),
        small(use_sliding_window=True, sliding_window=4, max_window_layers=0, num_key_value_heads=4),
        small(use_sliding_window=True, sliding_window=9, num_hidden_layers=3,
              layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        small(rope_scaling=LINEAR, hidden_size=42, num_attention_heads=3, num_key_value_heads=1),
        small(rope_scaling=LLAMA3, rope_theta=1000.0, tie_word_embeddings=True),
        small(hidden_size=56, num_attention_heads=14, num_key_value_heads=2, intermediate_size=51, rope_theta=1e6),
    ],
    "Qwen3": [
        small(head_dim=8),
        small(head_dim=16, tie_word_embeddings=True),
        small(head_dim=6, num_key_value_heads=1, attention_bias=True),
        small(head_dim=10, use_sliding_window=True, sliding_window=5, max_window_layers=1),
        small(head_dim=8, rope_scaling=LINEAR, num_key_value_heads=4),
        small(head_dim=12, rope_scaling=LLAMA3, rope_theta=1000.0, tie_word_embeddings=True),
        small(head_dim=4, num_hidden_layers=3, vocab_size=130),
        small(head_dim=32, hidden_size=40, num_attention_heads=5, num_key_value_heads=5, rope_theta=1e6),
    ],
}
# --write makes one of each of these.
TINY = {
    "Llama": small(rope_scaling={**LLAMA3, "original_max_position_embeddings": 8}, rope_theta=100.0, attention_bias=True),
    "Mistral": small(sliding_window=3, num_key_value_heads=1),
    "Qwen2": small(use_sliding_window=True, sliding_window=4, max_window_layers=1, rope_scaling=LINEAR),
    "Qwen3": small(head_dim=10, tie_word_embeddings=True),
}
for shape in TINY.values():
    shape.update(vocab_size=17, hidden_size=16, intermediate_size=10)


def loss_of(model, tokens, targets):
    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100), logits


def config_of(name, shape):
    return getattr(transformers, name + "Config")(attn_implementation="eager", **shape)


def write(name, shape, folder, seed, batch=BATCH, time=TIME, steps=STEPS):
    """Writes the model's folder: config.json, weights, and the reference results."""
    torch.manual_seed(seed)
    config = config_of(name, dict(shape))
    model = getattr(transformers, name + "ForCausalLM")(config)
    model.train()
    with torch.no_grad():  # gives norms values other than one, and biases values other than zero
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    vocabulary = shape["vocab_size"]
    tokens = torch.randint(0, vocabulary, (steps, batch, time))
    targets = torch.randint(0, vocabulary, (steps, batch, time))
    targets[:, :, ::7] = -100

    golden = {"tokens": tokens.float(), "targets": targets.float()}
    loss, logits = loss_of(model, tokens[0], targets[0])
    loss.backward()
    golden["logits"] = logits.detach().clone()
    # With a window of one transformers' cache keeps all tokens and should keep none, so its tokens differ from those of its own forward
    # pass.
    greedy = transformers.GenerationConfig(do_sample=False, max_new_tokens=GENERATED, eos_token_id=None, pad_token_id=0,
                                           use_cache=shape.get("sliding_window") != 1)
    prompt = tokens[0][:1, :PROMPT]  # without a mask, token 0 would count as padding
    golden["generated"] = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy)[0].float()
    golden["loss"] = loss.detach().reshape(1).clone()
    for key, parameter in model.named_parameters():
        golden["gradient." + key] = parameter.grad.detach().clone()
    # Weight decay applies to matrices only, as in the engine's default.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss, _ = loss_of(model, tokens[step], targets[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    golden["losses"] = torch.tensor(losses)
    save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")


def reads_back(name, text):
    """Checks that transformers reads our to_json() with the same fields."""
    ours = getattr(transformers, name + "Config")(**json.loads(text))
    return {**ours.to_dict(), "dtype": None}


def comes_back(program, folder):
    """True if import and export preserve the weights bit for bit, and transformers opens the export."""
    run, out = folder / "run", folder / "out"
    for command in (["import", folder, "--to", run], ["export", run, "--to", out]):
        done = subprocess.run([program, "checkpoint", *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout + done.stderr)
            return False
    ours, theirs = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    return same and transformers.AutoModelForCausalLM.from_pretrained(out) is not None


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    arguments = sys.argv[1:]
    if arguments[:1] == ["--write"]:
        for name, shape in TINY.items():
            write(name, shape, pathlib.Path(arguments[1]) / name.lower(), seed=1, batch=2, time=9, steps=5)
        return 0
    build = pathlib.Path(arguments[0]) if arguments else ROOT / "build/release"
    program, tranche = str(build / "tests/compare_with_golden"), str(build / "bin/tranche")
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name, shapes in MODELS.items():
            for index, shape in enumerate(shapes):
                folder = pathlib.Path(temporary) / f"{name.lower()}-{index}"
                write(name, shape, folder, seed=100 + index)
                done = subprocess.run([program, str(folder)], capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    failed += 1
                    print(f"FAILED  {folder.name}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
                    continue
                found = json.loads(done.stdout)
                theirs = {**config_of(name, dict(shape)).to_dict(), "dtype": None}
                ours = reads_back(name, found.pop("config"))
                other = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
                other -= {"architectures", "_attn_implementation", "attn_implementation", "transformers_version", "max_window_layers"}
                worst = found.pop("worst_gradient")
                back = comes_back(tranche, folder)
                good = all(value <= TOLERANCE for value in found.values()) and not other and back
                failed += not good
                figures = ", ".join(f"{key} {value:.1e}" for key, value in found.items())
                print(f"{'ok' if good else 'FAILED':7} {folder.name:10} {figures} ({worst})" +
                      (f"; config.json differs in {sorted(other)}" if other else "") + ("" if back else "; comes back otherwise"),
                      flush=True)
    print(f"{sum(map(len, MODELS.values()))} models, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
