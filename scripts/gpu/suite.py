#!/usr/bin/env python3
"""What run.sh runs once programs and libraries are in place: tests, compute-sanitizer, benches, trainings; one results folder.

Every part has a share of the time that is left when it begins, so that what an early part does not use goes to the later
ones. A program may take twice its equal share of its part; it is stopped then and listed as 'not finished', and what does
not begin any more is listed as 'not run'. A test program that ends in one of its cases, by a CUDA error that stays or by
lasting too long, is started again for the cases after that one. All files of results are written anew after each command.
Exit status: 0 all that ran passed, 1 something failed, 2 usage or no GPU, 4 tests were left for lack of time. A figure that
misses its target is no failure: the table says so.
"""
import argparse
import codecs
import json
import os
import pathlib
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from array import array

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from cases import LOST, Progress, without  # noqa: E402  (beside this file, as the next two)
from processes import Command  # noqa: E402
from summary import markdown, measured  # noqa: E402

LOG_BYTES = 12 << 20
LOG_BYTES_PER_COMMAND = 200 << 10
PROBE_SECONDS = 20
CASE_SECONDS = 20
SAVE_SECONDS = 10  # How often a program that runs has its state written.
ARGUMENT_BYTES = 100 << 10  # Linux takes no argument and no variable of more than 128 KiB.
# Tests that later ones stand on come first; those that wait for others, and so hang likeliest, come last.
ORDER = [r"device", r"kernels_gpu", r"kernels_layers", r"kernels", r"models", r"engine", r"offload", r"", r"comm", r"nccl|mpi"]
RANKS_ARE_THREADS = r"comm|engine|models"
GTEST_KEYS = {"name", "file", "line", "status", "result", "timestamp", "time", "classname", "failures", "skipped",
              "type_param", "value_param"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--source", required=True, help="the folder that holds scripts/")
    parser.add_argument("--build", required=True, help="the folder that holds bin/ and tests/")
    parser.add_argument("--tests", required=True, help="list of tests, as test_list.py writes it")
    parser.add_argument("--results", required=True)
    parser.add_argument("--limit", type=float, default=540)
    parser.add_argument("--started", type=float, default=None)
    parser.add_argument("--only", choices=["tests", "benches"])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--allow-no-gpu", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--notes", default="", help="a file whose text goes to machine.txt")
    parser.add_argument("--no-mpi", default="", metavar="REASON", help="tests under mpirun are skipped for this reason")
    return parser.parse_args()


class Ended(Exception):
    """The suite was told to end."""


