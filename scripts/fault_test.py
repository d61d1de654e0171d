#!/usr/bin/env python3
"""Lets every call on files of a training run fail, one run for each, and proves that nothing is lost and nothing goes unsaid.

usage: fault_test.py PROGRAM LIBRARY [--ranks 1] [--nvme] [--actions NAME,...] [--count N] [--seed N] [--jobs J] [--only LINE] [--list]

PROGRAM is build/release/bin/tranche, LIBRARY build/release/tests/libtranche_file_faults.so (tests/tools/file_faults.cpp). A tiny model's
run resumes from a folder with two checkpoints, reads its data, trains a step, saves and removes the oldest. A first run records its
calls: open, read, write, sync, preallocate, rename, remove, list, space, lock and so on. Then each of them is struck, in a run of its
own on a fresh copy of the folder, by each action that fits it:
  kill, killed   SIGKILL before it, or after it: every place of a save at which a process can end
  EIO ENOSPC EACCES EMFILE EOPNOTSUPP   it fails
  ENOSPC+        it and all later ones of its kind and path fail
  EINTR          it is interrupted: the run must not notice
  short          a read or a write transfers less: the run must not notice
Afterwards
  - the run has ended by itself within a minute, with status 0, or with one that is meant for files and a text that holds the path and
    the reason; never by a signal but SIGKILL,
  - a run that ended with 0 has said that its checkpoint is complete, and all its bytes verify,
  - the next run, undisturbed, resumes from the newest checkpoint that was complete, with the digests of a run that nothing disturbed,
    and ends with its weights; and nothing but checkpoints is left.
--count draws so many of the cases, of which TRANCHE_TEST_PART=k/n takes a share. Exit status: 0 all well, 1 a check failed (with the line that repeats it), 2 usage.
"""
import argparse
import collections
import concurrent.futures
import errno
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
from sweep_part import part_of_count  # noqa: E402

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_inner": 61, "vocab_size": 257, "n_positions": 16}
LIMIT = 60  # seconds for each run
WRITING = ("create", "write", "preallocate", "make_folder", "rename")
FITTING = {
    "kill": lambda call: call != "look",
    "killed": lambda call: call not in ("look", "open", "read", "list", "space"),
    "EIO": lambda call: True,
    "ENOSPC": lambda call: call in WRITING + ("sync",),
    "ENOSPC+": lambda call: call in ("write", "preallocate"),
    "EACCES": lambda call: call in ("create", "open", "open_write", "open_folder", "make_folder", "rename", "remove", "list", "look"),
    "EMFILE": lambda call: call in ("create", "open", "open_write", "open_folder", "list"),
    "EOPNOTSUPP": lambda call: call in ("preallocate", "lock", "sync", "open_write"),
    "EINTR": lambda call: call in ("read", "write", "sync", "preallocate", "truncate"),
    "short": lambda call: call in ("read", "write"),
}
FILE_STATUSES = (2, 3, 4, 8)  # may follow a failed call: arguments, no room for a tier, checkpoints, a tier's disk
UNNOTICED = ("EINTR", "short")
RESUMED = re.compile(r"resumed +(\S+): step (\d+),")
STATE = re.compile(r"^ +weights and moments +([0-9a-f]{32})$", re.M)
WEIGHTS = re.compile(r"; weights ([0-9a-f]{32})$", re.M)
COMPLETE = re.compile(r"checkpoint \S*step-0*(\d+) is complete")


class Failed(Exception):
    pass


def command(options, work, steps, more=()):
    line = [os.path.join(ROOT, "scripts", "run_mpi.sh"), str(options.ranks)] if options.ranks > 1 else []
    line += [options.program, "train", "--model", os.path.join(work, "config.json"), "--data", os.path.join(work, "text.txt"), "--sequence",
             "8", "--steps", str(steps), "--stage", "3", "--threads", "1", "--log-every", "1", "--eval-batches", "1", "--debug-peak-seconds", "0.01",
             "--set", "tranche.workspace=8MiB", "--set", "tranche.communication_slab=1MiB", "--checkpoint-dir", os.path.join(work, "run"),
             "--save-every", "1", "--keep-last", "2", "--resume", "latest"]
    if options.nvme:
        line += ["--offload-optimizer", "nvme", "--offload-param", "nvme", "--nvme-path", os.path.join(work, "swap"), "--host-state", "0"]
    return line + list(more)


