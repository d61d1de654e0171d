#!/usr/bin/env python3
"""program_test.py PROGRAM SUITE: the tranche program in separate processes, alone and under mpirun.

Suites: alone, agreement, configurations, data, errors, statuses, failures, hosts, digests, pipeline, pipeline_rows, tensor, any_ranks,
memory, offload, plan, report. Every failed check prints the command that reproduces it.
"""

import concurrent.futures
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts"))
from sweep_part import part  # noqa: E402

PROGRAM, SUITE = sys.argv[1], sys.argv[2]
RUN_MPI = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "run_mpi.sh")
FOLDER = tempfile.TemporaryDirectory(prefix="tranche-test-")
LIMIT = 60  # seconds; a job that still runs then counts as hung
# A run that only a failure ends, and the communication time-out where a rank hangs. Elsewhere no time-out passes within LIMIT, however busy the
# machine is.
ENDLESS, TIME_OUT = ["--steps", "1000000", "--max-seconds", "100"], ["--set", "tranche.communication_timeout=4"]
# mpirun sleeps a second before it ends a job in which a rank has failed. If a refusal is printed before any rank may end, nothing is lost
# without that second, and a rank that prints it too late is found.
AT_ONCE = {"OMPI_MCA_odls_base_sigkill_timeout": "0"}
failures = []


def side_by_side(count, cases):
    """Runs functions, `count` at a time. They mostly wait for mpirun or for a time-out."""
    with concurrent.futures.ThreadPoolExecutor(count) as jobs:
        for done in [jobs.submit(*case) for case in cases]:
            done.result()


def path(name):
    return os.path.join(FOLDER.name, name)


def write(name, content):
    with open(path(name), "wb") as file:
        file.write(content)
    return path(name)


