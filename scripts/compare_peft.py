#!/usr/bin/env python3
"""Compares low-rank adapters (LoRA) with Hugging Face's PEFT, on tiny random models in fp32 on the CPU:
  training   logits, loss, every gradient, 50 greedy tokens and the losses of 20 AdamW steps of adapters that PEFT made (Llama family)
  theirs     the program imports an adapter of PEFT: greedy tokens and loss are PEFT's, the merged export has PEFT's logits in
             transformers, and the adapter comes back bit for bit (GPT-2, Llama, Qwen3 with a tied head)
  ours       PEFT loads an adapter that the program trained: the same comparisons

usage: compare_peft.py [BUILD]           BUILD is build/release by default: build its targets compare_with_golden and tranche first

Run by hand, by a Python that has torch (for CPUs is enough), transformers, peft and safetensors:
    python3 -m venv ~/transformers && ~/transformers/bin/pip install torch transformers peft safetensors
Takes a minute or two; uses no network. Exit status: 0 all agree, 1 something does not, 2 a module is missing.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

if "-h" in sys.argv or "--help" in sys.argv:
    sys.exit(__doc__)
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print(f"{missing}\n{__doc__}", file=sys.stderr)
    sys.exit(2)

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/release"
PROGRAM, GOLDEN = str(BUILD / "bin/tranche"), str(BUILD / "tests/compare_with_golden")
BATCH, TIME, STEPS, PROMPT, GENERATED = 3, 23, 20, 8, 50
SEQUENCE, WINDOWS = 48, 6
TOLERANCE = 1e-5
TEXT = b"".join(b"It was the %d. of %d mornings, and the cat sat on mat %d.\n" % (i, i * i % 97, i * 7 % 31) for i in range(400))
LLAMA = {"vocab_size": 256, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
GPT2 = {"vocab_size": 256, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 4, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "initializer_range": 0.2}
TRAINED = [  # architecture, shape, LoraConfig
    ("Llama", {}, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    ("Llama", {"attention_bias": True, "mlp_bias": True},
     {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}),
    ("Mistral", {"sliding_window": 5}, {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]}),
    ("Qwen2", {"vocab_size": 61}, {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "lm_head"]}),
    ("Qwen3", {"head_dim": 10, "tie_word_embeddings": True}, {"r": 5, "lora_alpha": 4, "target_modules": ["gate_proj", "lm_head"]}),
]
EXCHANGED = [
    ("GPT2", GPT2, {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ("GPT2", GPT2, {"r": 3, "lora_alpha": 9, "target_modules": ["c_attn", "c_proj", "c_fc", "lm_head"], "fan_in_fan_out": True}),
    ("Llama", LLAMA, {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    ("Qwen3", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True},
     {"r": 6, "lora_alpha": 5, "target_modules": ["k_proj", "up_proj", "lm_head"]}),
]
failures = 0


def check(good, what):
    global failures
    print(("ok      " if good else "FAILED  ") + what, flush=True)
    failures += not good


def tranche(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        sys.exit(f"tranche {' '.join(map(str, arguments))}\nended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def made(name, shape, seed):
    """A model with random weights, including norms and biases."""
    torch.manual_seed(seed)
    attention = {} if name == "GPT2" else {"attn_implementation": "eager"}
    config = getattr(transformers, name + "Config")(**attention, **shape)
    model = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def adapted(model, lora):
    """The model with PEFT adapters whose B is not zero."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return wrapped


def loss_of(model, tokens, targets):
    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100), logits


def greedy(model, prompt, count, positions=1 << 30):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens[-positions:]]), use_cache=False).logits[0, -1].argmax()))
    return tokens


