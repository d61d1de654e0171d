#!/usr/bin/env python3
"""findings_test.py PROGRAM [NUMBER ...]: misconfigured clusters and hostile files; each case reproduces the first observation of its
failure.

The numbers are those of the reliability review that found them in the program of commit 1f4c68f, where each of these fails.
"""

import concurrent.futures
import ctypes
import ctypes.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts"))
from sweep_part import part_of_count  # noqa: E402

PROGRAM = os.path.abspath(sys.argv[1])
RUN_MPI = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "run_mpi.sh")
FOLDER = tempfile.TemporaryDirectory(prefix="tranche-test-")
LIMIT = 240  # seconds after which a command counts as hung; a correct one never takes so long, however busy the machine
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 257, "n_positions": 16}
failures = []


def path(*names):
    return os.path.join(FOLDER.name, *names)


def write(name, content):
    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    with open(path(name), "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    return path(name)


def start(arguments, out=subprocess.PIPE, program=None, **how):
    return subprocess.Popen((program or [PROGRAM]) + [os.fsencode(word) for word in arguments], stdin=subprocess.DEVNULL, stdout=out,
                            stderr=subprocess.STDOUT if out == subprocess.PIPE else subprocess.PIPE, start_new_session=True, **how)


def end(job):
    """Returns (status or "hung", output)."""
    try:
        out, errors = job.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        return "hung", ""
    return job.returncode, ((out or b"") + (errors or b"")).decode(errors="replace")


def run(arguments, **how):
    return end(start(arguments, **how))


def expect(what, result, status, *texts, absent=("json.exception", "\x1b")):
    got, text = result
    wrong = got not in (status if isinstance(status, tuple) else (status,))
    missing = [wanted for wanted in texts if wanted not in text] + [f"not '{word!r}'" for word in absent if word in text]
    if wrong or missing:
        failures.append(what)
        print(f"FAILED: {what}: status {got}, expected {status}; missing: {missing}\n  {text[-600:]}")
    return text


def train(model=None, data=None, **flags):
    line = ["train", "--model", model or path("mid.json"), "--data", data or path("my.txt"), "--micro-batch", "1", "--sequence", "8",
            "--eval-batches", "1", "--debug-peak-seconds", "0.01", "--threads", "1", "--set", "tranche.workspace=8MiB"]
    for name, value in flags.items():
        line += ["--" + name.replace("_", "-"), str(value)]
    return line


def mpirun(first, *others):
    """One line per rank. All are refused before the first step and end by themselves, so mpirun need not wait before it ends the job."""
    words = first + [word for line in others for word in [":", "-n", "1", PROGRAM] + line]
    environment = dict(os.environ, TRANCHE_MPI_TIMEOUT=str(LIMIT), OMPI_MCA_odls_base_sigkill_timeout="0")
    return run(words, program=[RUN_MPI, "1", PROGRAM], env=environment)


def wait_until(there, job):
    """Returns when `there` holds, when the job has ended, or at LIMIT."""
    limit = time.time() + LIMIT
    while not there() and job.poll() is None and time.time() < limit:
        time.sleep(0.01)


def digest(text):
    """XXH3-64, as in a manifest's first line."""
    library = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
    library.XXH3_64bits.restype = ctypes.c_uint64
    library.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return f"{library.XXH3_64bits(text, len(text)):016x}"


def crafted(name, change):
    """Makes a run's folder with a checkpoint of step 6 whose manifest is changed and has a correct digest. Returns its folder."""
    if not os.path.isdir(path("whole")):
        status, text = run(train(steps=6, save_every=6, checkpoint_dir=path("whole")))
        assert status == 0, text
    shutil.copytree(path("whole"), path(name))
    manifest = path(name, "step-00000006", "manifest.json")
    with open(manifest, "rb") as file:
        head, body = file.read().split(b"\n", 1)
    document = json.loads(b"{" + body)
    changed = change(document)
    if changed is None:
        changed = ("".join(f'"{key}": {json.dumps(value)},\n' for key, value in document.items())[:-2] + "}\n").encode()
    with open(manifest, "wb") as file:
        file.write(re.sub(rb'[0-9a-f]{16}', digest(changed).encode(), head) + b"\n" + changed)
    return path(name)


def refused_checkpoint(what, folder, *texts):
    """Expects a refusal by every command that opens it; `list` skips checkpoints that it cannot read."""
    newest = os.path.join(folder, "step-00000006")
    expect(f"{what}: show", run(["checkpoint", "show", newest]), 4, *texts)
    expect(f"{what}: export", run(["checkpoint", "export", newest, "--to", path("to")]), 4, *texts)
    expect(f"{what}: verify", run(["checkpoint", "verify", folder]), 4, *texts)
    expect(f"{what}: list", run(["checkpoint", "list", folder]), 0, *texts)


def finding_1():
    """A job that is started twice."""
    folder = path("dbl")
    with tempfile.TemporaryFile() as out:
        job_started_twice(folder, out)


def job_started_twice(folder, out):
    first = start(train(steps=100000000, max_seconds=LIMIT, save_every=300, keep_last=1, checkpoint_dir=folder, resume="latest"), out=out)
    wait_until(lambda: os.path.lexists(os.path.join(folder, "latest")), first)
    expect("1: the second run", run(train(steps=100000, max_seconds=4, save_every=370, keep_last=1, checkpoint_dir=folder, resume="latest")), 4,
           f"{folder} is in use by process {first.pid}", "end the other")
    os.kill(first.pid, signal.SIGTERM)  # it saves and ends
    status, errors = end(first)
    out.seek(0)
    text = expect("1: the first run", (status, out.read().decode(errors="replace") + errors), 9, "is complete")
    newest = re.findall(r"checkpoint (\S+) is complete", text)[-1:]
    if not newest or not os.path.isdir(newest[0]):
        failures.append("1")
        print(f"FAILED: 1: the first run's last checkpoint {newest} is gone")


def finding_2():
    """Ranks that read different data, and flags that only one rank has."""
    cases = []
    for name, data in (("other", b"x" * 4000), ("shorter", b"the cat sat on a mat\n" * 100)):
        cases.append((f"2: {name} data", train(steps=3, stage=3), train(steps=3, stage=3, data=write(f"{name}.txt", data)), "my.txt", "rank 1"))
    for flag in ("eval_every", "digest_every", "save_every"):
        more = {"checkpoint_dir": path("flags")} if flag == "save_every" else {}
        cases.append((f"2: {flag} on one rank", train(steps=3, **more), train(steps=3, **more, **{flag: 2}), "--" + flag.replace("_", "-")))
    with concurrent.futures.ThreadPoolExecutor(3) as jobs:
        for done in [jobs.submit(lambda what, first, second, *texts: expect(what, mpirun(first, second), 2, *texts), *case) for case in cases]:
            done.result()


def finding_3():
    """Output flags that name something other than a file."""
    node = path("null")
    if os.geteuid() == 0:
        subprocess.run(["mknod", node, "c", "1", "3"], check=True)
        expect("3: a device", run(train(steps=2, report=node)), 0)
        if os.path.isfile(node):
            failures.append("3")
            print("FAILED: 3: the device has become a file")
    os.symlink(write("target.json", "old"), path("link.json"))
    expect("3: a link", run(train(steps=2, report=path("link.json"))), 0)
    with open(path("target.json"), "rb") as file:
        if not os.path.islink(path("link.json")) or file.read() == b"old":
            failures.append("3")
            print("FAILED: 3: a link is not followed")


def finding_4():
    """A data file that is truncated while it is read."""
    data = write("cut.txt", b"the cat sat on a mat and saw seven rats\n" * 1000)
    job = start(train(steps=1000000, max_seconds=LIMIT, data=data))
    text = b""
    while b"\nstep" not in text and (line := job.stdout.readline()):
        text += line
    with open(data, "wb"):
        pass
    expect("4: one rank", end(job), 2, "cut.txt", absent=())


def finding_5():
    """JSON with endless nesting."""
    deep = "[" * 200000 + "]" * 200000
    expect("5: --config", run(["plan", "--model", "gpt-nano", "--config", write("deep.json", '{"gradient_clipping":' + deep + "}")]), 2, "nested deeper than 64")
    expect("5: --model", run(["plan", "--model", write("deep-model.json", deep)]), 2, "nested deeper than 64")
    def nested(manifest):
        manifest["run"]["optimizer"] = "DEEP"
        return ("".join(f'"{key}": {json.dumps(value)},\n' for key, value in manifest.items())[:-2] + "}\n").replace('"DEEP"', deep).encode()
    folder = crafted("deep", nested)
    refused_checkpoint("5", folder, "nested deeper than 64")


def finding_6():
    """Counts in files that are trusted."""
    for name, value in (("n_layer", 3000000), ("n_layer", 2**40), ("n_positions", 2**55), ("vocab_size", 2**55)):
        expect(f"6: {name} {value}", run(["plan", "--model", write("large.json", json.dumps({**MODEL, name: value}))]), 2, name)
    manifest = write("sparse/step-00000006/manifest.json", "")
    os.truncate(manifest, 6 << 30)
    refused_checkpoint("6: a manifest of 6 GiB", path("sparse"), "6442450944")


def finding_7():
    """Pipes in a checkpoint's folder."""
    for name in ("step-00000006/manifest.json", "latest"):
        folder = crafted("pipe-" + os.path.basename(name), lambda manifest: None)
        os.remove(os.path.join(folder, name))
        os.mkfifo(os.path.join(folder, name))
        expect(f"7: list with {name}", run(["checkpoint", "list", folder]), 0)
        expect(f"7: verify with {name}", run(["checkpoint", "verify", folder]), 4, "pipe")
        expect(f"7: train with {name}", run(train(steps=7, checkpoint_dir=folder, resume="latest")), (0, 4))
    folder = crafted("pipe-owner", lambda manifest: None)
    os.mkdir(os.path.join(folder, "step-00000001.0123456789abcdef.tmp"))
    os.mkfifo(os.path.join(folder, "step-00000001.0123456789abcdef.tmp", "owner.json"))
    expect("7: train beside debris", run(train(steps=7, checkpoint_dir=folder, resume="latest")), 0)


def finding_8():
    """Exceptions of libraries."""
    expect("8: 1e999", run(["plan", "--model", "gpt-nano", "--config", write("big.json", '{"gradient_clipping":1e999}')]), 2, "1e999")
    odd = os.fsencode(path("")) + b"\xff"
    expect("8: a path with a byte that is no text",
           run(train(steps=1) + ["--offload-optimizer", "nvme", "--nvme-path", odd]), (0, 2))
    expect("8: --set with such a byte", run(train(steps=1) + ["--set", b"gradient_clipping=\xff"]), 2)
    expect("8: n_embd 2^60", run(["plan", "--model", write("wide.json", json.dumps({**MODEL, "n_embd": 2**60}))]), 2, "n_embd")
    expect("8: an empty configuration", run(["plan", "--model", "gpt-nano", "--config", write("empty.json", "")]), 2, absent=("Success",))
    folder = crafted("created", lambda manifest: manifest.update(created=2**62))
    expect("8: created 2^62", run(["checkpoint", "list", folder]), 0, "created")


def finding_9():
    """Impossible layouts."""
    refused_checkpoint("9: sequence", crafted("sequence", lambda manifest: manifest.update(sequence=2**63 - 1)), "sequence")
    refused_checkpoint("9: cuts", crafted("cuts", lambda manifest: manifest["units"][0]["buffers"][0]["instances"][0].update(ranges=[[0, 0, 2**63 - 1]])), "elements")
    refused_checkpoint("9: a section twice", crafted("twice", lambda manifest: manifest["sections"].append(manifest["sections"][0])), "section")


def finding_10():
    """A save that just fits the disk."""
    mounted = path("small")
    os.makedirs(mounted)
    wide = write("wide-model.json", json.dumps({**MODEL, "n_embd": 384, "n_layer": 3, "n_head": 8}))
    script = f"mount -t tmpfs -o size=$1m none {mounted} && shift && exec \"$@\""
    line = [PROGRAM] + train(model=wide, steps=1, save_every=1, checkpoint_dir=os.path.join(mounted, "run"))
    if subprocess.run(["unshare", "-m", "true"], check=False, stderr=subprocess.DEVNULL).returncode != 0:
        print("skipped: 10: no file system may be mounted here")
        return
    status, text = run(["-m", "sh", "-c", script, "sh", "400"] + line, program=["unshare"])
    assert status == 0, text
    # Weights and moments, once.
    elements = int(re.search(r"parameters +(\d+)", text).group(1))
    room = elements * 12 // 2**20 + 4
    for _ in range(part_of_count(5, "saves by four ranks")):
        expect(f"10: {room} MiB", run(["-m", "sh", "-c", script, "sh", str(room), RUN_MPI, "4"] + line, program=["unshare"]), 0, "is complete")


def finding_11():
    """Standard output on a full disk, and a disk that fails under the nvme tier."""
    with open("/dev/full", "wb") as full:
        for line in (["plan", "--model", "gpt2", "--json"], ["info"], train(steps=1)):
            expect(f"11: {line[0]}", run(line, out=full), 1, "standard output cannot be written: No space left on device")
    expect("11: a folder that is none", run(train(steps=1) + ["--offload-optimizer", "nvme", "--nvme-path", "/proc/nothing"]), (2, 8), "/proc/nothing")


def finding_13():
    """The memory of a long run."""
    def peak(steps):
        with tempfile.TemporaryFile() as out:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.execv(PROGRAM, [PROGRAM] + train(model=write("nano.json", json.dumps({**MODEL, "n_embd": 8, "n_layer": 1})), steps=steps, log_every=1000))
            _, status, usage = os.wait4(child, 0)
            assert status == 0
            return usage.ru_maxrss
    grown = peak(12000) - peak(2000)
    if grown > 2000:
        failures.append("13")
        print(f"FAILED: 13: ten thousand steps take {grown} kB")


def finding_14():
    """Escape sequences in a manifest, symbolic links at the names of temporary files, and a damaged newest checkpoint."""
    folder = crafted("escapes", lambda manifest: manifest.update(library="\x1b]52;c;bGF1Z2g=\x07"))
    expect("14: escapes", run(["checkpoint", "show", os.path.join(folder, "step-00000006")]), 0, "\\u001b]52")
    folder, victim = crafted("planted", lambda manifest: None), write("victim", "whole")
    for name in ("latest.tmp", "latest.new"):
        os.symlink(victim, os.path.join(folder, name))
    expect("14: a planted link", run(train(steps=7, checkpoint_dir=folder, resume="latest", save_every=1)), 0)
    with open(victim, encoding="utf-8") as file:
        if file.read() != "whole":
            failures.append("14")
            print("FAILED: 14: a link in the folder was written through")
    folder = path("rotten")
    assert run(train(steps=2, save_every=1, checkpoint_dir=folder))[0] == 0
    with open(os.path.join(folder, "step-00000002", "shard-00000-of-00001.h5"), "r+b") as file:
        file.seek(20000)
        file.write(b"rotten")
    expect("14: the newest is rotten, with a flag", run(train(steps=3, checkpoint_dir=folder, resume="latest") + ["--resume-strict"]), 4, "step-00000002")
    expect("14: the newest is rotten", run(train(steps=3, checkpoint_dir=folder, resume="latest")), 0, "step-00000002", "step-00000001")


def finding_15():
    """A terminal that closes, and one whose hangup nohup lets the run ignore; and how long threads spin before they sleep."""
    def ended_by(name, *signals, **how):
        job = start(train(steps=100000000, max_seconds=LIMIT, checkpoint_dir=path(name)), **how)
        text = b""
        while b"\nstep" not in text and (line := job.stdout.readline()):
            text += line
        with open(f"/proc/{job.pid}/environ", "rb") as file:
            environment = file.read().split(b"\0")
        for number in signals:
            os.kill(job.pid, number)
        return end(job), environment
    for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGUSR1):
        result, environment = ended_by(f"ended-by-{number.name}", number)
        expect(f"15: {number.name}", result, 9, f" by {number.name}, ", "is complete: the same command with --resume latest goes on from it")
        if not any(word.startswith(b"GOMP_SPINCOUNT=") for word in environment):
            failures.append("15")
            print(f"FAILED: 15: the environment does not say how long threads turn: {environment}")
    result, environment = ended_by("nohup", signal.SIGHUP, signal.SIGTERM, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
                                   env=dict(os.environ, OMP_WAIT_POLICY="active"))
    expect("15: nohup", result, 9, " by SIGTERM, ")
    if any(word.startswith(b"GOMP_SPINCOUNT=") for word in environment) != ("GOMP_SPINCOUNT" in os.environ):
        failures.append("15")
        print("FAILED: 15: what the user has chosen is overruled")


def main():
    write("mid.json", json.dumps(MODEL))
    write("my.txt", b"the cat sat on a mat and saw seven rats\n" * 100)
    numbers = [int(word) for word in sys.argv[2:]] or [n for n in range(1, 16) if f"finding_{n}" in globals()]
    for number in numbers:
        before = len(failures)
        globals()[f"finding_{number}"]()
        print(f"finding {number}: {'as promised' if len(failures) == before else 'FAILED'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