TEXT = write("text.txt", (b"the cat sat on a mat and saw seven rats\n" * 200))
# Sizes that are not divisible by numbers of ranks or vector widths; 3 layers.
MODEL = write("config.json", json.dumps({
    "model_type": "gpt2", "n_layer": 3, "n_head": 3, "n_embd": 33, "n_inner": 61, "vocab_size": 257, "n_positions": 32,
    "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}).encode())
TINY = ["train", "--model", MODEL, "--data", TEXT, "--sequence", "13", "--steps", "3", "--threads", "1",
        "--eval-batches", "1", "--debug-peak-seconds", "0.01",
        "--set", "tranche.workspace=8MiB", "--set", "tranche.communication_slab=1MiB"]


def with_data(line, data):
    """A command line with another file than TEXT. A second --data would be read in addition."""
    return [data if word == TEXT else word for word in line]


def command(arguments, ranks):
    """The command of `ranks` ranks, or of one rank for each of several lists of arguments."""
    if arguments and isinstance(arguments[0], list):
        return [RUN_MPI, "1", PROGRAM] + arguments[0] + [word for one in arguments[1:] for word in [":", "-n", "1", PROGRAM] + one]
    return ([RUN_MPI, str(ranks)] if ranks else []) + [PROGRAM] + arguments


def run(arguments, ranks=0, extra=None):
    """Returns (status, standard output, standard error, seconds)."""
    begin = time.time()
    environment = dict(os.environ, TRANCHE_MPI_TIMEOUT=str(LIMIT), **(extra or {}))
    done = subprocess.run(command(arguments, ranks), capture_output=True, text=True, errors="replace", timeout=LIMIT + 15,
                          env=environment, check=False)
    return done.returncode, done.stdout, done.stderr, time.time() - begin


def check(condition, what, arguments, ranks, result):
    if condition:
        return
    failures.append(what)
    print(f"FAILED: {what}\n  {shlex.join(command(arguments, ranks))}\n  status {result[0]} after {result[3]:.1f} s")
    print("  " + "\n  ".join((result[1] + result[2]).strip().split("\n")[-25:]))


def expect(arguments, ranks, status, texts=(), once=None, extra=None):
    result = run(arguments, ranks, extra)
    check(result[0] == status, f"exit status {status}, not {result[0]}", arguments, ranks, result)
    for text in texts:
        check(text in result[2], f"standard error says '{text}'", arguments, ranks, result)
    if once:
        count = result[2].count(once)
        check(count == 1, f"'{once}' is said once, not {count} times", arguments, ranks, result)
    return result


def suite_alone():
    expect(["info"], 0, 0)
    expect([], 0, 2, ["which command?"])
    expect(["train", "--stge", "3"], 0, 2, ["unknown flag --stge", "--stage"], once="tranche: ")
    expect(TINY + ["--stage", "4"], 0, 2, ["stage is 0 to 3, not 4"])
    expect(TINY + ["--device-memory", "2MiB"], 0, 3, ["2.00 MiB"])
    expect(TINY + ["--debug-fail", "0:1"], 0, 1, ["told to fail"])
    skips = ["--dtype", "fp16", "--steps", "20", "--lr", "1e30", "--set", "tranche.maximum_consecutive_skips=2"]
    expect(TINY + skips, 0, 6)
    expect(TINY, 0, 0)


def suite_configurations():
    """DeepSpeed configuration files as users write them run unchanged (train_batch_size 32 and 4 accumulation steps fit 2 ranks)."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "configs")
    for name, stage, dtype in (("deepspeed_stage2.json", 2, "bf16"), ("deepspeed_stage3_fp16.json", 3, "fp16"),
                               ("hugging_face_auto.json", 3, "bf16")):
        report = path(name + ".report.json")
        arguments = TINY + ["--config", os.path.join(folder, name), "--report", report]
        if expect(arguments, 2, 0)[0] != 0:
            continue
        with open(report, encoding="utf-8") as file:
            written = json.load(file)
        in_force = written["config"][dtype]["enabled"]
        if written["stage"] != stage or in_force is not True or len(written["steps"]) != 3:
            failures.append(name)
            print(f"FAILED: {name} ran as stage {written['stage']}, {dtype} {in_force}, {len(written['steps'])} steps")


def suite_errors():
    """Errors that occur on all ranks are printed once, by rank 0, and end the job normally."""
    cases = [
        (["--stage", "4"], "stage is 0 to 3, not 4"),
        (["--set", "zero_optimisation.stage=1"], "zero_optimization"),
        (["--set", "train_batch_size=7"], "train_batch_size"),
        (["--data", path("none.txt")], "cannot be opened"),
        (["--data", write("empty.txt", b"")], "is empty"),
        (["--data", write("t.bin", b"\x05\x00" * 500 + b"\x01\x01" + b"\x05\x00" * 500), "--model", "gpt-nano"],
         "token 257 at position 500"),
        (["--sequence", "33"], "sequence length 33"),
        (["--model", write("heads.json", b'{"model_type": "gpt2", "n_head": 5, "n_embd": 32}')],
         "\"n_head\" 5 does not divide"),
        (["--flag"], "unknown flag --flag"),
    ]
    def refused(flags, text):
        expect(TINY + flags, 2, 2, [text], once="tranche: ", extra=AT_ONCE)

    side_by_side(3, [(refused, flags, text) for flags, text in cases])
    # It occurs on both ranks at the same time, after the start; more than one rank may print it.
    expect(TINY + ["--device-memory", "10MiB", "--set", "tranche.workspace=32MiB"], 2, 3, ["10.00 MiB"], once="tranche: ")


def suite_agreement():
    """Ranks that were started with different flags, files or commands are refused before the first step, with both values."""
    other = write("other.txt", open(TEXT, "rb").read().replace(b"rats", b"cats"))
    shorter = write("shorter.txt", open(TEXT, "rb").read()[:-40])
    copied = write("copied.txt", open(TEXT, "rb").read())
    evaluate = ["evaluate"] + [word for word in TINY[1:] if word not in ("--steps", "3")]
    config = write("rate.json", b'{"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}')
    rate = write("other_rate.json", b'{"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}}')
    folder = ["--checkpoint-dir", path("agreement")]

    def digest(rank, name):
        return f"the digest of data file '{name}' is ", f" on rank {rank}"

    refused = [
        (TINY, with_data(TINY, other), digest(0, TEXT) + digest(1, other) + ("copy rank 0's file",)),
        (TINY + ["--validation-data", TEXT], TINY + ["--validation-data", other], digest(0, TEXT) + digest(1, other)),
        (evaluate, with_data(evaluate, other), digest(0, TEXT) + digest(1, other)),
        (TINY, with_data(TINY, shorter), (f"the number of tokens in data file '{TEXT}' is 8000 on rank 0, "
                                            f"the number of tokens in data file '{shorter}' is 7960 on rank 1",)),
        (TINY, TINY + ["--data-format", "text"], ("--data-format is not given on rank 0, --data-format is text on rank 1",)),
        (TINY, evaluate, ("the command is tranche train on rank 0, the command is tranche evaluate on rank 1",
                          "start all ranks with the same command and flags")),
        (TINY, ["--help"], ("the command is tranche train on rank 0, the command is help or info on rank 1",)),
        (TINY, TINY + ["--config", config], ("--config is not given on rank 0, --config is given on rank 1",)),
        (TINY + ["--config", config], TINY + ["--config", rate],
         ("the configuration's optimizer.params.lr is 0.5 on rank 0, the configuration's optimizer.params.lr is 0.25 on rank 1",)),
    ]
    for flag, value, first, second in (("--eval-every", "1", [], []), ("--digest-every", "1", [], []), ("--save-every", "1", folder, folder),
                                       ("--max-seconds", "100", [], []), ("--sample-bytes", "3", [], []),
                                       ("--memory-profile", path("profile"), [], []), ("--trace", path("t.json"), [], []),
                                       ("--checkpoint-dir", path("agreement"), [], []), ("--resume", "latest", folder, folder),
                                       ("--keep-last", "2", folder, folder), ("--steps", "4", ["--steps", "5"], [])):
        shown = value if not value.startswith("/") and value != "latest" else "given"
        before = first[1] if flag in first else "not given"
        refused.append((TINY + first, TINY + second + [flag, value], (f"{flag} is {before} on rank 0, {flag} is {shown} on rank 1",)))
    refused.append((TINY + ["--eval-every", "1"], TINY, ("--eval-every is 1 on rank 0, --eval-every is not given on rank 1",)))
    accepted = [TINY, with_data(TINY, copied) + ["--log-every", "1", "--debug-fail", "0:9", "--metrics", path("m.jsonl")]]
    def refuse(first, second, texts):
        expect([first, second], 2, 2, list(texts), once="tranche: ", extra=AT_ONCE)

    side_by_side(3, [(expect, accepted, 2, 0)] + [(refuse, *case) for case in refused])
    if os.path.exists(path("agreement")) and os.listdir(path("agreement")):
        failures.append("agreement")
        print(f"FAILED: a refused run wrote {os.listdir(path('agreement'))}")


def suite_data():
    """A data file that is truncated or changed during a run ends all ranks with status 2; a new file under its name is not noticed."""
    def cut(name):
        os.truncate(name, 0)

    def overwrite(name):
        with open(name, "r+b") as file:
            file.write(b"THE DOG")

    def replace(name):
        write("new.txt", b"short")
        os.rename(path("new.txt"), name)

    for ranks in (0, 2):
        changed_in_use(ranks, cut, 2, "was cut off while it was in use: it had 8000 bytes")
        changed_in_use(ranks, overwrite, 2, "was written to while it was in use")
    changed_in_use(2, replace, 0, "")


def changed_in_use(ranks, change, status, text):
    data = write("used.txt", open(TEXT, "rb").read())
    limit = "100" if status else "3"
    arguments = with_data(TINY, data) + ["--steps", "100000000", "--max-seconds", limit, "--log-every", "1"]
    output = path("used.out")
    with open(output, "wb") as out:
        job = subprocess.Popen(command(arguments, ranks), stdout=out, stderr=out, env=dict(os.environ, TRANCHE_MPI_TIMEOUT=str(LIMIT)))
        try:
            while job.poll() is None and b"\nstep" not in open(output, "rb").read():
                time.sleep(0.05)
            change(data)
            begin = time.time()
            job.wait(timeout=60)
        finally:
            if job.poll() is None:
                job.kill()
    result = (job.returncode, open(output, errors="replace").read(), "", time.time() - begin)
    name = change.__name__
    check(job.returncode == status, f"{name}: exit status {status}, not {job.returncode}", arguments, ranks, result)
    check(text in result[1], f"{name}: says '{text}'", arguments, ranks, result)
    if status:
        check(f"data file '{data}'" in result[1], f"{name}: names the file", arguments, ranks, result)


def suite_statuses():
    """Errors after the start, 20 times: the status is that of the cause, whichever rank ends the job."""
    every_rank = TINY + ["--set", 'tranche.frozen=["nothing.*"]']
    one_rank = TINY + ["--device-memory", "10MiB", "--debug-out-of-memory", "1:2"]
    side_by_side(3, 10 * [(expect, every_rank, 2, 2, ["pattern 'nothing.*' in tranche.frozen"]), (expect, one_rank, 2, 3, ["rank 1"])])


def suite_failures():
    def fails(stage, ranks, texts, *flags):
        expect(TINY + ENDLESS + ["--stage", stage, *flags], ranks, 5, texts)

    def hangs():
        result = expect(TINY + ENDLESS + TIME_OUT + ["--stage", "3", "--debug-hang", "1:2"], 3, 5, ["[rank 0]", "rank 1"])
        check(any(word in result[2] for word in ("all_gather", "reduce_scatter", "all_reduce")),
              "the operation that waited is named", ["hang"], 3, result)

    side_by_side(2, [
        (hangs,),
        (fails, "3", 3, ["[rank 1] --debug-fail: told to fail in step 2, micro-batch 1", "[rank 0]", "rank 1 failed"], "--accumulate", "2",
         "--debug-fail", "1:2"),
        (expect, TINY + ENDLESS + TIME_OUT + ["--stage", "2", "--debug-hang", "0:1"], 2, 5, ["rank 0"]),
        (fails, "1", 2, ["[rank 0] --debug-fail", "rank 0 failed"], "--debug-fail", "0:2"),
        (killed,)])


def suite_hosts():
    """Failures on two declared hosts of two ranks, which read each other's memory. Only rank 0 sees that rank 1 is missing, and reports it.
    """
    hosts = ["--set", "tranche.debug.ranks_per_host=2", "--set", "tranche.collectives=shared"]
    def hangs(stage):
        arguments = TINY + ENDLESS + TIME_OUT + hosts + ["--stage", stage, "--debug-hang", "1:2"]
        result = expect(arguments, 4, 5, ["[rank 0]", "no data from rank 1 after 4.0 s"])
        check(any(word in result[2] for word in ("all_gather of unit", "reduce_scatter of unit")),
              "the operation that waited and its unit are named", arguments, 4, result)

    side_by_side(2, [
        (hangs, "0"), (hangs, "3"),
        (expect, TINY + ENDLESS + hosts + ["--stage", "3", "--debug-fail", "1:2"], 4, 5,
         ["[rank 1] --debug-fail: told to fail in step 2", "rank 1 failed"]),
        (killed, ["--stage", "3"] + hosts, 4)])


def killed(more=(), count=2):
    """A rank that dies by a signal ends all others."""
    arguments = TINY + ["--steps", "100000000", "--log-every", "1", *more]
    with open(path("killed.out"), "wb") as out:
        job = subprocess.Popen(command(arguments, count), stdout=out, stderr=out, env=dict(os.environ, TRANCHE_MPI_TIMEOUT=str(LIMIT)))
        try:
            ranks = []
            while job.poll() is None and not (len(ranks) == count and b"step" in open(path("killed.out"), "rb").read()):
                time.sleep(0.05)
                ranks = children(job.pid)
            result = (0, open(path("killed.out"), errors="replace").read(), "", 0)
            check(len(ranks) == count, f"{count} ranks are training", arguments, count, result)
            for rank in ranks[-1:]:
                os.kill(rank, signal.SIGKILL)
            begin = time.time()
            status = job.wait(timeout=60)
            check(status != 0, "a killed rank is no success", arguments, count, result)
            # mpirun has killed them, but the kernel may not have finished.
            while (alive := [rank for rank in ranks if os.path.exists(f"/proc/{rank}/exe")]) and time.time() < begin + 30:
                time.sleep(0.02)
            check(not alive, f"all ranks have ended, {time.time() - begin:.1f} s later", arguments, count, result)
        finally:
            if job.poll() is None:
                job.kill()


def children(parent):
    """The processes of the program below `parent`."""
    found, name = [], os.path.basename(PROGRAM)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                stat = file.read()
        except OSError:
            continue
        own = stat[stat.index("(") + 1:stat.rindex(")")]
        if own == name[:15] and int(stat[stat.rindex(")") + 2:].split()[1]) == parent:
            found.append(int(entry))
    return sorted(found)


def trained(arguments, ranks):
    report = path("report.json")
    if os.path.exists(report):
        os.remove(report)
    arguments = TINY + arguments + ["--report", report]
    result = expect(arguments, ranks, 0)
    if result[0] != 0:
        return None
    with open(report, encoding="utf-8") as file:
        return json.load(file)


# (ranks, micro-batches, dtype, policy): each with stages 0 to 3; one of the stages has all other settings changed.
COVER = [
    (1, 2, "bf16", "micro_batch"),
    (2, 1, "fp32", "boundary"),
    (2, 4, "bf16", "micro_batch"),
    (3, 2, "fp16", "micro_batch"),
    (3, 4, "bf16", "boundary"),
    (4, 1, "bf16", "micro_batch"),
    (5, 3, "fp32", "micro_batch"),
]
OTHERWISE = ["--set", "zero_optimization.overlap_comm=false", "--set", "zero_optimization.reduce_bucket_size=1000",
             "--set", "zero_optimization.allgather_bucket_size=700", "--set", "tranche.depth=3",
             "--set", "tranche.debug.poison_memory=true"]


def suite_digests():
    """Stage 0 is the reference; a part of the sweep compares one of the other stages, which changes with each row."""
    chosen = part([(row, 1 + (n + number) % 3) for number, row in enumerate(COVER) for n in range(3)],
                  name=lambda item: f"stage {item[1]} of {item[0][0]} ranks, {item[0][2]}")
    for row in COVER:
        ranks, accumulation, dtype, policy = row
        stages = [0] + sorted(stage for other, stage in chosen if other is row)
        seen = {}
        for stage in stages:
            arguments = ["--stage", str(stage), "--accumulate", str(accumulation), "--dtype", dtype,
                         "--set", f"tranche.reduction={policy}", "--digest-every", "1"]
            report = trained(arguments + (OTHERWISE if stage == ranks % 4 else []), ranks)
            if report is None:
                continue
            assert report["world"] == ranks and report["stage"] == stage
            steps = tuple((step["weights_digest"], step["loss"], step["grad_norm"], step["applied"])
                          for step in report["steps"])
            seen[stage] = (report["weights_digest"], report["state_digest"], report["validation_loss"], steps)
        name = f"{ranks} ranks, {accumulation} micro-batches, {dtype}, {policy}"
        if len(seen) < len(stages) or len(set(seen.values())) != 1:
            failures.append(name)
            print(f"FAILED: equal bits in stages {stages} with {name}")
            for stage, values in seen.items():
                print(f"  stage {stage}: {values}")
        else:
            print(f"stages {stages} equal with {name}: weights {seen[0][0]}")


def traced(arguments, ranks, axis):
    """Checks one trace of all ranks: it has a process for each, and arrows with both ends that do not go back in time; the report has each
    stage's idle share."""
    trace, report = path("trace.json"), path("traced.json")
    arguments = arguments + ["--trace", trace, "--report", report]
    result = run(arguments, ranks)

    def holds(condition, what):
        check(condition, what, arguments, ranks, result)

    holds(result[0] == 0, "a traced run ends with 0")
    if result[0] != 0:
        return
    holds(f"trace: {trace}, of {ranks} ranks, whose clocks agree within " in result[1], "the end says how well clocks agree")
    holds(sorted(os.listdir(FOLDER.name)).count("trace.json") == 1 and not os.path.exists(path("trace.rank1.json")), "there is one file")
    with open(trace, encoding="utf-8") as file:
        whole = json.load(file)
    error = float(whole["otherData"]["clock_error_microseconds"])
    events = whole["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    holds(names == {rank: f"rank {rank} ({axis} {rank})" for rank in range(ranks)}, f"rows are named by coordinates: {names}")
    holds(all({event["pid"] for event in events if event["ph"] == "X" and event["name"] == kind + "3"} == set(range(ranks)) for kind in "FB"),
          "every rank has spans F3 and B3")
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    holds(begins and begins.keys() == ends.keys(), f"every arrow has both ends: {len(begins)} begin, {len(ends)} end")
    back = [begins[key]["ts"] - ends[key]["ts"] for key in begins.keys() & ends.keys()]
    holds(max(back, default=0) <= error + 0.002, f"no arrow goes back in time by more than {error} us: {max(back, default=0)}")
    with open(report, encoding="utf-8") as file:
        stages = json.load(file)["pipeline"]["stages"]
    holds([stage["stage"] for stage in stages] == list(range(ranks)) and all(0 <= stage["idle_share"] < 1 for stage in stages),
          f"the report has each stage's idle share: {stages}")
    shares = [f"{100 * share:.1f}%" for share in sorted(stage["idle_share"] for stage in stages)]
    holds(f"waiting for messages of other stages: {shares[0]} of a step on stage " in result[1] and f"to {shares[-1]} on stage " in result[1],
          f"the end says the least and the largest share: {shares}")


def suite_pipeline():
    """Stages of a pipeline have the bits of one rank that adds the gradients of a tied table by use, generate its text and evaluate its
    checkpoint; failures name the message."""
    checkpoint = path("staged")
    same = ["--accumulate", "4", "--digest-every", "1", "--sample-bytes", "9", "--set", "tranche.tie_sum=by_use"]
    for dtype in ("fp32", "bf16"):
        one = None
        for ranks, arguments in ((0, []), (2, ["--mesh", "pipeline=2"]),
                                 (3, ["--mesh", "pipeline=3", "--stage", "3", "--set", "tranche.pipeline_schedule=afab"])):
            # By default stage 3 reduces each micro-batch, which has other bits.
            report = trained(same + arguments + ["--dtype", dtype, "--set", "tranche.reduction=boundary"], ranks)
            if report is None:
                continue
            steps = [(step["weights_digest"], step["loss"], step["grad_norm"]) for step in report["steps"]]
            seen = (report["state_digest"], report["validation_loss"], report["sample"], steps)
            one = one or seen
            if seen != one:
                failures.append(f"{dtype} {arguments}")
                print(f"FAILED: the bits of one rank in {dtype} with {arguments}\n  {one}\n  {seen}")
            for axis in report["traffic"]["by_axis"]:
                if axis["elements"] != axis["formula_elements"] or (axis["axis"] == "pipeline" and axis["elements"] == 0):
                    failures.append(f"traffic of {axis}")
                    print(f"FAILED: traffic is the formula's with {arguments}: {axis}")
    trained(["--mesh", "pipeline=2", "--checkpoint-dir", checkpoint], 2)
    text = ["generate", "--from", checkpoint, "--prompt", "the cat", "--prompt", "a rat", "--tokens", "40", "--json", "--threads", "1", "--stop", "s"]
    loss = ["evaluate", "--from", checkpoint] + [word for word in TINY[1:] if word not in ("--steps", "3")]
    for what, arguments in (("text", text + ["--greedy"]), ("drawn text", text + ["--dtype", "bf16"]), ("loss", loss)):
        meshes = [(0, []), (2, ["--mesh", "pipeline=2"])] + ([(4, ["--mesh", "pipeline=2, shard=2", "--stage", "3"])] if what == "text" else [])
        said = [[line for line in expect(arguments + mesh, ranks, 0)[1].split("\n") if line.startswith(("{", "validation loss"))]
                for ranks, mesh in meshes]
        if not said[0] or any(one != said[0] for one in said):
            failures.append(f"{what} of a pipeline")
            print(f"FAILED: the {what} of one rank on a pipeline\n  {said}")
    traced(TINY + ["--mesh", "pipeline=2", "--accumulate", "4"], 2, "pipeline")
    staged = TINY + ["--mesh", "pipeline=2", "--accumulate", "4"]

    def fails():
        arguments = staged + ["--debug-fail", "1:2"]
        result = expect(arguments, 2, 5, ["[rank 1] forward of micro-batch 3, receive from rank 0: --debug-fail: told to fail in step 2, micro-batch 3",
                                          "rank 1 failed: forward of micro-batch 3"], None, AT_ONCE)
        # Where rank 0 is meanwhile depends on the speed of both.
        check(re.search(r"\[rank 0\] (forward|backward) of micro-batch \d", result[2]), "rank 0 says where it was", arguments, 2, result)

    side_by_side(3, [
        (expect, text + ["--mesh", "pipeline=9"], 2, 2, ["tranche.mesh: mesh \"pipeline=9\": pipeline 9, but there are 2 ranks"], None, AT_ONCE),
        (expect, [staged, staged + ["--set", "tranche.pipeline_cuts=[2]"]], 2, 2,
         ["tranche.pipeline_cuts=[2] on rank 1; start all ranks with the same command and flags"], None, AT_ONCE),
        (fails,),
    ])


def drawn_rows(count):
    """Returns (model, mesh, its ranks, the mesh without a pipeline, its ranks, ZeRO stage, schedule, dtype, reduction); each value occurs
    equally often."""
    draw = random.Random(42)
    axes = {"model": ["gpt", "llama"], "mesh": [("pipeline=2", 2, "", 0), ("pipeline=3", 3, "", 0), ("pipeline=4", 4, "", 0),
                                                ("pipeline=2, shard=2", 4, "shard=2", 2), ("shard=2, pipeline=2", 4, "shard=2", 2),
                                                ("pipeline=3, shard=2", 6, "shard=2", 2), ("pipeline=2, shard=3", 6, "shard=3", 3),
                                                ("replicate=2, pipeline=2, shard=2", 8, "replicate=2, shard=2", 4)],
            "stage": [0, 1, 2, 3], "schedule": ["1f1b", "afab"], "dtype": ["fp32", "bf16"], "reduction": ["boundary", "micro_batch"]}
    columns = []
    for values in axes.values():
        column = [values[n % len(values)] for n in range(count)]
        draw.shuffle(column)
        columns.append(column)
    return [(model, *mesh, *rest) for model, mesh, *rest in zip(*columns)]


def suite_pipeline_rows():
    """Drawn meshes with a pipeline, each compared with the same mesh without one: a tied GPT with dropout and an untied Llama, with
    clipping. Each commit runs a part of them."""
    llama = write("llama.json", json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 32, "vocab_size": 257, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, "rope_theta": 10000}).encode())
    seen = {}

    def outcome(model, arguments, ranks, dtype, reduction):
        report = trained((["--model", llama] if model == "llama" else []) + arguments + [
            "--accumulate", "4", "--micro-batch", "1", "--dtype", dtype, "--digest-every", "1", "--sample-bytes", "5", "--set", "gradient_clipping=0.5",
            "--set", "tranche.tie_sum=by_use", "--set", f"tranche.reduction={reduction}"], ranks)
        if report is None:
            return None
        steps = [(step["state_digest"], step["loss"], step["grad_norm"]) for step in report["steps"]]
        return report["state_digest"], report["validation_loss"], report["sample"], steps

    for row in part(drawn_rows(24), axes=lambda row: (row[0], *row[5:]), name=lambda row: f"{row[0]} {row[1]}", what="rows"):
        model, mesh, ranks, plain, plain_ranks, stage, schedule, dtype, reduction = row
        without = (model, plain, dtype, reduction)
        if without not in seen:
            seen[without] = outcome(model, ["--mesh", plain] if plain else [], plain_ranks, dtype, reduction)
        found = outcome(model, ["--mesh", mesh, "--stage", str(stage), "--set", f"tranche.pipeline_schedule={schedule}"], ranks, dtype, reduction)
        if found is None or found != seen[without]:
            failures.append(str(row))
            print(f"FAILED: the bits of '{plain or 'one rank'}' with {row}\n  {seen[without]}\n  {found}")
        else:
            print(f"equal to '{plain or 'one rank'}': {model}, {mesh}, ZeRO stage {stage}, {schedule}, {dtype}, {reduction}: {found[0]}")


def expect_results_of_one_rank(axis, meshes, flags=()):
    """Tests meshes of (ranks, flags) with `axis`, the first of which has one copy of the batch: losses, norms and evaluation of one rank,
    traffic equal to the formula, a state that one rank can load, and the greedy text of one rank."""
    one, seen, checkpoint, first = None, {}, path("of-" + axis), meshes[0][0]
    for ranks, mesh in [(0, [])] + meshes:
        report = trained(mesh + [*flags, "--dtype", "fp32", "--micro-batch", "2" if ranks > first else "4", "--set", "gradient_clipping=0.5"] +
                         (["--checkpoint-dir", checkpoint] if ranks == first else []), ranks)
        if report is None:
            continue
        figures = [step["loss"] for step in report["steps"]] + [step["grad_norm"] for step in report["steps"]] + [report["validation_loss"]]
        one = one or figures
        seen[ranks] = report
        apart = max(abs(a - b) / abs(b) for a, b in zip(figures, one))
        if len(figures) != len(one) or apart > 1e-5:
            failures.append(f"losses of {mesh}")
            print(f"FAILED: losses, norms and evaluation of one rank to 1e-5 with {mesh}, not {apart}\n  {one}\n  {figures}")
        for sent in report["traffic"]["by_axis"]:
            if sent["elements"] != sent["formula_elements"] or (sent["axis"] == axis and sent["elements"] == 0):
                failures.append(f"traffic of {sent}")
                print(f"FAILED: traffic is the formula's with {mesh}: {sent}")
    resumed = expect(TINY + [*flags, "--dtype", "fp32", "--micro-batch", "4", "--resume", checkpoint, "--steps", "4"], 0, 0)
    check(seen[first]["state_digest"] in resumed[1], f"one rank loads the state that {first} have saved", ["--resume"], 0, resumed)
    text = ["generate", "--from", checkpoint, "--prompt", "the cat", "--tokens", "30", "--json", "--threads", "1", "--greedy", "--dtype", "fp32"]
    said = [[line for line in expect(text + mesh, ranks, 0)[1].split("\n") if line.startswith("{")] for ranks, mesh in ((0, []), meshes[0])]
    if not said[0] or said[0] != said[1]:
        failures.append(f"text of a mesh with {axis}")
        print(f"FAILED: the greedy text of one rank on {first}\n  {said}")


def suite_context():
    """Ranks that share sequences have the losses, the evaluation and the greedy text of one rank, and a failing rank is named."""
    expect_results_of_one_rank("context", [(2, ["--mesh", "context=2"]), (4, ["--mesh", "shard=2, context=2", "--stage", "3"])], ["--sequence", "14"])
    cut = TINY + ENDLESS + ["--mesh", "context=2"]
    side_by_side(2, [
        (expect, cut + ["--sequence", "3"], 2, 2, ["samples of 3 tokens cannot be cut into the 4 parts", "use sequences of at least 4 tokens"]),
        (expect, cut + ["--sequence", "12", "--debug-fail", "1:2"], 2, 5, ["[rank 1] --debug-fail: told to fail in step 2", "[rank 0]", "rank 1 failed"])])


def suite_tensor():
    """Ranks that cut layers have the losses, the evaluation and the greedy text of one rank, and a failing rank is named with its
    coordinates, the layer and the micro-batch."""
    expect_results_of_one_rank("tensor", [(3, ["--mesh", "tensor=3"]), (6, ["--mesh", "shard=2, tensor=3", "--stage", "3"])])
    cut, both = TINY + ENDLESS + ["--mesh", "tensor=3"], TINY + ENDLESS + TIME_OUT + ["--mesh", "shard=2, tensor=3"]

    def hangs():
        result = expect(both + ["--debug-hang", "4:2"], 6, 5, ["no data from rank 4 (shard 1, tensor 1) after 4.0 s"])
        # Its neighbours wait for rows, and the ranks of the other shard for sums of whole tensors; the rank that has waited longest reports
        # first.
        check(any(text in result[2] for text in ("rows of embedding in micro-batch 0", "reduce_scatter of unit h.2 whole in backward")),
              "the operation that waited is named", both, 6, result)

    side_by_side(2, [
        (expect, cut + TIME_OUT + ["--debug-hang", "1:2"], 3, 5, ["[rank 0]", "rows of embedding in micro-batch 0", "no data from rank 1 after 4.0 s"]),
        (hangs,),
        (expect, cut + ["--accumulate", "2", "--debug-fail", "1:2"], 3, 5, ["[rank 1] --debug-fail: told to fail in step 2", "[rank 0]", "rows of embedding", "rank 1 failed"]),
        (killed, ["--mesh", "tensor=3"], 3)])


def suite_any_ranks():
    """Equal results for every number of ranks, of complete runs and of one that is killed and continued with others."""
    steps, first, second = 24, 4, 10  # first and second: checkpoints after which a rank is killed
    whole = ["--set", "tranche.world_size_invariant=true", "--micro-batch", "1", "--set", "train_batch_size=12", "--steps", str(steps)]

    def outcome(report, metrics):
        with open(metrics, encoding="utf-8") as file:
            told = [json.loads(line) for line in file]
        losses = tuple((step["step"], step["loss"], step["grad_norm"], step["clip_coefficient"]) for step in told if "loss" in step)
        return losses, report["weights_digest"], report["state_digest"], report["validation_loss"]

    for dtype in part(["fp32", "bf16"], what="data types"):
        arguments = whole + ["--dtype", dtype, "--set", "gradient_clipping=0.5"]
        results = {}
        for ranks, stage in ((1, 0), (5, 3), (8, 2)):
            metrics = path(f"metrics-{dtype}-{ranks}.jsonl")
            report = trained(arguments + ["--stage", str(stage), "--metrics", metrics], ranks)
            if report is not None:
                results[f"{ranks} ranks"] = outcome(report, metrics)
        metrics = path(f"metrics-{dtype}-killed.jsonl")
        arguments += ["--checkpoint-dir", path(f"killed-{dtype}"), "--save-every", "1", "--keep-last", "3", "--resume", "latest",
                      "--metrics", metrics]
        killed_behind(arguments + ["--stage", "1"], 4, path(f"killed-{dtype}"), first)
        killed_behind(arguments + ["--stage", "3"], 3, path(f"killed-{dtype}"), second)
        report = trained(arguments + ["--stage", "2"], 8)
        if report is not None:
            check(0 < len(report["steps"]) <= steps - second, f"the last of three runs makes a part of the {steps} steps", arguments, 8,
                  (0, str(len(report["steps"])), "", 0))
            results["4 ranks, 3 and 8"] = outcome(report, metrics)
            changed = [line for line in report["resumed"]["changes"] if "zero_optimization.stage" not in line]
            check(not changed, "a run that goes on with other ranks is told of no change", arguments, 8, (0, "\n".join(changed), "", 0))
        check(len(results) == 4 and len(set(results.values())) == 1, f"equal bits for every number of ranks in {dtype}", arguments, 8,
              (0, json.dumps({name: (values[0][-1], *values[1:]) for name, values in results.items()}, indent=1), "", 0))
    expect(TINY + whole, 13, 2, ["tranche.world_size_invariant: the 12 micro-batches of a step (train_batch_size 12 / "
                                 "train_micro_batch_size_per_gpu 1) leave 1 of 13 ranks without any; start at most 12"])
    expect(TINY + whole + ["--accumulate", "4"], 2, 2, ["gradient_accumulation_steps 4: with tranche.world_size_invariant the 12 "
                                                        "micro-batches of a step take 6 on 2 ranks; leave it out"])


def killed_behind(arguments, ranks, checkpoints, step):
    """Runs a training, and kills one of its ranks once there is a checkpoint of `step` or of a later one. The training is made to hang some
    steps later, so it cannot end before the kill."""
    out = path("killed.out")
    arguments = arguments + ["--debug-hang", f"0:{step + 5}"]
    with open(out, "wb") as file:
        job = subprocess.Popen(command(TINY + arguments, ranks), stdout=file, stderr=file, env=dict(os.environ, TRANCHE_MPI_TIMEOUT=str(LIMIT)))
    try:
        limit = time.time() + LIMIT
        while job.poll() is None and time.time() < limit:
            done = [int(name[5:]) for name in os.listdir(checkpoints) if name[5:].isdigit()] if os.path.isdir(checkpoints) else []
            victims = children(job.pid)
            if max(done, default=0) >= step and victims:
                os.kill(victims[-1], signal.SIGKILL)
                break
            time.sleep(0.01)
        status = job.wait(timeout=LIMIT)
        with open(out, encoding="utf-8", errors="replace") as file:
            check(status != 0, f"the run was killed behind step {step}", arguments, ranks, (status, file.read(), "", 0))
    finally:
        if job.poll() is None:
            job.kill()


def suite_offload():
    """The bits are equal wherever state lives, and every tier has the planned bytes."""
    os.mkdir(path("swap"))
    swap = ["--nvme-path", path("swap"), "--host-state", "0"]
    model = ["--model", MODEL, "--sequence", "13", "--set", "tranche.workspace=8MiB", "--set", "tranche.communication_slab=1MiB"]
    rows = ((1, 0, "bf16", 1), (2, 1, "fp32", 3), (2, 3, "bf16", 2))
    moved = [["--offload-optimizer", "cpu"], ["--offload-optimizer", "nvme"] + swap, ["--offload-optimizer", "cpu", "--offload-ratio", "0.5"]]
    moved_weights = [["--offload-param", "cpu"], ["--offload-optimizer", "nvme", "--offload-param", "nvme"] + swap,
                     ["--offload-optimizer", "nvme", "--offload-param", "nvme", "--nvme-path", path("swap"), "--host-state", "100KiB"],
                     ["--offload-optimizer", "nvme", "--offload-param", "nvme", "--nvme-path", path("swap")]]
    chosen = part([(row, flags) for row in rows for flags in moved + (moved_weights if row[1] == 3 else [])],
                  axes=lambda item: (item[0], " ".join(item[1])), name=lambda item: f"stage {item[0][1]} {' '.join(item[1])}")
    for row in rows:
        ranks, stage, dtype, accumulation = row
        base = ["--stage", str(stage), "--dtype", dtype, "--accumulate", str(accumulation)]
        tiers = [[]] + [flags for other, flags in chosen if other is row]
        seen = {}
        for flags in tiers:
            report = trained(base + flags, ranks)
            if report is None:
                continue
            seen[" ".join(flags)] = (report["weights_digest"], report["state_digest"], report["validation_loss"])
            arguments = ["plan"] + model + base + flags + ["--ranks", str(ranks), "--json"]
            result = expect(arguments, 0, 0)
            plan = json.loads(result[1])
            for key, measured in (("memory", report["memory"]), ("traffic", report["traffic"]),
                                  ("offload_bytes", report["steps"][-1]["offload_bytes"])):
                check(plan[key] == measured, f"{key} as measured: {measured}", arguments, 0, result)
        if len(seen) < len(tiers) or len(set(seen.values())) != 1:
            failures.append("offload")
            print(f"FAILED: equal bits in all tiers with {ranks} ranks, stage {stage}, {dtype}: {seen}")
        else:
            print(f"{len(seen)} placements equal with {ranks} ranks, stage {stage}, {dtype}")
    left = [name for name in os.listdir(path("swap"))] if os.path.isdir(path("swap")) else []
    if [name for name in left if "swap" in name]:
        failures.append("swap files")
        print(f"FAILED: runs left {left}")


def suite_report():
    """Batches are equal for every number of ranks, and so are the losses up to rounding."""
    losses = {}
    for ranks, accumulation, micro in ((1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 3, 1)):
        report = trained(["--micro-batch", str(micro), "--accumulate", str(accumulation), "--dtype", "fp32", "--stage", "3"],
                         ranks)
        if report is None:
            continue
        losses[ranks] = [step["loss"] for step in report["steps"]] + [report["validation_loss"]]
        sent = {name: count["elements"] for name, count in report["traffic"].items()
                if isinstance(count, dict) and name != "control"}
        if sum(sent.values()) != report["traffic"]["formula_elements"]:
            failures.append("traffic")
            print(f"FAILED: {ranks} ranks sent {sent}, the formula says {report['traffic']['formula_elements']}")
        sent = sum(count["bytes"] for name, count in report["traffic"].items() if isinstance(count, dict) and name != "control")
        if sent != report["traffic"]["formula_bytes"]:
            failures.append("bytes")
            print(f"FAILED: {ranks} ranks sent {sent} bytes, the formula says {report['traffic']['formula_bytes']}")
    for ranks, values in losses.items():
        worst = max(abs(a - b) for a, b in zip(values, losses[1]))
        # fp32 sums are in another order; the bound is that of law 2.
        if worst > 1e-5:
            failures.append("losses")
            print(f"FAILED: losses of {ranks} ranks differ by {worst} from those of one: {values} {losses[1]}")
    arguments = TINY + ["--trace", path("trace.json")]
    expect(arguments, 2, 0)
    with open(path("trace.json"), encoding="utf-8") as file:
        ranks = {event["pid"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"}
    assert ranks == {0, 1}, ranks


def suite_plan():
    """A plan, made alone, equals the report of a job under mpirun."""
    model = ["--model", MODEL, "--sequence", "13", "--set", "tranche.workspace=8MiB", "--set", "tranche.communication_slab=1MiB"]
    for ranks, flags in ((2, ["--stage", "3", "--accumulate", "2"]),
                         (3, ["--stage", "1", "--dtype", "fp32", "--micro-batch", "2",
                              "--set", "tranche.activation_checkpointing=true"])):
        report = trained(flags, ranks)
        arguments = ["plan"] + model + flags + ["--ranks", str(ranks), "--json"]
        result = expect(arguments, 0, 0)
        if report is None or result[0] != 0:
            continue
        plan = json.loads(result[1])
        for key in ("memory", "traffic", "model"):
            check(plan[key] == report[key], f"{key} as measured: {report[key]}", arguments, 0, result)
    expect(["plan", "--model", "gpt-nano", "--ranks", "2"], 2, 2, ["tranche plan runs on one process: start it without mpirun"],
           once="tranche: ")
    # A search finds a configuration and writes it, and a run fits into it.
    arguments = ["plan"] + model + ["--ranks", "2", "--set", "train_batch_size=16", "--fit", "10MiB", "--write", path("fit.json")]
    expect(arguments, 0, 0)
    expect(TINY + ["--config", path("fit.json"), "--device-memory", "10MiB"], 2, 0)
    machines_come_along()


def machines_come_along():
    """A program that was moved out of its installation or build tree still has its machine files."""
    moved = shutil.copy(PROGRAM, path("moved"))
    arguments = [moved, "plan", "--model", MODEL, "--device", "cuda", "--ranks", "2", "--stage", "3", "--machine", "dgx-h100"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT, check=False)
    with open(PROGRAM, "rb") as file:
        looks_for_files = b"/machines" in file.read()
    if done.returncode != 0 or looks_for_files:
        failures.append("machine files")
        print(f"FAILED: {shlex.join(arguments)}\n  status {done.returncode}, the program {'names' if looks_for_files else 'does not name'} "
              f"a folder of machine files\n  {done.stderr}")


def suite_memory():
    run_out()
    beyond_the_budget()
    process_memory()


def run_out():
    """Every rank ends with status 3, whichever rank exhausts its memory, and wherever: at the start, in a dynamic step, in the recorded
    step."""
    budget = ["--device-memory", "40MiB", "--stage", "3", "--accumulate", "2", "--steps", "100000",
              "--max-seconds", "100"]
    def runs_out(ranks, rank, step, texts):
        expect(TINY + budget + ["--debug-out-of-memory", f"{rank}:{step}"], 0 if ranks == 1 else ranks, 3,
               texts + ["but the limit is 40.00 MiB (41943040 B)", "device memory", "total"])

    side_by_side(3, [
        (runs_out, 2, 1, 1, ["[rank 1] ", "(activations) asks for"]),
        (runs_out, 3, 1, 0, ["[rank 0] rank 1 ran out of memory: start of embedding: 'embedding parameters'"]),
        (runs_out, 3, 2, 2, ["[rank 2] forward: 'residual' (activations) asks for", "rank 2 failed"]),
        # On all ranks at once: no rank can hold the state, which is reported once.
        (expect, TINY + ["--device-memory", "9MiB", "--stage", "0"], 3, 3,
         ["asks for", "but the limit is 9.00 MiB", "at stage 0 (this one)", "at stage 3"], "tranche: "),
        (runs_out, 1, 0, 0, ["start of embedding: 'embedding parameters' (parameters)"])])


def beyond_the_budget():
    """A model whose state is four times the budget: refused at stage 0, trained at stage 3 on 8 ranks with the same bits as without a
    budget."""
    model = write("deep.json", json.dumps({
        "model_type": "gpt2", "n_layer": 32, "n_head": 4, "n_embd": 128, "vocab_size": 257, "n_positions": 32,
        "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}).encode())
    arguments = ["--model", model, "--steps", "2"]
    parameters = 32 * (12 * 128 * 128 + 13 * 128) + (257 + 32 + 2) * 128
    budget = 18 * parameters // 4  # (2 + 4 + 12) bytes per parameter in bf16
    limit = ["--device-memory", str(budget), "--set", "tranche.communication_slab=256KiB"]
    expect(TINY + arguments + limit + ["--stage", "0"], 0, 3, ["start of h.", f"({budget} B)", "at stage 0 (this one)"])
    within = trained(arguments + limit + ["--stage", "3"], 8)
    free = [trained(arguments + flags, 8) for flags in part([["--stage", "3"], ["--stage", "0", "--set", "tranche.reduction=micro_batch"]],
                                                            name=" ".join, what="runs without a budget")]
    if within is None or None in free:
        return
    peak = within["memory"]["device"]["peak_bytes"]
    print(f"{18 * parameters} bytes of state at stage 0, budget {budget}: peak {peak} at stage 3 on 8 ranks; weights {within['weights_digest']}")
    if peak > budget or len({report["state_digest"] for report in (within, *free)}) != 1:
        failures.append("budget")
        print(f"FAILED: peak {peak}, budget {budget}; {[report['state_digest'] for report in (within, *free)]}")


def process_memory():
    """The operating system's figure equals the ledger's, apart from what an engine without a model uses."""
    model = write("wide.json", json.dumps({
        "model_type": "gpt2", "n_layer": 4, "n_head": 8, "n_embd": 512, "vocab_size": 4096, "n_positions": 64}).encode())
    common = ["train", "--data", TEXT, "--sequence", "32", "--threads", "1", "--eval-batches", "1", "--dtype", "bf16"]
    mebibyte = 1 << 20
    for ranks, stage in part([(0, 0), (2, 2), (2, 3)], axes=lambda item: item[:1], name=lambda item: f"{max(item[0], 1)} ranks, stage {item[1]}",
                             what="comparisons of process memory"):
        empty = watched(common + ["--model", MODEL, "--sequence", "13", "--stage", str(stage)], ranks)
        full = watched(common + ["--model", model, "--stage", str(stage)], ranks)
        if empty is None or full is None:
            continue
        taken = full["resident"] - empty["resident"]
        ledger = full["ledger"] - empty["ledger"]
        print(f"{max(ranks, 1)} ranks, stage {stage}: the process holds {taken / mebibyte:.1f} MiB more than an empty engine's "
              f"({empty['resident'] / mebibyte:.1f} MiB), the ledger {ledger / mebibyte:.1f} MiB")
        if abs(taken - ledger) > 0.01 * ledger + 64 * mebibyte or ledger < 100 * mebibyte:
            failures.append("process memory")
            print("FAILED: the process and the ledger differ")


def watched(arguments, ranks):
    """The highest memory of any rank's process during training, and the ledger's peak."""
    report = path("watched.json")
    arguments = arguments + ["--steps", "2", "--report", report]
    highest = 0
    with open(path("watched.out"), "wb") as out:
        job = subprocess.Popen(command(arguments, ranks), stdout=out, stderr=out, env=dict(os.environ, TRANCHE_MPI_TIMEOUT=str(LIMIT)))
        processes = [] if ranks else [job.pid]
        while job.poll() is None:
            processes = processes if len(processes) == max(ranks, 1) else children(job.pid)
            for process in processes:
                highest = max(highest, resident(process))
            time.sleep(0.01)
    with open(path("watched.out"), encoding="utf-8", errors="replace") as out:
        check(job.returncode == 0, "trains", arguments, ranks, (job.returncode, out.read(), "", 0))
    if job.returncode != 0:
        return None
    with open(report, encoding="utf-8") as file:
        memory = json.load(file)["memory"]["device"]
    return {"resident": highest, "ledger": memory["peak_bytes"]}


def resident(process):
    """RssAnon, and the pages of the process's own windows, which other ranks may read and which are therefore not anonymous."""
    total = 0
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) * 1024
        for name in os.listdir(f"/proc/{process}/fd"):
            link = f"/proc/{process}/fd/{name}"
            if os.readlink(link).startswith(f"/memfd:tranche window of {process} "):
                total += os.stat(link).st_blocks * 512
    except OSError:
        pass
    return total


begin = time.time()
{"alone": suite_alone, "agreement": suite_agreement, "configurations": suite_configurations, "context": suite_context, "data": suite_data, "errors": suite_errors, "statuses": suite_statuses, "failures": suite_failures, "hosts": suite_hosts, "digests": suite_digests,
 "any_ranks": suite_any_ranks,
 "memory": suite_memory, "pipeline": suite_pipeline, "pipeline_rows": suite_pipeline_rows, "offload": suite_offload, "plan": suite_plan, "report": suite_report, "tensor": suite_tensor}[SUITE]()
print(f"{SUITE}: {'passed' if not failures else f'{len(failures)} checks FAILED'} in {time.time() - begin:.1f} s")
sys.exit(1 if failures else 0)