def trained(name, shape, lora, folder, seed):
    shape = {**LLAMA, "vocab_size": 61, **shape}
    model = made(name, shape, seed)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    wrapped = adapted(model, lora).train()
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    tokens = torch.randint(0, shape["vocab_size"], (STEPS, BATCH, TIME))
    targets = torch.randint(0, shape["vocab_size"], (STEPS, BATCH, TIME))
    targets[:, :, ::7] = -100
    golden = {"tokens": tokens.float(), "targets": targets.float()}
    loss, logits = loss_of(wrapped, tokens[0], targets[0])
    loss.backward()
    golden["logits"], golden["loss"] = logits.detach().clone(), loss.detach().reshape(1).clone()
    golden["generated"] = torch.tensor(greedy(wrapped, tokens[0][0, :PROMPT].tolist(), GENERATED)).float()
    parameters = {key: p for key, p in wrapped.named_parameters() if p.requires_grad}
    for key, parameter in parameters.items():
        golden["gradient." + key.removeprefix("base_model.model.").replace(".default", "")] = parameter.grad.detach().clone()
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = loss_of(wrapped, tokens[step], targets[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    golden["losses"] = torch.tensor(losses)
    save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")
    done = subprocess.run([GOLDEN, str(folder)], capture_output=True, text=True, check=False)
    what = f"training {name} {lora['target_modules']}, rank {lora['r']}"
    if done.returncode != 0:
        return check(False, f"{what}: status {done.returncode}\n{done.stdout}{done.stderr}")
    found = json.loads(done.stdout)
    figures = {key: found[key] for key in ("logits", "loss", "gradients", "training", "generated")}
    return check(all(value <= TOLERANCE for value in figures.values()),
                 f"{what}: " + ", ".join(f"{key} {value:.1e}" for key, value in figures.items()))


def apart(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def compare(what, wrapped, run, folder):
    """Compares a checkpoint of adapters with a PEFT model."""
    windows = folder / "windows.txt"
    windows.write_bytes(TEXT[: SEQUENCE * WINDOWS + 1])
    report = folder / "evaluation.json"
    tranche("evaluate", "--from", run, "--model", folder / "base/config.json", "--data", windows, "--validation-data", windows,
            "--sequence", SEQUENCE, "--dtype", "fp32", "--report", report)
    data = torch.tensor([list(TEXT[w * SEQUENCE : w * SEQUENCE + SEQUENCE + 1]) for w in range(WINDOWS)])
    mine = json.loads(report.read_text())["validation_loss"]
    with torch.no_grad():
        theirs, logits = loss_of(wrapped, data[:, :-1], data[:, 1:])
    check(abs(mine - theirs.item()) < TOLERANCE, f"{what}: loss {mine:.7f} here, {theirs.item():.7f} there")
    prompt = list(TEXT[:9])
    text = tranche("generate", "--from", run, "--prompt-tokens", ",".join(map(str, prompt)), "--tokens", 30, "--greedy")
    check([int(token) for token in text.split()] == greedy(wrapped, prompt, 30, SEQUENCE if "ours" in what else 64),
          f"{what}: the same 30 likeliest tokens")
    tranche("checkpoint", "export", run, "--to", folder / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged", attn_implementation="eager").eval()
    with torch.no_grad():
        difference = apart(merged(input_ids=data[:, :-1], use_cache=False).logits, logits)
    check(difference <= TOLERANCE, f"{what}: the merged export's logits in transformers are {difference:.1e} from PEFT's")


def theirs(name, shape, lora, folder, seed):
    what = f"theirs {name} {lora['target_modules']}"
    made(name, shape, seed).save_pretrained(folder / "base")
    wrapped = adapted(made(name, shape, seed), lora).eval()
    wrapped.save_pretrained(folder / "adapter")
    tranche("checkpoint", "import", folder / "base", "--to", folder / "base-run")
    tranche("checkpoint", "import", folder / "adapter", "--base", folder / "base-run", "--to", folder / "run")
    compare(what, wrapped, folder / "run", folder)
    tranche("checkpoint", "export", folder / "run", "--to", folder / "back", "--peft")
    before, after = (load_file(folder / place / "adapter_model.safetensors") for place in ("adapter", "back"))
    before = {key: value for key, value in before.items() if ".lora_" in key}
    check(set(before) == set(after) and all(torch.equal(before[key], after[key]) for key in before),
          f"{what}: imported and exported, the same adapters to the bit")


def ours(name, shape, lora, folder, seed):
    what = f"ours {name} {lora['target_modules']}"
    made(name, shape, seed).save_pretrained(folder / "base")
    tranche("checkpoint", "import", folder / "base", "--to", folder / "base-run")
    (folder / "text.txt").write_bytes(TEXT)
    block = {"rank": lora["r"], "alpha": lora["lora_alpha"], "dropout": 0.1, "rslora": lora.get("use_rslora", False),
             "targets": lora["target_modules"]}
    tranche("train", "--model", folder / "base/config.json", "--data", folder / "text.txt", "--sequence", SEQUENCE, "--steps", 20,
            "--micro-batch", 4, "--dtype", "fp32", "--lr", 0.01, "--eval-batches", 1, "--resume-weights-only", folder / "base-run",
            "--set", "tranche.lora=" + json.dumps(block), "--checkpoint-dir", folder / "run")
    tranche("checkpoint", "export", folder / "run", "--to", folder / "adapter", "--peft")
    base = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM")).from_pretrained(folder / "base")
    wrapped = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    changed = max(p.abs().max().item() for key, p in wrapped.named_parameters() if "lora_B" in key)
    check(changed > 0, f"{what}: B was trained, up to {changed:.2f}")
    compare(what, wrapped, folder / "run", folder)


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(temporary)
        for index, (name, shape, lora) in enumerate(TRAINED):
            trained(name, shape, lora, place / f"trained-{index}", 100 + index)
        for index, (name, shape, lora) in enumerate(EXCHANGED):
            for one in (theirs, ours):
                folder = place / f"{one.__name__}-{index}"
                folder.mkdir()
                one(name, shape, lora, folder, 200 + index)
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