def mended(text):
    """A JSON document of Google Benchmark that was cut off, less its last and incomplete entry; None if no entry is whole."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    end = len(text)
    while True:
        end = text.rfind("}", 0, end)
        if end < 0:
            return None
        try:
            report = json.loads(text[:end + 1] + "]}")
        except ValueError:
            continue
        return report if isinstance(report, dict) else None


class Suite:
    def __init__(self, options):
        self.options = options
        self.begin = time.time()
        self.end = (options.started or time.time()) + options.limit
        self.part_end = self.end
        self.records, self.raw = [], {"tests": {}, "benches": {}, "training": {}}
        self.unsaved = set(self.raw)
        self.running, self.saved = None, 0.0
        self.results = pathlib.Path(options.results)
        self.results.mkdir(parents=True, exist_ok=True)
        self.log = (self.results / "log.txt").open("w", encoding="utf-8", errors="replace")
        self.temporary = tempfile.TemporaryDirectory()
        self.work = pathlib.Path(self.temporary.name)
        self.information, self.machine = {}, {}
        self.outputs = 0

    # --- Commands ------------------------------------------------------------------------------------------
    def left(self):
        return max(0.0, min(self.part_end, self.end) - time.time())

    def shown(self, command):
        """As a person would type it in the folder of the programs."""
        text = " ".join(shlex.quote(str(word)) for word in command)
        for folder in (self.options.build, self.options.source, str(self.work)):
            text = text.replace(folder + "/", "")
        return text

    def environment(self, more, ours):
        """Programs of ours find the bundle's libraries first, and programs of the host must not."""
        found = {**os.environ, **(more or {})}
        if ours and "TRANCHE_LIBRARY_PATH" in os.environ:
            found["LD_LIBRARY_PATH"] = os.environ["TRANCHE_LIBRARY_PATH"]
        return found

    def run(self, command, timeout=None, environment=None, watch=None, ours=True):
        """(status, output, seconds). status: a number, None when it was stopped at its time, 'stuck' when `watch` says so,
        'none' when it could not be started."""
        begin = time.time()
        limit = min(self.left(), 1e9 if timeout is None else timeout)
        if limit < 1:
            return None, "", 0.0
        self.outputs += 1  # A process that cannot be ended may still write to its file.
        file = self.work / f"output{self.outputs}"
        try:
            running = Command(command, self.work, self.environment(environment, ours), file)
        except OSError as error:
            return "none", str(error), 0.0
        self.say_log(f"$ {self.shown(command)[:2000]}\n")
        decoder, text, logged = codecs.getincrementaldecoder("utf-8")(errors="replace"), [], 0
        status, immortal = None, []
        try:
            while True:
                status = running.wait(min(0.25, begin + limit - time.time()))
                news = decoder.decode(running.news())
                text.append(news)
                if news and logged < LOG_BYTES_PER_COMMAND // 2:
                    self.say_log(news[:LOG_BYTES_PER_COMMAND // 2 - logged])
                    logged += len(news)
                if watch:
                    watch.feed(news)
                    self.save_running()
                if status is not None or time.time() >= begin + limit:
                    break
                if watch and watch.stuck():
                    status = "stuck"
                    break
        finally:
            immortal = running.end()
        news = decoder.decode(running.news())
        running.close()
        file.unlink()
        text = "".join(text + [news])
        if watch:
            watch.feed(news)
        hidden = len(text) - LOG_BYTES_PER_COMMAND // 2
        if hidden > 0:
            self.say_log("\n[...]\n" + text[-min(hidden, LOG_BYTES_PER_COMMAND // 2):])
        else:
            self.say_log(news)
        seconds = time.time() - begin
        if immortal:
            self.say_log(f"\n[processes {immortal} could not be ended: they wait inside the kernel]")
        self.say_log(f"\n[status {status}, {seconds:.1f} s]\n\n")
        return status, text, seconds

    def say_log(self, text):
        if self.log.tell() + len(text) < LOG_BYTES:
            self.log.write(text)
            self.log.flush()

    def add(self, record, save=True):
        if all(record is not known for known in self.records):
            self.records.append(record)
        if record["status"] == "measured":
            target = f" (target {record['target']}: {'met' if record['met'] else 'MISSED'})" if record["target"] else ""
            print(f"  {record['item']}: {record['figure']:.4g} {record['unit']}{target}", flush=True)
        else:
            print(f"  {record['item']}: {record['status']} {record.get('detail', '')}", flush=True)
        if save:
            self.save()

    def program(self, *words):
        return str(pathlib.Path(self.options.build, *words))

    # --- The probe -----------------------------------------------------------------------------------------
    def probe(self):
        """One small check of each thing that all else stands on, so that the first look takes seconds."""
        command = [self.program("tests", "gpu_probe")]
        record = {"part": "probe", "item": "gpu_probe", "command": self.shown(command)}
        reason = self.no_gpu() or ("" if os.access(command[0], os.X_OK) else "this build has none")
        if reason:
            self.add({**record, "status": "skipped", "detail": reason})
            return
        status, output, seconds = self.run(command, PROBE_SECONDS)
        lines = re.findall(r"^probe ([^:]+): (ok|FAILED)\b *(.*)$", output, re.MULTILINE)
        for name, verdict, text in lines:
            self.add({**record, "item": f"probe: {name}", "status": "passed" if verdict == "ok" else "failed",
                      "detail": text})
        failed = any(verdict != "ok" for _, verdict, _ in lines)
        if status is None:
            last = f"after '{lines[-1][0]}'" if lines else "in its first check"
            self.add({**record, "status": "hung", "seconds": seconds, "detail": f"stopped {last}"})
        elif not lines or (status != 0 and not (failed and status == 1)):
            found = self.verdict(status, output)
            if status == 0:
                found = {"status": "failed", "detail": "it named no check"}
            self.add({**record, "seconds": seconds, **found})

    # --- Tests ---------------------------------------------------------------------------------------------
    def expanded(self, entry):
        return [word.replace("@BUILD@", self.options.build).replace("@SOURCE@", self.options.source)
                for word in entry["command"]]

    def case_seconds(self, entry):
        """CTest's TIMEOUT is for one case and for machines that are busy; a program's is in the list as 'whole'."""
        if self.information.get("emulated") or not self.information.get("devices"):
            return max(300.0, entry["timeout"])
        return CASE_SECONDS if entry.get("whole") else max(CASE_SECONDS, entry["timeout"] / 6)

    def test(self, part, entry, limit, prefix=(), left_out=(), case_seconds=None):
        """Runs one entry of the list for at most `limit` seconds, once more for what is left after a case that ended it.
        True when it came to its end."""
        command = list(prefix) + self.expanded(entry)
        item = entry["name"] if not prefix else f"{entry['name']} under {pathlib.Path(prefix[0]).name} {prefix[-1]}"
        environment = dict(text.split("=", 1) for text in entry.get("environment", []))
        # Ranks that are threads share a context, and loading a kernel at its first launch may wait for all of it.
        if re.search(RANKS_ARE_THREADS, entry["name"]):
            environment.setdefault("CUDA_MODULE_LOADING", "EAGER")
        environment.setdefault("TRANCHE_TEST_CASE_SECONDS", f"{case_seconds or self.case_seconds(entry):.0f}")
        if not entry.get("googletest"):
            record = {"part": part, "item": item, "command": self.shown(command)}
            if self.options.no_mpi and any("run_mpi.sh" in word for word in command):
                self.add({**record, "status": "skipped", "detail": self.options.no_mpi})
                return True
            if self.left() < 1:
                self.add({**record, "status": "not run", "detail": "no time was left"})
                return True
            limit = min(limit, max(60.0, entry["timeout"]))
            environment.setdefault("TRANCHE_MPI_TIMEOUT", f"{max(1.0, limit - 2):.0f}")
            status, output, seconds = self.run(command, limit, environment)
            status = None if status == 110 else status  # mpirun's own, for a job at its limit
            self.add({**record, "seconds": seconds, **self.verdict(status, output)})
            return True
        pattern = entry.get("filter", "*")
        pattern = without(pattern, left_out) if left_out else pattern
        progress = entry.setdefault("progress", {}).get(item)
        if progress is None:
            progress = Progress(pattern, float(environment["TRANCHE_TEST_CASE_SECONDS"]))
            shown = self.shown(command + (["--gtest_filter=" + pattern] if pattern != "*" else []))
            progress.record = {"part": part, "item": item, "command": shown, "seconds": 0.0}
            progress.others = []
            entry["progress"][item] = progress
        if self.left() < 1 and not progress.processes:
            self.add({**progress.record, "status": "not run", "detail": "no time was left"})
            return True
        end = time.time() + limit
        finished = False
        while not finished and progress.left() != 0 and end - time.time() >= 1:
            finished = self.process(progress, command, environment, end, entry, prefix)
        record = progress.record
        failed = progress.others or [case for verdict in (*LOST, "failed") for case in progress.named(verdict)]
        left = progress.left()
        finished = finished or left == 0
        status = "failed" if failed else "not finished" if not finished else \
            "skipped" if progress.named("skipped") and not progress.named("passed") else "passed"
        reason = f"{progress.reason}: " if status == "skipped" and progress.reason else ""
        detail = "; ".join([*progress.others, reason + progress.counted()])
        if not finished:
            where = f", stopped in {progress.stopped_in}" if progress.stopped_in else ""
            detail += f"; not finished: {'some' if left is None else left} left{where}"
        if progress.processes > 1:
            detail += f"; {progress.processes} processes"
        record.update(status=status, detail=detail)
        self.add(record)
        return finished

    def process(self, progress, command, environment, end, entry, prefix):
        """One process of a GoogleTest program, for the cases that are left. True when there is no use in another."""
        json_file = self.work / "googletest.json"
        json_file.unlink(missing_ok=True)
        known = len(progress.results)
        progress.begin()
        progress.processes += 1
        self.running = progress
        flags, wanted = [f"--gtest_output=json:{json_file}"], progress.filter()
        if known == 0 and wanted != "*":
            flags.append("--gtest_filter=" + wanted)
        elif known and len(wanted) > ARGUMENT_BYTES:
            flag_file = self.work / "googletest.flags"
            flag_file.write_text(f"--gtest_filter={wanted}\n", encoding="utf-8")
            flags.append(f"--gtest_flagfile={flag_file}")
        elif known:
            environment = {**environment, "GTEST_FILTER": wanted}
        status, output, seconds = self.run(command + flags, end - time.time(), environment, progress)
        self.running = None
        progress.record["seconds"] += seconds
        self.figures(progress, json_file)
        progress.stopped_in = progress.case if status is None else None
        if status is None:
            if progress.left() == 0:
                progress.others.append("it did not end after its last case")
            return False  # There is no time for another; a second round may have some.
        if status == "none":
            progress.others.append("could not be started: " + output)
            return True
        death = progress.death(status)
        how = {"stuck": f"stopped after {progress.case_seconds:.0f} s in one case", 97: "a CUDA error that stays",
               98: f"more than {progress.case_seconds:.0f} s in one case"}.get(status)
        how = how or (f"ended by signal {-status}" if status < 0 else f"status {status}")
        if death:
            case, verdict = death
            self.add({"part": progress.record["part"], "item": f"{progress.record['item']} {case}", "status": verdict,
                      "detail": f"{how}{self.last_words(output, case)}",
                      "command": self.shown(command + ["--gtest_filter=" + case])})
            if verdict == "faulted" and not prefix:
                self.examine(entry, case, end)
            return False
        if status == 0 or (status > 0 and progress.named("failed")):
            return True
        last = (output.strip().splitlines() or [""])[-1][:200]
        progress.others.append(f"{how} {'after ' + progress.last if progress.last else 'before any case'}: {last}")
        # Outside of a case: what is left may run, unless nothing at all did.
        return len(progress.results) == known

    @staticmethod
    def last_words(output, case):
        """What a case said before it ended the process. The program's own last line has it all, after the case's name."""
        begin = output.rfind(f"[ RUN      ] {case}\n")
        lines = [line.strip() for line in output[begin:].splitlines()[1:]] if begin >= 0 else []
        lines = [line for line in lines if line and not re.match(r"\[[ A-Z]{10}\] ", line)]
        told = re.match(r"A case (?:left a CUDA error that stays: \S+ *(.*?)(?:; [^;]*program ends here)?$|hangs: )",
                        lines[-1] if lines else "")
        said = (told.group(1) or "") if told else "".join(lines[-1:])
        return f": {said[:200]}" if said else ""

    def examine(self, entry, case, end):
        """The case that ended its program, at once under memcheck, which names the access and its line."""
        tool = self.sanitizer_tool()
        if self.no_sanitizer() or end - time.time() < 10:
            return
        command = [tool, "--error-exitcode", "99", "--tool", "memcheck", *self.expanded(entry), "--gtest_filter=" + case]
        environment = dict(text.split("=", 1) for text in entry.get("environment", []))
        status, output, seconds = self.run(command, min(60.0, (end - time.time()) / 2), environment)
        said = re.search(r"^=+ (Invalid .*|Program hit .*|.*[Mm]isaligned.*)(?:\n=+ +(at .*))?", output, re.MULTILINE)
        record = {"part": "tests", "item": f"{entry['name']} {case} under memcheck", "command": self.shown(command),
                  "seconds": seconds}
        if said:
            self.add({**record, "status": "failed", "detail": "; ".join(text for text in said.groups() if text)[:300]})
        else:
            self.add({**record, **self.verdict(status, output)})

    @staticmethod
    def verdict(status, output):
        ran = len(re.findall(r"^\[       OK \] ", output, re.MULTILINE))
        skipped = len(re.findall(r"^\[  SKIPPED \] .*\(", output, re.MULTILINE))
        failed = list(dict.fromkeys(re.findall(r"^\[  FAILED  \] (\S+?),? ", output, re.MULTILINE)))
        reason = re.search(r": Skipped\n(.*)", output)
        if status == 0 and not ran and skipped:
            return {"status": "skipped", "detail": (reason.group(1) if reason else "") + f" ({skipped} cases)"}
        if status == 0:
            counts = f"{ran} cases" if ran else ""
            return {"status": "passed", "detail": counts + (f", {skipped} skipped" if skipped else "")}
        if status is None:
            return {"status": "not finished", "detail": "stopped at its limit" + (f"; {ran} cases had passed" if ran else "")}
        if status == "none":
            return {"status": "failed", "detail": "could not be started: " + output}
        names = [name for name in failed if not name.isdigit()]
        last = output.strip().splitlines()[-1:] or [""]
        how = f"ended by signal {-status}" if status < 0 else f"status {status}"
        kind = {97: "faulted", 98: "hung"}.get(status, "failed")
        return {"status": kind, "detail": f"{how}: {', '.join(names[:8]) if names else last[0][:200]}"}

    def figures(self, progress, json_file):
        """Figures that cases recorded; the file itself is kept for tests.json. A process that a case ends writes none."""
        if not json_file.exists():
            return
        try:
            report = json.loads(json_file.read_text(encoding="utf-8"))
        except ValueError:  # cut off: the program died while it wrote
            return
        self.raw["tests"].setdefault(progress.record["item"], []).append(report)
        self.unsaved.add("tests")
        for suite in report["testsuites"]:
            for case in suite["testsuite"]:
                for key in case:
                    try:
                        figure = None if key in GTEST_KEYS else float(case[key])
                    except (TypeError, ValueError):
                        continue
                    if figure is not None:
                        self.add(measured(progress.record["part"], f"{case['classname']}.{case['name']} {key}", "relative",
                                          figure, command=progress.record["command"]))

    def entries(self):
        """The list, in the order of ORDER: the first pattern that fits a name says its place."""
        entries = json.loads(pathlib.Path(self.options.tests).read_text(encoding="utf-8"))

        def place(entry):
            if "slow" in entry["labels"] or any("run_mpi.sh" in word for word in entry["command"]):
                return len(ORDER)
            return next((index for index, pattern in enumerate(ORDER) if pattern and re.search(pattern, entry["name"])),
                        ORDER.index(""))

        return sorted(entries, key=place)

    def tests(self):
        entries = self.entries()
        if not entries:
            self.add({"part": "tests", "item": "gpu tests", "status": "skipped", "detail": "this build has none"})
        if self.options.smoke:  # whoever smokes has CTest for the rest
            entries = sorted((entry for entry in entries if entry.get("googletest")),
                             key=lambda entry: entry.get("count", 0))[:1]
        unfinished = self.round("tests", entries)
        if unfinished and self.left() >= 2:
            self.round("tests", unfinished)  # with what the others did not use

    def round(self, part, entries, **more):
        """Runs entries, each within twice an equal share of the time; those which did not come to their end."""
        unfinished = []
        for index, entry in enumerate(entries):
            rest = len(entries) - index
            if not self.test(part, entry, self.left() * (1 if rest == 1 else min(1.0, 2 / rest)), **more):
                unfinished.append(entry)
        return unfinished

    def sanitizer_tool(self):
        return next((path for path in (os.environ.get("CUDA_HOME", "") + "/bin/compute-sanitizer",
                                       "/usr/local/cuda/bin/compute-sanitizer", *(
                                           folder + "/compute-sanitizer" for folder in os.environ["PATH"].split(":")))
                     if os.access(path, os.X_OK)), None)

    def no_sanitizer(self):
        return "compute-sanitizer is not installed" if not self.sanitizer_tool() else self.no_gpu() or \
            ("the GPU is emulated" if self.information.get("emulated") else "")

    def sanitizer(self):
        tool, reason = self.sanitizer_tool(), self.no_sanitizer()
        entries = [entry for entry in self.entries() if entry.get("googletest") and "kernels" in entry["name"]]
        for index, check in enumerate(("memcheck", "racecheck")):
            if reason:
                for entry in entries:
                    self.add({"part": "sanitizer", "item": f"{entry['name']} under {check}", "status": "skipped",
                              "detail": reason})
                continue
            end, self.part_end = self.part_end, time.time() + self.left() / (2 - index)
            # Shadow memory makes kernels some hundred times slower: the large sizes are for the plain run, and products are
            # cuBLASLt's kernels.
            self.round("sanitizer", entries, prefix=[tool, "--error-exitcode", "99", "--tool", check],
                       left_out=["*Large*", "*Long*", "*Many*", "MatmulGpu.*"], case_seconds=3 * CASE_SECONDS)
            self.part_end = end

    # --- Benches -------------------------------------------------------------------------------------------
    def benches(self):
        programs = sorted(pathlib.Path(self.options.build, "bin").glob("bench_*gpu*"))
        for index, program in enumerate(programs):
            left = len(programs) - index
            limit = self.left() * (1.0 if left == 1 else 1.4 / left)  # The last gets its part even if all before hang.
            file = self.work / "bench.json"
            file.unlink(missing_ok=True)
            command = [str(program)]
            reason = self.no_gpu() or ("times of an emulated GPU mean nothing" if self.information.get("emulated") else "")
            record = {"part": "benches", "item": program.name, "command": self.shown(command)}
            if reason or self.left() < 1:
                self.add({**record, "status": "skipped" if reason else "not run",
                          "detail": reason or "no time was left"})
                continue
            status, output, seconds = self.run(command + [f"--benchmark_out={file}", "--benchmark_out_format=json"], limit)
            found = self.bench_figures(program.name, file, record["command"])
            if status != 0 or not found:
                self.add({**record, "seconds": seconds,
                          "status": "not finished" if status is None else "failed",
                          "detail": f"{found} figures; " + (output.strip().splitlines()[-1:] or [""])[0][:200]})
        if not programs:
            self.add({"part": "benches", "item": "bench_*gpu*", "status": "skipped", "detail": "this build has none"})

    def bench_figures(self, name, file, command):
        """Adds a record for every share of a ceiling; how many there were."""
        try:
            report = mended(file.read_text(encoding="utf-8", errors="replace"))  # It may have been stopped while it wrote.
        except OSError:
            return 0
        if report is None:
            return 0
        self.raw["benches"][name] = report
        self.unsaved.add("benches")
        found = 0
        for entry in report.get("benchmarks", []):
            label = re.sub(r"/(real_time|manual_time|iterations:\d+|repeats:\d+)", "", entry["name"])
            if entry.get("error_occurred"):
                self.add({"part": "benches", "item": f"{name}/{label}", "command": command, "status": "failed",
                          "detail": entry.get("error_message", "")}, save=False)
                continue
            if entry.get("run_type") == "aggregate" and entry.get("aggregate_name") != "median":
                continue
            found += 1
            # Ceilings are no share of anything: their rate is told.
            told = [key for key in ("of_copy", "of_peak", "of_forward") if key in entry] or \
                [key for key in entry if key.endswith("/s") or key.endswith("_per_second")][:1]
            for key in told:
                self.add(measured("benches", f"{name}/{label}", key, float(entry[key]), command=command), save=False)
        self.save()  # Once: a save writes all records.
        return found

    # --- Trainings -----------------------------------------------------------------------------------------
    def tokens(self, vocabulary, count):
        """Random tokens as nanoGPT writes them: speed does not depend on what they say."""
        file = self.work / f"tokens{vocabulary}.bin"
        if not file.exists():
            draw = random.Random(20)
            values = array("H", draw.choices(range(vocabulary), k=count))
            if sys.byteorder == "big":
                values.byteswap()
            file.write_bytes(values.tobytes())
        return file

    def train(self, item, flags, timeout=None):
        """The report, or None with a record that says why."""
        report = self.work / "report.json"
        report.unlink(missing_ok=True)
        command = [self.program("bin", "tranche"), "train", *map(str, flags), "--report", str(report)]
        record = {"part": "training", "item": item, "command": self.shown(command)}
        reason = self.no_gpu()
        if reason or self.left() < 1:
            self.add({**record, "status": "skipped" if reason else "not run", "detail": reason or "no time was left"})
            return None, record, 0
        status, output, seconds = self.run(command, timeout)
        if status == 0 and report.exists():
            found = json.loads(report.read_text(encoding="utf-8"))
            self.raw["training"][item] = found
            self.unsaved.add("training")
            return found, record, 0
        if status != 3:
            self.add({**record, "seconds": seconds, **self.verdict(status, output)})
        return None, record, status

    def training(self):
        self.agreement()
        smoke = self.options.smoke
        for model, sequences in (("gpt-nano", (2,)),) if smoke else (("gpt2", (32, 16, 8)), ("gpt2-xl", (16, 8, 4))):
            vocabulary = 256 if smoke else 50257
            for rest, micro_batch in enumerate(sequences, 1 - len(sequences)):
                report, record, status = self.train(
                    f"training {model}",
                    ["--device", "cuda", "--model", model, "--data", self.tokens(vocabulary, 20000 if smoke else 600000),
                     "--data-format", "nanogpt", "--dtype", "bf16", "--micro-batch", micro_batch, "--sequence",
                     32 if smoke else 1024, "--steps", 3 if smoke else 1000, "--min-steps", 3 if smoke else 8,
                     "--max-seconds", 25, "--eval-batches", 1], timeout=self.left() / (1 if model == "gpt2-xl" else 2))
                if report:
                    for key, unit in (("tokens_per_second", "tokens_per_second"), ("matmul_peak_share", "of_peak"),
                                      ("matmul_peak_flops", "flops_per_second")):
                        self.add(measured("training", record["item"], unit, float(report[key] or 0),
                                          command=record["command"]))
                if status != 3:
                    break
                if rest == 0:
                    self.add({**record, "status": "failed", "detail": "out of memory at every size that was tried"})

    def agreement(self):
        """The same 20 steps in fp32 on CPU and GPU. Gradients and weights by tensor are compared by test_models_gpu."""
        for optimizer, rate in (("SGD", 0.05), ("AdamW", 1e-3)):
            config = self.work / f"{optimizer}.json"
            config.write_text(json.dumps({"optimizer": {"type": optimizer, "params": {"lr": rate}},
                                          "gradient_clipping": 1.0}), encoding="utf-8")
            reports = []
            for device in ("cpu", "cuda"):
                report, record, _ = self.train(
                    f"agreement of CPU and GPU, {optimizer}, {device}",
                    ["--config", config, "--device", device, "--model", "gpt-nano" if self.options.smoke else "gpt-mini",
                     "--data", self.tokens(256, 20000), "--data-format", "nanogpt", "--dtype", "fp32", "--micro-batch", 4,
                     "--sequence", 32 if self.options.smoke else 128, "--steps", 3 if self.options.smoke else 20,
                     "--eval-batches", 1])
                if report is None:
                    break
                reports.append(report)
            if len(reports) == 2:
                cpu, gpu = ([step["loss"] for step in report["steps"]] for report in reports)
                worst = max(abs(a - b) / abs(b) for a, b in zip(gpu, cpu))
                found = measured("training", f"agreement of CPU and GPU, {optimizer}, losses of {len(cpu)} steps",
                                 "relative", worst, command=record["command"])
                self.add(found)
                if not found["met"]:
                    self.add({"part": "training", "item": found["item"], "status": "failed", "detail":
                              f"losses differ by {worst:.3g}", "command": record["command"]})

    # --- All of it -----------------------------------------------------------------------------------------
    def no_gpu(self):
        if self.information.get("devices"):
            return ""
        return self.information.get("problem") or "no GPU"

    def look_around(self):
        """Fills `information` (what `tranche info` says of CUDA) and the machine's description."""
        status, text, _ = self.run([self.program("bin", "tranche"), "info", "--json"], 60)
        try:
            told = json.loads(text[text.index("{"):]) if status == 0 else {}
        except ValueError:
            told = {}
        self.information = told.get("cuda", {"problem": f"tranche info failed: {text.strip()[-200:]}"})
        smi = self.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit",
                        "--format=csv,noheader"], 15, ours=False)
        nvcc = self.run(["nvcc", "--version"], 15, ours=False)
        cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
        devices = self.information.get("devices", [])
        machine = {
            "commit": self.options.commit,
            "GPU": "; ".join(f"{device['name']} (compute capability {device['compute_capability']}, "
                             f"{device['memory_bytes'] / 2**30:.0f} GiB)" for device in devices),
            "driver": smi[1].strip() if smi[0] == 0 else self.information.get("problem", ""),
            "CUDA runtime": self.information.get("runtime_version", ""),
            "nvcc": (re.search(r"release (.*)", nvcc[1]) or [None, ""])[1] if nvcc[0] == 0 else "",
            "CPU": f"{cpu.group(1) if cpu else 'unknown'}, {os.cpu_count()} cores",
            "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }
        notes = pathlib.Path(self.options.notes).read_text(encoding="utf-8") if self.options.notes else ""
        (self.results / "machine.txt").write_text(
            "".join(f"{key}: {value}\n" for key, value in machine.items()) + "\n" + notes + "\n" + text, encoding="utf-8")
        return machine

    def go(self):
        def ended(number, _):
            raise Ended(signal.Signals(number).name)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, ended)
        try:
            return self.parts()
        except Ended as end:
            print(f"suite: ended by {end}", file=sys.stderr)
            running = self.running
            if running:
                where = f" in {running.case}" if running.case else ""
                running.record.update(status="not finished", detail=f"{running.counted()}; the suite was ended{where}")
                self.running = None
                self.add(running.record)
            self.save()
            return 4

    def parts(self):
        self.machine = self.look_around()
        for key, value in self.machine.items():
            print(f"{key}: {value}", flush=True)
        if self.no_gpu() and not self.options.allow_no_gpu:
            print(f"suite: {self.no_gpu()}. Nothing was run: this needs a GPU; with --allow-no-gpu tests only say "
                  "why they skip.", file=sys.stderr)
            return 2
        self.save()
        if self.options.only == "tests":
            parts = [("tests", self.tests, 0.75), ("sanitizer", self.sanitizer, 1.0)]
        elif self.options.only == "benches":
            parts = [("benches", self.benches, 0.50), ("training", self.training, 1.0)]
        else:
            parts = [("tests", self.tests, 0.40), ("benches", self.benches, 0.30), ("training", self.training, 0.50),
                     ("sanitizer", self.sanitizer, 1.0)]
        for name, run, share in [("probe", self.probe, 1.0), *parts]:
            print(f"== {name}", flush=True)
            self.part_end = time.time() + (self.end - time.time()) * share
            run()
            self.part_end = self.end
        print(f"\nresults: {self.results}")
        if any(record["status"] in ("failed", *LOST) for record in self.records):
            return 1
        left = any(record["status"] in ("not run", "not finished") and record["part"] == "tests"
                   for record in self.records)
        return 4 if left else 0

    def save_running(self):
        """While a program runs, at times: who ends the suite by force loses no more than the last seconds."""
        if time.time() - self.saved >= SAVE_SECONDS:
            self.save()

    def save(self):
        """After every record, each file in one step, so that a suite that is ended from outside leaves what it found."""
        self.saved = time.time()
        records = list(self.records)
        if self.running and all(self.running.record is not record for record in records):
            where = f"; in {self.running.case}" if self.running.case else ""
            records.append({**self.running.record, "status": "not finished", "detail": self.running.counted() + where})
        results = {"schema": "tranche-gpu-results-1", "machine": self.machine, "seconds": time.time() - self.begin,
                   "emulated": bool(self.information.get("emulated")), "records": records}
        texts = {"results.json": json.dumps(results, indent=1), "summary.md": markdown(results)}
        texts.update({f"{name}.json": json.dumps(self.raw[name], indent=1) for name in self.unsaved})
        self.unsaved.clear()
        for name, text in texts.items():
            part = self.results / f".{name}.part"
            part.write_text(text, encoding="utf-8")
            os.replace(str(part), str(self.results / name))


if __name__ == "__main__":
    sys.exit(Suite(arguments()).go())
