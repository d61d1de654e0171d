"""This module runs ctest and finds the processor seconds of each test in /proc; scripts/build_times.py prints them. It needs Linux."""
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import threading
import time

PERIOD = 0.05  # seconds between two looks at /proc
SLACK = 0.2  # a line of ctest's output may be read this many seconds late
TICK = os.sysconf("SC_CLK_TCK")


class Unusable(Exception):
    """The input cannot be measured."""


class Process:
    """A process below ctest. `own` holds the processor seconds that were last seen of it, `waited` those of the children that it has waited for."""

    def __init__(self, pid, born, parent, seen):
        self.pid, self.born, self.parent, self.seen, self.end = pid, born, parent, seen, None
        self.own = self.waited = self.extra = 0.0
        self.children, self.orphans, self.commands = [], [], set()
        self.root = self if parent is None or parent.parent is None else parent.root  # the ancestor that ctest started

    def total(self):
        """Returns the seconds of the process and of those below it. A child that has ended is in `waited` unless no process has waited for it, and
        `waited` has children that were never seen: the larger of both sums counts, so that nothing counts twice."""
        ended = sum(child.total() for child in self.children if child.end is not None)
        return self.own + max(self.waited, ended) + sum(child.total() for child in self.children if child.end is None)

    def seconds(self):
        """Returns the seconds of a test. Its orphans, whose parents ended before them, are added, since no process of the test waits for them."""
        return self.total() + sum(orphan.total() for orphan in self.orphans) + self.extra


def read_process(pid):
    """Returns (parent, time of birth, own seconds, seconds of children waited for), or None if there is no such process."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2:].split()
    return int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / TICK, (int(fields[13]) + int(fields[14])) / TICK


class Sampler:
    """The sampler keeps all processes that descend from ctest, also those that have ended, with the seconds that were last seen of each."""

    def __init__(self, pid, tests):
        self.top = Process(pid, (read_process(pid) or (0, 0))[1], None, 0)
        self.tests = tests  # The reader of ctest's output adds to this list.
        self.alive, self.foreign = {pid: self.top}, set()
        self.ended, self.settled, self.unseen, self.late = [], 0.0, 0.0, False

    def settle(self, reaped):
        """Divides seconds that ctest has waited for (`reaped` in all), but that no look at /proc showed, among the tests that have just ended. If none
        has, they belong to tests that were too short to be seen."""
        more = reaped - self.settled - sum(process.total() for process in self.ended)
        if more < 0 and not self.late:
            self.late = True  # A test may have ended after ctest's own figures were read. Then the next look has both figures.
            return
        for process in self.ended:
            process.extra += max(more, 0.0) / len(self.ended)
        if not self.ended and self.tests:
            self.unseen += max(more, 0.0)
        self.settled, self.ended, self.late = reaped, [], False

    def end(self, process, now):
        process.end = now
        del self.alive[process.pid]
        if process.parent is self.top:
            self.ended.append(process)

    def sample(self, now):
        listed = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self.foreign &= listed  # A process that does not descend from ctest is read once.
        for process in list(self.alive.values()):  # Parents come before their children.
            found = read_process(process.pid)
            if found is None or found[1] != process.born:
                self.end(process, now)
                continue
            process.own, process.waited = found[2:]
            parent = process.parent
            if parent not in (None, self.top) and found[0] != parent.pid and process not in process.root.orphans:
                parent.children.remove(process)
                process.root.orphans.append(process)
        self.settle(self.top.waited)
        fresh = {pid: read_process(pid) for pid in listed - self.foreign - self.alive.keys()}
        while True:
            found = {pid: one for pid, one in fresh.items() if one and one[0] in self.alive}
            for pid, (parent, born, own, waited) in found.items():
                process = self.alive[pid] = Process(pid, born, self.alive[parent], now)
                process.parent.children.append(process)
                process.own, process.waited = own, waited
                del fresh[pid]
            if not found:
                break
        self.foreign |= fresh.keys()
        for process in self.alive.values():
            if process.parent is self.top:
                try:
                    text = pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes()
                except OSError:
                    continue
                process.commands.add(tuple(os.fsdecode(text).split("\0")[:-1]))


class Test:
    """This is one start of a test, with what ctest's output says about it."""

    def __init__(self, name, command, labels, begin):
        self.name, self.command, self.labels, self.begin = name, tuple(command), labels, begin
        self.end = self.wall = self.process = None
        self.processor = 0.0


