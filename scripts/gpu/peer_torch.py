#!/usr/bin/env python3
"""peer_torch.py [--smoke] [--ours FOLDER]: the host's PyTorch at the shapes of our benches, on the same machine.

Times scaled_dot_product_attention by backend, matrix products, fused AdamW and a step of GPT-2 124M in bf16. With FOLDER, in
which tests/attention_samples has left inputs and results of our attention, PyTorch computes them again in fp32, and ours
must lie within the bounds of our tests. One JSON line for each finding: {item, figure, unit}, {item, skipped: reason} or {item, failed:
reason}. Exit status: 0, also where there is no PyTorch or no GPU; 1 our attention is out of bounds; 2 usage.
--smoke: tiny sizes, on the CPU where PyTorch sees no GPU.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

ROUNDING = 2.0 ** -8  # bf16's relative rounding error
FORWARD_BOUND, GRADIENT_BOUND = 2 * ROUNDING, 4 * ROUNDING  # of the norm, as in tests/kernels/attention_gpu_test.cpp


def say(item, **found):
    print(json.dumps({"item": item, **found}), flush=True)


def skip(item, reason):
    say(item, skipped=str(reason).strip().splitlines()[0][:300] if str(reason).strip() else type(reason).__name__)


class Peer:
    def __init__(self, torch, smoke):
        self.torch, self.smoke = torch, smoke
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def seconds(self, run):
        """Median of one run, by events on a GPU, after a warm-up."""
        torch = self.torch
        for _ in range(1 if self.smoke else 3):
            run()
        if self.device == "cpu":
            begin = time.perf_counter()
            run()
            return max(time.perf_counter() - begin, 1e-9)
        measured = []
        for _ in range(9):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(4):
                run()
            end.record()
            end.synchronize()
            measured.append(begin.elapsed_time(end) / 4e3)
        return statistics.median(measured)

    def random(self, *shape):
        return self.torch.rand(shape, device=self.device, dtype=self.torch.bfloat16) * 2 - 1

    def attention(self):
        torch = self.torch
        try:
            from torch.nn.attention import SDPBackend, sdpa_kernel
        except ImportError as error:
            skip("torch attention", error)
            return
        backends = {"cudnn": getattr(SDPBackend, "CUDNN_ATTENTION", None), "flash": SDPBackend.FLASH_ATTENTION}
        for head in (64, 128):
            for length, batch in ((1024, 16), (4096, 4)):
                length, batch, heads = (32, 1, 2) if self.smoke else (length, batch, 2048 // head)
                query, key, value = (self.random(batch, heads, length, head).requires_grad_() for _ in range(3))
                d_out = self.random(batch, heads, length, head)
                pairs = batch * heads * length * (length / 2) * head
                for name, backend in backends.items():
                    what = f"head {head} time {length}, {name}"
                    if backend is None:
                        skip(f"torch attention {what}", "this PyTorch has no such backend")
                        continue
                    try:
                        with sdpa_kernel(backend):
                            def forward():
                                return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
                            with torch.no_grad():
                                seconds = self.seconds(forward)
                            say(f"torch attention forward {what}", figure=4 * pairs / seconds * 1e-12, unit="TFLOP/s")
                            out = forward()
                            seconds = self.seconds(lambda: torch.autograd.grad(out, (query, key, value), d_out, retain_graph=True))
                            say(f"torch attention backward {what}", figure=10 * pairs / seconds * 1e-12, unit="TFLOP/s")
                    except RuntimeError as error:
                        skip(f"torch attention {what}", error)

    def products(self):
        shapes = [(8192, 8192, 8192)] + [(tokens, width, times * width) for width, tokens in ((768, 16384), (1600, 8192))
                                         for times in (3, 1, 4)]
        for m, k, n in shapes:
            a, b = (self.random(*(32, 32) if self.smoke else shape) for shape in ((m, k), (k, n)))
            operations = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
            say(f"torch product tokens {m} inputs {k} outputs {n}", figure=operations / self.seconds(lambda a=a, b=b: a @ b) * 1e-12,
                unit="TFLOP/s")

    def adamw(self):
        torch = self.torch
        count = 1 << (10 if self.smoke else 27)
        weights = torch.zeros(count, device=self.device, requires_grad=True)
        weights.grad = torch.rand(count, device=self.device)
        optimizer = torch.optim.AdamW([weights], fused=True)
        say("torch fused AdamW, fp32", figure=28.0 * count / self.seconds(optimizer.step) * 1e-9, unit="GB/s")

    def step(self):
        """One step of GPT-2 124M: bf16 autocast, fused AdamW, not compiled."""
        torch = self.torch
        layers, heads, width, length, batch, vocabulary = (1, 2, 16, 16, 1, 64) if self.smoke else (12, 12, 768, 1024, 16, 50257)
        functional = torch.nn.functional

        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
                self.packed, self.projected = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
                self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

            def forward(self, x):
                split = self.packed(self.first(x)).view(*x.shape[:2], 3, heads, width // heads).permute(2, 0, 3, 1, 4)
                seen = functional.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).reshape(x.shape)
                x = x + self.projected(seen)
                return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.positions = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(length, width)
                self.blocks, self.norm = torch.nn.ModuleList(Block() for _ in range(layers)), torch.nn.LayerNorm(width)

            def forward(self, tokens):
                x = self.tokens(tokens) + self.positions.weight
                for block in self.blocks:
                    x = block(x)
                return functional.linear(self.norm(x), self.tokens.weight)

        model = Model().to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(vocabulary, (batch, length + 1), device=self.device)

        def one():
            with torch.autocast(self.device, torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        say("torch step of GPT-2 124M, eager", figure=batch * length / self.seconds(one), unit="tokens_per_second")

    def compare(self, folder):
        """Returns False if one of our results is out of bounds."""
        torch = self.torch
        right = True
        for sample in json.loads((folder / "samples.json").read_text(encoding="utf-8")):
            batch, length, heads, shared, head = (sample[key] for key in ("batch", "time", "heads", "key_value_heads", "head"))

            def read(name, width):
                raw = bytearray((folder / sample["files"][name]).read_bytes())
                return torch.frombuffer(raw, dtype=torch.bfloat16).view(batch, length, width).to(self.device, torch.float32)
            packed = read("packed", (heads + 2 * shared) * head).requires_grad_()
            split = packed.split([heads * head, shared * head, shared * head], dim=2)
            query, key, value = (part.unflatten(2, (-1, head)).transpose(1, 2) for part in split)
            key, value = (part.repeat_interleave(heads // shared, dim=1) for part in (key, value))
            hidden = torch.ones(length, length, dtype=torch.bool, device=self.device).triu(1)
            scores = (query @ key.transpose(2, 3) / head ** 0.5).masked_fill(hidden, float("-inf"))
            out = (scores.softmax(3) @ value).transpose(1, 2).flatten(2)
            out.backward(read("d_out", heads * head))
            for what, expected, bound in (("out", out, FORWARD_BOUND), ("gradient", packed.grad, GRADIENT_BOUND)):
                ours = read(what, expected.shape[2])
                error = float((ours - expected).norm() / expected.norm())
                item = f"our attention against PyTorch's in fp32, head {head}, {heads} heads of {shared}, {what}"
                if error <= bound:
                    say(item, figure=error / bound, unit="of_bound")
                else:
                    right = False
                    say(item, failed=f"the norm of the difference is {error:.3g} of the result's, and the bound is {bound:.3g}")
        return right


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--ours", type=pathlib.Path)
    options = parser.parse_args()
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        skip("PyTorch", f"this Python has no PyTorch: {error}")
        return 0
    if not torch.cuda.is_available() and not options.smoke:
        skip("PyTorch", f"PyTorch {torch.__version__} sees no GPU")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    peer = Peer(torch, options.smoke)
    right = True
    if options.ours and (options.ours / "samples.json").exists():
        right = peer.compare(options.ours)
    else:
        skip("our attention against PyTorch's in fp32", "no results of ours are there")
    for part in (peer.attention, peer.products, peer.adamw, peer.step):
        try:
            part()
        except Exception as error:  # a failure of one part does not affect the others
            skip(f"torch {part.__name__}", error)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
