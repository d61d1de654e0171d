#!/usr/bin/env python3
"""summary.py RESULTS.json: the table for people of what run.sh found, as Markdown. Also what a figure is compared with.

A record is {part, item, status, command} and, where there is one, {figure, unit, target, met, detail, seconds}. status is
passed, failed, skipped, measured, faulted or hung (a case that ended its program), 'not run' (no time was left) or
'not finished' (stopped at its time).
"""
import json
import re
import sys

# Figures and their targets on one H100 or H200 (docs/results/gpu-targets.md has their sources): (pattern of "program/benchmark", counter,
# target, lowest or highest). The first matching line counts. Fractions refer to the same run: of_copy to the bandwidth of a device copy,
# of_peak to the rate of large bf16 GEMMs.
TARGETS = [
    (r"attention_forward.*/head:64/.*time:1024\b", "of_peak", 0.28, "lowest"),
    (r"attention_forward.*/head:64/.*time:4096\b", "of_peak", 0.35, "lowest"),
    (r"attention_forward.*/head:128/.*time:1024\b", "of_peak", 0.35, "lowest"),
    (r"attention_forward.*/head:128/.*time:4096\b", "of_peak", 0.42, "lowest"),
    (r"attention_backward", "of_forward", 0.8, "lowest"),
    (r"/adamw(_bf16_moments)?/", "of_copy", 0.92, "lowest"),
    (r"", "of_copy", 0.85, "lowest"),
    (r"training (gpt2-xl|qwen2.5-1.5b)", "of_peak", 0.55, "lowest"),
    (r"training gpt2-xl", "tokens_per_second", 46800, "lowest"),  # llm.c's on one of eight H100
    (r"training qwen2.5-1.5b", "tokens_per_second", 59000, "lowest"),  # LLMQ's on one H100
    (r"agreement .*, (state|pipeline=).*losses", "relative", 0.0, "highest"),  # the same bits
    (r"agreement .*losses", "relative", 1e-5, "highest"),
    (r"SGD.*gradients?", "relative", 1e-5, "highest"),
    (r"SGD.*weights", "relative", 1e-5, "highest"),
    (r"AdamW.*weights", "relative", 1e-4, "highest"),
]
ORDER = ["faulted", "hung", "failed", "not finished", "not run", "measured", "passed", "skipped"]


def judge(item, unit, figure):
    """Returns (target, met); (None, None) for a figure without a target."""
    for pattern, counter, target, kind in TARGETS:
        if counter == unit and re.search(pattern, item, re.IGNORECASE):
            if target is None:
                return None, None
            return target, bool(figure >= target if kind == "lowest" else figure <= target)
    return None, None


def measured(part, item, unit, figure, **more):
    target, met = judge(item, unit, figure)
    return {"part": part, "item": item, "status": "measured", "figure": figure, "unit": unit,
            "target": target, "met": met, **more}


def number(value):
    if value is None:
        return ""
    if isinstance(value, str) or isinstance(value, int):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ").strip()


def table(titles, rows):
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return lines + ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]


def markdown(results):
    records, machine = results["records"], results["machine"]
    count = {status: sum(record["status"] == status for record in records) for status in ORDER}
    missed = [record for record in records if record.get("met") is False]
    lines = ["# Results", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items() if value]
    lines += ["", ", ".join(f"{count[status]} {status}" for status in ORDER if count[status]) +
              (f"; {len(missed)} figures miss their target" if missed else "") + f"; {results['seconds']:.0f} s", ""]
    calls = results.get("calls", [])
    if len(calls) > 1:
        lines += [f"Merged from {len(calls)} calls: " + "; ".join(f"{call['when']}, {call['seconds']:.0f} s" for call in calls), ""]
    if not machine.get("GPU"):
        lines += ["No GPU was there: nothing below says anything about one.", ""]
    elif results.get("emulated"):
        lines += ["The GPU was emulated on the CPU: results count, times do not.", ""]
    figures = [record for record in records if record["status"] == "measured"]
    if figures:
        rows = [(record["item"], number(record["figure"]), record["unit"], number(record["target"]),
                 {True: "yes", False: "NO", None: ""}[record["met"]], f"`{record['command']}`", record.get("card", ""))
                for record in figures]
        lines += ["## Figures", ""]
        lines += table(["item", "figure", "unit", "target", "met", "command", "GPU, its clocks, power and temperature"], rows) + [""]
    tests = [record for record in records if record["status"] != "measured"]
    if tests:
        rows = [(record["part"], record["item"], record["status"], record.get("detail", ""),
                 number(record.get("seconds")), f"`{record['command']}`" if record.get("command") else "")
                for record in sorted(tests, key=lambda record: ORDER.index(record["status"]))]
        lines += ["## Tests and runs", ""]
        lines += table(["part", "item", "result", "detail", "s", "command"], rows) + [""]
    return "\n".join(lines)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__.split("\n", 1)[0])
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write(markdown(json.load(file)))


if __name__ == "__main__":
    main()
