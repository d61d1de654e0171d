#!/usr/bin/env python3
"""memory_profile_test.py PROGRAM: `tranche train --memory-profile` on two ranks. Its files must agree with their documentation, and bits
and peaks must be those of a run without a profile."""

import csv
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

PROGRAM = sys.argv[1]
RUN_MPI = str(pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "run_mpi.sh")
FOLDER = tempfile.TemporaryDirectory(prefix="tranche-profile-")
HERE = pathlib.Path(FOLDER.name)
CATEGORIES = ["parameters", "gathered", "gradients", "optimizer", "activations", "communication", "workspace", "other"]


def train(more, ranks=2, status=0):
    text = HERE / "text.txt"
    text.write_bytes(b"the cat sat on a mat and saw seven rats\n" * 200)
    command = [RUN_MPI, str(ranks), PROGRAM, "train", "--model", "gpt-nano", "--data", str(text), "--sequence", "16",
               "--steps", "4", "--accumulate", "2", "--stage", "3", "--threads", "1", "--eval-batches", "1",
               "--set", "tranche.workspace=8MiB", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False,
                          env=dict(os.environ, TRANCHE_MPI_TIMEOUT="55"))
    assert done.returncode == status, f"status {done.returncode}: {' '.join(command)}\n{done.stdout}{done.stderr}"
    return done


def texts_of(svg):
    """The words of a plot, which is XML."""
    return " | ".join(element.text or "" for element in xml.etree.ElementTree.parse(svg).iter()
                      if element.tag.endswith("}text") or element.tag.endswith("}title"))


def expect_in(words, text, where):
    for word in words:
        assert word in text, f"{where} has no '{word}':\n{text}"


def check_rank(folder, peak):
    expect_in(["of 2: step 4", "phase", "forward", "backward", "unit", "activations", "optimizer", "milliseconds", "bytes held",
               "MiB", "most in use"], texts_of(folder / "step_device.svg"), "the plot of a step")
    expect_in(["the whole run", "start"], texts_of(folder / "run_device.svg"), "the plot of the run")

    with open(folder / "timeline.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["seconds", "step", "phase", "unit", "tier", "category", "event", "change_bytes", "category_bytes",
                             "tier_bytes", "free_bytes", "tag"], list(rows[0])
    assert max(int(row["tier_bytes"]) for row in rows if row["tier"] == "device") <= peak
    units = {row["unit"] for row in rows if row["phase"] == "backward"}
    assert {"embedding", "h.0", "h.1"} <= units, units

    timeline = json.loads((folder / "timeline.json").read_text(encoding="utf-8"))
    assert timeline["events"] == len(timeline["rows"]) and timeline["dropped"] == 0
    assert {"forward", "backward", "reduce", "step"} <= set(timeline["by_phase"]), timeline["by_phase"].keys()
    live = json.loads((folder / "peak.json").read_text(encoding="utf-8"))["tiers"]["device"]
    assert sum(item["bytes"] * item["count"] for item in live["live"]) == live["peak_bytes"] <= peak

    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    counters = {name for event in trace if event["ph"] == "C" and event["name"] == "device memory" for name in event["args"]}
    assert set(CATEGORIES) <= counters, counters
    tracks = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    spans = {f"{tracks[event['tid']]}: {event['name']}" for event in trace if event["ph"] == "X"}
    for wanted in ("compute: matmul", "communication: all_gather", "communication: reduce_scatter", "phase: step",
                   "unit at work: h.1", "step: step 2"):
        assert any(span.startswith(wanted) for span in spans), f"no span '{wanted}' among {sorted(spans)[:40]}"


def main():
    profile = HERE / "profile"
    plain = train(["--report", str(HERE / "plain.json")])
    done = train(["--report", str(HERE / "profiled.json"), "--memory-profile", str(profile)])
    reports = [json.loads((HERE / name).read_text(encoding="utf-8")) for name in ("plain.json", "profiled.json")]
    for key in ("weights_digest", "state_digest", "validation_loss", "memory", "traffic"):
        assert reports[0][key] == reports[1][key], f"{key} differs: {reports[0][key]} and {reports[1][key]}"
    expect_in(["\nmemory of rank 0: device peak ", "\n  optimizer "], plain.stdout, "the table without a profile")
    assert "memory: " not in plain.stdout and "memory of rank 0" not in done.stdout, "memory is printed once"
    expect_in(["\nmemory: predicted = measured on all 2 ranks; device peak ", "at the peak of rank 0", "predicted", "measured", "difference",
               "device  optimizer", "device  total", "process unaccounted", str(profile)], done.stdout, "the table")
    whole = (profile / "summary.txt").read_text(encoding="utf-8")
    expect_in(["unaccounted = ", "before the engine"], whole, "the file")
    assert "before the engine" not in done.stdout
    peak = reports[1]["memory"]["device"]["peak_bytes"]
    for rank in range(2):
        check_rank(profile / f"rank{rank}", peak)
    ranks = json.loads((profile / "summary.json").read_text(encoding="utf-8"))["ranks"]
    assert max(rank["measured"]["device"]["peak_bytes"] for rank in ranks) == peak
    for rank in ranks:
        assert rank["predicted"] == rank["measured"], rank
        process = rank["process"]
        assert process["booked"] + process["unaccounted"] == process["rss_anon"] > 0, process
        assert process["before_the_engine"] + process["profile"] + process["since"] == process["unaccounted"], process
    expect_in(["by category and rank", "communication", "all 2 ranks"], texts_of(profile / "ranks_device.svg"), "the bars")
    assert not (profile / "predicted_device.svg").exists(), "bars that are equal two by two"

    (HERE / "file").write_text("in the way")
    refused = train(["--memory-profile", str(HERE / "file")], ranks=2, status=2)
    expect_in(["the memory profile cannot be written to", "Not a directory"], refused.stderr, "the refusal")
    assert "step 1" not in refused.stdout, "told before the training"


main()
print("memory profile: passed")
