#!/usr/bin/env python3
"""bench.py [--out DIR] [--build DIR] [--only REGEX] [--smoke] [--dir DIR] [--list]: runs the benches and keeps what they print.

Every bench prints what it measured beside its floor (a bandwidth, a matrix-product rate, the same work by the plainest
code) measured in the same run. This collects the fractions. DIR, by default bench/results/<date>-<host's processor>,
must not exist; it gets
  summary.md     machine, commit, load, and a table of every fraction with its command
  results.json   the same, and every figure (docs: bench/README.md)
  raw/           what each bench printed
  --smoke        smallest sizes: that everything runs and prints what is expected; no figure means anything
  --dir DIR      a folder on the disk in question, for benches that write files (default: below --out)
Exit status: 0 all ran and printed their figures, 1 one failed or printed none, 2 usage.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]

# The denominators of the fractions. Other keys that a bench prints are only recorded as figures.
FLOORS = {
    "share": "rate of the fastest square products of this dtype, same threads",
    "of_copy": "bandwidth of the same threads' copy",
    "of_floor": "writing the answer into memory that is there",
    "update_of_loop": "the same reads and writes without arithmetic",
    "update_of_bound": "the slower of those reads and writes and the arithmetic on data in the core's own caches",
    "write_of_raw": "plain direct writes of as many bytes",
    "read_of_raw": "plain direct reads of as many bytes",
    "reshard_of_raw": "plain direct reads of as many bytes",
    "write_of_hdf5": "H5Dwrite of as many bytes",
    "bytes_of_payload": "bytes of state",
    "step_of_bound": "time of the larger of transfers alone and update alone (1 or less is overlap)",
    "io_of_fio": "fio with the same block, depth and mix",
    "pause_of_copy": "one memcpy of the shard",
    "step_of_step": "steps without a save beside them (time)",
    "bare_of_step": "the step's own matrix products alone, each in the fastest known way (their time of the step's)",
    "processor_bare_of_step": "the same in processor seconds",
    "profiled_of_plain": "steps without a profile (processor time)",
}


class Bench:
    """One bench program: its arguments, those of the smoke run, the keys that it must print, and whether it uses Google Benchmark."""

    def __init__(self, name, arguments, smoke, keys, google=False, ranks=0, disk=False):
        self.name, self.arguments, self.smoke, self.keys = name, arguments, smoke, keys
        self.google, self.ranks, self.disk = google, ranks, disk

    def command(self, programs, options, disk, out):
        words = [str(programs / f"bench_{self.name}")]
        words += shlex.split(self.smoke if options.smoke else self.arguments)
        if self.disk:
            words += ["--dir", str(disk)]
        if self.google:
            words += [f"--benchmark_out={out}", "--benchmark_out_format=json"]
        return ([str(ROOT / "scripts" / "run_mpi.sh"), str(self.ranks)] if self.ranks else []) + words


BENCHES = [
    Bench("kernels", "", "--benchmark_filter=attention/bf16_forward/batch:8/time:256/width:256/heads:8 --benchmark_min_time=0.001",
          ["share"], google=True),
    Bench("memory_bound", "", "--small", ["of_copy"], google=True),
    Bench("host_optimizer", "--sizes 1M,32M --threads 1,all", "--sizes 1M --rounds 1 --seconds 0.001 --gradients bf16 --threads 1",
          ["update_of_loop", "update_of_bound"]),
    Bench("block_io", "", "--mib 4 --repeats 1", ["write_of_raw", "read_of_raw"], disk=True),
    Bench("nvme_step", "", "--elements 300000 --tile 65536 --repeats 1 --block-kib 64 --depth 8", ["step_of_bound"], disk=True),
    Bench("checkpoint", "", "--mib 12 --repeats 1", ["write_of_raw", "read_of_raw", "reshard_of_raw"], disk=True),
    Bench("save", "", "--mib 4 --repeats 2", ["pause_of_copy", "step_of_step"], ranks=2, disk=True),
    Bench("step", "", "--model gpt-nano --sequence 32 --rounds 2 --threads 1", ["bare_of_step"]),
    Bench("memory_profile", "", "--model gpt-nano --rounds 4 --sequence 16", ["profiled_of_plain"]),
]


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine(programs):
    facts = {}
    for line in output_of("lscpu").splitlines():
        key, _, value = line.partition(":")
        if key in ("Model name", "CPU(s)", "Hypervisor vendor", "L2 cache", "L3 cache"):
            facts[{"Model name": "processor", "CPU(s)": "cores"}.get(key, key)] = value.strip()
    with open("/proc/meminfo", encoding="ascii") as info:
        facts["memory"] = f"{int(info.readline().split()[1]) / 2**20:.1f} GiB"
    facts["kernel"] = os.uname().release
    for line in output_of(str(programs / "tranche"), "info").splitlines():
        key, _, value = line.partition(" ")
        if key in ("build", "CPU") or line.startswith("matmul by"):
            facts["matmul by" if line.startswith("matmul") else key] = line.split(None, 2 if line.startswith("matmul") else 1)[-1]
    return facts


def commit():
    name = output_of("git", "rev-parse", "--short", "HEAD") or "unknown"
    return name + (" with changes" if output_of("git", "status", "--porcelain", "--untracked-files=no") else "")


def number(text):
    try:
        return float(text)
    except ValueError:
        return None


def google_figures(path):
    """{case: {counter: number}} from Google Benchmark's JSON; the seconds of a call have the key `seconds`."""
    figures = {}
    known = {"family_index", "per_family_instance_index", "repetitions", "repetition_index", "threads", "iterations",
             "real_time", "cpu_time", "bytes_per_second", "items_per_second"}
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    for bench in json.loads(path.read_text(encoding="utf-8"))["benchmarks"]:
        if bench.get("error_occurred"):
            raise ValueError(f"{bench['name']}: {bench.get('error_message')}")
        counters = {key: value for key, value in bench.items() if key not in known and isinstance(value, (int, float))}
        counters["seconds"] = bench["real_time"] * units[bench["time_unit"]]
        figures[bench["name"].replace("/iterations:1/manual_time", "")] = counters
    return figures