def run(line, extra=None):
    """Returns (status, output)."""
    job = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                           env=dict(os.environ, TRANCHE_MPI_TIMEOUT="20", **(extra or {})))
    try:
        out, _ = job.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired as late:
        os.killpg(job.pid, signal.SIGKILL)
        out, _ = job.communicate()
        raise Failed(f"did not end within {LIMIT} s:\n{out.decode(errors='replace')}") from late
    return job.returncode, out.decode(errors="replace")


def faults(options, work, at="", action="", log=""):
    code = getattr(errno, action.rstrip("+"), None)
    return {"LD_PRELOAD": options.library, "TRANCHE_FAULTS_BELOW": work, "TRANCHE_FAULTS_AT": at, "TRANCHE_FAULTS_LOG": log,
            "TRANCHE_FAULTS_ACTION": action if code is None else str(code), "TRANCHE_FAULTS_TIMES": "0" if action.endswith("+") else "1"}


class Test:
    def __init__(self, options):
        self.options = options
        self.folder = tempfile.mkdtemp(prefix="tranche-faults-")
        self.base = os.path.join(self.folder, "base")
        os.makedirs(os.path.join(self.base, "swap"))
        with open(os.path.join(self.base, "text.txt"), "wb") as file:
            file.write(b"the cat sat on a mat and saw seven rats\n" * 100)
        # Runs read a file again while its last change is so recent that another one could have the same time; all runs here find an old file.
        os.utime(os.path.join(self.base, "text.txt"), (0, 0))
        with open(os.path.join(self.base, "config.json"), "w", encoding="utf-8") as file:
            json.dump(MODEL, file)
        # The state of an undisturbed run after each step.
        work = self.copy("reference")
        report = os.path.join(self.folder, "reference.json")
        self.sound(command(options, work, 4, ["--digest-every", "1", "--report", report]))
        with open(report, encoding="utf-8") as file:
            self.digests = {step["step"]: (step["weights_digest"], step["state_digest"]) for step in json.load(file)["steps"]}
        self.sound(command(options, self.base, 2))
        log = os.path.join(self.folder, "calls")
        self.sound(command(options, self.copy("recorded"), 3), faults(options, os.path.join(self.folder, "recorded"), log=log))
        with open(log, encoding="utf-8") as file:
            self.calls = [line for line in file.read().split("\n") if line]

    def sound(self, line, extra=None):
        status, text = run(line, extra)
        if status != 0:
            raise Failed(f"a run that nothing disturbed ended with status {status}: {' '.join(line)}\n{text}")

    def copy(self, name):
        work = os.path.join(self.folder, name)
        shutil.copytree(self.base, work)
        return work

    def cases(self):
        """(call, action) pairs, in the order of the recorded run; calls that do not occur in every run, such as the lease's beat, are
        included."""
        return [(call, action) for call in dict.fromkeys(self.calls) for action in self.options.actions if FITTING[action](call.split()[1])]

    def case(self, number, call, action):
        """Runs one case and returns the outcome of the disturbed run."""
        work = self.copy(f"case-{number}")
        log = os.path.join(self.folder, f"calls-{number}")
        status, text = run(command(self.options, work, 3), faults(self.options, work, call, action, log))
        with open(log, encoding="utf-8") as file:
            reached = call in file.read().split("\n")
        sure = max([2] + [int(step) for step in COMPLETE.findall(text)])
        if not reached:
            # A run that takes longer than the lease's beat makes calls that a quicker one does not make.
            outcome = "not reached, by the clock" if "run.lock" in call else "not reached"
        elif action in ("kill", "killed"):
            outcome = "killed"
            if status == 0 or "Segmentation" in text:
                raise Failed(f"status {status} after SIGKILL\n{text}")
        elif status == 0:
            outcome = "went on"
        else:
            outcome = f"status {status}"
            reason = os.strerror(getattr(errno, action.rstrip("+"), 0))
            said = [line for line in text.split("\n") if "tranche: " in line]
            if status not in FILE_STATUSES or not any(reason in line and os.path.basename(work) in line for line in said):
                raise Failed(f"status {status}, and its text does not hold the path and '{reason}'\n{text}")
            if action in UNNOTICED:
                raise Failed(f"status {status}\n{text}")
        if status == 0:
            if sure < 3:
                raise Failed(f"status 0, and no checkpoint of step 3\n{text}")
            verified, words = run([self.options.program, "checkpoint", "verify", os.path.join(work, "run", "step-00000003")])
            if verified != 0:
                raise Failed(f"status 0, and the checkpoint does not verify\n{words}")
        self.resume(work, sure)
        shutil.rmtree(work)
        os.remove(log)
        return outcome

    def resume(self, work, sure):
        status, text = run(command(self.options, work, 4))
        resumed, state, weights = RESUMED.search(text), STATE.search(text), WEIGHTS.search(text)
        if status != 0 or not resumed or not state or not weights:
            raise Failed(f"the next run ended with status {status}\n{text}")
        step = int(resumed.group(2))
        if step < sure or state.group(1) != self.digests[step][1] or weights.group(1) != self.digests[4][0]:
            raise Failed(f"the next run resumed step {step}, at least {sure} was complete; its digests {state.group(1)}, {weights.group(1)}; "
                         f"undisturbed {self.digests[step][1]}, {self.digests[4][0]}")
        left = sorted(os.listdir(os.path.join(work, "run")))
        if left != ["latest", "run.lock", "step-00000003", "step-00000004"] or os.listdir(os.path.join(work, "swap")):
            raise Failed(f"left in the folders: {left} {os.listdir(os.path.join(work, 'swap'))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("library")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--nvme", action="store_true")
    parser.add_argument("--actions", type=lambda text: text.split(","), default=list(FITTING))
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    options.program, options.library = os.path.abspath(options.program), os.path.abspath(options.library)
    for name in options.actions:
        if name not in FITTING:
            parser.error(f"no action is named '{name}'; there are {', '.join(FITTING)}")
    for path in (options.program, options.library):
        if not os.path.isfile(path):
            parser.error(f"{path} is not there")
    begin = last = time.time()
    test = Test(options)
    cases = [case for case in test.cases() if options.only in ("", case[0])]
    if options.list:
        print("\n".join(dict.fromkeys(test.calls)))
        return 0
    options.count = part_of_count(options.count, "drawn cases")
    if 0 < options.count < len(cases):
        cases = random.Random(options.seed).sample(cases, options.count)
    print(f"{len(set(test.calls))} calls, {len(cases)} cases, {options.ranks} rank(s){', nvme' if options.nvme else ''}; seed {options.seed}", flush=True)
    outcomes, failed, done = collections.Counter(), 0, 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(test.case, number, *case): case for number, case in enumerate(cases)}
        for future in concurrent.futures.as_completed(running):
            call, action = running[future]
            done += 1
            try:
                outcomes[(action, future.result())] += 1
            except Failed as failure:
                failed += 1
                print(f"FAILED: {action} at '{call}': {failure}\n  again by: --ranks {options.ranks}{' --nvme' if options.nvme else ''} "
                      f"--actions {action} --only '{call}'", flush=True)
            if time.time() - last > 10:
                last = time.time()
                print(f"{done} of {len(cases)}, {(last - begin) / done * (len(cases) - done) / 60:.1f} min to go", flush=True)
    for (action, outcome), count in sorted(outcomes.items()):
        print(f"  {count:5d}  {action:10s} {outcome}")
    missed = sum(count for (_, outcome), count in outcomes.items() if outcome == "not reached")
    if missed > len(cases) / 20:
        failed += 1
        print(f"FAILED: {missed} calls were not made again: their names differ from run to run, or their number does")
    print(f"{done} cases in {time.time() - begin:.0f} s, {failed} failed")
    if failed:
        print(f"left as it was: {test.folder}")
        return 1
    shutil.rmtree(test.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
