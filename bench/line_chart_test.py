"""line_chart_test.py PROGRAM: line_chart must draw every series, and must name the error in a file that is not a chart."""

import json
import pathlib
import subprocess
import sys
import tempfile

CHART = {"title": "Losses", "subtitle": "two runs", "x_label": "samples", "y_label": "nats",
         "series": [{"name": "first", "x": [1, 2], "y": [3, 2.5]}, {"name": "second", "x": [1, 2], "y": [3.5, 2]}]}


def drawn(folder, text):
    source, target = folder / "chart.json", folder / "chart.svg"
    source.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.argv[1], source, target], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, target.read_text(encoding="utf-8") if target.exists() else ""


with tempfile.TemporaryDirectory() as name:
    FOLDER = pathlib.Path(name)
    status, errors, svg = drawn(FOLDER, json.dumps({**CHART, "series": [{"name": "first", "x": [1], "y": [2, 3]}]}))
    assert status == 2 and svg == "", (status, errors)
    status, errors, svg = drawn(FOLDER, json.dumps({**CHART, "title": 3}))
    assert status == 2 and "line_chart: " in errors and "type must be string" in errors, (status, errors)
    status, errors, svg = drawn(FOLDER, "{")
    assert status == 2 and "parse error" in errors and svg == "", (status, errors)
    status, errors, svg = drawn(FOLDER, json.dumps(CHART))
    assert status == 0 and errors == "", (status, errors)
    assert "<svg" in svg and all(word in svg for word in ("Losses", "two runs", "samples", "nats", "first", "second")), svg
    done = subprocess.run([sys.argv[1]], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "line_chart: takes two arguments, IN.json and OUT.svg\n", done
print("line_chart: ok")
