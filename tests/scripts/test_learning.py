#!/usr/bin/env python3
"""scripts/learning.py with a fake training program: the runs, comparisons, kept results and refusals."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/learning.py"

# Losses by optimizer and seed; REFUSES and FAILS name an optimizer.
PROGRAM = r'''#!/usr/bin/env python3
import json, os, sys
arguments = sys.argv[1:]
def value(flag): return arguments[arguments.index(flag) + 1]
config = json.load(open(arguments[2] if arguments[0] == "config" else value("--config")))
kind = config["optimizer"]["type"]
if arguments[0] == "config":
    if kind == os.environ.get("REFUSES"):
        sys.exit("optimizer.type: no such optimizer")
    sys.exit(0)
with open(os.environ["RUNS"], "a") as runs:
    runs.write(f"{kind} {value('--seed')} {value('--steps')}\n")
if kind == os.environ.get("FAILS"):
    sys.exit("out of memory")
loss = {"AdamW": 2.0, "Muon": 1.9, "Lamb": 2.1}[kind] + 0.1 * int(value("--seed"))
steps = [{"loss": loss + 1 / step, "applied": True, "gradient_variance": 6.0 * step, "gradient_squares": 2.0 * step - 3}
         for step in range(1, int(value("--steps")) + 1)]
json.dump({"validation_loss": loss, "weights_digest": "d", "steps": steps}, open(value("--report"), "w"))
'''


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        program = folder / "tranche"
        program.write_text(PROGRAM, encoding="utf-8")
        program.chmod(0o755)
        text = folder / "text"
        text.write_text("words", encoding="utf-8")
        runs = folder / "runs"

        def study(*flags, status=0, out="out", **environment):
            runs.write_text("", encoding="utf-8")
            done = subprocess.run([sys.executable, SCRIPT, program, text, folder / out, *flags], capture_output=True, text=True,
                                  env={**os.environ, "RUNS": str(runs), **environment}, check=False)
            assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
            return done, runs.read_text(encoding="utf-8").splitlines()

        some = ["--only", "AdamW; Muon", "--seeds", "1,2", "--steps", "20"]
        done, made = study(*some)
        assert made == ["AdamW 1 20", "Muon 1 20", "AdamW 2 20", "Muon 2 20"], made  # seed by seed
        assert "| AdamW | 2.1000 | 2.2000 | 2.1500 | - | - | - | - |" in done.stdout, done.stdout
        row = "| Muon | 2.0000 | 2.1000 | 2.0500 | AdamW | -4.76, -4.55 % | -4.65 % | at most -1.0 %: met |"
        assert row in done.stdout, done.stdout
        results = json.loads((folder / "out/formats.json").read_text(encoding="utf-8"))
        assert results["lines"][1]["met"] is True and results["runs"]["Muon"]["1"]["validation_loss"] == 2.0, results

        done, made = study(*some[:3], "1,2,3", *some[4:])
        assert made == ["AdamW 3 20", "Muon 3 20"], made  # the others exist
        done, made = study(*some[:4], "--steps", "30", status=2)
        assert made == [] and "is of another configuration, text or number of steps; take another folder" in done.stderr, done.stderr

        # A variant that is not better, one that fails and is run again, and one that the program refuses.
        done, _ = study("--only", "AdamW;AdamW, states in 8 bits;LAMB", "--seeds", "1", "--steps", "20", out="other", FAILS="Lamb",
                        status=1)
        assert "LAMB, seed 1: status 1; see" in done.stderr, done.stderr
        done, made = study("--only", "AdamW;AdamW, states in 8 bits;LAMB", "--seeds", "1", "--steps", "20", out="other")
        assert made == ["Lamb 1 20"], made
        assert "+0.00 % | at most +0.5 %: met |" in done.stdout and "+4.76 % | - |" in done.stdout, done.stdout
        done, made = study("--only", "LAMB", out="third", REFUSES="Lamb", status=1)
        assert made == [] and "the program refuses 'LAMB': optimizer.type: no such optimizer" in done.stderr, done.stderr
        done, made = study("--only", "Adan", status=2)
        assert "no variant 'Adan' in formats; there are: AdamW; " in done.stderr, done.stderr

        # Batches use the same number of sequences, not of steps. A noise scale is the ratio of sums; there is none if they are not above 0.
        done, made = study("--study", "batches", "--seeds", "1", "--steps", "20", out="batches")
        assert made == ["AdamW 1 80", "AdamW 1 5", "Lamb 1 5"], made
        noise = json.loads((folder / "batches/batches-noise.json").read_text(encoding="utf-8"))["series"][1]
        assert noise["name"] == "AdamW, large batch" and noise["y"][0] == 12.0 and len(noise["y"]) == 4, noise
        loss = json.loads((folder / "batches/batches-loss.json").read_text(encoding="utf-8"))["series"]
        assert [len(line["x"]) for line in loss] == [10, 5, 5] and loss[0]["x"][0] == 32 and loss[1]["x"][-1] == 576, loss


if __name__ == "__main__":
    main()
    print("learning: ok")
