#!/usr/bin/env python3
"""Kills training runs while they save, again and again, and proves that nothing is lost and nothing torn is loaded.

usage: kill_test.py PROGRAM [--kills 1000] [--seed N] [--ranks 1,2,3] [--nvme] [--rivals SHARE] [--folder DIR] [--limit SECONDS] [--verbose]

PROGRAM is build/release/bin/tranche. A tiny model is trained with a save after every step, always by the same command
line with --resume latest, and SIGKILL ends one rank, or mpirun, at a time drawn over start-up, loading, training and saving. After each
kill the next start must
  - begin from a complete checkpoint, at least as new as the newest that was reported complete before,
  - with the digests of weights and optimizer state that a run which was never killed has after that step.
Stages are drawn anew at each start; the number of ranks for each folder (another number rounds otherwise).
--nvme keeps optimizer state in a swap file, and in stage 3 the weights too in half of the starts; SIGKILL then waits for
a save to be under way. In addition each rank that lives must hold one swap file of its own without a name, and none may
have a name once the next start has loaded: nothing of a dead run can be mistaken for state.
In a share of the starts (--rivals, 0.3) a second run is started on the same folder, in half of them at the same moment, else while the
first trains: exactly one of the two must be refused, with status 4 and the other's process named, and the one that goes on must not notice.
--limit ends early, after the kill under way. TRANCHE_TEST_PART=k/n takes a share of the kills, and the numbers of ranks from the k-th on.
Exit status: 0 all well, 1 a check failed (the folder stays), 2 usage.
"""
import argparse
import collections
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
from sweep_part import current, part_of_count  # noqa: E402

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
TEXT = b"the cat sat on a mat and saw seven rats\n" * 100
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_inner": 61, "vocab_size": 257, "n_positions": 16}
START_LIMIT = 300  # seconds after which a start counts as hung; a correct run never takes so long, however busy the machine
RESUMED = re.compile(r"resumed +(\S+): step (\d+),")
WEIGHTS = re.compile(r"^ +weights +([0-9a-f]{32})$", re.M)
STATE = re.compile(r"^ +weights and moments +([0-9a-f]{32})$", re.M)
COMPLETE = re.compile(r"checkpoint \S*step-(\d+) is complete")
REFUSED = re.compile(r"is in use by (another )?process")
ENDED = re.compile(r"^trained \d+ steps, to step \d+", re.MULTILINE)
HEADER = re.compile(r"^ +data  ", re.M)  # the last line before the checkpoint is looked for
STARTED = re.compile(r"^step +\d+/|nothing to train|no checkpoint in|weights and moments", re.M)


ALONE_LIMIT = 2  # seconds that a rank may outlive its mpirun
SAVE_LIMIT = 60  # seconds after which --nvme waits no longer for swap files and for a save to begin


class Failed(Exception):
    pass


def flags(folder, steps, stage):
    return ["train", "--model", os.path.join(folder, "config.json"), "--data", os.path.join(folder, "text.txt"),
            "--sequence", "8", "--steps", str(steps), "--stage", str(stage), "--threads", "1", "--log-every", "1",
            "--eval-batches", "1", "--debug-peak-seconds", "0.01", "--set", "tranche.reduction=micro_batch", "--set", "tranche.workspace=8MiB",
            "--set", "tranche.communication_slab=1MiB"]


def command(program, ranks, arguments):
    launcher = [os.path.join(ROOT, "scripts", "run_mpi.sh"), str(ranks)] if ranks > 1 else []
    return launcher + [program] + arguments


