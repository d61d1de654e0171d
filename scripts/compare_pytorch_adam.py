#!/usr/bin/env python3
"""compare_pytorch_adam.py BENCH [--sizes 1M,8M] [--threads 1,all] [--rounds 5] [--json F]: AdamW on the host beside PyTorch's.

BENCH is bench_host_optimizer. Each round times it and every form of torch.optim.AdamW that this PyTorch has for CPU tensors (plain,
foreach, fused), in turns, on the same number of parameters and threads: one tensor, gradients, moments and weights in fp32. Ours
writes a 16-bit weight in the same pass; PyTorch does not, so its time is also given with `half.copy_(weight)`, which a training step in
bf16 needs. Each figure is the median over rounds, and each ratio the median of the ratios within a round; the fastest form counts.

Wants a Python with PyTorch (CPU is enough): `apt-get install --no-install-recommends python3-torch` on Debian, or pip. Exit status 3
where there is none. --sizes 1B wants some 60 GB; PyTorch's foreach form keeps temporaries of several times its parameters.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
parser.add_argument("bench")
parser.add_argument("--sizes", default="1M,8M,32M,128M", help="parameters")
parser.add_argument("--threads", default="1,all")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement of PyTorch, at least one step")
parser.add_argument("--json")
options = parser.parse_args()

try:
    import torch
except ImportError as error:
    print(f"compare_pytorch_adam.py: {sys.executable} has no PyTorch ({error}).\nInstall it for this Python (`apt-get install "
          "--no-install-recommends python3-torch` on Debian, or `pip install torch`), or start this script by one that has it.\n"
          "Nothing was measured.", file=sys.stderr)
    sys.exit(3)


def count_of(text):
    scale = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}.get(text[-1], 1)
    return int(float(text[:-1] if scale > 1 else text) * scale)


def ours(size, threads):
    """Runs the bench; returns the milliseconds of one update and its memory bandwidth."""
    command = [options.bench, "--sizes", str(size), "--threads", str(threads), "--rules", "adamw", "--gradients", "fp32", "--rounds", "3",
               "--seconds", "0.03", "--ahead", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("rule=")), None)
    if done.returncode != 0 or line is None:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr}")
    return float(dict(word.split("=", 1) for word in line.split())["ms"])


def forms():
    """The arguments of torch.optim.AdamW that this PyTorch supports, by name."""
    known = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    found = {}
    for name, arguments in known.items():
        weight = torch.zeros(8, requires_grad=True)
        weight.grad = torch.full_like(weight, 1e-3)
        try:
            torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.1, **arguments).step()
        except (TypeError, RuntimeError, ValueError):
            continue  # an older PyTorch, or one whose AdamW lacks this option on CPUs
        found[name] = arguments
    return found


class Theirs:
    def __init__(self, size, arguments):
        self.weight = torch.full((size,), 0.5, requires_grad=True)
        self.weight.grad = torch.full_like(self.weight, 1e-3)
        self.half = torch.zeros(size, dtype=torch.bfloat16)
        self.optimizers = {name: torch.optim.AdamW([self.weight], lr=1e-4, weight_decay=0.1, **keys) for name, keys in arguments.items()}

    def step(self, form):
        """Returns milliseconds. A form's moments exist from its first step to the end of its turn."""
        optimizer = self.optimizers[form]
        optimizer.step()
        took = self.time(optimizer.step)
        optimizer.state.clear()
        gc.collect()
        return took

    def copy(self):
        with torch.no_grad():
            self.half.copy_(self.weight)
            return self.time(lambda: self.half.copy_(self.weight))

    @staticmethod
    def time(call):
        start, calls = time.perf_counter(), 0
        while True:
            call()
            calls += 1
            took = time.perf_counter() - start
            if took >= options.seconds:
                return 1e3 * took / calls


def compare(size, threads, arguments):
    torch.set_num_threads(threads)
    theirs = Theirs(size, arguments)
    times = {name: [] for name in ["ours", "copy", *arguments]}
    for _ in range(options.rounds):
        times["ours"].append(ours(size, threads))
        times["copy"].append(theirs.copy())
        for form in arguments:
            times[form].append(theirs.step(form))
    fastest = min(arguments, key=lambda form: statistics.median(times[form]))
    alone = [form / own for form, own in zip(times[fastest], times["ours"])]
    whole = [(form + copy) / own for form, copy, own in zip(times[fastest], times["copy"], times["ours"])]
    return {"parameters": size, "threads": threads, "ms": {name: round(statistics.median(values), 3) for name, values in times.items()},
            "fastest": fastest, "pytorch_over_ours": round(statistics.median(alone), 3),
            "range": [round(min(alone), 3), round(max(alone), 3)], "pytorch_and_copy_over_ours": round(statistics.median(whole), 3)}


def main():
    arguments = forms()
    if not arguments:
        sys.exit("compare_pytorch_adam.py: this PyTorch ran no form of torch.optim.AdamW")
    cores = os.cpu_count() or 1
    threads = list(dict.fromkeys(cores if word == "all" else int(word) for word in options.threads.split(",")))
    capability = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else "unknown"
    print(f"PyTorch {torch.__version__} (CPU kernels: {capability}), Python {platform.python_version()}, {options.rounds} rounds\n")
    print("| parameters | threads | ours ms | " + " | ".join(f"PyTorch {form} ms" for form in arguments) +
          " | 16-bit copy ms | PyTorch over ours (range) | with the copy |")
    print("|---" * (6 + len(arguments)) + "|")
    rows = []
    for count in threads:
        for size in options.sizes.split(","):
            row = compare(count_of(size), count, arguments)
            rows.append(row)
            print(f"| {size} | {count} | {row['ms']['ours']:.2f} | " + " | ".join(f"{row['ms'][form]:.2f}" for form in arguments) +
                  f" | {row['ms']['copy']:.2f} | {row['pytorch_over_ours']:.2f} ({row['range'][0]:.2f} to {row['range'][1]:.2f}) | "
                  f"{row['pytorch_and_copy_over_ours']:.2f} |", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"pytorch": torch.__version__, "capability": capability, "rounds": options.rounds, "rows": rows}, file, indent=1)
            file.write("\n")


main()
