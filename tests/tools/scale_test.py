#!/usr/bin/env python3
"""scale_test.py PROGRAM SUITE: `tranche scale` as users run it, on one and two ranks of a tiny model.

Suites: study (a whole one, with --json and its files; another study in its folder), extended (by points), meshes (several in one), schedules (of a pipeline),
resume (killed in the middle and continued), failures (points that fail, die and hang), refusals (errors before any run), launchers
(mpirun's arguments, srun).
"""

import csv
import fcntl
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

PROGRAM, SUITE = os.path.abspath(sys.argv[1]), sys.argv[2]
RUN_MPI = str(pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "run_mpi.sh")
FOLDER = tempfile.TemporaryDirectory(prefix="tranche-scale-")
HERE = pathlib.Path(FOLDER.name)
TINY = ["--model", "gpt-nano", "--sequence", "16", "--warmup", "2", "--steps", "2", "--debug-peak-seconds", "0.01",
        "--set", "tranche.workspace=8MiB", "--set", "tranche.communication_slab=1MiB", "--micro-batch", "2"]
# Each mpirun has its session folder here, separate from those of other tests that start at the same moment (scripts/run_mpi.sh).
os.environ["OMPI_MCA_orte_tmpdir_base"] = FOLDER.name
# A study reports "more ranks than cores" depending on the host; the tests have expectations for any host.
CORES = len(os.sched_getaffinity(0))


def command(out, more):
    return [PROGRAM, "scale", "--out", str(out), *TINY, *more]


def scale(out, more, status=0, environment=None):
    words = command(out, more)
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False,
                          env=dict(os.environ, **(environment or {})))
    assert done.returncode == status, f"status {done.returncode}, not {status}: {shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done


def expect_in(words, text, where):
    for word in words:
        assert word in text, f"{where} has no '{word}':\n{text}"


def texts_of(svg):
    """The words of a plot, which is XML."""
    return " | ".join(element.text or "" for element in xml.etree.ElementTree.parse(svg).iter()
                      if element.tag.endswith("}text") or element.tag.endswith("}title"))


def at_work(out):
    """Command lines of processes that belong to a study, by process."""
    found = {}
    for folder in pathlib.Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes() if folder.name.isdigit() and int(folder.name) != os.getpid() else b""
        except OSError:  # it has ended meanwhile
            continue
        if str(out).encode() in words:
            found[int(folder.name)] = words.replace(b"\0", b" ").decode(errors="replace")
    return found