def reference(program, folder, ranks, steps):
    """{step: (weights, state)} of an undisturbed run."""
    report = os.path.join(folder, f"reference-{ranks}.json")
    done = subprocess.run(command(program, ranks, flags(folder, steps, 0) + ["--digest-every", "1", "--report", report]),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise Failed(f"the reference run of {ranks} ranks ended with {done.returncode}:\n{done.stdout.decode(errors='replace')}")
    with open(report, encoding="utf-8") as file:
        return {step["step"]: (step["weights_digest"], step["state_digest"]) for step in json.load(file)["steps"]}


def processes(job, name):
    """Process ids of the program among the processes of `job`, which are all in one session."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                stat = file.read()
        except OSError:
            continue
        fields = stat[stat.rindex(")") + 2:].split()
        own = stat[stat.index("(") + 1:stat.rindex(")")]
        if own == name[:15] and fields[0] != "Z" and int(fields[3]) == job:  # 4th after the name: session
            found.append(int(entry))
    return sorted(found)


def swap_files(process, folder):
    """Swap files that a process has open, as (has a name, device and inode); None if the process has ended."""
    found = set()
    try:
        for entry in os.listdir(f"/proc/{process}/fd"):
            descriptor = f"/proc/{process}/fd/{entry}"
            try:
                if os.readlink(descriptor).startswith(folder + os.sep):
                    state = os.stat(descriptor)
                    found.add((state.st_nlink > 0, state.st_dev, state.st_ino))
            except OSError:
                continue
    except OSError:
        return None
    return found


def saving(folder):
    """True while a save is in progress."""
    return os.path.isdir(folder) and any(name.endswith(".tmp") for name in os.listdir(folder))


def what_was_hit(folder):
    """The part of a save in which the kill happened, derived from the files that it left."""
    while True:
        try:
            return what_is_there(folder)
        except FileNotFoundError:
            pass  # a rank that still lives has renamed the folder in between


def what_is_there(folder):
    """One look at the files; raises FileNotFoundError if a folder is renamed during it."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if any(".removed-" in name for name in names):
        return "while an old checkpoint was removed"
    if any(name.endswith(".old") for name in names):
        return "while a checkpoint was replaced"
    for name in names:
        if not name.endswith(".tmp"):
            continue
        try:
            inside = os.listdir(os.path.join(folder, name))
        except NotADirectoryError:
            inside = []
        shards = [entry for entry in inside if entry.startswith("shard-")]
        if "manifest.json" in inside:
            return "manifest there, folder not yet renamed"
        if any(entry.startswith("manifest.json") for entry in inside):
            return "while the manifest was written"
        if "model.h5" in inside:
            return "between model.h5 and the manifest"
        if not shards:
            return "before the first shard"
        world = int(shards[0].split("-of-")[1].split(".")[0])
        return "all shards begun, nothing committed" if len(shards) == world else "shards under way"
    steps = sorted(name for name in names if re.fullmatch(r"step-\d+", name))
    if not steps:
        return "before any save"
    try:
        with open(os.path.join(folder, "latest"), encoding="utf-8") as file:
            if file.read().split()[0] != steps[-1]:
                return "renamed, `latest` not yet replaced"
    except (OSError, IndexError):
        return "renamed, `latest` not yet there"
    return "between two saves"


class Campaign:
    """A folder of checkpoints, from empty to the last step."""

    def __init__(self, options, draw, folder, ranks, digests, number, looks):
        self.options, self.draw, self.folder, self.ranks, self.digests = options, draw, folder, ranks, digests
        self.checkpoints = os.path.join(folder, f"checkpoints-{number}")
        self.out = os.path.join(folder, "out.txt")
        self.looks = looks
        self.swap = os.path.join(folder, "swap")
        os.makedirs(self.swap, exist_ok=True)
        self.sure = 0  # newest step that was reported complete
        self.ended = False

    def text(self):
        with open(self.out, encoding="utf-8", errors="replace") as file:
            return file.read()

    def fail(self, what):
        raise Failed(f"{what}\n  {' '.join(self.line)}\n  its output:\n    " + "\n    ".join(self.text().split("\n")[-25:]))

    def check(self, text):
        """Checks the output of a start about the checkpoint that it resumed."""
        resumed, weights, state = RESUMED.search(text), WEIGHTS.search(text), STATE.search(text)
        if not resumed:
            if "no checkpoint in" in text:
                if self.sure > 0:
                    self.fail(f"step {self.sure} was complete, but the run started from the beginning")
                return 0
            return None
        if not state:
            return None
        step = int(resumed.group(2))
        if step < self.sure:
            self.fail(f"resumed step {step}, but step {self.sure} was reported complete")
        if (weights.group(1), state.group(1)) != self.digests[step]:
            self.fail(f"resumed step {step} with weights {weights.group(1)}, state {state.group(1)}; a run that was never "
                      f"killed has {self.digests[step]}")
        return step

    def tiers(self, stage):
        if not self.options.nvme:
            return []
        weights = ["--offload-param", "nvme"] if stage == 3 and self.draw.random() < 0.5 else []
        state = ["--host-state", self.draw.choice(["0", "0", "64KiB", "auto"])]
        return ["--offload-optimizer", "nvme", "--nvme-path", self.swap] + state + weights

    def check_swap(self, job, name):
        """Checks the swap files of a run that has begun: one file per rank, which no other process can find or open. A run may end before
        the check; that must stay the exception."""
        begin, held, named = time.time(), [], []
        while job.poll() is None:
            held = [swap_files(process, self.swap) for process in processes(job.pid, name)]
            held = [files for files in held if files is not None]
            named = os.listdir(self.swap) if os.path.isdir(self.swap) else []
            if (len(held) == self.ranks and all(len(files) == 1 for files in held) and len(set().union(*held)) == self.ranks and
                    not any(has_name for files in held for has_name, _, _ in files) and not any("swap" in entry for entry in named)):
                self.looks["proper"] += 1
                return
            if time.time() - begin > SAVE_LIMIT and job.poll() is None:
                self.fail(f"each of {self.ranks} ranks holds one swap file of its own without a name, not {held}; names: {named}")
            time.sleep(0.004)
        self.looks["never proper"] += 1
        if self.looks["never proper"] > 3 + self.looks["proper"]:
            self.fail(f"{self.looks['never proper']} runs ended before each of their ranks was seen to hold one swap file of its own without a name, "
                      f"{self.looks['proper']} were seen so; the last look found {held}; names: {named}")

    def start(self, out):
        return subprocess.Popen(self.line, stdout=out, stderr=out, start_new_session=True,
                                env=dict(os.environ, TRANCHE_MPI_TIMEOUT=str(START_LIMIT + 60)))

    def rival_text(self):
        with open(self.out + ".rival", encoding="utf-8", errors="replace") as file:
            return file.read()

    def race(self, job, rival):
        """Returns which of two runs, started at the same moment, got the folder, with its output in self.out."""
        begin = time.time()
        while job.poll() is None and rival.poll() is None:
            if time.time() - begin > START_LIMIT:
                self.fail("two runs share a folder:\n" + self.rival_text())
            time.sleep(0.004)
        first_ended = job.poll() is not None
        loser, winner = (job, rival) if first_ended else (rival, job)
        text = self.text() if first_ended else self.rival_text()
        # A run that has reached the last step may end before the other one looks.
        if loser.returncode != 0 and not (loser.returncode == 4 and REFUSED.search(text)):
            self.fail(f"the second of two runs ended with status {loser.returncode}:\n{text}")
        self.looks["rivals refused"] += loser.returncode == 4
        if first_ended:
            os.replace(self.out + ".rival", self.out)
        return winner

    def refuse_second(self, job, rival):
        """Checks that a second run is refused while `job` trains."""
        try:
            status = rival.wait(timeout=START_LIMIT)
        except subprocess.TimeoutExpired:
            self.fail("a second run was not refused:\n" + self.rival_text())
        if job.poll() is not None and status == 0:
            return  # it started after the first run had released the folder
        if status != 4 or not REFUSED.search(self.rival_text()):
            self.fail(f"a second run ended with status {status}:\n{self.rival_text()}")
        self.looks["rivals refused"] += 1

    def life(self):
        """One start with its kill and checks. Returns (part of the save that was hit, resumed step)."""
        stage = self.draw.randrange(4)
        self.line = command(self.options.program, self.ranks, flags(self.folder, len(self.digests), stage) +
                            ["--checkpoint-dir", self.checkpoints, "--save-every", "1", "--keep-last", "3", "--resume", "latest"] +
                            self.tiers(stage))
        name = os.path.basename(self.options.program)
        moment = self.draw.random()
        starting, loading = moment < 0.06, 0.06 <= moment < 0.16
        early = starting or loading
        delay = self.draw.uniform(0, 0.6 if starting else 0.04 if loading else 0.35)
        whole = self.ranks > 1 and self.draw.random() < 0.25
        rivalry = self.draw.random() / self.options.rivals if self.options.rivals > 0 else 1
        jobs = []
        with open(self.out, "wb") as out, open(self.out + ".rival", "wb") as rival_out:
            jobs.append(self.start(out))
            if rivalry < 0.5:
                jobs.append(self.start(rival_out))
        try:
            job = jobs[0] if len(jobs) == 1 else self.race(*jobs)
            resumed = None
            begin = time.time()
            while not starting and job.poll() is None:
                text = self.text()
                if loading and HEADER.search(text):
                    break
                resumed = self.check(text)
                if resumed is not None and STARTED.search(text):
                    break
                if time.time() - begin > START_LIMIT:
                    self.fail("the run did not start")
                time.sleep(0.004)
            if self.options.nvme and resumed is not None:
                self.check_swap(job, name)
            if 0.5 <= rivalry < 1 and resumed is not None:
                with open(self.out + ".rival", "wb") as rival_out:
                    jobs.append(self.start(rival_out))
                self.refuse_second(job, jobs[-1])
            time.sleep(delay)
            begin = time.time()
            while self.options.nvme and not early and not saving(self.checkpoints) and job.poll() is None:
                if time.time() - begin > SAVE_LIMIT:
                    self.fail("no save begins")
            victims = [job.pid] if whole or self.ranks == 1 else processes(job.pid, name) or [job.pid]
            victim = self.draw.choice(victims)
            over = job.poll() is not None
            if not over:
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    over = True
            hit = what_was_hit(self.checkpoints)
            status = job.wait(timeout=START_LIMIT)
            # Ranks whose mpirun was killed end by themselves; until then they hold the folder.
            begin = time.time()
            while processes(job.pid, name):
                if time.time() - begin > START_LIMIT:
                    self.fail("ranks live on without mpirun")
                time.sleep(0.02)
            alone = time.time() - begin
            self.looks["longest alone, ms"] = max(self.looks["longest alone, ms"], round(alone * 1000))
            self.looks["alone too long"] += alone > ALONE_LIMIT
        finally:
            for started in jobs:
                for left in processes(started.pid, name) + [started.pid]:  # they have a session of their own, so only the processes of this job are killed
                    try:
                        os.kill(left, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                started.wait()
        text = self.text()
        if resumed is None:
            resumed = self.check(text)
        if resumed is None:
            hit = "while loading" if HEADER.search(text) else "while starting"
        self.sure = max([self.sure] + [int(step) for step in COMPLETE.findall(text)])
        # The kill may also hit a rank that has just ended and for which mpirun has not yet waited.
        if status == 0 and (over or ENDED.search(text)):
            self.ended = True
        elif status == 0 or "tranche: " in text and "complete checkpoint" in text:
            self.fail(f"ended with status {status} of its own accord")
        return hit, resumed, over


def run(options):
    draw = random.Random(options.seed)
    folder = options.folder or tempfile.mkdtemp(prefix="tranche-kill-")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "text.txt"), "wb") as file:
        file.write(TEXT)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(MODEL, file)
    print(f"seed {options.seed}; folder {folder}", flush=True)
    steps = max(60, min(400, 12 * options.kills))
    digests = {}
    looks = collections.Counter()  # --nvme: runs whose swap files were correct ("proper"), and those whose were never seen
    hits, kills, lives, number, campaign = collections.Counter(), 0, 0, 0, None
    begin = last = time.time()
    newest = 0
    try:
        while kills < options.kills and not (options.limit and time.time() - begin > options.limit):
            if campaign is None or campaign.ended:
                if campaign is not None:
                    shutil.rmtree(campaign.checkpoints, ignore_errors=True)
                ranks, number = options.ranks[number % len(options.ranks)], number + 1
                if ranks not in digests:
                    digests[ranks] = reference(options.program, folder, ranks, steps)
                campaign = Campaign(options, draw, folder, ranks, digests[ranks], number, looks)
            hit, resumed, over = campaign.life()
            lives += 1
            newest = max(newest, campaign.sure)
            if not over:
                kills += 1
                hits[hit] += 1
            # The folder changes from time to time, so that all numbers of ranks are used.
            if campaign.sure > 0 and draw.random() < 0.02 * len(options.ranks):
                campaign.ended = True
            if options.verbose:
                print(f"kill {kills}: {campaign.ranks} ranks, resumed step {resumed}, {hit}", flush=True)
            elif time.time() - last > 10:
                last = time.time()
                rate = kills / (last - begin)
                left = (options.kills - kills) / rate if rate > 0 else float("inf")
                print(f"{kills} of {options.kills} kills, {rate:.2f} a second, {left / 60:.0f} min to go", flush=True)
    except (Failed, subprocess.TimeoutExpired) as failure:
        print(f"FAILED at kill {kills + 1}, start {lives + 1}: {failure}\n"
              f"  reproduce with --seed {options.seed}; left as it was: {folder}", flush=True)
        return 1
    print(f"{kills} kills in {time.time() - begin:.0f} s, {lives} starts: every resume began from a complete checkpoint with "
          "the digests of a run that was never killed")
    for hit, count in hits.most_common():
        print(f"  {count:5d}  {hit}")
    print(f"  {looks['rivals refused']:5d}  second runs on the same folder, each refused")
    print(f"  {looks['alone too long']:5d}  runs with ranks later than {ALONE_LIMIT} s after mpirun; the latest {looks['longest alone, ms']} ms")
    if not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[2, 3, 1])
    parser.add_argument("--nvme", action="store_true")
    parser.add_argument("--rivals", type=float, default=0.3)
    parser.add_argument("--folder", default="")
    parser.add_argument("--limit", type=float, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    options.program = os.path.abspath(options.program)
    options.kills = part_of_count(options.kills, "kills")
    first = current()[0] % len(options.ranks)
    options.ranks = options.ranks[first:] + options.ranks[:first]
    if not os.access(options.program, os.X_OK):
        print(f"kill_test.py: {options.program} is no program", file=sys.stderr)
        return 2
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
