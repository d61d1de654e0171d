#!/usr/bin/env python3
"""Compares what the programs of two commits compute and plan: drawn configurations, each run by both.

Each configuration file has every key that both programs know, so that a default that changed between them changes nothing. For each
  - both train a few steps on 1 to 5 ranks, with a digest of weights and optimizer state after every step, and save,
  - both continue from the checkpoint that OLD saved, for two steps; NEW has to load the bits that OLD saved,
  - `tranche plan --json` says what that run takes, and a run of a larger model on more ranks.
Bits are digests, losses, norms, rates and scales; bytes are plans, and memory and traffic of the runs. Keys of reports and plans that one
program has alone are named, and are no difference. What OLD refuses (exit status 2) NEW has to refuse too, and others are drawn in its place;
every value of a dimension is in the draw at least twice (40 configurations). Each row has a number: --only NUMBER repeats it, and where something
differs its files stay in --folder, with the commands in repeat.sh.

Between 1f4c68f and fb2dcd2 bits are equal and some bytes are not, as is meant: at the end of a step each rank sends each other rank 24 bytes
more (learning rate, momentum, whether there is a hook: traffic.control), and stage 3 gathers the next unit ahead whatever its size (memory.device and
peak.device, where the size of prefetch, of live parameters or the depth held it back). --bits names such differences and does not count them.

Exit status: 0 equal, 1 differences, 2 usage or a failed build.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import time

from drawn_configurations import MORE, OPTIONAL, STEPS, configuration, draw, put, remove, scarce

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 300  # seconds of a run
CMAKE = [f"-DTRANCHE_{part}=OFF" for part in ("CUDA", "TESTS", "BENCHES", "EXAMPLES")]
SHAPES = {"odd": {"n_layer": 2, "n_embd": 32, "n_inner": 61, "vocab_size": 257}, "wide": {"n_layer": 3, "n_embd": 64, "n_inner": 256, "vocab_size": 5000},
          "gpt-nano": {"n_layer": 2, "n_embd": 32, "n_inner": 128, "vocab_size": 257}}
# Times, speeds and paths of a report are not compared. Its memory and traffic count as bytes, everything else as bits.
UNSTEADY = re.compile(r"(^|\.)(\w*seconds|version|placement|matmul_peak_\w+|(learned_)?tokens_per_second|path|changes)(\[|\.|$)")
BYTES = re.compile(r"^(memory|traffic)\b|offload_bytes")
# Further plans: searches, and projections on a machine whose file is built into the program.
PLANS = ["--model gpt2-xl --ranks 8 --fit 16GiB", "--model gpt2 --ranks 2 --fit 1GiB",
         "--model gpt2-xl --device cuda --ranks 64 --ranks-per-node 8 --stage 2 --machine dgx-h100",
         "--model gpt2-large --device cuda --ranks 16 --ranks-per-node 8 --stage 3 --rank 5 --machine dgx-h100"]
# Both programs must refuse these.
REFUSED = [{"bf16.enabled": True, "fp16.enabled": True}, {"train_batch_size": 1 << 20}, {"zero_optimization.stage": 4},
           {"tranche.frozen": ["no such tensor"]}, {"optimizer.params.betas": [2, 0.9]}, {"tranche.depth": 0}]


class Unusable(Exception):
    """Raised if nothing can be compared; exit status 2."""


def leaves(value, place=""):
    """{path: value} of a JSON document, with the length of every list. The key of an entry with a tag is the tag, otherwise its position.
    """
    if isinstance(value, dict):
        inner = [(f"{place}.{key}" if place else key, entry) for key, entry in value.items()]
    elif isinstance(value, list):
        tags = [entry.get("tag", index) if isinstance(entry, dict) else index for index, entry in enumerate(value)]
        inner = [(f"{place}[{tag}{'*' * tags[:index].count(tag)}]", entry) for index, (tag, entry) in enumerate(zip(tags, value))]
    else:
        return {place: value}
    found = {f"{place} (entries)": len(value)} if isinstance(value, list) else {}
    for path, entry in inner:
        found.update(leaves(entry, path))
    return found


def without_entries(path):
    return re.sub(r"\[[^]]*\]", "[]", path)


class Case:
    """One row of the table: a folder in which both programs run, and the differences between them."""

    def __init__(self, options, number, drawn, label=""):
        self.options, self.number, self.drawn, self.document = options, number, drawn, {}
        self.label = label or " ".join(f"{name}={','.join(value) or 'none' if isinstance(value, list) else value}" for name, value in drawn.items())
        self.folder = options.folder / f"cases-{os.getpid()}" / str(number).replace(" ", "-")
        self.bits, self.bytes, self.notes, self.refused, self.seconds = [], [], set(), False, 0
        (self.folder / "swap").mkdir(parents=True)
        self.write("repeat.sh", 'cd "$(dirname "$0")" && rm -rf old new || exit\n')

    def write(self, name, text):
        (self.folder / name).write_text(text if isinstance(text, str) else json.dumps(text, indent=1) + "\n", encoding="utf-8")

    def read(self, name):
        return (self.folder / name).read_text(encoding="utf-8")

    def last_line(self, side, name):
        return (self.read(f"{side}-{name}.log").strip().splitlines() or [""])[-1]

    def run(self, name, side, arguments, ranks=1):
        """Returns exit status and standard output of one program; SIDE-NAME.log also contains its standard error."""
        extra = self.options.set_new if side == "new" and arguments[0] in ("train", "plan") else []
        launcher = [str(ROOT / "scripts/run_mpi.sh"), str(ranks)] if ranks > 1 else []
        command = [*launcher, self.options.programs[side], *arguments, *extra]
        with open(self.folder / "repeat.sh", "a", encoding="utf-8") as script:
            script.write(f"{shlex.join(command)}  # {side}, {name}\n")
        done = subprocess.run(["timeout", "-k", "5", str(LIMIT), *command], cwd=self.folder, capture_output=True, check=False)
        self.write(f"{side}-{name}.log", (done.stdout + done.stderr).decode(errors="replace"))
        return done.returncode, done.stdout.decode(errors="replace")

    def both(self, name, arguments, ranks=1):
        """Returns the standard outputs of OLD and NEW, or None unless both ended with status 0. SIDE in the arguments becomes `old` or
        `new`."""
        done = {side: self.run(name, side, [part.replace("SIDE", side) for part in arguments], ranks) for side in ("old", "new")}
        statuses = {status for status, _ in done.values()}
        if statuses == {2}:
            self.refused, self.label = True, f"{self.label}: {self.last_line('old', name)}"
        elif statuses != {0}:
            for side, (status, _) in done.items():
                self.bits.append(f"{name}: {side.upper()} ended with status {status}{f': {self.last_line(side, name)}' if status else ''}")
        return {side: text for side, (_, text) in done.items()} if statuses == {0} else None

    def compare(self, what, documents):
        old, new = (leaves(json.loads(documents[side])) for side in ("old", "new"))
        forms = [{without_entries(path) for path in side} for side in (old, new)]
        self.notes |= {f"{'OLD' if path in forms[0] else 'NEW'} alone has {path} in a {what.split(' ')[0]}" for path in forms[0] ^ forms[1]}
        for path in sorted((path for path in old if path in new and old[path] != new[path]), key=lambda path: not path.startswith("steps[")):
            if what.startswith("report") and UNSTEADY.search(path):
                continue
            place = re.sub(r"^steps\[(\d+)\]\.", lambda found: f"step {int(found[1]) + 1}: ", path)
            found = self.bytes if what.startswith("plan") or BYTES.search(path) else self.bits
            found.append(f"{what}: {place}: {old[path]} -> {new[path]}")

    def plan(self, what, arguments):
        plans = self.both("plan", ["plan", "--json", "--host-memory", "1TiB", *arguments])
        if plans is None:
            return
        self.compare(f"plan of {what}", plans)
        if self.document:
            written = {without_entries(path) for path in leaves(self.document)}
            for side, text in plans.items():
                self.notes |= {f"{side.upper()} has a key that the files leave to its default: {path}" for path in map(without_entries, leaves(json.loads(text)["config"]))
                               if path not in written and "parameter_groups" not in path}

    def train(self, name, steps, flags, ranks):
        done = self.both(name, [
            "train", "--config", "config.json", "--model", "model.json", "--data", "text.txt", "--data-format", "text", "--sequence", "16", "--steps", str(steps),
            "--eval-batches", "1", "--digest-every", "1", "--debug-peak-seconds", "0.01", "--report", f"SIDE-{name}.json", *flags], ranks)
        if done:
            self.compare(f"report of {name}", {side: self.read(f"{side}-{name}.json") for side in done})
        return done is not None

    def prepare(self, left_out, changes=()):
        self.document = configuration(self.drawn)
        for path, value in dict(changes).items():
            put(self.document, path, value)
        for path in left_out:
            remove(self.document, path)
        self.write("config.json", self.document)
        self.write("model.json", {"model_type": "gpt2", "n_head": 2, "n_positions": 32, **SHAPES[self.drawn["shape"]],
                                  **{f"{place}_pdrop": self.drawn["dropout"] for place in ("embd", "attn", "resid")}})
        self.write("text.txt", "".join(random.Random(1).choices("abcdefgh \n", k=5000)))

    def whole(self, left_out):
        ranks, planned = self.drawn["ranks"], self.drawn["planned_ranks"]
        self.prepare(left_out)
        if self.train("run", STEPS, ["--checkpoint-dir", "SIDE"], ranks):
            if any("_digest" in text for text in self.bits):
                text = self.run("diff", "new", ["checkpoint", "diff", "old", "new"])[1].strip()
                self.bits += [f"checkpoints: {line}" for line in text.splitlines()[:12]]
            self.train("resumed", STEPS + MORE, ["--resume", "old"], ranks)
        if not self.refused:
            batch = planned * self.drawn["micro_batch"] * self.drawn["accumulation"]
            self.plan("this run", ["--config", "config.json", "--model", "model.json", "--sequence", "16", "--ranks", str(ranks)])
            self.plan(self.drawn["planned_model"], ["--config", "config.json", "--model", self.drawn["planned_model"], "--ranks", str(planned),
                                                    "--set", f"train_batch_size={batch}"])

    def refusal(self, left_out, changes):
        self.prepare(left_out, changes)
        if self.train("refusal", 1, [], 1):
            self.bits.append("both run what is to be refused")

    def verdict(self):
        return "BITS DIFFER" if self.bits else "only bytes differ" if self.bytes else "refused by both" if self.refused else "equal"

    def finish(self, task):
        begin = time.monotonic()
        try:
            task(self)
        except (ValueError, LookupError, OSError) as problem:
            self.bits.append(f"what a program wrote cannot be compared: {type(problem).__name__}: {problem}")
        self.seconds = time.monotonic() - begin
        if not self.bits and (self.options.bits or not self.bytes):
            shutil.rmtree(self.folder)


def build(options, commit):
    """Returns the program of a commit, cloned and built in its own folder unless that was done before."""
    def call(log, *command, environment=None):
        with open(log, "wb") as file:
            failed = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode != 0
        if failed:
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise Unusable(f"{shlex.join(map(str, command))} failed; the end of {log}:\n{tail}")
    git = ["git", "-C", ROOT]
    found = subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"], capture_output=True, text=True, check=False)
    name = found.stdout.strip()
    if found.returncode != 0:
        raise Unusable(f"no commit '{commit}'")
    if commit == "HEAD" and subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode != 0:
        print("note: changes that are not committed are no part of HEAD", flush=True)
    folder = options.folder / name
    source, program = folder / "source", folder / "build/bin/tranche"
    if not ((folder / "complete").exists() and program.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        if not (source / ".git").exists():
            call(folder / "clone.log", "git", "clone", "--shared", "--no-checkout", ROOT, source)
        call(folder / "checkout.log", "git", "-C", source, "checkout", "--force", "--detach", name)
        environment = {**os.environ, "CCACHE_BASEDIR": str(source), "CCACHE_NOHASHDIR": "1"}
        # Commits before 0.2 had a preset of its own for large units.
        presets = source / "CMakePresets.json"
        preset = "ci" if presets.exists() and '"name": "ci"' in presets.read_text(encoding="utf-8") else "release"
        call(folder / "configure.log", "cmake", "-S", source, "-B", folder / "build", "--preset", preset, *CMAKE, environment=environment)
        call(folder / "build.log", "cmake", "--build", folder / "build", "--target", "tranche_program", environment=environment)
        (folder / "complete").touch()
    print(f"{commit} is {name[:12]}: {program}", flush=True)
    return str(program)


def keys_left_out(options, cases):
    """Returns the keys that one of the programs does not know, according to `tranche plan` for the drawn files."""
    found = set()
    case = Case(options, "keys", {})
    for case.drawn in cases:
        case.prepare(())
        for side in ("old", "new"):
            case.run("plan", side, ["plan", "--json", "--config", "config.json", "--model", "gpt-nano", "--ranks", str(case.drawn["ranks"])])
            found.update(re.findall(r"unknown key '([\w.]+)'", case.read(f"{side}-plan.log")))
    shutil.rmtree(case.folder)
    return found


def run_all(options, tasks):
    """Runs (case, task) pairs and prints a row for each when it ends."""
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(case.finish, task): case for case, task in tasks}
        for future in concurrent.futures.as_completed(futures):
            future.result()
            case = futures[future]
            print(f"{case.number:>9} | {case.verdict():17} | {case.seconds:5.1f} s | {case.label}", flush=True)
            found = case.bits + ([] if options.bits else case.bytes)
            for text in found[:6] + ([f"{len(found)} differences; files and commands: {case.folder}"] if found else []):
                print(f"{'':9} | {text}", flush=True)
    return list(futures.values())


def compare_all(options):
    """Returns all cases, the keys that were left out, and the values that too few configurations had."""
    count = options.configurations
    left_out = keys_left_out(options, draw(count, options.seed, (), options.ranks))
    not_drawn = {name for name, key in OPTIONAL.items() if key in left_out}

    def drawn(turn):
        return list(enumerate(draw(count, f"{options.seed}/{turn}", not_drawn, options.ranks), turn * count + 1))

    def run(batch):
        return run_all(options, [(Case(options, number, values), lambda case: case.whole(left_out)) for number, values in batch])

    if options.only:
        return run([drawn((options.only - 1) // count)[(options.only - 1) % count]]), left_out, []
    plain = draw(1, 0, not_drawn, [1])[0]
    fixed = [(Case(options, f"plan {number}", {}, flags), lambda case: case.plan("fixed flags", case.label.split())) for number, flags in enumerate(PLANS, 1)]
    fixed += [(Case(options, f"refusal {number}", plain, json.dumps(changes)), lambda case, changes=changes: case.refusal(left_out, changes))
              for number, changes in enumerate(REFUSED, 1)]
    fixed = run_all(options, fixed)
    cases = []
    for turn in range(6):
        ran = [case.drawn for case in cases if not case.refused]
        short, missing = count - len(ran), scarce(ran, not_drawn, options.ranks) if count >= 40 else []
        if short <= 0 and not missing:
            break
        fitting = [(number, values) for number, values in drawn(turn) if short > 0 or any(values.get(name) == value for name, value in missing)]
        cases += run(fitting[:max(short, len(missing)) if turn else count])
    if short > 0:
        raise Unusable(f"{len(ran)} of {count} configurations ran; both programs refuse the others, for the reasons in their rows")
    return fixed + cases, left_out, missing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", default="1f4c68f", help="a commit (default: %(default)s)")
    parser.add_argument("new", nargs="?", default="HEAD", help="a commit (default: %(default)s)")
    parser.add_argument("--old-program", help="in place of OLD: a program that is built already")
    parser.add_argument("--new-program", help="in place of NEW")
    parser.add_argument("--bits", action="store_true", help="bytes that differ do not count")
    parser.add_argument("--configurations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this configuration alone; the other flags as they were")
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4, 5])
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build/compare")
    parser.add_argument("--jobs", type=int, default=1, help="configurations at a time")
    parser.add_argument("--set-new", action="append", default=[], metavar="KEY=VALUE", help="for NEW: the value of a key that OLD does not know")
    parser.add_argument("--report", type=pathlib.Path, help="the result as JSON")
    options = parser.parse_args()
    if min(options.configurations, options.jobs, options.only or 1, *options.ranks) < 1 or options.only == 0:
        parser.error("--configurations, --jobs, --only and --ranks are 1 or more")
    options.folder = options.folder.absolute()
    options.set_new = [part for text in options.set_new for part in ("--set", text)]
    begin = time.monotonic()
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        options.programs = {}
        for side, commit, program in (("old", options.old, options.old_program), ("new", options.new, options.new_program)):
            options.programs[side] = os.path.abspath(program) if program else build(options, commit)
            if not os.path.isfile(options.programs[side]) or not os.access(options.programs[side], os.X_OK):
                raise Unusable(f"{options.programs[side]} is no program")
        built = time.monotonic()
        cases, left_out, missing = compare_all(options)
    except (Unusable, OSError) as problem:
        print(f"compare_commits: {problem}", file=sys.stderr)
        return 2
    if not any(case.folder.exists() for case in cases):
        shutil.rmtree(options.folder / f"cases-{os.getpid()}")
    notes = set().union(*(case.notes for case in cases)) | {f"left out, as one of the programs does not know it: {key}" for key in left_out}
    notes |= {f"fewer than two configurations have {name}={value}" for name, value in missing}
    places = collections.Counter(without_entries(text.split(": ")[1]) for case in cases for text in case.bytes)
    notes |= {f"bytes differ in {place}, {number} times" for place, number in places.items()}
    verdicts = collections.Counter(case.verdict() for case in cases if case.drawn and not str(case.number).startswith("refusal"))
    others = collections.Counter(case.verdict() for case in cases) - verdicts
    print("\n".join(f"note: {note}" for note in sorted(notes)))
    for what, counted in (("configurations", verdicts), (f"{len(PLANS)} plans and {len(REFUSED)} refusals", others)):
        print(f"{what}: {', '.join(f'{number} {verdict}' for verdict, number in sorted(counted.items())) or 'none'}")
    print(f"bits equal in {sum(not case.bits for case in cases)} of {len(cases)} rows; {time.monotonic() - built:.0f} s, and {built - begin:.0f} s to build")
    different = any(case.bits or case.bytes and not options.bits for case in cases)
    if options.report:
        options.report.write_text(json.dumps({
            "schema": "tranche-comparison-1", "arguments": sys.argv[1:], "equal": not different, "notes": sorted(notes),
            "cases": [{"number": case.number, "verdict": case.verdict(), "seconds": case.seconds, "drawn": case.drawn, "config": case.document,
                       "bits": case.bits, "bytes": case.bytes} for case in cases]}, indent=1) + "\n", encoding="utf-8")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
