#!/usr/bin/env python3
"""kernel_times.py TRACE.json [--rows N]: device time by kernel of a training's --trace, and the share of time in which the GPU was idle.

The first third of the time is left out, since memory is planned and kernels are loaded then. A span's time is its own, less
that of spans inside it. Tracks of the host (steps, saving, counters) do not count.
"""
import argparse
import json
import re
import sys

DEVICE_TRACK = re.compile(r"compute|communication|exchange|quantize|dequantize|sums|offload|copy")


def read(text):
    """[(track, name, begin, end)] of the device, in microseconds."""
    events = json.loads(text)["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events
             if event["ph"] == "M" and event["name"] == "thread_name"}
    return [(names.get((event["pid"], event["tid"]), ""), event["name"], event["ts"], event["ts"] + event["dur"])
            for event in events if event["ph"] == "X" and DEVICE_TRACK.search(names.get((event["pid"], event["tid"]), ""))]


def own_times(spans):
    """{name: [calls, microseconds]}: spans of one track nest and do not cross."""
    times, open_spans = {}, []
    for track in sorted({span[0] for span in spans}):
        open_spans.clear()
        for _, name, begin, end in sorted((span for span in spans if span[0] == track), key=lambda span: (span[2], -span[3])):
            while open_spans and open_spans[-1][1] <= begin:
                open_spans.pop()
            if open_spans:
                times[open_spans[-1][0]][1] -= min(end, open_spans[-1][1]) - begin
            its = times.setdefault(name, [0, 0.0])
            its[0] += 1
            its[1] += end - begin
            open_spans.append((name, end))
    return times


def idle_share(spans):
    """The fraction of the time from the first begin to the last end in which no span is open."""
    end_of_all = begin_of_all = None
    busy = 0.0
    for _, _, begin, end in sorted(spans, key=lambda span: span[2]):
        if end_of_all is None:
            begin_of_all = end_of_all = begin
        busy += max(0.0, end - max(begin, end_of_all))
        end_of_all = max(end_of_all, end)
    whole = (end_of_all - begin_of_all) if spans else 0.0
    return 1 - busy / whole if whole > 0 else 0.0


def summary(text):
    """{"idle": share, "kernels": [[name, calls, microseconds, share]]}, or None where the trace has nothing of a device."""
    spans = read(text)
    if not spans:
        return None
    first, last = min(span[2] for span in spans), max(span[3] for span in spans)
    steady = [span for span in spans if span[2] >= first + (last - first) / 3] or spans
    times = own_times(steady)
    whole = sum(its[1] for its in times.values()) or 1.0
    rows = sorted(([name, *its, its[1] / whole] for name, its in times.items()), key=lambda row: -row[2])
    return {"idle": idle_share(steady), "kernels": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("trace")
    parser.add_argument("--rows", type=int, default=30)
    options = parser.parse_args()
    try:
        with open(options.trace, encoding="utf-8") as file:
            found = summary(file.read())
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"kernel_times.py: {options.trace} is no trace of 'tranche train --trace': {error}")
    if found is None:
        sys.exit(f"kernel_times.py: {options.trace} has no span of a device")
    print(f"idle {100 * found['idle']:.1f} % of the time")
    for name, calls, microseconds, share in found["kernels"][:options.rows]:
        print(f"{100 * share:6.2f} %  {microseconds / 1e3:10.3f} ms  {calls:7d} x {microseconds / calls:9.1f} us  {name}")


if __name__ == "__main__":
    main()
