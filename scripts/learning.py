#!/usr/bin/env python3
"""learning.py PROGRAM TEXT FOLDER [--study formats|batches] [--steps N] [--seeds 1,2,3] [--only NAME;...]

Trains the quickstart's model on the quickstart's text by every variant of a study, with the same seeds for all of them,
and compares their held-out losses seed by seed. A variant is a line of a table below: a patch of scripts/quickstart.json.
FOLDER keeps a report of each run; a run that is there is not made again, so that a study may be interrupted, and takes
new lines and seeds later. Writes FOLDER/STUDY.json, FOLDER/STUDY.md, and two charts of the first seed for
build/*/bench/line_chart: FOLDER/STUDY-loss.json and, where it was measured, FOLDER/STUDY-noise.json. A variant that the program refuses ends the study
before the first run. Exit status: 0 made, 1 a run failed, 2 arguments or folder.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEQUENCES = 32  # of a step: the quickstart's
BYTES = 128  # of a sequence


@dataclass
class Variant:
    """A way to train: a patch of the quickstart's configuration, and the bound of its loss."""
    name: str
    patch: dict = field(default_factory=dict)
    beside: str = ""  # the variant of the same seed that it is compared with
    most: float = math.inf  # largest mean difference to that variant, in percent
    ranks: int = 1
    sequences: int = SEQUENCES  # sequences of a step; with more of them there are fewer steps
    micro_batch: int = 8


def optimizer(kind, rate, **more):
    params = {"lr": rate, "betas": [0.9, 0.98], "weight_decay": 0.05}
    return {"optimizer": {"type": kind, "params": {**params, **more}}}


def noise(kind, rate):
    return {**optimizer(kind, rate), "tranche": {"reduction": "micro_batch", "gradient_noise_scale": True}}


# Learning rates were fixed before the first run. AdamW has the quickstart's, Muon the same (its default factor matches AdamW's), and LAMB a
# round number, because its updates are relative to the weights.
FORMATS = [
    Variant("AdamW"),
    # A control: only the place where the gradient is rounded differs.
    Variant("AdamW, reduced each micro-batch", {"tranche": {"reduction": "micro_batch"}}, "AdamW"),
    Variant("AdamW, states in 8 bits", {"tranche": {"moments": "block8"}}, "AdamW", 0.5),
    Variant("AdamW, no master, stochastic rounding",
            {"tranche": {"master": "none", "stochastic_rounding": True}}, "AdamW", 0.5),
    Variant("AdamW, no master", {"tranche": {"master": "none"}}, "AdamW"),
    Variant("Muon", optimizer("Muon", 0.003), "AdamW", -1.0),
    Variant("LAMB", optimizer("Lamb", 0.02), "AdamW"),
    Variant("AdamW, 2 ranks, int8 gradients and weights",
            {"zero_optimization": {"zero_quantized_gradients": True, "zero_quantized_weights": True}}, "AdamW", 0.5, ranks=2),
]

# All variants have the same number of sequences. Rates grow with the square root of the batch, beginning at 32 sequences.
BATCHES = [
    Variant("AdamW, small batch", noise("AdamW", 0.0015), sequences=8, micro_batch=4),
    Variant("AdamW, large batch", noise("AdamW", 0.006), "AdamW, small batch", sequences=128),
    Variant("LAMB, large batch", noise("Lamb", 0.04), "AdamW, small batch", sequences=128),
]
STUDIES = {"formats": FORMATS, "batches": BATCHES}


def merged(base, patch):
    """`base` with the keys of `patch`; an optimizer is replaced as a whole."""
    result = dict(base)
    for key, value in patch.items():
        whole = key == "optimizer" or not isinstance(value, dict) or not isinstance(result.get(key), dict)
        result[key] = value if whole else merged(result[key], value)
    return result


def configuration(variant, steps):
    """The configuration file of a run of `steps` steps of SEQUENCES sequences, or as many sequences in other steps; a tenth of them is
    warm-up."""
    base = json.loads((ROOT / "scripts/quickstart.json").read_text(encoding="utf-8"))
    made = merged(base, variant.patch)
    made["train_micro_batch_size_per_gpu"] = variant.micro_batch
    made["gradient_accumulation_steps"] = variant.sequences // (variant.micro_batch * variant.ranks)
    made["scheduler"]["params"]["warmup_num_steps"] = steps_of(variant, steps) // 10
    return made


