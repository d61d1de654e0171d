#!/usr/bin/env python3
"""Draws README's picture from `tranche plan`: a rank's model state at stages 0 to 3, and the timeline of one step.

    scripts/overview_picture.py                  prints the SVG
    scripts/overview_picture.py --compare FILE   prints nothing where FILE is that SVG; exit status 1 where it is not

`tranche` has to be in PATH. It needs no GPU: the upper half is a plan of memory, the lower half a projected step.
"""
import json
import pathlib
import tempfile

from svg_drawing import BOLD, Drawing, main, output_of

STATE = ["tranche", "plan", "--model", "gpt2-xl", "--ranks", "8", "--json"]
STEP = ["tranche", "plan", "--model", "gpt2", "--device", "cuda", "--ranks", "8", "--ranks-per-node", "8", "--stage", "3",
        "--micro-batch", "4", "--machine", "dgx-h100"]
PARTS = [("parameters", "#0072B2"), ("gradients", "#E69F00"), ("optimizer", "#009E73")]
PHASES = {"forward": "#56B4E9", "head": "#CC79A7", "backward": "#D55E00", "update": "#009E73"}
TRANSFERS = {"all_gather": ("gather weights", "#0072B2"), "reduce_scatter": ("reduce gradients", "#E69F00")}
UPDATE_KERNELS = ("gradient_statistics", "adam_update")


def model_state():
    """GiB of one rank by part, for each stage."""
    plans = [json.loads(output_of([*STATE, "--stage", str(stage)])) for stage in range(4)]
    return [{part: plan["state"][part] / 2**30 for part, _ in PARTS} for plan in plans]


def step_spans():
    """Returns (lane, kind, begin, end) in microseconds, with neighbours of one kind joined, and the end of the step."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "step.json"
        output_of([*STEP, "--trace", str(file)])
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = sorted(((lanes[event["tid"]], event["name"], event["ts"], event["ts"] + event["dur"]) for event in events
                    if event["ph"] == "X"), key=lambda span: span[2])
    compute = [span for span in spans if span[0] == "compute"]
    head = min(begin for _, name, begin, _ in compute if name.startswith("cross_entropy"))
    block = min(begin for _, name, begin, _ in compute if name == "gelu_forward_backward")
    merged = []
    for lane, name, begin, end in spans:
        if lane == "compute":
            phase = "forward" if begin < head else "head" if begin < block else "backward"
            kind = "update" if name in UPDATE_KERNELS else phase
        elif name in TRANSFERS:
            kind = name
        else:
            continue
        last = next((span for span in reversed(merged) if span[0] == lane), None)
        if last is not None and lane == "compute" and last[1] == kind and begin - last[3] < 3:
            last[3] = max(last[3], end)
        elif end > begin:
            merged.append([lane, kind, begin, end])
    return merged, max(span[3] for span in spans)


def draw_state(drawing, states):
    base, height, most = 270, 190, max(sum(state.values()) for state in states)
    drawing.text(20, 26, "Model state of one rank, GiB", more=BOLD)
    drawing.text(20, 44, "GPT-2 XL (1.56 billion parameters), bf16, 8 ranks")
    for stage, state in enumerate(states):
        x, y = 34 + 132 * stage, base
        for part, colour in PARTS:
            y -= state[part] / most * height
            drawing.box(x, y, 58, state[part] / most * height, colour)
        drawing.text(x + 29, y - 6, f"{sum(state.values()):.2f}", "middle")
        drawing.text(x + 29, base + 18, f"stage {stage}", "middle")
    drawing.line(20, base, 540, base)
    for number, (part, colour) in enumerate(PARTS):
        drawing.box(34 + 112 * number, 305, 12, 12, colour)
        drawing.text(51 + 112 * number, 316, part)


def draw_step(drawing, spans, end):
    top, left, width, lanes = 350, 120, 420, {"compute": 404, "communication": 460}
    drawing.text(20, top, f"One stage-3 step, {end / 1000:.1f} ms", more=BOLD)
    drawing.text(20, top + 18, "GPT-2 124M on 8 GPUs, projected from datasheet figures, not measured")
    for lane, y in lanes.items():
        drawing.text(left - 8, y + 25, lane, "end")
        drawing.box(left, y, width, 40, "#f0f0f0")
    for lane, kind, begin, until in spans:
        colour = PHASES[kind] if lane == "compute" else TRANSFERS[kind][1]
        drawing.box(left + begin / end * width, lanes[lane], (until - begin) / end * width, 40, colour)
    drawing.line(left, top + 160, left + width, top + 160)
    for millisecond in range(int(end / 1000) + 1):
        x = left + millisecond * 1000 / end * width
        drawing.line(x, top + 160, x, top + 165)
        drawing.text(x, top + 180, str(millisecond), "middle")
    drawing.text(left + width, top + 180, "ms", "end")
    legend = [*PHASES.items(), *TRANSFERS.values()]
    for number, (name, colour) in enumerate(legend):
        x, y = 20 + 135 * (number % 4), top + 196 + 22 * (number // 4)
        drawing.box(x, y, 12, 12, colour)
        drawing.text(x + 17, y + 11, name)


def picture():
    states = model_state()
    spans, end = step_spans()
    totals = ", ".join(f"{sum(state.values()):.2f} GiB at stage {stage}" for stage, state in enumerate(states))
    drawing = Drawing(560, 600, "ZeRO stages: memory and one step",
                      f"Above: model state of one of 8 ranks: {totals}. Below: a step of {end / 1000:.1f} ms at stage 3; "
                      "gathers of weights and reductions of gradients run beside the computation.")
    draw_state(drawing, states)
    draw_step(drawing, spans, end)
    return str(drawing)


main(__doc__, picture, "overview_picture.py")