def suite_study():
    out = HERE / "study"
    done = scale(out, ["--ranks", "1,2", "--stages", "0,3", "--repeats", "2", "--json"])
    expect_in(["weak scaling of gpt-nano: 2 x 2 points, 2 repeats: 8 runs of 2 + 2 steps", "repeat 2, 2 ranks, stage 3: ",
               "[8/8]", " left"], done.stderr, "progress")
    results = json.loads(done.stdout)
    assert results == json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["schema"] == "tranche-scale-1" and results["complete"] and results["runs_done"] == 8, results
    assert results["differences"] == [] and results["failures"] == [], results["differences"]
    assert results["begun"]["load_average"] >= 0 and results["begun"]["time"].endswith(" UTC")
    assert results["machine"]["cores"] == CORES and results["machine"]["memory_bytes"] > 0
    assert results["settings"]["scaling"] == "weak" and results["settings"]["configuration"]["bf16"]["enabled"]
    assert [(point["ranks"], point["stage"]) for point in results["points"]] == [(1, 0), (1, 3), (2, 0), (2, 3)]
    for point in results["points"]:
        assert point["micro_batch"] == 2 and point["batch"] == 2 * point["ranks"], point
        assert [run["repeat"] for run in point["runs"]] == [1, 2]
        assert len({run["weights_digest"] for run in point["runs"]}) == 1
        assert point["oversubscribed"] == (point["ranks"] > CORES)
        assert ("efficiency" in point) == (point["ranks"] <= CORES), point
        assert point["work_inflation"]["median"] > 0 and point["state_formula_bytes"] > 0
        for run in point["runs"]:
            parts = sum(run[part + "_seconds"]
                        for part in ("compute", "exposed_gather", "exposed_reduce", "exposed_message", "update", "other"))
            assert abs(parts - run["seconds_per_step"]) < 1e-9 and run["compute_seconds"] > 0, run
            assert abs(run["tokens_per_second"] * run["seconds_per_step"] - run["tokens_per_step"]) < 1e-6, run
            assert run["tokens_per_step"] == 16 * point["batch"] and run["cpu_seconds_per_token"] > 0
            assert run["memory_measured_bytes"] == point["memory_predicted_bytes"], point
            assert run["bytes_sent"] == run["formula_bytes"] and (run["bytes_sent"] > 0) == (point["ranks"] > 1)
            assert run["state_measured_bytes"] >= point["state_formula_bytes"]
            assert point["bytes_predicted"] == run["bytes_sent"] and point["ranks_per_node"] == point["ranks"], point
            # The threads are equal at every point; otherwise a single rank would have had more.
            assert run["threads"] == results["settings"]["threads"] == max(1, CORES // 2), run
    base = results["points"][0]["efficiency"]
    assert base["median"] == base["least"] == base["most"] == 1, base

    # Runs are ordered by repeat: all points of one, then the next.
    order = sorted((out / "runs").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.stem for path in order] == [f"n{n}-stage{s}-r{r}" for r in (1, 2) for n in (1, 2) for s in (0, 3)], order
    with open(out / "results.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and rows[7]["ranks"] == "2" and rows[7]["stage"] == "3" and rows[7]["repeat"] == "2", rows
    assert rows[7]["bytes_sent"] == rows[7]["formula_bytes"] and float(rows[7]["tokens_per_second"]) > 0
    table = (out / "table.md").read_text(encoding="utf-8")
    expect_in(["# Weak scaling of gpt-nano", "weak efficiency", "exposed communication, ms", "by the formula",
               "memory predicted, MiB", "of matmul peak", "| 1 | 3 | 2 |", "| 100.0 % |", " at a load average of ",
               "Bytes and elements on the wire are the formula's"], table, "the table")
    for name, words in (("throughput.svg", ["Throughput", "stage 0", "stage 3", "tokens per second"]),
                        ("time.svg", ["Time of a step", "compute", "exposed gather", "exposed reduce", "step: norm, agree, update",
                                      "other", "ranks"]),
                        ("memory.svg", ["stage 3", "measured", "predicted"]),
                        ("model_state.svg", ["stage 0", "measured", "formula"])):
        expect_in(words, texts_of(out / name), name)

    # Repeating the command runs nothing, because everything exists. With other settings it is refused, with both values.
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    again = scale(out, ["--ranks", "1,2", "--stages", "0,3", "--repeats", "2"])
    expect_in(["8 of 8 runs are kept", "# Weak scaling"], again.stdout, "the second time")
    assert before == {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    # A report of another run, or an incomplete one, does not count: that run alone is repeated.
    (out / "runs" / "n2-stage3-r2.json").write_bytes((out / "runs" / "n1-stage0-r2.json").read_bytes())
    (out / "runs" / "n1-stage3-r1.json").write_text('{"world": 1, "sta')
    again = scale(out, ["--ranks", "1,2", "--stages", "0,3", "--repeats", "2"])
    expect_in(["6 of 8 runs are kept", "repeat 1, 1 rank, stage 3: ", "repeat 2, 2 ranks, stage 3: "], again.stdout, "the repair")
    assert json.loads((out / "runs" / "n2-stage3-r2.json").read_text(encoding="utf-8"))["world"] == 2
    kept = {path for path in before if path.stem not in ("n2-stage3-r2", "n1-stage3-r1")}
    assert all(before[path] == path.stat().st_mtime_ns for path in kept), "those that were whole are kept"
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    other = scale(out, ["--ranks", "1,2", "--stages", "0,3", "--repeats", "3", "--lr", "0.5"], status=2)
    expect_in(["is a study with other settings", "configuration/optimizer/params/lr was 0.001, is 0.5"], other.stderr, "the refusal")
    assert "repeats was" not in other.stderr, other.stderr  # repeats may be added
    fewer = scale(out, ["--ranks", "2", "--stages", "0,3", "--repeats", "1"], status=2)
    expect_in(["to which ranks, stages, meshes, schedules and repeats may be added:", "ranks/1 was 2, is not there", "repeats was 2, is 1"],
              fewer.stderr, "the refusal")
    assert before == {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}

    # Strong scaling if the flags give a rank's part: the batch of the largest number of ranks applies to all.
    strong = json.loads(scale(HERE / "strong", ["--ranks", "1,2", "--stages", "0", "--repeats", "1", "--strong", "--json"]).stdout)
    assert [(point["micro_batch"], point["accumulation"], point["batch"]) for point in strong["points"]] == [(2, 2, 4), (2, 1, 4)], strong["points"]


def suite_extended():
    """A study goes on with more points than it was begun with, and keeps its runs."""
    out = HERE / "extended"

    def points(ranks, stages, repeats, meshes):
        return ["--ranks", ranks, "--stages", stages, "--repeats", repeats, "--meshes", meshes]

    def extended(out, begun, more, kept, runs):
        scale(out, begun)
        before = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
        expect_in([f"going on with the study that is there: {kept} of {runs} runs are kept"], scale(out, more).stdout, "an extension")
        results = json.loads((out / "results.json").read_text(encoding="utf-8"))
        assert results["complete"] and results["runs_done"] == runs and results["differences"] == [], results["differences"]
        now = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
        assert before.items() <= now.items(), "runs are kept"
        return results

    # The threads of a rank are those that one rank has by default. Of two ranks each would have half as many.
    results = extended(out, points("1", "3", "1", "shard=*"), points("1,2", "3", "2", "shard=*"), 1, 4)
    assert results["settings"]["threads"] == CORES, results["settings"]["threads"]
    both = "shard=*; replicate=*, shard=1"
    extended(HERE / "meshes_extended", points("2", "3", "1", "shard=*"), points("2", "0,3", "1", both), 1, 4)
    for wrong, text in ((points("1,2", "3", "2", "replicate=*, shard=1; shard=*"), "meshes/0 was "),
                        (points("1", "3", "2", "shard=*"), "ranks/1 was 2, is not there")):
        expect_in(["is a study with other settings", text], scale(out, wrong, status=2).stderr, "the refusal")

    # With --strong the batch of a step stays that of the study: 4 sequences on one rank, where two would have 8 by default.
    for ranks in ("1", "1,2"):
        words = command(HERE / "strong_extended", ["--ranks", ranks, "--stages", "0", "--repeats", "1", "--strong", "--json"])
        at = words.index("--micro-batch")
        del words[at:at + 2]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    assert results["complete"] and [point["batch"] for point in results["points"]] == [4, 4], results["points"]


def suite_meshes():
    out = HERE / "meshes"
    meshes = ["shard=*", "replicate=2, shard=1", "tensor=2", "context=2"]
    done = scale(out, ["--ranks", "2", "--stages", "0,3", "--repeats", "1", "--meshes", "; ".join(meshes), "--json"])
    expect_in(["1 x 2 x 4 points, 1 repeats: 8 runs", "repeat 1, 2 ranks, stage 3, mesh replicate=2, shard=1: "],
              done.stderr, "progress")
    results = json.loads(done.stdout)
    assert results["complete"] and results["differences"] == [], results["differences"]
    assert [(point["stage"], point["mesh"]) for point in results["points"]] == [
        (stage, mesh) for stage in (0, 3) for mesh in meshes], results["points"]
    runs = {(point["stage"], point["mesh"]): point["runs"][0] for point in results["points"]}
    for point in results["points"]:
        measured = point["runs"][0]["state_measured_bytes"]
        assert abs(point["state_formula_bytes"] - measured) <= measured / 1000, point
    # Ranks of tensor hold half of the cut tensors, at every stage.
    assert runs[0, meshes[2]]["state_measured_bytes"] < 0.6 * runs[0, meshes[1]]["state_measured_bytes"], runs
    # Ranks of context share state like those of shard.
    assert all(runs[stage, meshes[3]]["state_measured_bytes"] == runs[stage, meshes[0]]["state_measured_bytes"] for stage in (0, 3)), runs
    # With one replica on each rank no stage shards anything, so all hold and send the same.
    assert runs[0, meshes[1]]["state_measured_bytes"] == runs[3, meshes[1]]["state_measured_bytes"], runs
    assert runs[3, meshes[0]]["state_measured_bytes"] < runs[3, meshes[1]]["state_measured_bytes"], runs
    assert sorted(path.name for path in (out / "runs").glob("*.json")) == [
        f"n2-stage{stage}-mesh{number}-r1.json" for stage in (0, 3) for number in (1, 2, 3, 4)]
    report = json.loads((out / "runs" / "n2-stage3-mesh2-r1.json").read_text(encoding="utf-8"))
    assert report["mesh"] == {"axes": "replicate=2", "coordinates": [{"replicate": 0, "shard": 0}, {"replicate": 1, "shard": 0}]}
    assert [one["axis"] for one in report["traffic"]["by_axis"]] == ["replicate", "shard"], report["traffic"]
    table = (out / "table.md").read_text(encoding="utf-8")
    expect_in(["| ranks | stage | mesh | batch |", "| 2 | 3 | replicate=2, shard=1 | 4 |"], table, "the table")
    with open(out / "results.csv", newline="", encoding="utf-8") as file:
        assert [row["mesh"] for row in csv.DictReader(file)] == meshes * 2
    expect_in(["stage 3, shard=*", "stage 3, replicate=2, shard=1"], texts_of(out / "memory.svg"), "memory.svg")
    for wrong, text in (("shard=*;", "has nothing on one side of a ';'"), ("shard=*; shard=*", "has 'shard=*' twice"),
                        ("replicate=3", 'mesh "replicate=3": replicate 3, but there are 2 ranks')):
        expect_in([text], scale(HERE / "wrong", ["--ranks", "2", "--meshes", wrong], 2).stderr, "the refusal")
    expect_in(["--mesh and --meshes both say how state is sharded"],
              scale(HERE / "wrong", ["--ranks", "2", "--meshes", "shard=*", "--mesh", "shard=2"], 2).stderr, "the refusal")


def suite_schedules():
    out = HERE / "schedules"
    point = ["--ranks", "2", "--stages", "0", "--repeats", "1", "--mesh", "pipeline=2", "--accumulate", "4"]
    mine = HERE / "mine.csv"
    subprocess.run([PROGRAM, "schedule", "afab", "--p", "2", "--m", "4", "--write", str(mine)], check=True, capture_output=True)
    schedules = ["1f1b", "zb-h1", "interleaved", str(mine)]
    words = [*point, "--pipeline-schedules", ", ".join(schedules), "--set", "tranche.pipeline_chunks=2", "--json"]
    done = scale(out, words)
    expect_in(["1 x 1 x 4 points, 1 repeats: 4 runs", "repeat 1, 2 ranks, stage 0, schedule zb-h1: ",
               "note: tranche.pipeline_chunks 2 is not for zb-h1, which has its own number\n"], done.stderr, "progress")
    assert "not for interleaved" not in done.stderr, done.stderr
    results = json.loads(done.stdout)
    assert results["complete"] and results["differences"] == [], results["differences"]
    assert [point["pipeline_schedule"] for point in results["points"]] == schedules, results["points"]
    runs = [point["runs"][0] for point in results["points"]]
    assert len({run["weights_digest"] for run in runs}) == 1, "all schedules have the same bits"
    assert all(run["exposed_message_seconds"] > 0 for run in runs), runs
    peaks = [point["memory_predicted_bytes"]["device"] for point in results["points"]]
    assert peaks[0] < peaks[3], "1f1b holds fewer micro-batches than a file with afab"
    for number, schedule in enumerate(schedules, 1):
        config = json.loads((out / "runs" / f"n2-stage0-schedule{number}-r1.json").read_text(encoding="utf-8"))["config"]["tranche"]
        assert config.get("pipeline_schedule", "1f1b") == schedule and config.get("pipeline_chunks", 0) == 2 * (number == 3), config
    expect_in(["| ranks | stage | schedule | batch |", "| 2 | 0 | zb-h1 | 8 |"], (out / "table.md").read_text(encoding="utf-8"), "the table")
    # A mesh without a pipeline runs once, under the name that an earlier version gave its first run.
    both = HERE / "both"
    words_of_both = [*point, "--pipeline-schedules", "1f1b, zb-h1", "--meshes", "shard=*; pipeline=2", "--json"]
    at = words_of_both.index("--mesh")
    del words_of_both[at:at + 2]
    results = json.loads(scale(both, words_of_both).stdout)
    assert [(one["mesh"], one["pipeline_schedule"]) for one in results["points"]] == [
        ("shard=*", ""), ("pipeline=2", "1f1b"), ("pipeline=2", "zb-h1")], results["points"]
    assert results["complete"] and results["differences"] == [], results["differences"]
    names = sorted(path.stem for path in (both / "runs").glob("*.json"))
    assert names == ["n2-stage0-mesh1-schedule1-r1", "n2-stage0-mesh2-schedule1-r1", "n2-stage0-mesh2-schedule2-r1"], names
    # Another text in the file makes it another study.
    mine.write_text(mine.read_text(encoding="utf-8").replace("0F0,0F1", "0F0,,0F1"), encoding="utf-8")
    expect_in(["schedule_files/"], scale(out, words, 2).stderr, "the refusal")
    for more, text in ((["--pipeline-schedules", "1f1b,"], "--pipeline-schedules '1f1b,' has nothing on one side of a ','"),
                       (["--pipeline-schedules", "zb-h"], "'zb-h' is no schedule (did you mean zb-h1?)"),
                       (["--pipeline-schedules", "afab", "--set", "tranche.pipeline_schedule=1f1b"],
                        "--pipeline-schedules and --set tranche.pipeline_schedule both name schedules"),
                       (["--pipeline-schedules", "afab", "--mesh", "shard=*"], "no point of the study has one; give --mesh pipeline=2")):
        expect_in([text], scale(HERE / "wrong", [*point, *more], 2).stderr, "the refusal")


def suite_resume():
    out = HERE / "study"
    # The batch of a step is given instead of a rank's.
    words = [word for word in command(out, ["--ranks", "1,2", "--stages", "1", "--repeats", "2", "--strong", "--steps", "600",
                                            "--set", "train_batch_size=4"])]
    at = words.index("--micro-batch")
    del words[at:at + 2]
    reports = [out / "runs" / f"n{n}-stage1-r{r}.json" for r in (1, 2) for n in (1, 2)]

    def stopped(how, report):
        """Starts the study, and stops it when `report` exists and the next run has begun. The signal is repeated until the study is gone."""
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        limit = time.time() + 60

        def under_way():
            return report.exists() and any(f"{PROGRAM} train" in line and str(report) not in line for line in at_work(out).values())

        while not under_way() and process.poll() is None and time.time() < limit:
            time.sleep(0.02)
        limit = time.time() + 60
        while process.poll() is None and time.time() < limit:
            process.send_signal(how)
            time.sleep(0.001)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    status, errors = stopped(signal.SIGUSR1, reports[0])  # what Slurm sends before the limit of time
    assert status == 9, (status, errors)
    expect_in(["stopped after ", " of 4 runs; the same command goes on with the rest"], errors, "the end")
    kept = [report for report in reports if report.exists()]
    assert 1 <= len(kept) < 4, kept
    partial = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert not partial["complete"] and partial["runs_done"] == len(kept), partial["runs_done"]
    first = reports[0].stat().st_mtime_ns

    # Killed without a chance to react: its processes end with it.
    missing = next(report for report in reports if not report.exists())
    status, _ = stopped(signal.SIGKILL, missing)
    limit = time.time() + 60
    while left := at_work(out):
        assert time.time() < limit, f"left behind: {left}"
        time.sleep(0.1)

    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    expect_in(["going on with the study that is there: ", " of 4 runs are kept", "# Strong scaling"], done.stdout, "the last part")
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["complete"] and reports[0].stat().st_mtime_ns == first, "what was done is kept"
    assert [(point["ranks"], point["micro_batch"], point["batch"]) for point in results["points"]] == [(1, 4, 4), (2, 2, 4)]


def suite_failures():
    out = HERE / "study"
    # Rank 1 fails in each run of two ranks. With one rank there is no rank 1, which is a usage error.
    done = scale(out, ["--ranks", "1,2", "--stages", "0", "--repeats", "2", "--debug-fail", "1:2"], status=7)
    expect_in(["the run of repeat 1, 1 rank, stage 0 failed with status 2", "there is no rank 1 to fail among 1",
               "the run of repeat 2, 2 ranks, stage 0 failed with status 5", "  command: ", "mpirun -n 2 ", "--stage 0",
               "told to fail in step 2", "4 of 4 runs are missing", "the same command tries them again"], done.stderr, "errors")
    expect_in(["repeat 2, 1 rank, stage 0: left out, as it failed before"], done.stdout, "progress")
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [failure["status"] for failure in results["failures"]] == [2, 5, 5] and not results["complete"], results["failures"]
    expect_in(["## Runs that failed", "told to fail in step 2"], (out / "table.md").read_text(encoding="utf-8"), "the table")

    # One point fails and the others continue: the memory for one rank is not enough for two with their staging buffer.
    out = HERE / "partly"
    peak = json.loads(scale(HERE / "sizes", ["--ranks", "1,2", "--stages", "0", "--repeats", "1", "--json"]).stdout)["points"]
    sizes = [point["memory_predicted_bytes"]["device"] for point in peak]
    assert sizes[0] < sizes[1], sizes
    done = scale(out, ["--ranks", "1,2", "--stages", "0", "--repeats", "1", "--device-memory", str((sizes[0] + sizes[1]) // 2)],
                 status=7)
    expect_in(["the run of repeat 1, 2 ranks, stage 0 failed with status 3", "1 of 2 runs are missing"], done.stderr, "errors")
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [point["ranks"] for point in results["points"]] == [1] and results["runs_done"] == 1

    # A rank that dies without a message.
    process = subprocess.Popen(command(HERE / "dead", ["--ranks", "2", "--stages", "3", "--repeats", "1", "--steps", "100000000"]),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rank, limit = None, time.time() + 60
    while rank is None and process.poll() is None and time.time() < limit:
        time.sleep(0.1)
        rank = next((pid for pid, words in at_work(HERE / "dead").items() if words.startswith(PROGRAM + " train")), None)
    log = HERE / "dead" / "runs" / "n2-stage3-r1.log"
    while not (log.exists() and b"ranks, stage" in log.read_bytes()) and process.poll() is None and time.time() < limit:
        time.sleep(0.02)
    if rank is None:
        process.kill()
    os.kill(rank, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 7, errors
    expect_in(["the run of repeat 1, 2 ranks, stage 3 failed with status ", "1 of 1 runs are missing, as one failed"], errors, "errors")
    assert json.loads((HERE / "dead" / "results.json").read_text(encoding="utf-8"))["points"] == []

    # A run that does not end.
    done = scale(HERE / "long", ["--ranks", "1", "--stages", "0", "--repeats", "1", "--steps", "100000000", "--run-timeout", "1"],
                 status=7)
    expect_in(["was ended after", "--run-timeout 1"], done.stderr, "errors")


def suite_refusals():
    def refused(out, more, words, environment=None):
        done = scale(out, more, status=2, environment=environment)
        expect_in(words, done.stderr, shlex.join(more))
        assert done.stderr.count("tranche: ") == 1, done.stderr

    plain = ["--ranks", "1,2", "--stages", "0"]
    refused(HERE / "new", plain, ["mpirun is not found in PATH", "openmpi-bin"], {"PATH": "/nowhere"})
    refused(HERE / "new", [*plain, "--launcher", "srun"], ["srun is not found in PATH", "leave --launcher out"], {"PATH": "/nowhere"})
    nested = subprocess.run([RUN_MPI, "2", *command(HERE / "new", plain)], capture_output=True, text=True, timeout=60, check=False)
    assert nested.returncode == 2 and nested.stderr.count("tranche scale starts mpirun itself") == 1, nested.stderr
    refused(HERE / "new", ["--ranks", "1,x"], ["--ranks '1,x': 'x' is no number of ranks"])
    refused(HERE / "new", ["--ranks", "2", "--stages", "4"], ["--stages '4': '4' is no stage, which is 0 to 3"])
    refused(HERE / "new", [*plain, "--data", str(HERE / "none.txt")], ["none.txt' is not there"])
    refused(HERE / "new", [*plain, "--hostfile", str(HERE / "none")], ["--hostfile '", "none' cannot be read: No such file"])
    refused(HERE / "new", [*plain, "--set", "train_batch_size=4", "--micro-batch", "1"],
            ["weak scaling keeps the batch of a rank, but train_batch_size 4", "give --strong"])
    refused(HERE / "new", [*plain, "--sequence", "1000"], ["sequence length 1000"])
    refused(HERE / "new", [*plain, "--strong", "--micro-batch", "1", "--accumulate", "2"],
            ["--strong keeps the batch of a step, but --micro-batch 1 and --accumulate 2 fix that of a rank: leave one of them out"])
    (HERE / "empty").write_text("")
    refused(HERE / "new", [*plain, "--hostfile", str(HERE / "empty")], ["--hostfile '", "empty' is empty"])
    assert not (HERE / "new").exists(), "refused before anything is written"
    (HERE / "mine").mkdir()
    (HERE / "mine" / "thesis.txt").write_text("years of work")
    refused(HERE / "mine", plain, ["mine' is there already and is no study", "nothing was written"])
    assert os.listdir(HERE / "mine") == ["thesis.txt"]
    refused(HERE / "mine" / "thesis.txt", plain, ["is a file; give a folder"])
    # Another command is using the folder and has its lock.
    (HERE / "busy").mkdir()
    (HERE / "busy" / "study.json").write_text("{}")
    with open(HERE / "busy" / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(HERE / "busy", plain, ["busy' is a study that another tranche scale is at work on"])
    (HERE / "strange").mkdir()
    for changed in ('{"schema": "other"}', '{"schema": 3, "settings": {}}', '{"schema": "tranche-scale-1", "settings": 3}', "[]",
                    '{"schema": "tranche-scale-1", "settings": {}, "begun": []}'):
        (HERE / "strange" / "study.json").write_text(changed)
        refused(HERE / "strange", plain, ["is no study that can be gone on with", "tranche-scale-1"])


def suite_launchers():
    point = ["--ranks", "2", "--stages", "2", "--repeats", "1"]
    scale(HERE / "hosts", [*point, "--host", "localhost:2", "--", "--tag-output"])
    log = (HERE / "hosts" / "runs" / "n2-stage2-r1.log").read_text(encoding="utf-8")
    expect_in(["[1,0]<stdout>", "2 x stage 2"], log, "the output of a run whose mpirun tags it")
    (HERE / "list").write_text("localhost slots=1\n")
    done = scale(HERE / "few", [*point, "--hostfile", str(HERE / "list")], status=7)
    expect_in([f"mpirun -n 2 --hostfile {HERE / 'list'} ", "not enough slots"], done.stderr, "mpirun's own refusal")
    # A failure that would end every run ends the study after three of them.
    many = ["--ranks", "2", "--stages", "0,1,2,3", "--repeats", "2", "--hostfile", str(HERE / "list")]
    done = scale(HERE / "none", many, status=7)
    expect_in(["3 runs failed and none ended well, so the others were not tried", "8 of 8 runs are missing, as 3 failed"],
              done.stderr, "the study's end")
    assert len(json.loads((HERE / "none" / "results.json").read_text(encoding="utf-8"))["failures"]) == 3

    # Two declared nodes of two ranks: the plan, the formula and the traffic have the nodes' sums in fp32.
    nodes = ["--ranks", "4", "--stages", "1", "--repeats", "1", "--json", "--set", "tranche.collectives=shared"]
    declare = ["--set", "tranche.debug.ranks_per_host=2"]
    results = json.loads(scale(HERE / "nodes", [*nodes, *declare, "--ranks-per-node", "2"]).stdout)
    both = results["points"][0]
    run = both["runs"][0]
    assert results["differences"] == [] and both["ranks_per_node"] == run["ranks_on_host"] == 2, results["differences"]
    assert both["bytes_predicted"] == run["bytes_sent"] == run["formula_bytes"], both
    one = json.loads(scale(HERE / "one", nodes).stdout)["points"][0]
    assert one["ranks_per_node"] == 4 and one["bytes_predicted"] < both["bytes_predicted"], one
    assert one["oversubscribed"] == (4 > CORES) and ("efficiency" in one) == (4 <= CORES), one
    # Plans use the declared nodes. Here the runs differ, which is reported: the fake mpirun takes two hosts for one.
    folder = HERE / "mpi"
    folder.mkdir()
    (folder / "mpirun").write_text(f'#!/bin/sh\nshift 4\nPATH={shlex.quote(os.environ["PATH"])} exec {RUN_MPI} 4 "$@"\n')
    (folder / "mpirun").chmod(0o755)
    for out, more, path in (("flag", ["--ranks-per-node", "2"], os.environ["PATH"]),
                            ("said", ["--host", "a:2,b:2"], f"{folder}:{os.environ['PATH']}")):
        done = scale(HERE / out, [*nodes, *more], environment={"PATH": path})
        results = json.loads(done.stdout)
        assert results["points"][0]["bytes_predicted"] == both["bytes_predicted"], results["points"][0]
        expect_in(["4 ranks were on the node of rank 0, 2 were planned: say --ranks-per-node",
                   f"{one['bytes_predicted']} bytes were sent, {both['bytes_predicted']} were planned"],
                  "\n".join(results["differences"]), "the differences")

    # There is no Slurm here: a fake srun calls mpirun and records its arguments.
    folder = HERE / "bin"
    folder.mkdir()
    (folder / "srun").write_text(f'#!/bin/sh\nprintf "%s " "$@" > {HERE}/given\nshift 4\nexec {RUN_MPI} 2 "$@"\n')
    (folder / "srun").chmod(0o755)
    done = scale(HERE / "slurm", [*point, "--launcher", "srun", "--", "--mpi=pmix"],
                 environment={"PATH": f"{folder}:{os.environ['PATH']}"})
    expect_in(["note: how many ranks a node has is not clear"], done.stdout, "the notes")
    given = (HERE / "given").read_text()
    expect_in([f"-n 2 --mpi=pmix --kill-on-bad-exit=1 {PROGRAM} train --model gpt-nano ", " --stage 2 "], given, "srun's arguments")
    assert json.loads((HERE / "slurm" / "results.json").read_text(encoding="utf-8"))["complete"]


{"study": suite_study, "extended": suite_extended, "meshes": suite_meshes, "schedules": suite_schedules, "resume": suite_resume, "failures": suite_failures, "refusals": suite_refusals,
 "launchers": suite_launchers}[SUITE]()
print(f"scale {SUITE}: passed")
