"""Results of earlier calls for the same commit, used by run.sh --resume: passed items do not run again, failed items run once more.

A call's results.json contains its records, and under `progress` the verdict of every case of every test program.
"""
import json
import pathlib

FAILED = ("failed", "faulted", "hung")
MOST_TRIES = 2


def key_of(record):
    return record["part"], record["item"]


class History:
    def __init__(self, folders=(), commit=""):
        self.records, self.tries, self.progress, self.raw, self.calls, self.note = [], {}, {}, {}, [], ""
        for folder in map(pathlib.Path, folders):
            try:
                results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            earlier = results.get("machine", {}).get("commit", "")
            if not commit or commit != earlier:
                self.note = f"the results in {folder} are of commit {earlier or 'unknown'}, not {commit or 'unknown'}: all runs anew"
                continue
            self.note = ""
            self.take(folder, results)
            return

    def take(self, folder, results):
        self.calls = results.get("calls", [])
        self.progress = results.get("progress", {})
        for record in results["records"]:
            if record["status"] in FAILED:
                self.tries[key_of(record)] = record.get("tries", 1)
            if self.stays(record):
                self.records.append({**record, "earlier": True})
        for name in ("tests", "benches", "training"):
            try:
                self.raw[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                pass

    @staticmethod
    def stays(record):
        """False for skipped items that took no time: they are tried again, because their requirements may be met now."""
        if record["status"] in FAILED:
            return record.get("tries", 1) >= MOST_TRIES
        return record["status"] in ("passed", "measured") or (record["status"] == "skipped" and bool(record.get("seconds")))

    def settled(self, part, item):
        return any(key_of(record) == (part, item) and record["status"] != "measured" for record in self.records)

    def cases(self, item):
        """Returns (verdicts to keep, number of tries of failed cases, total number of cases) of a test program."""
        known = self.progress.get(item, {})
        tries = known.get("tries", {})
        verdicts = {case: its for case, its in known.get("results", {}).items()
                    if its not in FAILED or tries.get(case, 1) >= MOST_TRIES}
        return verdicts, dict(tries), known.get("total")
