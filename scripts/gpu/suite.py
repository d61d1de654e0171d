#!/usr/bin/env python3
"""What run.sh runs once programs and libraries are in place: tests, compute-sanitizer, benches, trainings; one results folder.

Every part is stopped at its share of the whole time (plan.py), so that what an early part does not use goes to the later
ones. A program may take twice its equal share of its part; it is stopped then and listed as 'not finished', and what does
not begin any more is listed as 'not run'. A test program that ends in one of its cases, by a CUDA error that stays or by
lasting too long, is started again for the cases after that one. All files of results are written anew after each command.
With --resume, what earlier calls of the same commit found stays (history.py).
Exit status: 0 all that ran passed, 1 something failed, 2 usage or no GPU, 4 tests were left for lack of time. A figure that
misses its target is no failure: the table says so.
"""
import argparse
import codecs
import csv
import json
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from array import array
from concurrent.futures import ThreadPoolExecutor

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import kernel_times  # noqa: E402  (beside this file, as the next ones)
import plan  # noqa: E402
from cases import LOST, Progress, without  # noqa: E402
from history import History, key_of  # noqa: E402
from processes import Command, end_marked, MARK  # noqa: E402
from summary import markdown, measured  # noqa: E402

LOG_BYTES = 12 << 20
LOG_BYTES_PER_COMMAND = 200 << 10
START_SECONDS = 45  # No check fails for being slow before 40 s, and the probe ends itself then.
SAVE_SECONDS = 10  # The state of a running program is written at these intervals.
ARGUMENT_BYTES = 100 << 10  # Linux takes no argument and no variable of more than 128 KiB.
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
    parser.add_argument("--resume", action="store_true", help="goes on from the results of an earlier call")
    parser.add_argument("--keep", default="", metavar="DIR", help="a second folder of results, which a later --resume finds")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--allow-no-gpu", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--notes", default="", help="a file whose text goes to machine.txt")
    parser.add_argument("--no-mpi", default="", metavar="REASON", help="tests under mpirun are skipped for this reason")
    return parser.parse_args()


class Ended(BaseException):
    """Raised by Suite.check_not_ended() once a signal has asked for the end."""


def mended(text):
    """A JSON document of Google Benchmark that was cut off, without its last, incomplete entry; None if no entry is complete."""
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


def ncu_figures(output):
    """[(metric, figure, unit)] of `ncu --csv --page details`."""
    lines = output.splitlines()
    begin = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    figures = []
    for row in csv.DictReader(lines[begin:]) if begin is not None else ():
        try:
            figures.append((row["Metric Name"], float(row["Metric Value"].replace(",", "")), row["Metric Unit"] or "number"))
        except (KeyError, TypeError, ValueError, AttributeError):  # a figure that is no number, or a line of the program's output
            continue
    return figures