def assign(processes, tests):
    """Finds the process of each test: by its command line, before which an interpreter may stand, and else by the time and the order in which both
    began. A process that belongs to no test stays alone, since ctest runs some programs to ask for their cases."""
    left = sorted(processes, key=lambda process: (process.born, process.pid))
    for by_command in (True, False):
        for process in list(left):
            fitting = []
            for order, test in enumerate(tests):
                late = max(0.0, test.begin - process.seen, process.seen - test.end)
                if test.process is None and test.command and late < SLACK and (
                        not by_command or any(command[-len(test.command):] == test.command for command in process.commands)):
                    fitting.append((late, order))
            if fitting:
                tests[min(fitting)[1]].process = process
                left.remove(process)


def read_output(stream, known, tests):
    """Passes ctest's output through and adds a Test to `tests` for each that starts. `known` has the command line and labels of each name."""
    running = {}
    for line in stream:
        now = time.monotonic()
        sys.stdout.write(line)
        sys.stdout.flush()
        start = re.match(r"\s*Start\s+(\d+): (.*)", line)
        end = re.match(r"\s*\d+/\d+ Test\s+#(\d+): .* ([\d.]+) sec", line)
        if start and start[2] in known:
            running[start[1]] = Test(start[2], *known[start[2]], now)
            tests.append(running[start[1]])
        elif end and end[1] in running:
            test = running.pop(end[1])
            test.end, test.wall = now, float(end[2])


def used_by_children():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def used_by_machine():
    """Returns the seconds that all cores have worked, for whatever process, and that the host of a virtual machine has taken."""
    user, nice, system, _, _, *interrupts_and_stolen = pathlib.Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    return sum(map(int, (user, nice, system, *interrupts_and_stolen))) / TICK


def measure(build, arguments):
    """Returns (tests, processor seconds of ctest and everything below it, those of all other work on the machine, ctest's status)."""
    if not build.is_dir():
        raise Unusable(f"there is no folder {build}")
    if not (build / "CTestTestfile.cmake").is_file():
        raise Unusable(f"there is no CTestTestfile.cmake in {build}: configure it with CMake first")
    cache = build / "CMakeCache.txt"
    found = re.search(r"^CMAKE_CTEST_COMMAND:\w+=(.+)$", cache.read_text(encoding="utf-8"), re.MULTILINE) if cache.is_file() else None
    ctest = [found[1] if found else "ctest", "--test-dir", str(build)]
    listed = json.loads(subprocess.run([*ctest, "--show-only=json-v1"], stdout=subprocess.PIPE, check=True).stdout)["tests"]
    known = {one["name"]: (one.get("command", []), next((p["value"] for p in one.get("properties", []) if p["name"] == "LABELS"), [])) for one in listed}
    before, machine, tests = used_by_children(), used_by_machine(), []
    child = subprocess.Popen([*ctest, *arguments], stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    reader = threading.Thread(target=read_output, args=(child.stdout, known, tests))
    reader.start()
    sampler = Sampler(child.pid, tests)
    while child.poll() is None:
        sampler.sample(time.monotonic())
        time.sleep(PERIOD)
    reader.join()
    everything = used_by_children() - before
    others = max(0.0, used_by_machine() - machine - everything)
    for process in list(sampler.alive.values()):
        sampler.end(process, time.monotonic())
    sampler.settle(everything - sampler.top.own)
    tests = [test for test in tests if test.end is not None]
    assign(sampler.top.children, tests)
    short = [test for test in tests if test.process is None and test.command]
    for test in tests:
        test.processor = test.process.seconds() if test.process else 0.0
    for test in short:  # These tests began and ended between two looks.
        test.processor = sampler.unseen / len(short)
    return tests, everything, others, child.returncode if child.returncode >= 0 else 128 - child.returncode
