#!/usr/bin/env python3
"""checkpoint_test.py PROGRAM SUITE: the tranche program saves, resumes and is asked to stop, in separate processes.

Suites: resume, mixture, adapters, stop, disk. Every failed check prints the command that reproduces it.
"""

import filecmp
import json
import os
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

PROGRAM, SUITE = os.path.abspath(sys.argv[1]), sys.argv[2]
RUN_MPI = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "run_mpi.sh")
FOLDER = tempfile.TemporaryDirectory(prefix="tranche-test-")
LIMIT = 60  # seconds; a job that still runs then counts as hung
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would processes started here
failures = []


def path(*names):
    return os.path.join(FOLDER.name, *names)


def write(name, content):
    with open(path(name), "wb") as file:
        file.write(content)
    return path(name)


TEXT = write("text.txt", (b"the cat sat on a mat and saw seven rats\n" * 200))
SHAPE = {"model_type": "gpt2", "n_layer": 3, "n_head": 3, "n_embd": 33, "n_inner": 61, "vocab_size": 257, "n_positions": 32,
         "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}
MODEL = write("config.json", json.dumps(SHAPE).encode())
WITHOUT_DATA = ["train", "--model", MODEL, "--sequence", "13", "--threads", "1", "--eval-batches", "1",
                "--debug-peak-seconds", "0.01", "--set", "tranche.workspace=8MiB", "--set", "tranche.communication_slab=1MiB"]
TINY = WITHOUT_DATA + ["--data", TEXT]


def command(arguments, ranks):
    return ([RUN_MPI, str(ranks)] if ranks else []) + [PROGRAM] + arguments


def environment():
    return dict(os.environ, TRANCHE_MPI_TIMEOUT=str(LIMIT))


def fail(what, line, output):
    failures.append(what)
    print(f"FAILED: {what}\n  {shlex.join(line)}\n  " + "\n  ".join(output.strip().split("\n")[-25:]))


def run(arguments, ranks, status=0, texts=(), line=None):
    """Returns standard output and error together; checks status and texts."""
    line = line or command(arguments, ranks)
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          timeout=LIMIT + 15, env=environment(), check=False)
    if done.returncode != status:
        fail(f"exit status {status}, not {done.returncode}", line, done.stdout)
    for text in texts:
        if text not in done.stdout:
            fail(f"it says '{text}'", line, done.stdout)
    return done.stdout


def train(arguments, ranks, texts=(), base=None):
    """Returns the report of a successful run; None if it fails."""
    report = path("report.json")
    if os.path.exists(report):
        os.remove(report)
    run((base or TINY) + arguments + ["--report", report], ranks, 0, texts)
    if not os.path.exists(report):
        return {"steps": [], "checkpoints": [], "resumed": {}}
    with open(report, encoding="utf-8") as file:
        return json.load(file)


def expect(condition, what):
    if not condition:
        failures.append(what)
        print(f"FAILED: {what}")


def losses(report):
    return [step["loss"] for step in report["steps"]]


