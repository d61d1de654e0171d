#!/usr/bin/env python3
"""Plants the faults of tests/planted_faults.json, one at a time, and says which of them a command finds.

    planted_faults.py --check                      every fault fits: its text stands in its file exactly once
    planted_faults.py --list                       one line for each fault
    planted_faults.py --run [ID...] [OPTIONS] -- COMMAND
                                                   applies each fault in turn and runs COMMAND in the tree
    planted_faults.py --together RUN.json...       says what several runs have found, each of them and all together

An entry of the list has `id`, `folder`, `file`, the text to `find` and what to `replace` it with, one sentence that says what is `wrong`, the
`promise` that it breaks, and the kind of test that should see it (`seen_by`). A fault is found when COMMAND ends with another status than 0, or
does not end within --timeout. It did not compile when the command of --build fails, or when COMMAND ends with 125, for one that builds by itself.
COMMAND and --build have FAULT_ID, FAULT_FOLDER, FAULT_FILE and FAULT_SEEN_BY in their environment, so that they can build and run only a part:

    planted_faults.py --run --tree ../clone --build 'cmake --build build/release --parallel 2' -- sh -c 'ctest --preset release -R "$FAULT_FOLDER"'

The tree has to be a clone or worktree without changes, and no other process may use it meanwhile. Its file is put back however the command ends, by SIGINT,
SIGTERM and SIGHUP too; after a SIGKILL `git checkout -- FILE` does it. Its time of change stays new, so that the next build compiles it again. First
both commands run without any fault and have to pass, unless --without-baseline says that they do.

Exit status: 0 all is well (--run: every fault was found), 1 something is not (--run: some were not found or did not compile),
2 usage, a tree with changes, a list that does not fit, or commands that fail without any fault.
"""
import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIELDS = ("id", "folder", "file", "find", "replace", "wrong", "promise", "seen_by")
CANNOT_TEST = 125  # the status that tells `git bisect run` that a commit cannot be tested
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FOUND, NOT_FOUND, NOT_COMPILED = "found", "not found", "did not compile"


class Unusable(Exception):
    """Raised if there is no result; exit status 2."""


class Stopped(Exception):
    """Raised after a signal has asked for the end."""


stopped_by = []  # the names of the signals that have asked for the end


def read_list(path):
    try:
        faults = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise Unusable(f"{path} cannot be read: {problem}") from problem
    if not isinstance(faults, list) or not all(isinstance(fault, dict) for fault in faults):
        raise Unusable(f"{path} is not a list of faults")
    return faults


def problems_of(faults, tree):
    """Sentences about faults of the list that do not fit the tree."""
    problems, ids = [], set()
    for number, fault in enumerate(faults):
        name = fault.get("id", f"entry {number}")
        for field in FIELDS:
            if not isinstance(fault.get(field), str) or (not fault[field] and field != "replace"):
                problems.append(f"{name} has no text in its field '{field}'.")
        for field in set(fault) - set(FIELDS):
            problems.append(f"{name} has an unknown field '{field}'.")
        if not all(isinstance(fault.get(field), str) for field in FIELDS):
            continue
        if name in ids:
            problems.append(f"{name} is there twice.")
        ids.add(name)
        if fault["file"].split("/")[0] != fault["folder"]:
            problems.append(f"{name} says folder '{fault['folder']}', but its file is {fault['file']}.")
        if fault["find"] == fault["replace"]:
            problems.append(f"{name} changes nothing.")
        try:
            count = (tree / fault["file"]).read_text(encoding="utf-8").count(fault["find"])
        except OSError as problem:
            problems.append(f"{name}: {fault['file']} cannot be read: {problem.strerror}.")
            continue
        if count != 1:
            problems.append(f"{name}: its text is {count} times in {fault['file']} and has to be there once; adapt the fault to the source.")
    return problems


def require_clean(tree):
    done = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unusable(f"{tree} is no git tree: {done.stderr.strip()}")
    if done.stdout:
        raise Unusable(f"{tree} has changes; commit them, or name a clone by --tree:\n{done.stdout.rstrip()}")