def steps_of(variant, steps):
    return steps * SEQUENCES // variant.sequences


def slug(name):
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


class Study:
    """The runs of a study in a folder."""

    def __init__(self, options):
        self.options = options
        self.folder = pathlib.Path(options.folder)
        variants = STUDIES[options.study]
        names = [variant.name for variant in variants]
        chosen = [name.strip() for name in options.only.split(";")] if options.only else names
        unknown = [name for name in chosen if name not in names]
        if unknown:
            stop(2, f"no variant {unknown[0]!r} in {options.study}; there are: {'; '.join(names)}")
        self.variants = [variant for variant in variants if variant.name in chosen]
        self.seeds = [int(seed) for seed in options.seeds.split(",")]

    def path(self, variant, seed, ending):
        return self.folder / f"{self.options.study}-{slug(variant.name)}-{seed}.{ending}"

    def arguments(self, variant, seed):
        return ["train", "--model", "gpt-mini", "--sequence", str(BYTES), "--validation-fraction", "0.01", "--eval-batches",
                "0", "--threads", "1", "--steps", str(steps_of(variant, self.options.steps)), "--seed", str(seed)]

    def key(self, variant, seed):
        """The key of a run; runs with equal keys are the same run."""
        text = hashlib.sha256(pathlib.Path(self.options.text).read_bytes()).hexdigest()
        return {"arguments": self.arguments(variant, seed), "ranks": variant.ranks, "text": text,
                "configuration": configuration(variant, self.options.steps)}

    def check(self):
        """Ends the study if the program refuses a configuration."""
        for variant in self.variants:
            file = self.folder / f"check-{os.getpid()}.json"
            file.write_text(json.dumps(configuration(variant, self.options.steps)), encoding="utf-8")
            done = subprocess.run([self.options.program, "config", "check", str(file)], capture_output=True, text=True,
                                  check=False)
            file.unlink()
            if done.returncode != 0:
                stop(1, f"the program refuses {variant.name!r}: {(done.stderr or done.stdout).strip()}")

    def run(self, variant, seed):
        """Returns the report of a run, which is made unless it exists."""
        report, made_by = self.path(variant, seed, "report.json"), self.path(variant, seed, "run.json")
        key = self.key(variant, seed)
        if report.exists() and made_by.exists():
            if json.loads(made_by.read_text(encoding="utf-8")) != key:
                stop(2, f"{report} is of another configuration, text or number of steps; take another folder, or remove it")
            return json.loads(report.read_text(encoding="utf-8"))
        config, log = self.path(variant, seed, "config.json"), self.path(variant, seed, "log")
        config.write_text(json.dumps(key["configuration"], indent=2), encoding="utf-8")
        made_by.write_text(json.dumps(key, indent=2), encoding="utf-8")
        command = shlex.split(self.options.prefix)
        if variant.ranks > 1:
            command += [str(ROOT / "scripts/run_mpi.sh"), str(variant.ranks)]
        command += [self.options.program, *self.arguments(variant, seed), "--data", self.options.text, "--config", str(config),
                    "--report", str(report)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANCHE_MPI_TIMEOUT": "7200"}
        with open(log, "w", encoding="utf-8") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode
        if status != 0:
            stop(1, f"{variant.name}, seed {seed}: status {status}; see {log}")
        return json.loads(report.read_text(encoding="utf-8"))

    def results(self):
        rows = {variant.name: {} for variant in self.variants}
        for seed in self.seeds:
            for variant in self.variants:
                report = self.run(variant, seed)
                rows[variant.name][seed] = figures(report)
                print(f"{variant.name}, seed {seed}: {report['validation_loss']:.4f}", flush=True)
        return rows


def mean_noise(steps):
    """The noise scale over the steps: the mean of variances divided by the mean of squares; None unless that is above 0."""
    measured = [step for step in steps if step.get("gradient_variance") is not None]
    squares = sum(step["gradient_squares"] for step in measured)
    return sum(step["gradient_variance"] for step in measured) / squares if squares > 0 else None


def figures(report):
    """The figures of a report that are compared: the held-out loss, and means over tenths of the run."""
    steps = report["steps"]
    cuts = [round(len(steps) * i / 10) for i in range(11)]
    tenths = [steps[begin:end] for begin, end in zip(cuts, cuts[1:])]
    return {"validation_loss": report["validation_loss"], "digest": report["weights_digest"],
            "skipped": sum(not step["applied"] for step in steps),
            "losses": [statistics.mean(step["loss"] for step in part) for part in tenths if part],
            "noise": [mean_noise(part) for part in tenths if part]}


def compared(variants, rows, seeds):
    """Lines of the table: losses by seed, their mean, and the mean of the differences by seed."""
    lines = []
    for variant in variants:
        losses = [rows[variant.name][seed]["validation_loss"] for seed in seeds]
        line = {"name": variant.name, "losses": losses, "mean": statistics.mean(losses), "beside": variant.beside,
                "most": variant.most if math.isfinite(variant.most) else None}
        if variant.beside in rows:
            others = [rows[variant.beside][seed]["validation_loss"] for seed in seeds]
            line["differences"] = [100 * (own / other - 1) for own, other in zip(losses, others)]
            line["difference"] = statistics.mean(line["differences"])
            line["met"] = None if line["most"] is None else line["difference"] <= line["most"]
        lines.append(line)
    return lines


def markdown(lines, seeds):
    text = "| variant | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | beside | by seed | mean | goal |\n"
    text += "|---" * (len(seeds) + 6) + "|\n"
    for line in lines:
        cells = [line["name"], *(f"{loss:.4f}" for loss in line["losses"]), f"{line['mean']:.4f}"]
        if "difference" in line:
            cells += [line["beside"], ", ".join(f"{difference:+.2f}" for difference in line["differences"]) + " %",
                      f"{line['difference']:+.2f} %"]
            goal = line["most"]
            cells.append("-" if goal is None else f"at most {goal:+.1f} %: {'met' if line['met'] else '**missed**'}")
        else:
            cells += ["-"] * 4
        text += "| " + " | ".join(cells) + " |\n"
    return text


def chart(title, y_label, key, lines, rows, seed, sequences):
    """A chart of one figure over the tenths of every variant's run, each at the middle of its tenth; None without figures."""
    series = []
    for line in lines:
        values = rows[line["name"]][seed][key]
        points = [((i + 0.5) * sequences / len(values), value) for i, value in enumerate(values) if value is not None]
        if points:
            series.append({"name": line["name"], "x": [x for x, _ in points], "y": [y for _, y in points]})
    if not series:
        return None
    return {"title": title, "subtitle": f"gpt-mini on the quickstart's text, seed {seed}; means of a tenth of the run",
            "x_label": "sequences of 128 bytes", "y_label": y_label, "series": series}


def stop(status, text):
    print(f"learning: {text}", file=sys.stderr)
    sys.exit(status)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("text")
    parser.add_argument("folder")
    parser.add_argument("--study", choices=STUDIES, default="formats")
    parser.add_argument("--steps", type=int, default=400, help="of 32 sequences; a variant with other batches takes as many sequences")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", default="", help="names of variants, separated by semicolons")
    parser.add_argument("--prefix", default="", help="command in front of every run, such as nice")
    options = parser.parse_args()
    study = Study(options)
    study.folder.mkdir(parents=True, exist_ok=True)
    study.check()
    rows = study.results()
    lines = compared(study.variants, rows, study.seeds)
    made = {"study": options.study, "steps": options.steps, "seeds": study.seeds, "lines": lines, "runs": rows}
    (study.folder / f"{options.study}.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    sequences = options.steps * SEQUENCES
    for name, drawn in (("loss", chart("Training loss", "nats a byte", "losses", lines, rows, study.seeds[0], sequences)),
                        ("noise", chart("Gradient noise scale", "sequences", "noise", lines, rows, study.seeds[0], sequences))):
        if drawn is not None:
            (study.folder / f"{options.study}-{name}.json").write_text(json.dumps(drawn, indent=1), encoding="utf-8")
    table = markdown(lines, study.seeds)
    (study.folder / f"{options.study}.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
