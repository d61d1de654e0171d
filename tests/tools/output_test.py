#!/usr/bin/env python3
"""output_test.py PROGRAM SUITE: the output of the tranche program, its destinations, and the memory that it keeps meanwhile.

Suites: streams (standard output that cannot be written, terminal escapes), files (FIFOs, links and devices named for output), threads (a
system that starts none), steady (memory over thousands of steps), steady_long (over 100,000).
"""

import fcntl
import json
import os
import re
import resource
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import threading

PROGRAM, SUITE = sys.argv[1], sys.argv[2]
RUN_MPI = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "run_mpi.sh")
FOLDER = tempfile.TemporaryDirectory(prefix="tranche-test-")
LIMIT = 60  # seconds
failures = []


def path(name):
    return os.path.join(FOLDER.name, name)


def write(name, content):
    with open(path(name), "wb") as file:
        file.write(content)
    return path(name)


TEXT = write("text.txt", (b"the cat sat on a mat and saw seven rats\n" * 200))
MODEL = write("config.json", json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 256,
                                         "n_positions": 16}).encode())
TINY = ["train", "--model", MODEL, "--data", TEXT, "--sequence", "8", "--micro-batch", "1", "--steps", "3", "--threads", "1",
        "--eval-batches", "1", "--debug-peak-seconds", "0.01",
        "--set", "tranche.workspace=8MiB", "--set", "tranche.communication_slab=1MiB"]


def check(condition, what, arguments, shown=""):
    if condition:
        return
    failures.append(what)
    print(f"FAILED: {what}\n  {shlex.join([PROGRAM] + arguments)}\n  {str(shown)[-1500:]}")


def run(arguments, **how):
    how = {"stdout": subprocess.PIPE, **how}
    return subprocess.run([PROGRAM] + arguments, stderr=subprocess.PIPE, timeout=LIMIT, check=False, **how)


def suite_streams():
    checkpoints = path("checkpoints")
    saved = TINY + ["--checkpoint-dir", checkpoints]
    with open("/dev/full", "wb") as full:
        for arguments in ([["--help"], ["--version"], ["info"], ["info", "--json"], saved,
                           ["plan", "--model", "gpt2"], ["plan", "--model", "gpt2", "--json"],
                           ["checkpoint", "list", checkpoints], ["checkpoint", "show", checkpoints],
                           ["checkpoint", "verify", checkpoints],
                           ["generate", "--from", checkpoints, "--prompt", "a", "--tokens", "3"]]):
            done = run(arguments, stdout=full)
            check(done.returncode == 1 and b"standard output cannot be written: No space left on device" in done.stderr,
                  "a full disk behind standard output is status 1 with a text", arguments, (done.returncode, done.stderr))
    complete = run(["checkpoint", "verify", checkpoints])
    check(complete.returncode == 0, "the run whose output was lost has saved its last step", saved, complete.stderr)
    done = run(["plan", "--model", "gpt2", "--fit", "1MiB"], stdout=open("/dev/full", "wb"))
    check(done.returncode == 3, "a status that says more stays", ["plan", "--fit", "1MiB"], (done.returncode, done.stderr))
    # The next opened file must not get a closed descriptor's number.
    done = run(["info"], stdout=None, preexec_fn=lambda: os.close(1))
    check(done.returncode == 1 and b"Bad file descriptor" in done.stderr, "a closed standard output", ["info"],
          (done.returncode, done.stderr))
    read, closed = os.pipe()
    os.close(read)
    done = run(["info"], stdout=closed)
    check(done.returncode == -signal.SIGPIPE, "`| head` ends the program as it ends others", ["info"], done.returncode)
    unread = TINY + ["--checkpoint-dir", path("unread")]
    done = run(unread, stdout=closed)
    check(done.returncode == 9 and b"standard output cannot be written: Broken pipe" in done.stderr,
          "a run whose reader is gone saves and ends", unread, (done.returncode, done.stderr))
    done = run(["checkpoint", "verify", path("unread")])
    check(done.returncode == 0, "a run whose reader is gone has saved", unread, done.stderr)
    escapes()