def stop(number, _frame):
    """Only notes the signal. An exception that is raised here may interrupt any line of the standard library, for example one
    that holds the lock of subprocess.Popen, or may be lost in a destructor."""
    stopped_by.append(signal.Signals(number).name)


def check_not_stopped():
    if stopped_by:
        raise Stopped(stopped_by[0])


def execute(command, tree, log, timeout, fault):
    """Returns the status of the command, or None if it took too long. Its processes end with it."""
    environment = dict(os.environ)
    for field in ("id", "folder", "file", "seen_by"):
        environment["FAULT_" + field.upper()] = fault.get(field, "")
    shell = isinstance(command, str)
    log.write(f"$ {command if shell else ' '.join(command)}\n")
    log.flush()
    child = subprocess.Popen(command, cwd=tree, shell=shell, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                             env=environment, start_new_session=True)
    end = time.monotonic() + timeout
    try:
        while time.monotonic() < end:
            check_not_stopped()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(min(0.1, timeout))
        log.write(f"\nThe command did not end within {timeout:g} s.\n")
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
                if number == signal.SIGTERM:
                    time.sleep(0.05)  # other processes of its group may still be ending


@contextlib.contextmanager
def planted(fault, tree):
    path = tree / fault["file"]
    before = path.read_bytes()
    try:
        path.write_bytes(before.replace(fault["find"].encode(), fault["replace"].encode(), 1))
        yield
    finally:
        path.write_bytes(before)


def outcome(options, log, fault):
    """(result, seconds of the build, seconds of the command, a remark)"""
    began = time.monotonic()
    if options.build is not None and execute(options.build, options.tree, log, options.timeout, fault) != 0:
        return NOT_COMPILED, time.monotonic() - began, 0.0, ""
    built = time.monotonic()
    status = execute(options.command, options.tree, log, options.timeout, fault)
    seconds = time.monotonic() - built
    if status == CANNOT_TEST:
        return NOT_COMPILED, built - began, seconds, ""
    if status == 0:
        return NOT_FOUND, built - began, seconds, ""
    return FOUND, built - began, seconds, f"timed out after {options.timeout:g} s" if status is None else f"status {status}"


def row(record):
    return f"{record['id']:<32} {record['result']:<15} {record['build_seconds']:>8.1f} {record['seconds']:>8.1f}  {record['remark']}"


def summary(records):
    counts = {result: sum(record["result"] == result for record in records) for result in (FOUND, NOT_FOUND, NOT_COMPILED)}
    return ", ".join(f"{count} {result}" for result, count in counts.items()) + f", of {len(records)} faults"


def run(options, faults):
    require_clean(options.tree)
    if problems := problems_of(faults, options.tree):
        raise Unusable("\n".join(problems))
    logs = options.logs or options.tree / "build" / "planted-faults"
    logs.mkdir(parents=True, exist_ok=True)
    records, known = [], {}
    if options.go_on and options.json is not None and options.json.exists():
        known = {record["id"]: record for record in json.loads(options.json.read_text(encoding="utf-8"))["faults"]}
    for number in ENDING:
        signal.signal(number, stop)
    if not options.without_baseline:
        path = logs / "baseline.log"
        with path.open("w", encoding="utf-8") as log:
            result, build_seconds, seconds, remark = outcome(options, log, {})
        if result != NOT_FOUND:
            raise Unusable(f"The commands fail without any fault ({remark or result}); their log is {path}")
        print(f"The commands pass without any fault: {build_seconds:.1f} s to build, {seconds:.1f} s to run.", flush=True)
    print(f"{'fault':<32} {'result':<15} {'build s':>8} {'run s':>8}")
    for fault in faults:
        if fault["id"] in known:
            records.append(known[fault["id"]])
            print(row(records[-1]), "(known)", flush=True)
            continue
        path = logs / f"{fault['id']}.log"
        with planted(fault, options.tree), path.open("w", encoding="utf-8") as log:
            result, build_seconds, seconds, remark = outcome(options, log, fault)
        records.append({"id": fault["id"], "folder": fault["folder"], "result": result, "build_seconds": round(build_seconds, 2),
                        "seconds": round(seconds, 2), "remark": remark, "log": str(path)})
        print(row(records[-1]), flush=True)
        if options.json is not None:  # after each fault, so that an interrupted run has reported its results
            document = {"command": options.command, "build": options.build, "faults": records}
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(summary(records) + f"; their logs are in {logs}")
    return 0 if all(record["result"] == FOUND for record in records) else 1


