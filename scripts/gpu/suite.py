#!/usr/bin/env python3
"""What run.sh runs once programs and libraries are in place: tests, compute-sanitizer, benches, trainings; one results folder.

Every part has a share of the time that is left when it begins, so that what an early part does not use goes to the later
ones. A command is stopped at the end of its part's time and listed as 'not finished'; what does not begin any more is
listed as 'not run'. Exit status: 0 all that ran passed, 1 something failed, 2 usage or no GPU, 4 tests were left for lack
of time. A figure that misses its target is no failure: the table says so.
"""
import argparse
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
import time
from array import array

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from summary import markdown, measured  # noqa: E402  (beside this file)

LOG_BYTES = 12 << 20
LOG_BYTES_PER_COMMAND = 200 << 10
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
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--allow-no-gpu", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--notes", default="", help="a file whose text goes to machine.txt")
    return parser.parse_args()


class Suite:
    def __init__(self, options):
        self.options = options
        self.end = (options.started or time.time()) + options.limit
        self.part_end = self.end
        self.records, self.raw_tests, self.raw_benches, self.raw_training = [], {}, {}, {}
        self.results = pathlib.Path(options.results)
        self.results.mkdir(parents=True, exist_ok=True)
        self.log = (self.results / "log.txt").open("w", encoding="utf-8", errors="replace")
        self.temporary = tempfile.TemporaryDirectory()
        self.work = pathlib.Path(self.temporary.name)
        self.information = {}

    # --- Commands ------------------------------------------------------------------------------------------
    def left(self):
        return max(0.0, min(self.part_end, self.end) - time.time())

    def shown(self, command):
        """As a person would type it in the folder of the programs."""
        text = " ".join(shlex.quote(str(word)) for word in command)
        for folder in (self.options.build, self.options.source, str(self.work)):
            text = text.replace(folder + "/", "")
        return text

    def run(self, command, timeout=None, environment=None):
        """(status, output, seconds); status None when it was stopped, 'none' when it could not be started."""
        begin = time.time()
        limit = min(self.left(), timeout or 1e9)
        if limit < 1:
            return None, "", 0.0
        try:
            process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, cwd=self.work, start_new_session=True,
                                       env={**os.environ, **(environment or {})})
        except OSError as error:
            return "none", str(error), 0.0
        try:
            output, _ = process.communicate(timeout=limit)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own: its ranks end with it
            output, _ = process.communicate()
            status = None
        text, seconds = output.decode("utf-8", errors="replace"), time.time() - begin
        self.say_log(f"$ {self.shown(command)}\n{text[-LOG_BYTES_PER_COMMAND:]}\n[status {status}, {seconds:.1f} s]\n\n")
        return status, text, seconds

    def say_log(self, text):
        if self.log.tell() + len(text) < LOG_BYTES:
            self.log.write(text)
            self.log.flush()

    def add(self, record):
        self.records.append(record)
        if record["status"] == "measured":
            target = f" (target {record['target']}: {'met' if record['met'] else 'MISSED'})" if record["target"] else ""
            print(f"  {record['item']}: {record['figure']:.4g} {record['unit']}{target}", flush=True)
        else:
            print(f"  {record['item']}: {record['status']} {record.get('detail', '')}", flush=True)

    def program(self, *words):
        return str(pathlib.Path(self.options.build, *words))

    # --- Tests ---------------------------------------------------------------------------------------------
    def expanded(self, entry):
        return [word.replace("@BUILD@", self.options.build).replace("@SOURCE@", self.options.source)
                for word in entry["command"]]

    def test(self, part, entry, prefix=(), extra=(), timeout=None):
        """Runs one entry of the list, and adds its record and the figures that its cases recorded."""
        command = list(prefix) + self.expanded(entry)
        item = entry["name"] if not prefix else f"{entry['name']} under {pathlib.Path(prefix[0]).name} {prefix[-1]}"
        json_file = self.work / "googletest.json"
        json_file.unlink(missing_ok=True)
        shown = list(command)
        if entry.get("googletest"):
            if entry.get("filter", "*") != "*":
                shown.append("--gtest_filter=" + entry["filter"])
            shown += extra
            command = shown + [f"--gtest_output=json:{json_file}"]
        record = {"part": part, "item": item, "command": self.shown(shown)}
        environment = dict(text.split("=", 1) for text in entry.get("environment", []))
        # Ranks that are threads share a context, and loading a kernel at its first launch may wait for all of it.
        environment.setdefault("CUDA_MODULE_LOADING", "EAGER")
        if self.left() < 1:
            self.add({**record, "status": "not run", "detail": "no time was left"})
            return
        status, output, seconds = self.run(command, timeout or max(60.0, entry["timeout"]), environment)
        cases = self.cases(item, json_file)
        for name, properties in cases:
            for key, value in properties.items():
                try:
                    figure = float(value)
                except ValueError:
                    continue
                self.add(measured(part, f"{name} {key}", "relative", figure, command=record["command"]))
        record.update(seconds=seconds, **self.verdict(status, output))
        self.add(record)

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
            return {"status": "not finished", "detail": f"stopped; {ran} cases had passed"}
        if status == "none":
            return {"status": "failed", "detail": "could not be started: " + output}
        names = [name for name in failed if not name.isdigit()]
        last = output.strip().splitlines()[-1:] or [""]
        how = f"ended by signal {-status}" if status < 0 else f"status {status}"
        return {"status": "failed", "detail": f"{how}: {', '.join(names[:8]) if names else last[0][:200]}"}

    def cases(self, item, json_file):
        """Recorded properties of every case; the file itself is kept for tests.json."""
        if not json_file.exists():
            return []
        try:
            report = json.loads(json_file.read_text(encoding="utf-8"))
        except ValueError:  # cut off: the program died while it wrote
            return []
        self.raw_tests[item] = report
        return [(f"{case['classname']}.{case['name']}", {key: case[key] for key in case if key not in GTEST_KEYS})
                for suite in report["testsuites"] for case in suite["testsuite"]]

    def tests(self):
        entries = json.loads(pathlib.Path(self.options.tests).read_text(encoding="utf-8"))
        if not entries:
            self.add({"part": "tests", "item": "gpu tests", "status": "skipped", "detail": "this build has none"})
        # Quick ones first: a slow one that hangs must not cost the others their time.
        entries.sort(key=lambda entry: "slow" in entry["labels"])
        if self.options.smoke:  # whoever smokes has CTest for the rest
            entries = sorted((entry for entry in entries if entry.get("googletest")),
                             key=lambda entry: entry.get("count", 0))[:1]
        for entry in entries:
            self.test("tests", entry)

    def sanitizer(self):
        tool = next((path for path in (os.environ.get("CUDA_HOME", "") + "/bin/compute-sanitizer",
                                       "/usr/local/cuda/bin/compute-sanitizer", *(
                                           folder + "/compute-sanitizer" for folder in os.environ["PATH"].split(":")))
                     if os.access(path, os.X_OK)), None)
        entries = [entry for entry in json.loads(pathlib.Path(self.options.tests).read_text(encoding="utf-8"))
                   if entry.get("googletest") and "kernels" in entry["name"]]
        reason = "compute-sanitizer is not installed" if not tool else self.no_gpu() or \
            ("the GPU is emulated" if self.information.get("emulated") else "")
        for check in ("memcheck", "racecheck"):
            for entry in entries:
                prefix = [tool or "compute-sanitizer", "--error-exitcode", "99", "--tool", check]
                if reason:
                    self.add({"part": "sanitizer", "item": f"{entry['name']} under {check}", "status": "skipped",
                              "detail": reason})
                    continue
                # Shadow memory makes kernels some hundred times slower: the large sizes are for the plain run.
                self.test("sanitizer", entry, prefix, ["--gtest_filter=-*Large*:*Long*:*Many*"],
                          timeout=max(30.0, self.left() / 2))

    # --- Benches -------------------------------------------------------------------------------------------
    def benches(self):
        programs = sorted(pathlib.Path(self.options.build, "bin").glob("bench_*gpu*"))
        for program in programs:
            file = self.work / "bench.json"
            file.unlink(missing_ok=True)
            command = [str(program)]
            reason = self.no_gpu() or ("times of an emulated GPU mean nothing" if self.information.get("emulated") else "")
            record = {"part": "benches", "item": program.name, "command": self.shown(command)}
            if reason or self.left() < 1:
                self.add({**record, "status": "skipped" if reason else "not run",
                          "detail": reason or "no time was left"})
                continue
            status, output, seconds = self.run(command + [f"--benchmark_out={file}", "--benchmark_out_format=json"])
            found = self.bench_figures(program.name, file, record["command"])
            if status != 0 or not found:
                self.add({**record, "seconds": seconds,
                          "status": "not finished" if status is None else "failed",
                          "detail": f"{found} figures; " + (output.strip().splitlines()[-1:] or [""])[0][:200]})
        if not programs:
            self.add({"part": "benches", "item": "bench_*gpu*", "status": "skipped", "detail": "this build has none"})

    def bench_figures(self, name, file, command):
        """Adds a record for every share of a ceiling; how many there were."""
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # stopped while it wrote
            return 0
        self.raw_benches[name] = report
        found = 0
        for entry in report.get("benchmarks", []):
            label = re.sub(r"/(real_time|manual_time|iterations:\d+|repeats:\d+)", "", entry["name"])
            if entry.get("error_occurred"):
                self.add({"part": "benches", "item": f"{name}/{label}", "command": command, "status": "failed",
                          "detail": entry.get("error_message", "")})
                continue
            if entry.get("run_type") == "aggregate" and entry.get("aggregate_name") != "median":
                continue
            found += 1
            # Ceilings are no share of anything: their rate is told.
            told = [key for key in ("of_copy", "of_peak", "of_forward") if key in entry] or \
                [key for key in entry if key.endswith("/s") or key.endswith("_per_second")][:1]
            for key in told:
                self.add(measured("benches", f"{name}/{label}", key, float(entry[key]), command=command))
        return found

    # --- Trainings -----------------------------------------------------------------------------------------
    def tokens(self, vocabulary, count):
        """Random tokens as nanoGPT writes them: speed does not depend on what they say."""
        file = self.work / f"tokens{vocabulary}.bin"
        if not file.exists():
            draw = random.Random(20)
            values = array("H", draw.choices(range(vocabulary), k=count))
            if sys.byteorder == "big":
                values.byteswap()
            file.write_bytes(values.tobytes())
        return file

    def train(self, item, flags, timeout=None):
        """The report, or None with a record that says why."""
        report = self.work / "report.json"
        report.unlink(missing_ok=True)
        command = [self.program("bin", "tranche"), "train", *map(str, flags), "--report", str(report)]
        record = {"part": "training", "item": item, "command": self.shown(command)}
        reason = self.no_gpu()
        if reason or self.left() < 1:
            self.add({**record, "status": "skipped" if reason else "not run", "detail": reason or "no time was left"})
            return None, record, 0
        status, output, seconds = self.run(command, timeout)
        if status == 0 and report.exists():
            found = json.loads(report.read_text(encoding="utf-8"))
            self.raw_training[item] = found
            return found, record, 0
        if status != 3:
            self.add({**record, "seconds": seconds, **self.verdict(status, output)})
        return None, record, status

    def training(self):
        self.agreement()
        smoke = self.options.smoke
        for model, sequences in (("gpt-nano", (2,)),) if smoke else (("gpt2", (32, 16, 8)), ("gpt2-xl", (16, 8, 4))):
            vocabulary = 256 if smoke else 50257
            for rest, micro_batch in enumerate(sequences, 1 - len(sequences)):
                report, record, status = self.train(
                    f"training {model}",
                    ["--device", "cuda", "--model", model, "--data", self.tokens(vocabulary, 20000 if smoke else 600000),
                     "--data-format", "nanogpt", "--dtype", "bf16", "--micro-batch", micro_batch, "--sequence",
                     32 if smoke else 1024, "--steps", 3 if smoke else 1000, "--min-steps", 3 if smoke else 8,
                     "--max-seconds", 25, "--eval-batches", 1], timeout=self.left() / (1 if model == "gpt2-xl" else 2))
                if report:
                    for key, unit in (("tokens_per_second", "tokens_per_second"), ("matmul_peak_share", "of_peak"),
                                      ("matmul_peak_flops", "flops_per_second")):
                        self.add(measured("training", record["item"], unit, float(report[key] or 0),
                                          command=record["command"]))
                if status != 3:
                    break
                if rest == 0:
                    self.add({**record, "status": "failed", "detail": "out of memory at every size that was tried"})

    def agreement(self):
        """The same 20 steps in fp32 on CPU and GPU. Gradients and weights by tensor are compared by test_models_gpu."""
        for optimizer, rate in (("SGD", 0.05), ("AdamW", 1e-3)):
            config = self.work / f"{optimizer}.json"
            config.write_text(json.dumps({"optimizer": {"type": optimizer, "params": {"lr": rate}},
                                          "gradient_clipping": 1.0}), encoding="utf-8")
            reports = []
            for device in ("cpu", "cuda"):
                report, record, _ = self.train(
                    f"agreement of CPU and GPU, {optimizer}, {device}",
                    ["--config", config, "--device", device, "--model", "gpt-nano" if self.options.smoke else "gpt-mini",
                     "--data", self.tokens(256, 20000), "--data-format", "nanogpt", "--dtype", "fp32", "--micro-batch", 4,
                     "--sequence", 32 if self.options.smoke else 128, "--steps", 3 if self.options.smoke else 20,
                     "--eval-batches", 1])
                if report is None:
                    break
                reports.append(report)
            if len(reports) == 2:
                cpu, gpu = ([step["loss"] for step in report["steps"]] for report in reports)
                worst = max(abs(a - b) / abs(b) for a, b in zip(gpu, cpu))
                found = measured("training", f"agreement of CPU and GPU, {optimizer}, losses of {len(cpu)} steps",
                                 "relative", worst, command=record["command"])
                self.add(found)
                if not found["met"]:
                    self.add({"part": "training", "item": found["item"], "status": "failed", "detail":
                              f"losses differ by {worst:.3g}", "command": record["command"]})

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
        smi = self.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit",
                        "--format=csv,noheader"], 30)
        nvcc = self.run(["nvcc", "--version"], 30)
        cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
        devices = self.information.get("devices", [])
        machine = {
            "commit": self.options.commit,
            "GPU": "; ".join(f"{device['name']} (compute capability {device['compute_capability']}, "
                             f"{device['memory_bytes'] / 2**30:.0f} GiB)" for device in devices),
            "driver": smi[1].strip() if smi[0] == 0 else self.information.get("problem", ""),
            "CUDA runtime": self.information.get("runtime_version", ""),
            "nvcc": (re.search(r"release (.*)", nvcc[1]) or [None, ""])[1] if nvcc[0] == 0 else "",
            "CPU": f"{cpu.group(1) if cpu else 'unknown'}, {os.cpu_count()} cores",
            "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }
        notes = pathlib.Path(self.options.notes).read_text(encoding="utf-8") if self.options.notes else ""
        (self.results / "machine.txt").write_text(
            "".join(f"{key}: {value}\n" for key, value in machine.items()) + "\n" + notes + "\n" + text, encoding="utf-8")
        return machine

    def go(self):
        begin = time.time()
        machine = self.look_around()
        for key, value in machine.items():
            print(f"{key}: {value}")
        if self.no_gpu() and not self.options.allow_no_gpu:
            print(f"suite: {self.no_gpu()}. Nothing was run: this needs a GPU; with --allow-no-gpu tests only say "
                  "why they skip.", file=sys.stderr)
            return 2
        parts = [("tests", self.tests, 0.40), ("benches", self.benches, 0.30), ("training", self.training, 0.50),
                 ("sanitizer", self.sanitizer, 1.0)]
        if self.options.only:
            kept = {"tests": ("tests", "sanitizer"), "benches": ("benches", "training")}[self.options.only]
            parts = [part for part in parts if part[0] in kept]
        for name, run, share in parts:
            print(f"== {name}", flush=True)
            self.part_end = time.time() + (self.end - time.time()) * share
            run()
            self.part_end = self.end
            self.save(machine, begin)
        print(f"\nresults: {self.results}")
        if any(record["status"] == "failed" for record in self.records):
            return 1
        left = any(record["status"] in ("not run", "not finished") and record["part"] == "tests"
                   for record in self.records)
        return 4 if left else 0

    def save(self, machine, begin):
        """After every part, so that a job that is ended from outside leaves what it found."""
        results = {"schema": "tranche-gpu-results-1", "machine": machine, "seconds": time.time() - begin,
                   "emulated": bool(self.information.get("emulated")), "records": self.records}
        for name, value in (("results", results), ("tests", self.raw_tests), ("benches", self.raw_benches),
                            ("training", self.raw_training)):
            (self.results / f"{name}.json").write_text(json.dumps(value, indent=1), encoding="utf-8")
        (self.results / "summary.md").write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(Suite(arguments()).go())