def escapes():
    """File names and contents must not reach the terminal as escapes, and letters must stay letters."""
    evil = "caf\u00e9\x1b]0;title\x07\x1b[2J\u202e\u009b"
    shown = "caf\u00e9\\u001b]0;title\\u0007\\u001b[2J\\u202e\\u009b".encode()

    def all_visible(what, arguments, status, where):
        done = run(arguments)
        text = getattr(done, where)
        raw = re.search(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]", done.stdout + done.stderr)
        check(done.returncode == status and shown in text and raw is None, what, arguments, (done.returncode, raw, text))

    all_visible("a path in an error", ["plan", "--model", path(evil)], 2, "stderr")
    all_visible("a path in results", TINY + ["--report", path(evil + ".json")], 0, "stdout")
    all_visible("a configuration's key", ["plan", "--model", MODEL, "--set", f"tranche.{evil}=1"], 2, "stderr")
    bytes_path = os.path.join(FOLDER.name.encode(), b"no \xff utf-8")
    done = subprocess.run([PROGRAM.encode(), b"plan", b"--model", bytes_path], capture_output=True, check=False, timeout=LIMIT)
    check(b"no \\xff utf-8" in done.stderr, "a path that is no UTF-8", ["plan"], done.stderr)


def suite_files():
    """Something that is not a regular file is written to and stays; links are followed."""
    fifo = path("fifo")
    os.mkfifo(fifo)
    read = {}

    def reader():
        with open(fifo, "rb") as file:
            read["report"] = file.read()
    thread = threading.Thread(target=reader, daemon=True)
    thread.start()
    done = run(TINY + ["--report", fifo])
    thread.join(LIMIT)  # waits for ever if the FIFO was replaced
    check(done.returncode == 0 and len(json.loads(read.get("report", "{}")).get("steps", [])) == 3 and stat.S_ISFIFO(os.stat(fifo).st_mode),
          "a report to a FIFO", TINY + ["--report", fifo], done)
    done = run(TINY + ["--report", fifo])
    check(done.returncode == 8 and b"nobody reads this FIFO" in done.stderr and b"trained 3 steps" in done.stdout,
          "a FIFO without a reader does not hang", TINY + ["--report", fifo], done)
    os.mkdir(path("far"))
    write("far/target.json", b"{}")
    for name in ("report", "plan", "trace"):
        os.symlink("far/target.json" if name == "report" else f"far/{name}.json", path(name))
    arguments = TINY + ["--report", path("report"), "--trace", path("trace")]
    done = run(arguments)
    planned = run(["plan", "--model", MODEL, "--fit", "1GiB", "--write", path("plan")])
    check(done.returncode == 0 and planned.returncode == 0, "output through links", arguments, done.stderr + planned.stderr)
    for name, target in (("report", "target"), ("plan", "plan"), ("trace", "trace")):
        with open(path(f"far/{target}.json"), encoding="utf-8") as file:
            check(os.path.islink(path(name)) and json.load(file), f"the link of --{name} stays", arguments)
    device = path("device")
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        device = None if os.geteuid() == 0 else "/dev/null"  # use the system's device only if this user cannot replace it
    if device:
        done = run(TINY + ["--report", device])
        check(stat.S_ISCHR(os.stat(device).st_mode), "a device stays one", ["--report", device], done)
    log = path("log")
    with open(log, "wb") as file:
        done = run(TINY + ["--report", "/proc/self/fd/1"], stdout=file)  # the same as /dev/stdout
    with open(log, encoding="utf-8") as file:
        text = file.read()
    check(done.returncode == 0 and "trained 3 steps" in text and
          '"schema": "tranche-report-1"' in text and "report: /proc/self/fd/1" in text,
          "a report to standard output keeps what was printed", ["--report", "/proc/self/fd/1"], (done, text))
    left = [name for name in os.listdir(FOLDER.name) + os.listdir(path("far")) if ".part" in name]
    check(not left, "no temporary files are left", arguments, left)
    many_files()


def many_files():
    """All data files stay open: the program raises its soft limit, and an error names the hard one."""
    for number in range(60):
        write(f"many-{number}.txt", b"many files of one run %d " % number * 40)
    arguments = TINY + ["--data", path("many-*.txt")]
    for hard, status, text in ((4096, 0, b"trained 3 steps"), (40, 2, b"cannot be opened: Too many open files; every data file stays open: "
                                                                      b"raise `ulimit -n`, or put many files into one with tranche tokenize")):
        done = run(arguments, preexec_fn=lambda most=hard: resource.setrlimit(resource.RLIMIT_NOFILE, (40, most)))
        check(done.returncode == status and text in done.stdout + done.stderr, f"60 files where {hard} may be open", arguments,
              (done.returncode, done.stdout, done.stderr))