def together(paths, least):
    """Checks that each of the successive runs finds `least` faults, and all together every one."""
    runs = []
    for path in paths:
        try:
            runs.append({record["id"]: record["result"] for record in json.loads(path.read_text(encoding="utf-8"))["faults"]})
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise Unusable(f"{path} is no file that --run --json wrote: {problem!r}") from problem
    ids = list(dict.fromkeys(each for one in runs for each in one))
    print(f"{'fault':<32} " + " ".join(f"run {number + 1:<11}" for number in range(len(runs))).rstrip())
    for each in ids:
        print(f"{each:<32} " + " ".join(f"{one.get(each, '-'):<15}" for one in runs).rstrip())
    found = [sum(result == FOUND for result in one.values()) for one in runs]
    of_all = sum(any(one.get(each) == FOUND for one in runs) for each in ids)
    print(f"found: {', '.join(map(str, found))} by each run, {of_all} of {len(ids)} by all together")
    return 0 if of_all == len(ids) and min(found) >= least else 1


def main():
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--list", action="store_true")
    what.add_argument("--run", nargs="*", metavar="ID", help="all faults, or these alone")
    what.add_argument("--together", nargs="+", type=pathlib.Path, metavar="RUN.json")
    parser.add_argument("--tree", type=pathlib.Path, default=ROOT, help="the clone or worktree that faults are planted in; this one unless given")
    parser.add_argument("--faults", type=pathlib.Path, default=ROOT / "tests" / "planted_faults.json", help="another list")
    parser.add_argument("--build", metavar="COMMAND", help="a line for the shell that builds what COMMAND needs")
    parser.add_argument("--logs", type=pathlib.Path, metavar="DIR", help="the folder of the logs; build/planted-faults of the tree unless given")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="what was found, written after each fault")
    parser.add_argument("--timeout", type=float, default=7200, metavar="S", help="seconds of a command; 7200 unless given")
    parser.add_argument("--go-on", action="store_true", help="passes over faults whose result the file of --json holds already")
    parser.add_argument("--without-baseline", action="store_true", help="does not run the commands without a fault first")
    parser.add_argument("--least", type=int, default=0, metavar="N", help="with --together: faults that each run has to find")
    options = parser.parse_args(arguments)
    try:
        if options.together:
            return together(options.together, options.least)
        faults = read_list(options.faults)
        options.tree = options.tree.resolve()
        if options.check:
            problems = problems_of(faults, options.tree)
            print("\n".join(problems) if problems else f"{len(faults)} faults fit their sources.")
            return 1 if problems else 0
        if options.list:
            for fault in faults:
                print(f"{fault['id']:<32} {fault['file']:<40} {fault['seen_by']:<10} {fault['wrong']}")
            return 0
        if not command:
            raise Unusable("--run needs the command behind --")
        options.command = command
        if unknown := set(options.run) - {fault["id"] for fault in faults}:
            raise Unusable(f"the list has no fault {', '.join(sorted(unknown))}; see --list")
        return run(options, [fault for fault in faults if not options.run or fault["id"] in options.run])
    except Stopped as reason:
        print(f"planted_faults.py: ended by {reason}; the tree is as it was", file=sys.stderr)
        return 2
    except Unusable as reason:
        print(f"planted_faults.py: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