def suite_resume():
    base = ["--dtype", "fp32", "--micro-batch", "6", "--accumulate", "1"]
    reference = train(base + ["--stage", "2", "--steps", "7", "--digest-every", "1"], 2)
    folder = path("resume")
    save = ["--checkpoint-dir", folder, "--resume", "latest"]
    first = train(base + save + ["--stage", "2", "--steps", "4", "--save-every", "3"], 2,
                  ["no checkpoint in", "step-00000003 is complete", "step-00000004 is complete"])
    expect(losses(first) == losses(reference)[:4], "saving changes no loss")
    shutil.copytree(folder, path("kept"))
    # The same number of ranks at another stage: the same bits as without the interruption.
    rest = train(base + save + ["--stage", "3", "--steps", "7", "--digest-every", "1"], 2,
                 ["zero_optimization.stage is 3, was 2"])
    expect(rest["resumed"]["state_digest"] == reference["steps"][3]["state_digest"], "the state loaded is that of step 4")
    for key in ("weights_digest", "state_digest"):
        expect(rest.get(key) == reference[key], f"{key} of a run that was resumed on as many ranks")
    expect(losses(rest) == losses(reference)[4:], "losses of a run that was resumed on as many ranks")
    # More and fewer ranks with another division: the same samples, with sums that round differently.
    for ranks, micro, stage in ((3, 4, 1), (1, 12, 0)):
        shutil.rmtree(folder)
        shutil.copytree(path("kept"), folder)
        other = train(["--dtype", "fp32", "--micro-batch", str(micro), "--stage", str(stage), "--steps", "7"] + save, ranks,
                      [f"saved by 2 ranks, loaded by {ranks}"])
        expect(other["resumed"]["state_digest"] == reference["steps"][3]["state_digest"], f"{ranks} ranks load what 2 saved")
        expect(other["resumed"]["samples"] == 48, "4 steps of 12 samples came before")
        worst = max((abs(a - b) for a, b in zip(losses(other), losses(reference)[4:])), default=1)
        expect(worst < 1e-5 and len(other["steps"]) == 3, f"losses of {ranks} ranks differ by {worst} from those of 2")
    # Only rank 0 finds it, and all end normally.
    model = write("other.json", json.dumps(dict(SHAPE, n_layer=2)).encode())
    run(TINY + base + save + ["--model", model], 2, 4, ["is of another model", "n_layer is 3 there, 2 here"])
    run(["evaluate", "--model", MODEL, "--data", TEXT, "--sequence", "13", "--threads", "1",
         "--debug-peak-seconds", "0.01", "--from", path("kept")], 3, 0,
        ["validation loss of " + path("kept", "step-00000004")])
    # A model of two layers loads the matching ones of the three, on all ranks.
    part = train(base + ["--stage", "3", "--model", model, "--resume", path("kept"), "--partial", "--steps", "5"], 3,
                 ["the model's n_layer is 2, was 3",
                  "tensor transformer.h.2.ln_1.weight of " + path("kept", "step-00000004") + ": passed over"])
    expect(len(part["resumed"].get("differences", [])) == 12, "each tensor of the third layer is passed over")
    expect([step["step"] for step in part["steps"]] == [5], "a partial load goes on with the next step")


def tensors_of(file):
    """Returns the fp32 tensors of a safetensors file, by name."""
    with open(file, "rb") as opened:
        content = opened.read()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        expect(entry["dtype"] == "F32", f"{name} is fp32")
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = struct.unpack(f"<{(end - begin) // 4}f", content[begin:end])
    return tensors


def suite_adapters():
    """Adapters whose layers the axis tensor cuts: the PEFT files equal those of one rank."""
    base = path("base")
    train(["--dtype", "fp32", "--micro-batch", "6", "--steps", "1", "--checkpoint-dir", base], 0)
    flags = ["--dtype", "fp32", "--micro-batch", "6", "--resume-weights-only", base, "--set", "tranche.lora.rank=3", "--set",
             "tranche.lora.dropout=0.2", "--set", 'tranche.lora.targets=["all-linear", "lm_head"]']

    def exported(name, ranks, more):
        mesh = ["--mesh", "tensor=3"] if ranks else []
        report = train(flags + mesh + more + ["--checkpoint-dir", path(name)], ranks)
        run(["checkpoint", "export", path(name), "--to", path(name + "-peft"), "--peft"], 0)
        return losses(report), path(name + "-peft", "adapter_model.safetensors")

    # With a learning rate of 0 the adapters stay as they were drawn.
    still = ["--steps", "1", "--lr", "0"]
    (_, one), (_, cut) = exported("still", 0, still), exported("still-cut", 3, still)
    expect(filecmp.cmp(one, cut, shallow=False), "adapters that were drawn are exported to the same file")
    trained = ["--steps", "5", "--lr", "0.02"]
    (losses_of_one, one), (losses_of_cut, cut) = exported("trained", 0, trained), exported("trained-cut", 3, trained)
    worst = max((abs(a - b) for a, b in zip(losses_of_one, losses_of_cut)), default=1)
    expect(worst < 1e-5 and len(losses_of_cut) == 5, f"losses differ by {worst}")
    ours, theirs = tensors_of(one), tensors_of(cut)
    expect(ours.keys() == theirs.keys() and len(ours) == 26, "two tensors of each of 13 layers")
    largest = max(abs(value) for values in ours.values() for value in values)
    worst = max(abs(a - b) for name, values in ours.items() for a, b in zip(values, theirs[name]))
    expect(worst < 1e-4 * largest, f"exported adapters differ by {worst}")
    expect(not filecmp.cmp(one, path("still-peft", "adapter_model.safetensors"), shallow=False), "training has an effect")


