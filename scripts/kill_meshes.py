#!/usr/bin/env python3
"""Kills training runs on a mesh and starts each again on another mesh, which has to load what was saved last.

usage: kill_meshes.py PROGRAM [--mesh MESH] [--kills 50] [--equal-kills 20] [--seed N] [--folder DIR] [--verbose]

PROGRAM is build/release/bin/tranche. As in kill_test.py a tiny model is trained with a save after every step and --resume latest, and SIGKILL ends
one rank, or mpirun, at a time drawn over start-up, loading, training and saving. ZeRO stages are drawn anew at each start.
  --mesh         replicate=2,pipeline=2,shard=2 (the default), shard=2,tensor=2, or pipeline=2,shard=2,tensor=2.
  --kills        Runs on the mesh are killed. The next start is on another mesh, has other bits, and ends by itself after a step or
                 two. Both have to load the newest complete checkpoint of the folder, with the digests of weights and optimizer state that the run
                 that saved it wrote to its metrics before the save (--digest-every 1).
  --equal-kills  Runs on any of the meshes that have the bits of the mesh are killed, and the last one is let run to its end. Each has to
                 load the newest complete checkpoint with the digests that an undisturbed run has after that step; the last one ends with the
                 undisturbed run's digest.
TRANCHE_TEST_PART=k/n takes a share of the kills.
Exit status: 0 all well, 1 a check failed (the folder stays), 2 usage.
"""
import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from kill_test import (COMPLETE, HEADER, MODEL, RESUMED, START_LIMIT, STARTED, STATE, TEXT, WEIGHTS, Failed, command, flags, processes,  # noqa: E402
                       what_was_hit)
from sweep_part import part_of_count  # noqa: E402

# For each mesh that is killed: meshes with other bits, and meshes with equal bits and the settings that make them equal.
OTHERS = {
    "replicate=2,pipeline=2,shard=2": [
        "", "shard=2", "shard=3", "pipeline=2", "pipeline=3", "pipeline=4", "replicate=2,shard=1", "replicate=2,shard=2", "replicate=2,pipeline=2",
        "pipeline=2,shard=2", "shard=2,pipeline=2", "shard=2,pipeline=3", "pipeline=2,shard=3", "pipeline=2,shard=4", "pipeline=4,replicate=2"],
    "shard=2,tensor=2": [
        "", "shard=2", "shard=3", "pipeline=2", "tensor=2", "tensor=4", "shard=3,tensor=2", "tensor=2,shard=3", "replicate=2,tensor=2",
        "pipeline=2,tensor=2", "tensor=2,pipeline=3", "pipeline=2,shard=2,tensor=2", "replicate=2,shard=2", "replicate=2,tensor=3"],
    "pipeline=2,shard=2,tensor=2": [
        "", "shard=2", "shard=3", "pipeline=2", "tensor=2", "tensor=4", "context=2", "shard=2,context=2", "context=2,tensor=2", "shard=2,tensor=2",
        "pipeline=2,tensor=2", "pipeline=3,tensor=2", "pipeline=2,context=2", "replicate=2,tensor=2", "replicate=2,shard=2"],
}
# All of these have the same number of data ranks, whose gradients are added in pairs; the uses of the tied table are added separately.
EQUAL = {
    "replicate=2,pipeline=2,shard=2": ["replicate=2,pipeline=2,shard=2", "pipeline=2,replicate=2,shard=2", "replicate=2,shard=2,pipeline=2",
                                       "replicate=2,shard=2", "shard=4", "pipeline=2,shard=4"],
    "shard=2,tensor=2": ["shard=2,tensor=2", "tensor=2,shard=2", "replicate=2,tensor=2", "pipeline=2,shard=2,tensor=2"],
    "pipeline=2,shard=2,tensor=2": ["pipeline=2,shard=2,tensor=2", "tensor=2,pipeline=2,shard=2", "pipeline=2,replicate=2,tensor=2",
                                    "shard=2,tensor=2", "replicate=2,tensor=2"],
}
STEP = re.compile(r"^ *step +\d+/", re.M)
BATCH = 12  # samples of a step, on any number of data ranks: 1, 2, 3, 4 and 6
MOST_STEPS, KILL_WINDOW = 4, 0.3  # a run is killed at most this many seconds after it has begun one of so many steps


def ranks_of(mesh):
    ranks = 1
    for number in re.findall(r"=(\d+)", mesh):
        ranks *= int(number)
    return ranks


def newest_complete(folder):
    """The newest step whose checkpoint has its final name, which it gets when everything else is written; 0: none."""
    steps = [int(name[5:]) for name in os.listdir(folder) if re.fullmatch(r"step-\d+", name)] if os.path.isdir(folder) else []
    return max(steps, default=0)


