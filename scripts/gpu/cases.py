"""The output of a GoogleTest program about its cases while it runs, and the resumption after a case that ended it.

The gpu programs end with FAULT after a case that leaves a sticky CUDA error, which every later call would return, and with HANG if a case
takes longer than TRANCHE_TEST_CASE_SECONDS. The case that did so is the one that began and did not end.
"""
import re
import time

FAULT, HANG = 97, 98
LOST = ("faulted", "hung")
MARK = re.compile(r"\[( RUN      |       OK |  FAILED  |  SKIPPED )\] ([^\s,]+)(.*)")
TOTAL = re.compile(r"\[==========\] Running (\d+) tests? from")
VERDICTS = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}


def without(pattern, cases):
    """A GoogleTest filter without these cases. In a filter everything after the first '-' is excluded."""
    wanted, _, left_out = pattern.partition("-")
    left_out = ":".join([part for part in left_out.split(":") if part] + list(cases))
    return wanted.strip(":") + ("-" + left_out if left_out else "") if wanted.strip(":") else "-" + left_out


class Progress:
    """The cases of one program, over all processes that ran them."""

    def __init__(self, pattern="*", case_seconds=None):
        self.pattern, self.case_seconds = pattern, case_seconds
        self.results = {}  # case: passed, failed, skipped, faulted or hung
        self.tries = {}  # case: number of failures over all calls of run.sh
        self.total, self.processes, self.reason = None, 0, ""
        self.begin()

    def begin(self):
        """Notes that a new process of the program begins."""
        self.case = self.last = self.since = None
        self.rest, self.lost = "", set()

    def lose(self, case, verdict):
        self.results[case] = verdict
        if case not in self.lost:
            self.lost.add(case)
            self.tries[case] = self.tries.get(case, 0) + 1

    def feed(self, text):
        lines = (self.rest + text).split("\n")
        self.rest = lines.pop()
        for line in lines:
            self.line(line)

    def line(self, line):
        total = TOTAL.search(line)
        if total and self.total is None:
            self.total = int(total.group(1))
        if line.strip() and self.reason is None:
            self.reason = line.strip()
        if line.endswith(": Skipped") and not self.reason:
            self.reason = None  # The next line says why.
        mark = MARK.search(line)
        if not mark:
            return
        kind, case, more = mark.group(1).strip(), mark.group(2), mark.group(3)
        if kind == "RUN":
            self.case, self.since = case, time.time()
        elif case == self.case or re.search(r"\(\d+ ms\)", more):  # The summary names cases again, without times.
            if kind == "FAILED":
                self.lose(case, "failed")
            else:
                self.results[case] = VERDICTS[kind]
            self.last, self.case = case, None

    def stuck(self):
        """Marks the current case as stuck. Programs end such a case themselves; this is for programs that cannot, and comes later."""
        return bool(self.case and self.case_seconds and time.time() - self.since > 1.25 * self.case_seconds + 2)

    def death(self, status):
        """Returns (case, faulted or hung) if a case ended the process, else None. status: a number, or 'stuck'."""
        if self.rest:
            self.line(self.rest)
        case = self.case or (self.last if status in (FAULT, HANG) else None)
        if status == 0 or case is None:
            return None
        kind = "hung" if status in (HANG, "stuck") else "faulted"
        self.lose(case, kind)
        return case, kind

    def left(self):
        """Returns the number of remaining cases; None if the program has not reported its total."""
        return None if self.total is None else max(0, self.total - len(self.results))

    def filter(self):
        return without(self.pattern, self.results) if self.results else self.pattern

    def named(self, verdict):
        return [case for case, its in self.results.items() if its == verdict]

    def counted(self):
        """For example '1 faulted (A.a), 12 passed'."""
        parts = []
        for verdict in ("faulted", "hung", "failed"):
            names = self.named(verdict)
            if names:
                more = ", ..." if len(names) > 8 else ""
                parts.append(f"{len(names)} {verdict} ({', '.join(names[:8])}{more})")
        parts += [f"{len(self.named(verdict))} {verdict}" for verdict in ("passed", "skipped") if self.named(verdict)]
        return ", ".join(parts) or "no case ended"