class Suite:
    def __init__(self, options):
        self.options = options
        self.begin = time.time()
        self.started = options.started or time.time()
        self.end = self.started + options.limit
        self.part_end = self.end
        self.results = pathlib.Path(options.results)
        self.folders = list(dict.fromkeys([self.results] + ([pathlib.Path(options.keep)] if options.keep else [])))
        self.history = History(self.folders if options.resume else (), options.commit)
        self.records, self.raw = list(self.history.records), {"tests": {}, "benches": {}, "training": {}, **self.history.raw}
        self.progress = {}  # item: Progress
        self.unsaved = set(self.raw)
        self.running, self.saved = [], 0.0
        self.ended_by = ""  # The signal that has asked for the end.
        self.lock = threading.RLock()
        self.temporary = tempfile.TemporaryDirectory()
        self.work = pathlib.Path(self.temporary.name)
        self.logs, self.log_bytes, self.log_of = [], 0, None
        for folder in list(self.folders):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.logs.append((folder / "log.txt").open("a" if options.resume else "w", encoding="utf-8", errors="replace"))
            except OSError as error:
                self.unwritable(folder, error)
        self.information, self.machine, self.mpi = {}, {}, ""
        self.holder = None
        self.alone = False  # Whether programs run one at a time.
        self.outputs = 0

    # --- Files -----------------------------------------------------------------------------------------------
    def unwritable(self, folder, error):
        """Handles a folder that accepts no more files: only those files are lost."""
        item = f"results folder {folder}"
        print(f"suite: {folder} cannot be written: {error.strerror or error}", file=sys.stderr, flush=True)
        if all(record["item"] != item for record in self.records):
            others = [str(other) for other in self.folders if other != folder]
            self.records.append({"part": "results", "item": item, "status": "failed", "detail":
                                 f"cannot be written: {error.strerror or error}; " +
                                 (f"all of it is in {', '.join(others)}" if others else "see the output of this command")})

    def write(self, name, text):
        for folder in self.folders:
            part = folder / f".{name}.part"
            try:
                part.write_text(text, encoding="utf-8")
                os.replace(str(part), str(folder / name))
            except OSError as error:
                self.unwritable(folder, error)
                try:
                    part.unlink()
                except OSError:
                    pass

    # --- Commands ------------------------------------------------------------------------------------------
    def left(self):
        return max(0.0, min(self.part_end, self.end) - time.time())

    def shown(self, command):
        """The command as a person would type it in the programs' folder."""
        text = " ".join(shlex.quote(str(word)) for word in command)
        for folder in (self.options.build, self.options.source, str(self.work)):
            text = text.replace(folder + "/", "")
        return text

    def environment(self, more, ours):
        """The environment of a command. Our programs must find the bundle's libraries first, programs of the host must not."""
        found = {**os.environ, **(more or {}), MARK: self.options.keep or str(self.results)}
        if ours and "TRANCHE_LIBRARY_PATH" in os.environ:
            found["LD_LIBRARY_PATH"] = os.environ["TRANCHE_LIBRARY_PATH"]
        return found

    def run(self, command, timeout=None, environment=None, watch=None, ours=True):
        """Returns (status, output, seconds). status is a number, None if it was stopped at its limit, 'stuck' if `watch` says so, and
        'none' if it could not be started. Throws Ended, with the command stopped and its output read, after a signal."""
        self.check_not_ended()
        begin = time.time()
        limit = min(self.left(), 1e9 if timeout is None else timeout)
        if limit < 1:
            return None, "", 0.0
        file = self.new_file("output")  # A process that cannot be ended may still write to its file.
        try:
            running = Command(command, self.work, self.environment(environment, ours), file)
        except OSError as error:
            return "none", str(error), 0.0
        self.say_log(f"$ {self.shown(command)[:2000]}\n", running)
        decoder, text, logged = codecs.getincrementaldecoder("utf-8")(errors="replace"), [], 0
        status, immortal = None, []
        try:
            while True:
                status = running.wait(min(0.25, begin + limit - time.time()))
                news = decoder.decode(running.news())
                text.append(news)
                if news and logged < LOG_BYTES_PER_COMMAND // 2:
                    self.say_log(news[:LOG_BYTES_PER_COMMAND // 2 - logged], running)
                    logged += len(news)
                if watch:
                    watch.feed(news)
                    self.save_running()
                if status is not None or time.time() >= begin + limit or self.ended_by:
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
            self.say_log("\n[...]\n" + text[-min(hidden, LOG_BYTES_PER_COMMAND // 2):], running)
        else:
            self.say_log(news, running)
        seconds = time.time() - begin
        if immortal:
            self.say_log(f"\n[processes {immortal} could not be ended: they wait inside the kernel]", running)
        self.say_log(f"\n[status {status}, {seconds:.1f} s: {self.shown(command)[:80]}]\n\n", running)
        if status is None:
            self.check_not_ended()
        return status, text, seconds

    def check_not_ended(self):
        if self.ended_by:
            raise Ended(self.ended_by)

    def say_log(self, text, owner=None):
        """Writes text to the log, with its owner in front if several commands run at once."""
        with self.lock:
            if text and owner is not self.log_of and None not in (owner, self.log_of) and not text.startswith("$ "):
                text = f"\n[{self.shown(owner.words)[:80]} says]\n{text}"
            self.log_of = owner if text else self.log_of
            self.log_bytes += len(text)
            if self.log_bytes > LOG_BYTES:
                return
            for log in list(self.logs):
                try:
                    log.write(text)
                    log.flush()
                except OSError as error:
                    self.logs.remove(log)
                    self.unwritable(pathlib.Path(log.name).parent, error)

    def new_file(self, name):
        with self.lock:
            self.outputs += 1
            return self.work / f"{name}{self.outputs}"

    def add(self, record, save=True):
        with self.lock:
            if all(record is not known for known in self.records):
                key = key_of(record)
                self.records = [known for known in self.records if not (known.get("earlier") and key_of(known) == key
                                                                        and known.get("unit") == record.get("unit"))]
                if record["status"] in ("failed", *LOST):
                    record["tries"] = self.history.tries.get(key, 0) + 1
                self.records.append(record)
            if record["status"] == "measured":
                target = f" (target {record['target']}: {'met' if record['met'] else 'MISSED'})" if record["target"] is not None else ""
                print(f"  {record['item']}: {record['figure']:.4g} {record['unit']}{target}", flush=True)
            else:
                print(f"  {record['item']}: {record['status']} {record.get('detail', '')}", flush=True)
            if save:
                self.save()

    def settled(self, part, item):
        """Returns True, and prints a line about it, if an earlier call has done the item."""
        if not self.history.settled(part, item):
            return False
        print(f"  {item}: kept from an earlier call", flush=True)
        return True

    def program(self, *words):
        return str(pathlib.Path(self.options.build, *words))

    # --- The probe -----------------------------------------------------------------------------------------
    def probe(self):
        """Measures the start of CUDA and checks the few things on which everything else depends."""
        command = [self.program("tests", "gpu_probe")]
        record = {"part": "probe", "item": "gpu_probe", "command": self.shown(command)}
        reason = self.no_gpu() or ("" if os.access(command[0], os.X_OK) else "this build has none")
        if reason:
            self.add({**record, "status": "skipped", "detail": reason})
            return
        self.look_for_sharing()
        self.hold_context(command[0])
        if self.settled("probe", "gpu_probe"):
            return
        if self.alone:
            command.append("--one-by-one")
        status, output, seconds = self.run(command, START_SECONDS)
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
        elif not failed:
            self.add({**record, "seconds": seconds, "status": "passed", "detail": f"{len(lines)} checks"})

    def hold_context(self, program):
        """Measures a start of CUDA without another process on the GPU and beside one, which then stays until the end. If the driver shuts
        an idle GPU down, every program would otherwise pay for its start."""
        def start(item):
            status, output, seconds = self.run([program, "--start"], START_SECONDS)
            started = re.search(r"^start ([0-9.]+) s$", output, re.MULTILINE)
            record = {"part": "probe", "item": item, "command": self.shown([program, "--start"])}
            if status == 0 and started:
                return measured("probe", item, "seconds", float(started.group(1)), command=record["command"])
            return {**record, "seconds": seconds, **self.verdict(status, output)}
        first = start("CUDA start, no other process on the GPU")
        self.add(first)
        self.holder = Command([program, "--hold"], self.work, self.environment({}, True), self.work / "holder", subprocess.PIPE)
        end = min(time.time() + START_SECONDS, self.end)
        told = b""
        while b"\n" not in told and time.time() < end and self.holder.wait(0.05) is None:
            self.check_not_ended()
            told += self.holder.news()
        if not re.match(rb"start [0-9.]+ s", told + self.holder.news()):
            self.end_holder()
            self.add({"part": "probe", "item": "gpu_probe --hold", "status": "failed", "detail":
                      f"no process could hold the GPU's context: {told.decode(errors='replace').strip() or 'no answer'}"})
            return
        beside = "CUDA start, beside a process that holds the GPU"
        second = start(beside)
        if second["status"] == "failed":
            second = start(beside)  # a temporary failure is no reason to leave out tests with several processes
        if first["status"] == "measured" and second["status"] == "failed":
            # On such a GPU programs fail while this process or another program uses it.
            self.end_holder()
            self.one_at_a_time(f"the GPU admits one process at a time ({second['detail']})")
            self.options.no_mpi = self.options.no_mpi or "the GPU admits one process at a time"
            return
        self.add(second)

    def one_at_a_time(self, why):
        self.alone = True
        self.add({"part": "probe", "item": "programs side by side", "status": "skipped", "detail": f"{why}: one runs after the other"})

    def look_for_sharing(self):
        """Looks for the Multi-Process Service, whose clients share a context, so that a fault in one program would end the others."""
        pipes = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
        if (pipes / "control").exists():
            self.one_at_a_time(f"the Multi-Process Service runs here ({pipes})")

    def end_holder(self):
        if self.holder:
            self.holder.process.stdin.close()
            self.holder.end()
            self.holder.close()
            self.holder = None

    # --- Tests ---------------------------------------------------------------------------------------------
    def expanded(self, entry):
        return [word.replace("@BUILD@", self.options.build).replace("@SOURCE@", self.options.source)
                for word in entry["command"]]

    def case_seconds(self, entry):
        """Returns the limit of a case. CTest's TIMEOUT is for one case on a busy machine; that of a whole program is in the list as
        'whole'."""
        if self.information.get("emulated") or not self.information.get("devices"):
            return max(300.0, entry["timeout"])
        least = plan.case_seconds(entry["name"])
        return least if entry.get("whole") else max(least, entry["timeout"] / 6)

    def test(self, part, entry, limit, prefix=(), left_out=(), case_seconds=None, environment=None, suffix=""):
        """Runs one entry of the list for at most `limit` seconds, and again for the remaining cases after one that ended it. Returns True
        if it came to its end."""
        self.check_not_ended()
        command = list(prefix) + self.expanded(entry)
        item = (entry["name"] if not prefix else f"{entry['name']} under {pathlib.Path(prefix[0]).name} {prefix[-1]}") + suffix
        if self.settled(part, item):
            return True
        environment = {**dict(text.split("=", 1) for text in entry.get("environment", [])), **(environment or {})}
        if re.search(plan.RANKS_ARE_THREADS, entry["name"]):
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
            status = None if status == 110 else status  # the status of run_mpi.sh for a job that reached its time limit
            self.add({**record, "seconds": seconds, **self.verdict(status, output)})
            return True
        pattern = entry.get("filter", "*")
        pattern = without(pattern, left_out) if left_out else pattern
        progress = self.progress.get(item)
        if progress is None:
            progress = Progress(pattern, float(environment["TRANCHE_TEST_CASE_SECONDS"]))
            progress.results, progress.tries, progress.total = self.history.cases(item)
            shown = self.shown(command + (["--gtest_filter=" + pattern] if pattern != "*" else []))
            progress.record = {"part": part, "item": item, "command": shown, "seconds": 0.0}
            progress.others = []
            with self.lock:
                self.progress[item] = progress
        if self.left() < 1 and not progress.processes:
            progress.record.update(status="not run", detail="no time was left")
            self.add(progress.record)
            return False
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
        """Runs one process of a GoogleTest program for the remaining cases. Returns True if another process would be useless."""
        json_file = self.new_file("googletest.json")
        known = len(progress.results)
        progress.begin()
        progress.processes += 1
        with self.lock:
            self.running.append(progress)
        flags, wanted = [f"--gtest_output=json:{json_file}"], progress.filter()
        if known == 0 and wanted != "*":
            flags.append("--gtest_filter=" + wanted)
        elif known and len(wanted) > ARGUMENT_BYTES:
            flag_file = self.new_file("googletest.flags")
            flag_file.write_text(f"--gtest_filter={wanted}\n", encoding="utf-8")
            flags.append(f"--gtest_flagfile={flag_file}")
        elif known:
            environment = {**environment, "GTEST_FILTER": wanted}
        status, output, seconds = self.run(command + flags, end - time.time(), environment, progress)
        with self.lock:
            self.running.remove(progress)
        progress.record["seconds"] += seconds
        self.figures(progress, json_file)
        progress.stopped_in = progress.case if status is None else None
        if status is None:
            if progress.left() == 0:
                progress.others.append("it did not end after its last case")
            return False  # there is no time for another; a second round may have some
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
        # The process ended outside of a case. The remaining cases may run, unless no case ran at all.
        return len(progress.results) == known

    @staticmethod
    def last_words(output, case):
        """Returns the output of a case that ended the process. The program's own last line, after the case's name, contains all of it."""
        begin = output.rfind(f"[ RUN      ] {case}\n")
        lines = [line.strip() for line in output[begin:].splitlines()[1:]] if begin >= 0 else []
        lines = [line for line in lines if line and not re.match(r"\[[ A-Z]{10}\] ", line)]
        told = re.match(r"A case (?:left a CUDA error that stays: \S+ *(.*?)(?:; [^;]*program ends here)?$|hangs: )",
                        lines[-1] if lines else "")
        said = (told.group(1) or "") if told else "".join(lines[-1:])
        return f": {said[:200]}" if said else ""

    def examine(self, entry, case, end):
        """Runs the case that ended its program again under memcheck, which names the access and its line."""
        tool = self.sanitizer_tool()
        if self.no_sanitizer() or end - time.time() < 10:
            return
        command = [tool, "--error-exitcode", "99", "--tool", "memcheck", *self.expanded(entry), "--gtest_filter=" + case]
        environment = dict(text.split("=", 1) for text in [*entry.get("environment", []), "TRANCHE_PLAIN_DEVICE_MEMORY=1"])
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
        """Records the figures of cases and keeps the file for tests.json. A process that a case ended writes no file."""
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
        """Returns the list sorted by ORDER: the first matching pattern determines the position."""
        entries = json.loads(pathlib.Path(self.options.tests).read_text(encoding="utf-8"))

        def place(entry):
            if "slow" in entry["labels"] or any("run_mpi.sh" in word for word in entry["command"]):
                return len(plan.ORDER)
            return next((index for index, pattern in enumerate(plan.ORDER) if pattern and re.search(pattern, entry["name"])),
                        plan.ORDER.index(""))

        return sorted(entries, key=place)

    def chosen(self, first):
        """The entries of the part `kernels` (first) or `tests`; with --smoke the smallest program of each."""
        entries = [entry for entry in self.entries()
                   if bool(entry.get("googletest") and re.search(plan.FIRST_PROGRAMS, entry["name"])) == first]
        if self.options.smoke:  # a smoke run leaves the others to CTest
            entries = sorted((entry for entry in entries if entry.get("googletest")),
                             key=lambda entry: (not re.search(plan.SMOKE_PROGRAMS, entry["name"]), entry.get("count", 0)))[:1]
        return entries

    def first_tests(self):
        entries = self.chosen(True)
        if not self.entries():
            self.add({"part": "tests", "item": "gpu tests", "status": "skipped", "detail": "this build has none"})
        if self.history.settled("probe", "gpu_probe") or any(
                record["item"] == "gpu_probe" and record["status"] == "passed" for record in self.records):
            # Left out are the probe, which has run already, and the test of the watchdog, which faults and hangs on purpose and takes 10 s.
            entries = [entry for entry in entries if not re.search("gpu_(probe|cases)", entry["name"])]
        with ThreadPoolExecutor(1 if self.alone else plan.AT_ONCE) as pool:
            done = [(entry, pool.submit(self.test, "tests", entry, self.left())) for entry in entries]
            self.unfinished = [entry for entry, future in done if not future.result()]

    def tests(self):
        unfinished = self.round("tests", [*self.chosen(False), *self.unfinished])
        if unfinished and self.left() >= 2:
            self.round("tests", unfinished)  # with the time that the others did not use

    def lazy_loading(self):
        """Whether ranks that are threads need CUDA_MODULE_LOADING=EAGER; make_device() loads our own kernels."""
        entries = [] if self.options.smoke else [entry for entry in self.entries() if "combinations" in entry["name"]]
        self.round("lazy loading", entries, environment={"CUDA_MODULE_LOADING": "LAZY"}, suffix=", lazy loading")

    def round(self, part, entries, **more):
        """Runs entries, each within twice an equal share of the time; returns those that did not end."""
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

    def sanitizer(self, check):
        tool, reason = self.sanitizer_tool(), self.no_sanitizer()
        entries = [entry for entry in self.entries() if entry.get("googletest") and "kernels" in entry["name"]]
        if reason:
            for entry in entries:
                self.add({"part": "sanitizer", "item": f"{entry['name']} under {check}", "status": "skipped", "detail": reason})
            return
        if check == "memcheck":
            self.bounds(tool)
        # Shadow memory makes kernels some hundred times slower, so large sizes are left to the plain run; GEMMs are cuBLASLt's kernels.
        self.round("sanitizer", entries, prefix=[tool, "--error-exitcode", "99", "--tool", check],
                   left_out=["*Large*", "*Long*", "*Many*", "MatmulGpu.*"], case_seconds=3 * plan.CASE_SECONDS,
                   environment={"TRANCHE_PLAIN_DEVICE_MEMORY": "1"})

    def bounds(self, tool):
        """Checks that memcheck finds an access one byte beyond each tensor of a list of kernels, because otherwise its silence means
        nothing."""
        command = [tool, "--tool", "memcheck", "--destroy-on-device-error", "kernel", self.program("tests", "kernel_bounds"), "--all"]
        record = {"part": "sanitizer", "item": "kernel_bounds under memcheck", "command": self.shown(command)}
        if self.settled("sanitizer", record["item"]):
            return
        _, output, seconds = self.run(command, max(plan.CASE_SECONDS, self.left() / 3), {"TRANCHE_PLAIN_DEVICE_MEMORY": "1"})
        parts = re.split(r"^kernel_bounds: (.*)$", output, flags=re.MULTILINE)
        missed = [name for name, said in zip(parts[1::2], parts[2::2]) if "Invalid __global__" not in said]
        count = len(parts) // 2
        found = {"status": "passed", "detail": f"an access one byte beyond each of {count} tensors was found"}
        if missed or not count:
            found = {"status": "failed", "detail": f"of {count} accesses one byte beyond a tensor {len(missed)} were not found: "
                     + "; ".join(missed[:8])}
        self.add({**record, "seconds": seconds, **found})

    # --- Nsight Compute ----------------------------------------------------------------------------------------
    def profile(self):
        """Records figures of single kernels: the utilisation of multiprocessors, tensor cores and memory, and the reasons for which warps
        waited."""
        tool = next((path for path in (os.environ.get("CUDA_HOME", "") + "/bin/ncu", "/usr/local/cuda/bin/ncu",
                                       *(folder + "/ncu" for folder in os.environ["PATH"].split(":")))
                     if os.access(path, os.X_OK)), None)
        for kernel, program, bench in plan.PROFILED:
            item = f"ncu {kernel}, {program} {bench}"
            command = [tool or "ncu", "--clock-control", "none", "--csv", "--page", "details", "--section", "SpeedOfLight",
                       "--section", "ComputeWorkloadAnalysis", "--section", "WarpStateStats", "--kernel-name",
                       f"regex:{kernel}", "--launch-skip", "1", "--launch-count", "1", self.program("bin", program),
                       f"--benchmark_filter={bench}"]
            record = {"part": "ncu", "item": item, "command": self.shown(command)}
            reason = self.no_gpu() or ("the GPU is emulated" if self.information.get("emulated") else
                                       "" if tool else "ncu is not installed")
            if self.settled("ncu", item):
                continue
            if reason or self.left() < 1:
                self.add({**record, "status": "skipped" if reason else "not run", "detail": reason or "no time was left"})
                continue
            status, output, seconds = self.run(command, max(40.0, self.left() / 2))
            figures = ncu_figures(output)
            for name, figure, unit in figures:
                self.add(measured("ncu", f"{item}: {name}", unit, figure, command=record["command"]), save=False)
            found = {"status": "passed", "detail": f"{len(figures)} figures"} if figures else \
                {**self.verdict(status, output), "status": "failed" if status is not None else "not finished"}
            self.add({**record, "seconds": seconds, **found})

    # --- The host's PyTorch --------------------------------------------------------------------------------------
    def peer(self):
        script = pathlib.Path(__file__).resolve().parent / "peer_torch.py"
        command = ["python3", str(script), *(["--smoke"] if self.options.smoke else [])]
        record = {"part": "peer", "item": "PyTorch", "command": self.shown(command)}
        if self.settled("peer", "PyTorch"):
            return
        reason = self.no_gpu()
        if reason or self.left() < 1:
            self.add({**record, "status": "skipped" if reason else "not run", "detail": reason or "no time was left"})
            return
        status, output, seconds = self.run([*command, "--ours", self.attention_samples()], ours=False)
        found = skipped = 0
        for line in output.splitlines():
            try:
                told = json.loads(line)
            except ValueError:
                continue
            if "skipped" in told:
                skipped += 1
                self.add({**record, "item": told.get("item", "PyTorch"), "status": "skipped", "detail": told["skipped"]})
            elif "failed" in told:
                self.add({**record, "item": told["item"], "status": "failed", "detail": told["failed"]})
            else:
                found += 1
                self.add(measured("peer", told["item"], told["unit"], float(told["figure"]), command=record["command"]), save=False)
        if status == 0 and skipped and not found:
            self.save()
            return
        verdict = {"status": "passed", "detail": f"{found} figures"} if status == 0 else self.verdict(status, output)
        self.add({**record, "seconds": seconds, **verdict})

    def attention_samples(self):
        """A folder with inputs and results of our attention, which the peer computes again; empty if the program is missing."""
        folder = self.work / "attention"
        program = self.program("tests", "attention_samples")
        if not self.no_gpu() and os.access(program, os.X_OK) and not folder.exists():
            folder.mkdir()
            self.run([program, str(folder)], plan.CASE_SECONDS)
        return str(folder)

    def over_peer(self):
        """Records the ratio of our figure to PyTorch's, for each figure that both have."""
        figures = {record["item"]: record["figure"] for record in self.records
                   if record["status"] == "measured" and record["unit"] == "TFLOP/s"}
        for ours, theirs in plan.PEERS:
            mine = figures.get(ours)
            best = max((its for item, its in figures.items() if item.startswith("torch " + theirs)), default=None)
            if mine and best:
                self.add(measured("peer", f"{ours} over PyTorch's {theirs}", "of_torch", mine / best, command="suite.py"))

    # --- Benches -------------------------------------------------------------------------------------------
    def benches(self):
        programs = sorted(pathlib.Path(self.options.build, "bin").glob("bench_*gpu*"))
        for index, program in enumerate(programs):
            rest = len(programs) - index
            # The last program gets its share even if all earlier ones hang.
            self.bench(program, self.left() * (1.0 if rest == 1 else 1.4 / rest), program.name)
        if not programs:
            self.add({"part": "benches", "item": "bench_*gpu*", "status": "skipped", "detail": "this build has none"})

    def first_benches(self):
        for name, bench in plan.FIRST_BENCHES:
            program = pathlib.Path(self.options.build, "bin", name)
            if program.exists():
                self.bench(program, max(1.0, self.left() / 3), f"{name}, first look", bench)

    def bench(self, program, limit, item, bench=""):
        """Runs a bench, without the cases that have figures from the first look or from an earlier call."""
        if self.settled("benches", item):
            return
        file = self.new_file("bench.json")
        known = [entry["name"] for report in self.raw["benches"].get(program.name, []) for entry in report.get("benchmarks", [])
                 if not entry.get("error_occurred")]
        pattern = bench or ("-^(" + "|".join(re.escape(name) for name in known) + ")$" if known else "")
        command = [str(program), *([f"--benchmark_filter={pattern}"] if pattern else [])]
        record = {"part": "benches", "item": item, "command": self.shown([program, *([f"--benchmark_filter={bench}"] if bench else [])])}
        emulated = self.information.get("emulated")
        reason = self.no_gpu() or ("times of an emulated GPU mean nothing" if emulated and not self.options.smoke else "")
        if reason or self.left() < 1:
            self.add({**record, "status": "skipped" if reason else "not run", "detail": reason or "no time was left"})
            return
        card = self.card()
        status, output, seconds = self.run(command + [f"--benchmark_out={file}", "--benchmark_out_format=json"], limit)
        found = 0 if emulated else self.bench_figures(program.name, file, record["command"], card and f"{card}; after: {self.card()}")
        if emulated:
            self.add({**record, "seconds": seconds, **self.verdict(status, output)})
        elif status != 0 or not found:
            self.add({**record, "seconds": seconds,
                      "status": "not finished" if status is None else "failed",
                      "detail": f"{found} figures; " + (output.strip().splitlines()[-1:] or [""])[0][:200]})
        else:
            self.add({**record, "seconds": seconds, "status": "passed", "detail": f"{found} figures"})

    def card(self):
        """Name, clocks, power and temperature of the GPU at this moment; "" for an emulated one."""
        if self.no_gpu() or self.information.get("emulated"):
            return ""
        status, text, _ = self.run(["nvidia-smi", "--query-gpu=name,clocks.sm,clocks.mem,power.draw,temperature.gpu",
                                    "--format=csv,noheader"], 40, ours=False)
        return text.strip().splitlines()[0] if status == 0 and text.strip() else "nvidia-smi did not answer"

    def bench_figures(self, name, file, command, card=""):
        """Adds a record for every fraction of a peak; returns their number."""
        try:
            report = mended(file.read_text(encoding="utf-8", errors="replace"))  # It may have been stopped while it wrote.
        except OSError:
            return 0
        if report is None:
            return 0
        self.raw["benches"].setdefault(name, []).append(report)
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
            # Peaks are not fractions, so their rates are shown.
            told = [key for key in ("of_copy", "of_peak", "of_forward") if key in entry] or \
                [key for key in entry if key.endswith("/s") or key.endswith("_per_second")][:1]
            for key in told:
                self.add(measured("benches", f"{name}/{label}", key, float(entry[key]), command=command, card=card), save=False)
            if "TFLOP/s" in entry:
                self.add(measured("benches", f"{name}/{label}", "TFLOP/s", float(entry["TFLOP/s"]), command=command, card=card),
                         save=False)
        self.save()  # one save writes all records
        return found

    # --- Trainings -----------------------------------------------------------------------------------------
    def tokens(self, vocabulary, count):
        """Writes random tokens in nanoGPT's format; speed does not depend on their values."""
        file = self.work / f"tokens{vocabulary}.bin"
        if not file.exists():
            draw = random.Random(20)
            values = array("H", draw.choices(range(vocabulary), k=count))
            if sys.byteorder == "big":
                values.byteswap()
            file.write_bytes(values.tobytes())
        return file

    def train(self, item, flags, timeout=None, ranks=1):
        """Trains on `ranks` processes. Returns (report, or None with a record of the reason; the record; status; the GPU before and after)."""
        report = self.work / "report.json"
        report.unlink(missing_ok=True)
        command = [self.program("bin", "tranche"), "train", *map(str, flags), "--report", str(report)]
        reason, environment = self.no_gpu(), {}
        if ranks > 1:
            command = [str(pathlib.Path(self.options.source, "scripts", "run_mpi.sh")), str(ranks), *command]
            reason = reason or self.options.no_mpi or ("this build has no MPI" if self.mpi == "not compiled" else "")
            environment["TRANCHE_MPI_TIMEOUT"] = f"{max(1.0, min(self.left(), timeout or 1e9) - 2):.0f}"
        record = {"part": "training", "item": item, "command": self.shown(command)}
        if reason or self.left() < 1:
            self.add({**record, "status": "skipped" if reason else "not run", "detail": reason or "no time was left"})
            return None, record, 0, ""
        card = self.card()
        status, output, seconds = self.run(command, timeout, environment)
        status = None if ranks > 1 and status == 110 else status  # mpirun's own, for a job at its limit
        record["seconds"] = seconds
        if status == 0 and report.exists():
            found = json.loads(report.read_text(encoding="utf-8"))
            self.raw["training"][item] = found
            self.unsaved.add("training")
            return found, record, 0, card and f"{card}; after: {self.card()}"
        if status == 0:
            self.add({**record, "status": "failed", "detail": "it wrote no report"})
        elif status != 3:
            self.add({**record, **self.verdict(status, output)})
        return None, record, status, ""

    def small(self):
        """Trains at the smallest sizes, because an emulated GPU has little memory and is slow."""
        return self.options.smoke or bool(self.information.get("emulated"))

    def trainings(self, chosen, traced):
        """Runs the trainings `chosen`, in the form of FIRST_TRAININGS in plan.py; with `traced` records each one's device time by kernel.
        """
        for number, (model, sequences, accumulate, seconds) in enumerate(chosen):
            smoke = self.small()
            item = f"training {model}" + (", traced" if traced else "")
            if self.settled("training", item):
                continue
            vocabulary, length = (256, 32) if smoke else (50257, 1024)
            share = self.left() / (len(chosen) - number)
            for rest, micro_batch in enumerate(sequences, 1 - len(sequences)):
                # The number of micro-batches that makes a step of so many tokens.
                times = accumulate if accumulate < 1024 else max(1, accumulate // (micro_batch * length))
                trace = self.work / "trace.json"
                report, record, status, card = self.train(
                    item, ["--device", "cuda", "--model", model, "--data", self.tokens(vocabulary, 20000 if smoke else 2000000),
                           "--data-format", "nanogpt", "--dtype", "bf16", "--micro-batch", micro_batch, "--sequence", length,
                           "--accumulate", times, "--steps", 3 if smoke else 1000, "--min-steps", 3, "--max-seconds", seconds,
                           "--eval-batches", 1, *(["--trace", trace] if traced else [])],
                    timeout=max(share, min(self.left(), 2 * seconds)))
                if report:
                    for key, unit in (("tokens_per_second", "tokens_per_second"), ("matmul_peak_share", "of_peak"),
                                      ("matmul_peak_flops", "flops_per_second")):
                        self.add(measured("training", item, unit, float(report[key] or 0), command=record["command"], card=card))
                    tokens = times * micro_batch * length
                    if traced:
                        self.kernel_table(item, trace, record["command"])
                    self.add({**record, "status": "passed", "detail": f"{tokens} tokens a step, {times} micro-batches"})
                if status != 3:
                    break
                if rest == 0:
                    self.add({**record, "status": "failed", "detail": "out of memory at every size that was tried"})

    def kernel_table(self, item, trace, command):
        try:
            found = kernel_times.summary(trace.read_text(encoding="utf-8"))
            trace.unlink()
        except (OSError, ValueError, KeyError) as error:
            found = None
            self.say_log(f"[no table of kernels: {error}]\n")
        if not found:
            self.add({"part": "training", "item": f"{item}: device time by kernel", "status": "failed", "command": command,
                      "detail": "the trace has no span of the device"})
            return
        self.add(measured("training", item, "idle_share", found["idle"], command=command), save=False)
        self.raw["training"][f"{item}: device time by kernel"] = found
        self.unsaved.add("training")
        self.add({"part": "training", "item": f"{item}: device time by kernel", "status": "passed", "command": command,
                  "detail": "; ".join(f"{name} {100 * share:.1f} %" for name, _, _, share in found["kernels"][:12])})

    def first_look(self):
        self.first_benches()
        self.trainings(plan.SMOKE_TRAININGS if self.small() else plan.FIRST_TRAININGS, True)

    def training(self):
        self.agreement()
        self.ways()
        if not self.small():
            self.trainings(plan.TRAININGS, False)

    def agreement(self):
        """Trains the same 20 steps in fp32 on CPU and GPU. test_models_gpu compares gradients and weights by tensor."""
        for optimizer, rate in (("SGD", 0.05), ("AdamW", 1e-3)):
            done = f"agreement of CPU and GPU, {optimizer}"
            if self.settled("training", done):
                continue
            config = self.work / f"{optimizer}.json"
            config.write_text(json.dumps({"optimizer": {"type": optimizer, "params": {"lr": rate}},
                                          "gradient_clipping": 1.0}), encoding="utf-8")
            reports = []
            for device in ("cpu", "cuda"):
                report, record, _, _ = self.train(
                    f"agreement of CPU and GPU, {optimizer}, {device}",
                    ["--config", config, "--device", device, "--model", "gpt-nano" if self.small() else "gpt-mini",
                     "--data", self.tokens(256, 20000), "--data-format", "nanogpt", "--dtype", "fp32", "--micro-batch", 4,
                     "--sequence", 32 if self.small() else 128, "--steps", 3 if self.small() else 20,
                     "--eval-batches", 1])
                if report is None:
                    break
                reports.append(report)
            if len(reports) == 2:
                self.compare(done, reports, record)

    def compare(self, item, reports, record):
        """Compares the losses of two trainings, of which the first is the reference."""
        reference, losses = ([step["loss"] for step in report["steps"]] for report in reports)
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, reference))
        found = measured("training", f"{item}, losses of {len(reference)} steps", "relative", worst, command=record["command"])
        self.add(found)
        same_length = len(losses) == len(reference)
        verdict = {"status": "passed", "detail": f"losses of {len(reference)} steps"} if found["met"] and same_length else \
            {"status": "failed", "detail": f"losses differ by {worst:.3g}" if same_length else f"{len(losses)} steps, not {len(reference)}"}
        self.add({**record, "item": item, **verdict})

    def ways(self):
        """Trains the same steps in fp32 with state in host memory and on NVMe, and on two processes that share the GPU, and compares the
        losses with those of one process with all state on the GPU."""
        open_ways = [way for way in plan.WAYS if not self.settled("training", plan.item_of(way))]
        small = self.small()

        def run(item, way, timeout):
            report, record, status, _ = self.train(
                item, ["--device", "cuda", "--model", "gpt-nano" if small else "gpt-mini", "--data", self.tokens(256, 20000),
                       "--data-format", "nanogpt", "--dtype", "fp32", "--micro-batch", 2, "--accumulate", way.accumulate,
                       "--sequence", 32 if small else 128, "--steps", 3 if small else 6, "--eval-batches", 1, "--set", "tranche.tie_sum=by_use",
                       *(str(self.work) if flag == "FOLDER" else flag for flag in way.flags)], timeout, way.ranks)
            if status == 3:
                self.add({**record, "status": "failed", "detail": "out of memory"})
            return report, record
        if not open_ways:
            return
        reference = run("agreement with one process on the GPU, that process", plan.ONE_PROCESS, None)[0]
        for number, way in enumerate(open_ways if reference else ()):
            # One that hangs leaves the others their shares of the time.
            report, record = run(plan.item_of(way), way, max(plan.CASE_SECONDS / 2, 2 * self.left() / (len(open_ways) - number)))
            if report:
                self.compare(plan.item_of(way), (reference, report), record)

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
        self.mpi = told.get("mpi", "")
        smi = self.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit",
                        "--format=csv,noheader"], 40, ours=False)
        nvcc = self.run(["nvcc", "--version"], 15, ours=False)
        cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
        devices = self.information.get("devices", [])
        machine = {
            "commit": self.options.commit,
            "GPU": "; ".join(f"{device['name']} (compute capability {device['compute_capability']}, "
                             f"{device['memory_bytes'] / 2**30:.0f} GiB)" for device in devices),
            "driver": smi[1].strip() if smi[0] == 0 else self.information.get("problem") or
            f"CUDA {self.information.get('driver_version')}; nvidia-smi did not answer, so there are no clocks: {smi[1].strip()[:200]}",
            "CUDA runtime": self.information.get("runtime_version", ""),
            "nvcc": (re.search(r"release (.*)", nvcc[1]) or [None, ""])[1] if nvcc[0] == 0 else "",
            "CPU": f"{cpu.group(1) if cpu else 'unknown'}, {os.cpu_count()} cores",
            "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }
        notes = pathlib.Path(self.options.notes).read_text(encoding="utf-8") if self.options.notes else ""
        self.write("machine.txt", "".join(f"{key}: {value}\n" for key, value in machine.items()) + "\n" + notes + "\n" + text)
        return machine

    def go(self):
        def ended(number, _):
            # An exception that is raised here could interrupt any line of the standard library, for example one that holds
            # the lock of subprocess.Popen. All waits look at this name several times per second.
            self.ended_by = signal.Signals(number).name
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, ended)
        try:
            return self.parts()
        except Ended as end:
            print(f"suite: ended by {end}", file=sys.stderr)
            for running in list(self.running):
                where = f" in {running.case}" if running.case else ""
                running.record.update(status="not finished", detail=f"{running.counted()}; the suite was ended{where}")
                self.running.remove(running)
                self.add(running.record)
            self.save()
            return 4
        finally:
            self.end_holder()

    def parts(self):
        ended = end_marked(self.options.keep or str(self.results))
        self.machine = self.look_around()
        if ended:
            self.machine["ended"] = f"{ended} processes that an earlier call, which was killed, had left on this host"
        for key, value in self.machine.items():
            print(f"{key}: {value}", flush=True)
        if self.no_gpu() and not self.options.allow_no_gpu:
            print(f"suite: {self.no_gpu()}. Nothing was run: this needs a GPU; with --allow-no-gpu tests only say "
                  "why they skip.", file=sys.stderr)
            return 2
        if self.history.note:
            print(f"note: {self.history.note}", flush=True)
        print(plan.table(self.options.limit), flush=True)
        self.save()
        self.unfinished = []
        does = {"probe": self.probe, "kernels": self.first_tests, "first look": self.first_look, "peer": self.peer,
                "tests": self.tests, "benches": self.benches, "training": self.training,
                "memcheck": lambda: self.sanitizer("memcheck"), "ncu": self.profile,
                "racecheck": lambda: self.sanitizer("racecheck"), "lazy loading": self.lazy_loading}
        wanted = plan.PARTS_OF.get(self.options.only, set(does))
        for part in plan.PLAN:
            if part.name not in wanted:
                continue
            print(f"== {part.name}", flush=True)
            self.part_end = self.started + part.until * self.options.limit
            if part.name == "probe":
                self.part_end = max(self.part_end, time.time() + START_SECONDS)
            try:
                does[part.name]()
            except Exception:  # a fault of this script costs only its part
                text = traceback.format_exc()
                self.say_log(text + "\n")
                self.add({"part": part.name, "item": f"part {part.name}", "status": "failed",
                          "detail": "suite.py: " + text.strip().splitlines()[-1]})
            self.part_end = self.end
        self.over_peer()
        print(f"\nresults: {self.results}")
        if any(record["status"] in ("failed", *LOST) for record in self.records):
            return 1
        left = any(record["status"] in ("not run", "not finished") and record["part"] == "tests"
                   for record in self.records)
        return 4 if left else 0

    def save_running(self):
        """Saves at intervals while a program runs, so that a forced end loses only the last seconds."""
        if time.time() - self.saved >= SAVE_SECONDS:
            self.save()

    def save(self):
        """Writes every file atomically after each record, so that a suite that is ended from outside leaves its results."""
        with self.lock:
            self.saved = time.time()
            records = list(self.records)
            for running in self.running:
                if all(running.record is not record for record in records):
                    where = f"; in {running.case}" if running.case else ""
                    records.append({**running.record, "status": "not finished", "detail": running.counted() + where})
            progress = {**self.history.progress, **{
                item: {"results": its.results, "tries": its.tries, "total": its.total} for item, its in self.progress.items()}}
            seconds = time.time() - self.begin
            calls = [*self.history.calls, {"limit": self.options.limit, "seconds": seconds,
                                           "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.begin))}]
            results = {"schema": "tranche-gpu-results-1", "machine": self.machine, "seconds": seconds, "calls": calls,
                       "emulated": bool(self.information.get("emulated")), "records": records, "progress": progress}
            texts = {f"{name}.json": json.dumps(self.raw[name], indent=1) for name in self.unsaved}
            texts.update({"results.json": json.dumps(results, indent=1), "summary.md": markdown(results)})
            self.unsaved.clear()
            for name, text in texts.items():
                self.write(name, text)


if __name__ == "__main__":
    sys.exit(Suite(arguments()).go())