def token_file(name, documents):
    """A file in the format of `tranche tokenize`: bytes, ends of documents, and a mask in which the first half of each document is not
    learned."""
    tokens, ends, targets = b"", b"", b""
    for document in documents:
        tokens += document
        targets += bytes(len(document) // 2) + b"\x01" * (len(document) - len(document) // 2)
        ends += len(tokens).to_bytes(8, "little")
    header, at = {}, 0
    for key, dtype, size, data in (("document_ends", "I64", 8, ends), ("tokens", "U8", 1, tokens), ("targets", "U8", 1, targets)):
        header[key] = {"dtype": dtype, "shape": [len(data) // size], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write(name, len(text).to_bytes(8, "little") + text + ends + tokens + targets)


def suite_mixture():
    """A mixture of packed documents and text continues in the middle, on other numbers of ranks, with the samples that would have followed.
    """
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 32, "initializer_range": 0.3}
    documents = [bytes(33 + (7 * i + j * j) % 90 for j in range(3 + 5 * i % 17)) for i in range(300)]
    replaced = {MODEL: write("llama.json", json.dumps(shape).encode()), TEXT: token_file("documents.safetensors", documents) + ":0.6"}
    base = [replaced.get(word, word) for word in TINY] + ["--data", TEXT + ":0.4", "--dtype", "fp32", "--accumulate", "1"]
    folder = path("mixture")
    save = ["--checkpoint-dir", folder, "--resume", "latest"]
    reference = train(["--micro-batch", "12", "--steps", "7"], 0, base=base)
    expect(len(set(losses(reference))) == 7, "steps have losses of their own")
    train(["--micro-batch", "12", "--steps", "4"] + save, 0, ["step-00000004 is complete"], base)
    shutil.copytree(folder, path("mixture-kept"))
    for ranks, micro, more in ((3, 4, ["--stage", "3"]), (2, 6, ["--mesh", "replicate=2,shard=1"])):
        shutil.rmtree(folder)
        shutil.copytree(path("mixture-kept"), folder)
        other = train(["--micro-batch", str(micro), "--steps", "7"] + more + save, ranks, [f"loaded by {ranks}"], base)
        expect(other["resumed"].get("samples") == 48, "4 steps of 12 samples came before")
        worst = max((abs(a - b) for a, b in zip(losses(other), losses(reference)[4:])), default=1)
        expect(worst < 1e-5 and len(other["steps"]) == 3, f"losses of {ranks} ranks differ by {worst} from those of one")
    masked_ranks()


def masked_ranks():
    """Steps in which one rank has nothing to learn equal those of one rank with the whole batch."""
    lines = [{"prompt": f"{n} " * 60, "completion": f"is {n}. " * 30} for n in range(30)]
    text, tokens = path("prompts.jsonl"), path("prompts.safetensors")
    write("prompts.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    run(["tokenize", "--data", text, "--out", tokens], 0)
    base = ["--data", tokens, "--dtype", "fp32", "--steps", "12", "--eval-every", "6"]
    alone = train(base + ["--micro-batch", "2", "--stage", "0"], 1, base=WITHOUT_DATA)
    both = train(base + ["--micro-batch", "1", "--stage", "3"], 2, ["30 of 30 documents are longer than a sequence of 13 tokens"],
                 base=WITHOUT_DATA)
    counts = [step["tokens"] for step in both["steps"]]
    expect(13 in counts and 26 in counts, f"a rank of a step is masked, and none: {counts}")
    expect([step["tokens"] for step in alone["steps"]] == counts, "masked tokens are counted nowhere")
    expect([loss is None for loss in losses(both)] == [count == 0 for count in counts], "a step without tokens has no loss")
    expect([loss is None for loss in losses(alone)] == [count == 0 for count in counts], "a step without tokens has no loss")
    worst = max((abs(a - b) for a, b in zip(losses(both), losses(alone)) if a is not None), default=1)
    expect(worst < 1e-5 and len(both["steps"]) == 12, f"losses with masked ranks differ by {worst}")


def catches(process, number):
    """Whether the process has a handler for the signal."""
    with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
        return bool(int(re.search(r"SigCgt:\s+(\w+)", file.read())[1], 16) >> number - 1 & 1)


class Job:
    """A run that continues while it is observed."""

    def __init__(self, arguments, ranks):
        self.line = command(TINY + arguments, ranks)
        self.out = path("job.txt")
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(self.line, stdout=out, stderr=out, start_new_session=True, env=environment())
        self.ranks = []

    def text(self):
        with open(self.out, encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait_for(self, text):
        begin = time.time()
        while text not in self.text():
            if time.time() - begin > LIMIT or self.process.poll() is not None:
                fail(f"it comes to say '{text}'", self.line, self.text())
                return
            time.sleep(0.01)
        self.ranks = self.find_ranks()

    def find_ranks(self):
        """Finds the processes of the program in the job's session."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                    stat = file.read()
            except OSError:
                continue
            own = stat[stat.index("(") + 1:stat.rindex(")")]
            if own == os.path.basename(PROGRAM)[:15] and int(stat[stat.rindex(")") + 2:].split()[3]) == self.process.pid:
                found.append(int(entry))
        return sorted(found)

    def end(self, status, texts, seconds=LIMIT):
        begin = time.time()
        try:
            found = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            fail(f"it ends within {seconds} s", self.line, self.text())
            found = None
        for process in self.find_ranks():
            # mpirun has killed it, but the kernel may not have finished.
            while os.path.exists(f"/proc/{process}/exe") and time.time() < begin + seconds:
                time.sleep(0.02)
            if os.path.exists(f"/proc/{process}/exe"):
                fail("no rank lives on", self.line, self.text())
                os.kill(process, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if found is not None and found != status:
            fail(f"exit status {status}, not {found}", self.line, self.text())
        for text in texts:
            if text not in self.text():
                fail(f"it says '{text}'", self.line, self.text())
        return self.text()


def suite_stop():
    def stopped(name, send, by, ranks=3, status=9):
        folder, report = path(name), path(name + ".json")
        flags = ["--stopped-status", str(status)] if status != 9 else []
        job = Job(["--stage", "2", "--steps", "1000000", "--log-every", "1", "--checkpoint-dir", folder, "--report", report] + flags, ranks)
        job.wait_for("step       3/1000000")
        send(job)
        job.end(status, ["is complete: the same command with --resume latest goes on from it", by])
        if not os.path.exists(report):
            return None, 0
        with open(report, encoding="utf-8") as file:
            written = json.load(file)
        last = written["steps"][-1]["step"]
        expect([entry["step"] for entry in written["checkpoints"]] == [last], f"{name}: the last step is saved, and only that")
        expect(os.listdir(folder).count(f"step-{last:08d}") == 1, f"{name}: its folder is there")
        return written, last

    # mpirun forwards SIGUSR1 to its ranks.
    first, last = stopped("usr1", lambda job: os.kill(job.process.pid, signal.SIGUSR1), "by SIGUSR1")
    if first:
        rest = train(["--stage", "2", "--steps", str(last + 2), "--checkpoint-dir", path("usr1"), "--resume", "latest"], 3)
        whole = train(["--stage", "2", "--steps", str(last + 2)], 3)
        expect(rest["weights_digest"] == whole["weights_digest"], "a run that was stopped and resumed has the same bits")

    # A signal to a single rank, and to all ranks again and again until they are gone, as the manager of the nodes may send it.
    stopped("term", lambda job: os.kill(job.ranks[-1], signal.SIGTERM), "stopped after step")

    def repeatedly(job):
        left, begin = set(job.ranks), time.time()
        while left and time.time() < begin + LIMIT:
            for rank in sorted(left):
                try:
                    os.kill(rank, signal.SIGTERM)
                except ProcessLookupError:
                    left.remove(rank)
            time.sleep(0.001)
    stopped("terms", repeatedly, "by SIGTERM", 2, 75)

    # A person at the terminal: SIGINT to a run without mpirun, and to one rank.
    stopped("int", lambda job: os.kill(job.process.pid, signal.SIGINT), "by SIGINT", 0, 0)
    stopped("int2", lambda job: os.kill(job.ranks[0], signal.SIGINT), "by SIGINT", 2)

    # A signal to a single rank during a validation of many windows, which all ranks leave.
    with open(path("long.txt"), "w", encoding="utf-8") as file:
        file.write("0123456789abcdef" * (1 << 18))
    job = Job(["--steps", "1000000", "--log-every", "1", "--checkpoint-dir", path("validates"), "--eval-every", "1",
               "--eval-batches", "0", "--validation-data", path("long.txt")], 3)
    job.wait_for("step       1/1000000")
    os.kill(job.ranks[-1], signal.SIGTERM)
    job.end(9, ["stopped after step 1 of 1000000 by a signal to another rank"])
    expect("validation loss" not in job.text(), "a validation that is left has no loss")

    # A rank hangs, so no step notices the first signal; the second signal ends the process.
    job = Job(["--steps", "1000000", "--log-every", "1", "--checkpoint-dir", path("hangs"), "--debug-hang", "0:4"], 0)
    job.wait_for("step       3/1000000")
    os.kill(job.process.pid, signal.SIGINT)
    begin = time.time()
    while job.process.poll() is None and catches(job.process.pid, signal.SIGINT) and time.time() < begin + LIMIT:
        time.sleep(0.01)  # a second SIGINT before the first is taken would be the same one
    expect(job.process.poll() is None, "the first SIGINT ends nothing")
    os.kill(job.process.pid, signal.SIGINT)
    job.end(-signal.SIGINT, [], 60)

    # Without a checkpoint folder no signal is handled, so it ends the run as usual.
    job = Job(["--steps", "1000000", "--log-every", "1"], 0)
    job.wait_for("step       3/1000000")
    os.kill(job.process.pid, signal.SIGTERM)
    job.end(-signal.SIGTERM, [])


def suite_disk():
    """A disk that fills up, a file that may not grow, and a folder that cannot be written: reported, and nothing is lost."""
    # Some 1.5 MiB per checkpoint.
    model = write("larger.json", json.dumps(dict(SHAPE, n_head=4, n_embd=64, n_inner=256, n_layer=2)).encode())
    for ranks in (0, 3):
        name = f"limit{ranks}"
        job = Job(["--model", model, "--stage", "3", "--steps", "1000000", "--checkpoint-dir", path(name), "--save-every", "5"],
                  ranks)
        job.wait_for("step-00000005 is complete")
        for rank in job.ranks:
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (65536, 65536))
        job.end(4, ["cannot save step", "File too large", path(name)], 20)
        run(["checkpoint", "verify", path(name)], 0, 0)
        run(TINY + ["--model", model, "--checkpoint-dir", path(name), "--resume", "latest", "--steps", "6"], ranks, 0,
            [f"resumed                {path(name)}/step-"])

    within = "mount -t tmpfs -o size=4m none \"$1\" && shift && exec \"$@\""
    probe = subprocess.run(["unshare", "--mount", "sh", "-c", within, "sh", FOLDER.name, "true"], stderr=subprocess.PIPE, check=False)
    if probe.returncode != 0:
        print(f"skipped: a disk that fills up: no file system may be mounted here ({probe.stderr.decode().strip()})")
        return
    disk = path("disk")
    os.mkdir(disk)
    for ranks in (0, 3):
        flags = TINY + ["--model", model, "--stage", "1", "--checkpoint-dir", os.path.join(disk, "ckpt"), "--save-every", "1"]
        script = "; ".join([
            shlex.join(command(flags + ["--steps", "9"], ranks)),
            "echo full: status $?", f"ls {disk}/ckpt", f"{shlex.quote(PROGRAM)} checkpoint verify {disk}/ckpt; echo verified: status $?",
            shlex.join(command(flags + ["--resume", "latest", "--keep-last", "1", "--steps", "1"], ranks)),
            "echo resumed: status $?",
            f"mount -o remount,ro {disk}",
            shlex.join(command(flags + ["--resume", "latest"], ranks)),
            "echo read-only: status $?"])
        output = run([], 0, 0, ["bytes, but only ", "are free there: remove old ones", "full: status 4", "verified: status 0", "resumed: status 0",
                                "Read-only file system", "nothing was trained yet", "read-only: status 4"],
                     line=["unshare", "--mount", "sh", "-c", within, "sh", disk, "sh", "-c", script])
        for line in output.splitlines():
            if line.count("cannot save step") > 1:
                fail("what could not be done is said once", [], line)
        if ".tmp" in output or "all_gather" in output:
            fail("what a failed save had begun is removed, and every rank tells of the save", [], output)


begin = time.time()
{"resume": suite_resume, "mixture": suite_mixture, "adapters": suite_adapters, "stop": suite_stop, "disk": suite_disk}[SUITE]()
print(f"{SUITE}: {'passed' if not failures else f'{len(failures)} checks FAILED'} in {time.time() - begin:.1f} s")
sys.exit(1 if failures else 0)