def printed_figures(text):
    """Returns {case: {key: number}} from lines of key=value. Values that are not numbers form the name of the case."""
    figures = {}
    for line in text.splitlines():
        pairs = re.findall(r"(\S+?)=(\S+)", line)
        if not pairs or not any(key in FLOORS or "of_" in key for key, _ in pairs):
            continue
        numbers = {key: number(value) for key, value in pairs if number(value) is not None}
        name = " ".join(f"{key}={value}" for key, value in pairs
                        if number(value) is None and ".." not in value or key in ("parameters", "threads", "ranks", "bytes"))
        figures[name or "all"] = numbers
    return figures


def run(bench, programs, options, disk, raw):
    out = raw / f"{bench.name}.json"
    command = bench.command(programs, options, disk, out)
    shown = " ".join(shlex.quote(word) for word in bench.command(pathlib.Path(""), options, "DIR" if bench.disk else disk,
                                                                "OUT.json")).replace(str(ROOT) + "/", "")
    record = {"bench": bench.name, "command": shown, "load_before": os.getloadavg()[0]}
    begin = time.monotonic()
    program = programs / f"bench_{bench.name}"
    if not program.exists():
        return {**record, "status": "failed", "why": f"no program bench_{bench.name}; build with TRANCHE_BENCHES=ON"}
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    (raw / f"{bench.name}.txt").write_text(result.stdout + result.stderr, encoding="utf-8")
    record.update(seconds=round(time.monotonic() - begin, 1), load_after=os.getloadavg()[0])
    if result.returncode != 0:
        tail = "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:])
        return {**record, "status": "failed", "why": f"exit status {result.returncode}: {tail}"}
    try:
        figures = google_figures(out) if bench.google else printed_figures(result.stdout)
    except (OSError, ValueError, KeyError) as error:
        return {**record, "status": "failed", "why": f"unreadable figures: {error}"}
    missing = [key for key in bench.keys if not any(key in case for case in figures.values())]
    if missing:
        return {**record, "status": "failed", "why": f"printed no {', '.join(missing)}", "figures": figures}
    return {**record, "status": "measured", "figures": figures}


def summary(results):
    lines = ["# Benches", "", f"Commit {results['commit']}, {results['date']}."]
    if results["smoke"]:
        lines += ["", "**Smallest sizes: that everything runs. No figure below means anything.**"]
    lines += ["", "| machine | |", "|---|---|"] + [f"| {key} | {value} |" for key, value in results["machine"].items()]
    for record in results["benches"]:
        load = f"load {record['load_before']:.1f}" + (f" to {record['load_after']:.1f}" if "load_after" in record else "")
        lines += ["", f"## {record['bench']}", "", f"    {record['command']}", ""]
        lines += [f"{record.get('seconds', 0)} s, {load} on {os.cpu_count()} cores." +
                  (f" **Failed**: {record['why']}" if record["status"] == "failed" else "")]
        rows = [(case, key, value) for case, figures in record.get("figures", {}).items()
                for key, value in figures.items() if key in FLOORS]
        if rows:
            kinds = sorted({key for _, key, _ in rows})
            lines += [""] + [f"`{key}`: of {FLOORS[key]}." for key in kinds]
            lines += ["", "| case | fraction | |", "|---|---|---|"]
            lines += [f"| {case} | {value:.3f} | {key} |" for case, key, value in rows]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="See the first lines of the script.")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("--only", default="", help="benches whose name matches")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--dir", type=pathlib.Path)
    parser.add_argument("--list", action="store_true", help="names and commands, runs nothing")
    options = parser.parse_args()
    programs = (options.build / "bin").resolve()
    chosen = [bench for bench in BENCHES if re.search(options.only, bench.name)]
    if not chosen:
        parser.error(f"--only {options.only}: none of {', '.join(bench.name for bench in BENCHES)}")
    if options.list:
        for bench in chosen:
            print(bench.name + ":", " ".join(bench.command(pathlib.Path(""), options, "DIR", "OUT.json")))
        return 0
    facts = machine(programs)
    if options.out is None:
        processor = re.sub(r"[^a-z0-9]+", "-", facts.get("processor", "machine").lower()).strip("-")
        options.out = ROOT / "bench" / "results" / f"{datetime.date.today()}-{processor}"
    if options.out.exists():
        parser.error(f"{options.out} exists; results are added, not written over: name another with --out")
    raw = options.out / "raw"
    raw.mkdir(parents=True)
    disk = (options.dir or options.out / "disk").resolve()
    disk.mkdir(parents=True, exist_ok=True)
    results = {"schema": 1, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
               "commit": commit(), "smoke": options.smoke, "machine": facts, "benches": []}
    begin = time.monotonic()
    for index, bench in enumerate(chosen):
        print(f"[{index + 1}/{len(chosen)}] bench_{bench.name} ({time.monotonic() - begin:.0f} s so far)", file=sys.stderr, flush=True)
        results["benches"].append(run(bench, programs, options, disk, raw))
        (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (options.out / "summary.md").write_text(summary(results), encoding="utf-8")
    if not options.dir:
        shutil.rmtree(disk, ignore_errors=True)
    failed = [record for record in results["benches"] if record["status"] == "failed"]
    for record in failed:
        print(f"bench.py: bench_{record['bench']} failed: {record['why']}", file=sys.stderr)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} benches measured; see {options.out / 'summary.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