class Runs:
    """A folder of checkpoints that runs on several meshes continue, one after the other."""

    def __init__(self, options, draw, folder, name):
        self.options, self.draw, self.folder = options, draw, folder
        self.checkpoints = os.path.join(folder, name)
        self.out, self.metrics, self.report = (os.path.join(folder, f"{name}.{kind}") for kind in ("txt", "jsonl", "json"))
        self.digests = {}  # digests of the run that saved a step, written before the save; or of an undisturbed run
        self.undisturbed = False
        self.sure = 0  # newest step that was reported complete
        self.line = []
        self.hits = collections.Counter()

    def text(self):
        with open(self.out, encoding="utf-8", errors="replace") as file:
            return file.read()

    def fail(self, what):
        raise Failed(f"{what}\n  {' '.join(self.line)}\n  its output:\n    " + "\n    ".join(self.text().split("\n")[-25:]))

    def take_digests(self):
        """Reads the digests that the last run wrote. A kill may have cut its last line short."""
        if not os.path.exists(self.metrics):
            return
        with open(self.metrics, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if "state_digest" not in entry:
                    continue
                step, written = entry["step"], (entry["weights_digest"], entry["state_digest"])
                if self.undisturbed and written != self.digests[step]:
                    self.fail(f"step {step} has weights and state {written}; an undisturbed run has {self.digests[step]}")
                self.digests[step] = written

    def check(self, newest):
        """Returns the step that the run loaded, 0 if it found none, None if it was killed before. `newest` was complete when the run
        started."""
        text = self.text()
        resumed, weights, state = RESUMED.search(text), WEIGHTS.search(text), STATE.search(text)
        if resumed is None and "no checkpoint in" in text:
            if newest > 0:
                self.fail(f"step {newest} was complete, but the run started from the beginning")
            return 0
        if resumed is None or state is None:
            return None
        step, loaded = int(resumed.group(2)), (weights.group(1), state.group(1))
        if step != newest:
            self.fail(f"resumed step {step}, but the newest complete checkpoint was that of step {newest}")
        if loaded != self.digests.get(step):
            self.fail(f"resumed step {step} with weights and state {loaded}; the run that saved it had {self.digests.get(step)}")
        return step

    def life(self, mesh, steps, kill, more=()):
        """Starts a run on a mesh, kills it or lets it end. Returns the step that it loaded, and whether it was killed."""
        ranks, stage = ranks_of(mesh), self.draw.randrange(4)
        if os.path.exists(self.metrics):
            os.remove(self.metrics)
        self.line = command(self.options.program, ranks, flags(self.folder, steps, stage) +
                            ["--checkpoint-dir", self.checkpoints, "--save-every", "1", "--keep-last", "3", "--resume", "latest", "--digest-every", "1",
                             "--metrics", self.metrics, "--report", self.report, "--micro-batch", "1", "--set", f"train_batch_size={BATCH}", *more] +
                            (["--mesh", mesh] if mesh else []))
        newest = newest_complete(self.checkpoints)
        if newest < self.sure:
            self.fail(f"step {self.sure} was reported complete, but the folder's newest is that of step {newest}")
        moment = self.draw.random()
        early = "starting" if moment < 0.08 else "loading" if moment < 0.25 else ""
        with open(self.out, "wb") as out:
            job = subprocess.Popen(self.line, stdout=out, stderr=out, start_new_session=True,
                                   env=dict(os.environ, TRANCHE_MPI_TIMEOUT=str(START_LIMIT + 60)))
        name = os.path.basename(self.options.program)
        begin, killed = time.time(), False
        try:
            if kill:
                if early == "starting":
                    time.sleep(self.draw.uniform(0, 1.5))
                begun = 0 if early else self.draw.randrange(MOST_STEPS)
                while early != "starting" and job.poll() is None:
                    text = self.text()
                    if HEADER.search(text) if early else STARTED.search(text) and len(STEP.findall(text)) >= begun:
                        break
                    if time.time() - begin > START_LIMIT:
                        self.fail("the run did not start")
                    time.sleep(0.01)
                time.sleep(self.draw.uniform(0, 0.1 if early else KILL_WINDOW))
                whole = ranks == 1 or self.draw.random() < 0.25
                victim = self.draw.choice([job.pid] if whole else processes(job.pid, name) or [job.pid])
                if job.poll() is None:
                    with contextlib.suppress(ProcessLookupError):  # the rank may just have ended
                        os.kill(victim, signal.SIGKILL)
                        killed = True
                self.hits[what_was_hit(self.checkpoints)] += killed
            try:
                status = job.wait(timeout=START_LIMIT)
            except subprocess.TimeoutExpired:
                self.fail("the run hangs")
            begin = time.time()
            while processes(job.pid, name):  # ranks whose mpirun was killed end by themselves
                if time.time() - begin > START_LIMIT:
                    self.fail("ranks live on without mpirun")
                time.sleep(0.02)
        finally:
            for left in processes(job.pid, name) + [job.pid]:  # they have a session of their own, so only the processes of this job are killed
                try:
                    os.kill(left, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            job.wait()
        loaded = self.check(newest)
        if not killed and (status != 0 or loaded is None):
            self.fail(f"ended with status {status} of its own accord")
        self.take_digests()
        self.sure = max([self.sure, newest] + [int(step) for step in COMPLETE.findall(self.text())])
        if self.options.verbose:
            print(f"  {mesh or 'one rank'}, ZeRO stage {stage}: loaded step {loaded}, {'killed' if killed else 'ended'}, "
                  f"newest {newest_complete(self.checkpoints)}", flush=True)
        return loaded, killed


def restarts_on_other_meshes(options, draw, folder):
    """Implements --kills. The meshes have different bits, so only the digests written before each save are known."""
    runs, kills, same, restarts, met = Runs(options, draw, folder, "other"), 0, 0, 0, set()
    while kills < options.kills:
        loaded, killed = runs.life(options.mesh, 100000, True)
        kills += killed
        same += bool(loaded)
        others = [mesh for mesh in OTHERS[options.mesh] if mesh not in met] or OTHERS[options.mesh]
        mesh = draw.choice(others)
        met.add(mesh)
        loaded, _ = runs.life(mesh, newest_complete(runs.checkpoints) + draw.randrange(1, 3), False)
        restarts += loaded > 0
    print(f"{kills} kills of {options.mesh}: {restarts} restarts on {len(met)} other meshes, and {same} on the same, loaded the newest complete checkpoint "
          "with the digests that were written before it was saved", flush=True)
    return runs.hits


def by_equal_bits(mesh):
    """Settings with which a mesh of EQUAL has the bits of the first mesh."""
    return ["--set", "tranche.tie_sum=by_use"] + (["--set", "tranche.reduction_group=2"] if "shard=4" in mesh else [])


def restarts_on_equal_meshes(options, draw, folder):
    """Implements --equal-kills: every run has the bits of an undisturbed one, from its first step to the end of the last run."""
    steps = max(60, 20 * options.equal_kills)  # far more than pass before the last kill, however late that is
    undisturbed, runs = Runs(options, draw, folder, "undisturbed"), Runs(options, draw, folder, "equal")
    undisturbed.life(options.mesh, steps, False, by_equal_bits(options.mesh))
    runs.digests, runs.undisturbed = undisturbed.digests, True
    kills, met, equal = 0, collections.Counter(), EQUAL[options.mesh]
    while kills < options.equal_kills:
        if newest_complete(runs.checkpoints) + 1 >= steps:
            runs.fail(f"{steps} steps were over after {kills} kills: raise their number")
        mesh = draw.choice([mesh for mesh in equal if met[mesh] == min(met[other] for other in equal)])
        met[mesh] += 1
        kills += runs.life(mesh, steps, True, by_equal_bits(mesh))[1]
    mesh = draw.choice(equal)
    loaded, _ = runs.life(mesh, steps, False, by_equal_bits(mesh))
    with open(runs.report, encoding="utf-8") as file:
        end = json.load(file)["state_digest"]
    with open(undisturbed.report, encoding="utf-8") as file:
        expected = json.load(file)["state_digest"]
    if end != expected:
        runs.fail(f"the run ended with state {end}; one that was never killed ends with {expected}")
    print(f"{kills} kills of runs on {sum(count > 0 for count in met.values())} meshes of equal bits: the last one, on {mesh}, went on from step {loaded} "
          f"and ended after {steps} with the undisturbed run's digest, {end}", flush=True)
    return runs.hits


def run(options):
    draw = random.Random(options.seed)
    folder = options.folder or tempfile.mkdtemp(prefix="tranche-kill-meshes-")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "text.txt"), "wb") as file:
        file.write(TEXT)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**MODEL, "n_head": 12, "n_embd": 48}, file)  # so that 2, 3 and 4 ranks of the axis tensor can share it
    print(f"seed {options.seed}; folder {folder}", flush=True)
    begin, hits = time.time(), collections.Counter()
    try:
        for kills, campaign in ((options.kills, restarts_on_other_meshes), (options.equal_kills, restarts_on_equal_meshes)):
            if kills > 0:
                hits += campaign(options, draw, folder)
    except Failed as failure:
        print(f"FAILED: {failure}\n  reproduce with --seed {options.seed}; left as it was: {folder}", flush=True)
        return 1
    print(f"{time.time() - begin:.0f} s")
    for hit, count in hits.most_common():
        print(f"  {count:5d}  {hit}")
    if not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--mesh", choices=sorted(OTHERS), default="replicate=2,pipeline=2,shard=2")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--equal-kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--folder", default="")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    options.program = os.path.abspath(options.program)
    options.kills = part_of_count(options.kills, "kills")
    options.equal_kills = part_of_count(options.equal_kills, "kills of equal bits")
    if not os.access(options.program, os.X_OK):
        print(f"kill_meshes.py: {options.program} is no program", file=sys.stderr)
        return 2
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
