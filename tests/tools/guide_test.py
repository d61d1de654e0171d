#!/usr/bin/env python3
"""Runs the commands in docs/guides/fine-tuning.md in order, as a user pastes them.

usage: guide_test.py PROGRAM
The folder Qwen3-0.6B is a small Qwen3 with random weights and a tokenizer of bytes and special tokens, which are made here; nothing else
differs from the guide."""
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs/guides/fine-tuning.md"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def commands(guide):
    """The blocks of shell commands, in order."""
    return re.findall(r"^```sh\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)


def write_tokenizer(folder):
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [{"id": 256 + i, "content": mark, "special": True, "normalized": False} for i, mark in enumerate(MARKS)]
    model = {"type": "BPE", "vocab": letters, "merges": []}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))


def write_model(folder):
    hidden, heads, pairs, size, inner, layers = 16, 2, 1, 8, 32, 2
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 256 + len(MARKS), "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": pairs, "head_dim": size, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": [heads * size, hidden], at + "self_attn.k_proj.weight": [pairs * size, hidden],
            at + "self_attn.v_proj.weight": [pairs * size, hidden], at + "self_attn.o_proj.weight": [hidden, heads * size],
            at + "self_attn.q_norm.weight": [size], at + "self_attn.k_norm.weight": [size],
            at + "mlp.gate_proj.weight": [inner, hidden], at + "mlp.up_proj.weight": [inner, hidden], at + "mlp.down_proj.weight": [hidden, inner],
            at + "input_layernorm.weight": [hidden], at + "post_attention_layernorm.weight": [hidden],
        }  # fmt: skip
    draw, header, data = random.Random(1), {}, b""
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        block = struct.pack(f"<{count}f", *([1.0] * count if len(shape) == 1 else [draw.gauss(0, 0.05) for _ in range(count)]))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(block)]}
        data += block
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(config))


def main(program):
    blocks = commands(GUIDE.read_text(encoding="utf-8"))
    wanted = ["tokenize", "checkpoint import", "train", "evaluate", "generate", "checkpoint export"]
    missing = [command for command in wanted if not any(f"tranche {command} " in block for block in blocks)]
    assert not missing, f"{GUIDE} has no commands of {missing}"
    with tempfile.TemporaryDirectory() as folder:
        base = pathlib.Path(folder)
        (base / "bin").mkdir()
        (base / "bin/tranche").symlink_to(pathlib.Path(program).resolve())
        (base / "Qwen3-0.6B").mkdir()
        write_model(base / "Qwen3-0.6B")
        write_tokenizer(base / "Qwen3-0.6B")
        environment = os.environ | {"PATH": f"{base}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        output = ""
        for block in blocks:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=base, env=environment, capture_output=True, text=True, timeout=100)
            assert done.returncode == 0, f"status {done.returncode} of\n{block}\n{done.stdout}{done.stderr}"
            output += done.stdout
        losses = [float(loss) for loss in re.findall(r"validation loss of \S+: ([0-9.]+) over", output)]
        assert len(losses) == 2 and losses[1] < losses[0], f"fine-tuning is to lower the loss: {losses}"
        for name in ("merged/config.json", "merged/model.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"):
            assert (base / name).stat().st_size > 0, name
        print(f"{len(blocks)} blocks of commands; held-out loss {losses[0]} before, {losses[1]} after")


if __name__ == "__main__":
    main(sys.argv[1])
