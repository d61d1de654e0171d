#!/usr/bin/env python3
"""Runs the example own_trainer. A run that is killed, and one that is stopped by a signal, must continue to the same losses as an
uninterrupted one. The last two checkpoints and the best one must remain.

usage: check_own_trainer.py PROGRAM RANKS TEXT [LAUNCHER]
"""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM, RANKS, TEXT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ENDLESS = 10**9  # steps


def command(folder, steps):
    launcher = [sys.argv[4], str(RANKS)] if RANKS > 1 else []
    return launcher + [PROGRAM, TEXT, str(folder), str(steps)]


def lines(folder):
    try:
        return (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []


def ranks_of(folder):
    """Process ids of the ranks of this test's program."""
    for entry in pathlib.Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if words and words[0] == PROGRAM.encode() and str(folder).encode() in words:
            yield int(entry.name)


def signalled(folder, number, after):
    """Starts the program, which trains until it gets a signal, and sends one to its ranks (to stop it, only to the last) once `after` lines of
    figures exist."""
    process = subprocess.Popen(command(folder, ENDLESS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(lines(folder)) < after and process.poll() is None:
        time.sleep(0.002)
    ranks = sorted(ranks_of(folder))
    for rank in ranks if number == signal.SIGKILL else ranks[-1:]:
        os.kill(rank, number)
    output = process.communicate(timeout=60)[0]
    while list(ranks_of(folder)):
        time.sleep(0.01)
    return process.returncode, output


def figures(folder):
    """The pairs (step, loss or validation loss) of all lines, in order."""
    return [(line["step"], line.get("loss"), line.get("validation_loss"), line.get("set"))
            for line in map(json.loads, lines(folder))]


with tempfile.TemporaryDirectory(prefix="own-trainer-") as root:
    whole, torn = pathlib.Path(root, "whole"), pathlib.Path(root, "torn")
    status, output = signalled(torn, signal.SIGKILL, 33)
    assert status != 0, output
    killed_at = len(lines(torn))
    status, output = signalled(torn, signal.SIGTERM, killed_at + 15)
    assert status == 9, output
    stopped_at = int(re.findall(r"^step (\d+), best ", output, re.MULTILINE)[-1])  # the output before mpirun's message about status 9
    assert 20 < stopped_at < ENDLESS, output
    steps = max(300, stopped_at // 10 * 10 + 20)

    done = subprocess.run(command(whole, steps), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"step {steps}, best "), done.stdout
    expected = figures(whole)
    assert [step for step, loss, *_ in expected if loss is not None] == list(range(1, steps + 1)), expected
    validations = {step: loss for step, _, loss, name in expected if name == "text"}
    best = min(validations, key=validations.get)
    assert sorted(validations) == list(range(10, steps + 1, 10)), expected

    done = subprocess.run(command(torn, steps), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures(torn) == expected, "the losses are not those of the run that was left alone"
    for folder in (whole, torn):
        names = {name.name for name in folder.glob("step-*")}
        assert names == {f"step-{step:08}" for step in (steps - 5, steps, best)}, names
    print(f"killed after {killed_at} lines, stopped after step {stopped_at}, best {best}")