def suite_threads():
    """A system that cannot start more threads is reported; OpenMP's runtime would end the process."""
    def few():  # leaves room for some stacks
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 31, 1 << 31))
        resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
    arguments = TINY + ["--threads", "64"]
    done = run(arguments, preexec_fn=few, env=dict(os.environ, OPENBLAS_NUM_THREADS="1"))
    check(done.returncode == 2 and b"the system does not start 64 threads for this rank" in done.stderr and
          b"lower tranche.threads" in done.stderr, "threads that cannot be started", arguments, (done.returncode, done.stderr))


def resident(process):
    """Memory of a process in kB; None if it has ended meanwhile."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
            found = re.search(r"VmRSS:\s+(\d+) kB", file.read())
    except OSError:
        return None
    return int(found.group(1)) if found else None


def written_step(metrics):
    """The step of the last whole line of a file of metrics, each line of which is flushed."""
    with open(metrics, "rb") as file:
        file.seek(max(0, os.path.getsize(metrics) - 65536))
        lines = file.read().split(b"\n")[:-1]
    return max((int(found.group(1)) for line in lines if (found := re.search(rb'"step": ?(\d+)', line))), default=0)


def ranks_of(mark):
    """Processes of the program that have `mark` among their arguments."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                arguments = file.read().split(b"\0")
        except OSError:
            continue
        if arguments[0] == PROGRAM.encode() and mark.encode() in arguments:
            found.append(name)
    return found


def steady(ranks, steps, more, every=500):
    """After step 1000 no rank's memory may grow by more than 1 MB. Memory is read every `every` steps."""
    mark = path(f"metrics-{ranks}-{steps}-{len(failures)}-{len(more)}")
    arguments = TINY + ["--steps", str(steps), "--log-every", "1"] + more + ["--metrics", mark]
    launched = ([RUN_MPI, str(ranks)] if ranks > 1 else []) + [PROGRAM] + arguments
    seen = {}
    environment = dict(os.environ, TRANCHE_MPI_TIMEOUT="3000")
    with subprocess.Popen(launched, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as job:
        fcntl.fcntl(job.stdout, 1031, 4096)  # F_SETPIPE_SZ: with a small pipe the run cannot end while this reader is behind
        text = ""
        for line in job.stdout:
            text += line
            at = re.match(r"step +(\d+)/", line)
            if not at or not 1000 <= int(at.group(1)) < steps or int(at.group(1)) % every != 0:
                continue
            taken = {process: resident(process) for process in ranks_of(mark)}
            # This reader may lag behind. The end of a run takes memory of its own, so that only what was taken before it counts.
            if written_step(mark) >= steps:
                continue
            for process, kilobytes in taken.items():
                if kilobytes is not None:
                    seen.setdefault(process, {})[int(at.group(1))] = kilobytes
    check(job.returncode == 0 and len(seen) == ranks, "trains", arguments, text)
    for process, memory in seen.items():
        first = memory[min(memory)]
        grown = max(memory.values()) - first
        print(f"{ranks} ranks, {steps} steps {shlex.join(more)}: {first} kB at step {min(memory)}, at most {grown} kB more after")
        check(grown <= 1024, f"memory grew by {grown} kB after step 1000", arguments, memory)


def suite_steady():
    steady(1, 5000, [])
    report = path("report.json")
    steady(1, 5000, ["--report", report])
    with open(report, encoding="utf-8") as file:
        written = file.read()
    steps = json.loads(written)["steps"]
    check([step["step"] for step in steps] == list(range(1, 5001)) and all("cpu_seconds" in step for step in steps) and
          json.dumps(json.loads(written), indent=1, ensure_ascii=False).count("\n") == written.count("\n") - 1,
          "the report has every step", ["--report"])


def suite_steady_long():
    for ranks in (1, 2):
        steady(ranks, 100000, ["--report", path(f"report-{ranks}.json")], every=1000)


{"streams": suite_streams, "files": suite_files, "threads": suite_threads, "steady": suite_steady,
 "steady_long": suite_steady_long}[SUITE]()
print(f"{SUITE}: {'passed' if not failures else f'{len(failures)} checks FAILED'}")
sys.exit(1 if failures else 0)
