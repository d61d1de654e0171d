#!/usr/bin/env python3
"""Trains a few steps of a small GPT at every stage and prints what one rank held and sent, as Markdown.

    scripts/stage_table.py [--model gpt-mini] [--ranks 1,2,4] [--steps 4] [--dtype bf16]

Needs build/release/bin/tranche and mpirun. Memory is the highest of all ranks, from the ledger; traffic is what rank
0 sent in the last step, metered, beside the formula of docs/internals/arithmetic.md; the digest shows that all stages of one number
of ranks and one reduction policy end with the same weights.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BATCH = 8  # sequences a step, whatever the number of ranks


def train(folder, arguments, ranks, stage):
    report = folder / f"report-{ranks}-{stage}.json"
    command = [str(ROOT / "scripts/run_mpi.sh"), str(ranks), str(ROOT / "build/release/bin/tranche"), "train",
               "--model", arguments.model, "--data", str(folder / "text.txt"), "--sequence", "128",
               "--stage", str(stage), "--dtype", arguments.dtype, "--steps", str(arguments.steps),
               "--micro-batch", str(BATCH // ranks // 2), "--accumulate", "2", "--threads", "1",
               "--set", "tranche.reduction=micro_batch", "--report", str(report)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        sys.exit(f"status {result.returncode} from: {' '.join(command)}\n{result.stdout}")
    return json.loads(report.read_text())


def mib(count):
    return f"{count / 2**20:.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-mini")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", default="bf16")
    arguments = parser.parse_args()
    print("| ranks | stage | parameters | gradients | optimizer | gathered | peak, MiB | elements sent | formula | weights |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(20000)))
        for ranks in map(int, arguments.ranks.split(",")):
            for stage in range(4):
                report = train(folder, arguments, ranks, stage)
                memory, traffic = report["memory"]["device"], report["traffic"]
                held = memory["persistent"]
                sent = sum(v["elements"] for k, v in traffic.items()
                           if k != "control" and isinstance(v, dict))
                print("| " + " | ".join([
                    str(ranks), str(stage), mib(held["parameters"]), mib(held["gradients"]), mib(held["optimizer"]),
                    mib(memory["by_category"]["gathered"]), mib(memory["peak_bytes"]), f"{sent:,}",
                    f"{traffic['formula_elements']:,}", str(report["weights_digest"])[:8]]) + " |", flush=True)


if __name__ == "__main__":
    main()
