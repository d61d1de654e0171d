#!/usr/bin/env python3
"""Nothing is silent: everything that a command skips, drops or replaces is reported in a line that begins with "note" or "changed".

usage: notes_test.py PROGRAM
Runs a table of commands that end with status 0, and looks for the lines. Then it looks for the text of every note in the sources in that
table and in the other tests, so that a note without a test fails."""

import ctypes
import ctypes.util
import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
from guide_test import write_model, write_tokenizer  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = "--model gpt-nano --micro-batch 2 --eval-batches 1 --threads 1 --debug-peak-seconds 0.01 --set tranche.workspace=8MiB"
TRAIN = f"train {SMALL} --data t.txt --sequence 16 --steps 1"

# A command, and parts of its notes. The commands run in order, in one folder.
CASES = [
    # tokenize
    ("tokenize --data lines.txt --out a.safetensors", ["'lines.txt' holds JSON lines, an object a line, each a document",
                                                       "'lines.txt': keys of its first line that are not read: prompt, id"]),
    ("tokenize --data lines.jsonl --data-format text --out a.safetensors", ["'lines.jsonl' is taken as one text, as --data-format text says"]),
    ("tokenize --data v.txt --data t.txt --data v.txt --out a.safetensors", ["'v.txt' is the same file as 'v.txt': its documents are written once more"]),
    ("tokenize --data mark.txt --out a.safetensors", ["'mark.txt' begins with a byte order mark, which is left out of its text"]),
    ("tokenize --data t.txt --out left.safetensors", ["left.safetensors.new-0123456789abcdef', which a process that has ended left"]),
    ("tokenize --data t.txt --out other.safetensors", ["removed the parts in 'other.safetensors.parts', which are of another command"]),
    ("tokenize --data t.txt --threads 2 --threads 1 --out a.safetensors", ["--threads was given 2 times: 1, the last, is taken"]),
    ("tokenize --data lines.jsonl --out documents.safetensors", ["keys of its first line that are not read"]),
    ("tokenize --data empty.jsonl --out a.safetensors", ["documents without a token, which are left out: 1 of 2"]),
    # flags and overrides
    (TRAIN + " --validation-data v.txt --validation-fraction 0.1 --min-steps 2 --offload-ratio 0.5 --nvme-path . --base nothing --lr 0.1"
     " --lr 0.2 --set gradient_clipping=1 --set gradient_clipping=2 --checkpoint-dir flags --keep-every 5",
     ["--validation-fraction has no effect: --validation-data is held out", "--min-steps has no effect: it is for runs that --max-seconds ends",
      "--keep-every has no effect: without --keep-last every checkpoint is kept",
      "--offload-ratio has no effect: the optimizer's state stays on the device", "--nvme-path has no effect: nothing is on nvme",
      "--base has no effect: no checkpoint is read", "--lr was given 2 times: 0.2, the last, is taken",
      "gradient_clipping=1 is replaced by gradient_clipping=2, which was given behind it"]),
    ("plan --model gpt-nano --stage 1 --stage 2 --ranks-per-node 8", ["--stage was given 2 times: 2, the last, is taken",
                                                                      "--ranks-per-node 8 is taken as 1, the ranks of the run"]),
    # data
    (TRAIN + " --data t.txt:2 --validation-data day=v.txt",
     ["--data 't.txt:2' is taken as a path; the file 't.txt' with the weight 2 is meant by 't.txt:2.0'",
      "--validation-data 'day=v.txt' is taken as a path; the set 'day' of 'v.txt' is meant by 'day=./v.txt'"]),
    (TRAIN + " --validation-data t.txt", ["'t.txt' is held out, but has the contents of a file that is trained on: its losses are of text"]),
    ("plan --model misspelt.json", ["misspelt.json: the key 'n_layers' is not read; did you mean 'n_layer'?"]),
    ("plan --model qwen3-0.6b", ["--sequence: not given: sequences of 1024 tokens, of the 40960 that the model has positions for"]),
    (TRAIN.replace("gpt-nano", "model/config.json"),
     ["text is read as bytes: 256 of the model's 259 tokens are used",
      "the weights are randomly initialised: model.safetensors in 'model' is not read; tranche checkpoint import model --to BASE takes it, and --resume-weights-only BASE"]),
    (TRAIN.replace("train", "evaluate").replace("--steps 1", "").replace("gpt-nano", "model/config.json"), ["takes it, and --from BASE begins with it",
                                                                                                                "the tail of --data is evaluated, 5 % of it, as training holds it out; --validation-data"]),
    (TRAIN.replace("t.txt", "documents.safetensors"), [" attends from one document to those before it in its sequence",
                                                       "longer than a sequence of 16 tokens"]),
    ("tokenize --data pairs.jsonl --out pairs.safetensors", []),
    (TRAIN.replace("t.txt", "pairs.safetensors"), [" are cut by the end of a window of 16 tokens: what follows the cut is learned without"]),
    ("tokenize --data t.txt --tokenizer swapped --out swapped.safetensors", []),
    (TRAIN.replace("gpt-nano", "model/config.json").replace("t.txt", "swapped.safetensors"),
     ["the tokens of 'swapped.safetensors' were made with another tokenizer than the model's in 'model': the same numbers mean other text"]),
    # configurations
    ("plan --model gpt-nano --config deepspeed.json",
     ["of the configuration has no effect here", "zero_optimization.cpu_offload: taken as zero_optimization.offload_optimizer.device: \"cpu\", its present name",
      "zero_optimization.offload_param.device: cpu has no effect: at stage 1 every rank has all weights",
      "zero_optimization.reduce_bucket_size: 0 is taken as 500000000, the default",
      "zero_optimization.sub_group_size: 5000 is taken as 4096: tiles are multiples of 4096",
      "activation_checkpointing.cpu_checkpointing: true has no effect", "\"auto\", which Hugging Face's trainer fills in, is ",
      "scheduler.params.warmup_num_steps: \"auto\" is no warm-up, as the trainer's", "optimizer.params.weight_decay: tensors of less than two dimensions",
      "scheduler: step 1 has its first rate"]),
    ("plan --model gpt-nano --set optimizer.type=Muon", ["optimizer.params.adjust_lr_fn: not given: match_rms_adamw, with which AdamW's rate"]),
    ("plan --model gpt-nano --stage 2 --offload-optimizer cpu --set tranche.master=split",
     ["tranche.master split: the weights of ", " elements are not kept together with the optimizer's state, which therefore holds fp32 master weights"]),
    ("plan --model gpt-nano --set tranche.tie_sum=by_use", ["tranche.tie_sum by_use: tensors that two uses of a unit read keep the gradients of each"]),
    ("plan --model gpt-nano --set tranche.tensor_sums=chain", ["tranche.tensor_sums has no effect: the mesh has no axis tensor"]),
    ("plan --model gpt-nano --set tranche.pipeline_schedule=afab", ["tranche.pipeline_schedule has no effect: the mesh has no axis pipeline"]),
    ("plan --model gpt-nano --set tranche.replicate=parameters", ["tranche.replicate has no effect: the mesh has no axis replicate"]),
    ("plan --model gpt-nano --ranks 2 --mesh replicate=2 --set tranche.replica_sum=step",
     ["tranche.replica_sum has no effect: gradients are reduced once a step (tranche.reduction boundary)"]),
    ("plan --model gpt-nano --ranks 2 --mesh pipeline=2 --accumulate 2 --set tranche.tie_sum=together",
     ["tranche.tie_sum: together is taken as by_use: the stages of a pipeline add each use's gradients"]),
    ("plan --model gpt-nano --ranks 2 --mesh pipeline=2", ["1 micro-batch on 2 stages of a pipeline: at most 1 of 2 stages can work at once"]),
    ("plan --model gpt-nano --set tranche.layout.inner=whole --set tensor_parallel.autotp_size=auto",
     ["tranche.layout has no effect: the mesh has no axis tensor", "tensor_parallel.autotp_size: \"auto\" is 1: write the number of ranks that share layers"]),
    ("plan --model gpt-nano --ranks 2 --set tensor_parallel.autotp_size=2 --rank 0 --ranks-per-node 1",
     ["ranks of tensor are on several nodes: layers wait for"]),
    ("plan --model gpt-nano --set pipeline.stages=auto --set pipeline.partition=uniform",
     ["pipeline.stages: \"auto\" is 1: write the number of stages for a pipeline", "pipeline.partition has no effect: the mesh has no axis pipeline"]),
    ("plan --model gpt-nano --ranks 2 --set pipeline.stages=2 --set pipeline.partition=best --set pipeline.seed_layers=true",
     ["pipeline.partition: best is taken as tranche.pipeline_cuts balanced", "pipeline.seed_layers: no meaning here: random numbers are keyed by tensor"]),
    ("plan --model gpt-nano --ranks 4 --mesh pipeline=2,shard=2 --stage 3 --accumulate 4",
     ["ZeRO stage 3 gathers the weights of pipeline stage 1 anew for each of 4 micro-batches: a rank sends "]),
    ("plan --model gpt-nano --set zero_optimization=true", ["zero_optimization: true is taken as stage 1"]),
    ("plan --model units.json --ranks 2 --stage 3 --set tranche.reduction=micro_batch", ["stage 2 would take less memory here: "]),
    ("plan --model gpt-mini --device cuda --machine dgx-h100 --micro-batch 1 --accumulate 64", ["64 micro-batches from the simulation of "]),
    (TRAIN + " --config warmup.json", ["scheduler.params.warmup_num_steps: the warm-up ends with step 100, and the run with step 1",
                                       "scheduler.params.total_num_steps: the schedule is for 50 steps, and the run has 1 step"]),
    (TRAIN + " --config length.json --lr 0.1", ["tranche.total_steps: the schedule is for 20 steps, and the run has 1 step",
                                                "--lr has no effect: WarmupDecayLR rises to scheduler.params.warmup_max_lr, which is 0.5"]),
    # checkpoints of a run
    (TRAIN + " --checkpoint-dir run --resume latest", ["no checkpoint in run yet: training starts from the beginning"]),
    (TRAIN + " --checkpoint-dir run --resume latest", ["step 1 of 1 is reached already: nothing to train"]),
    (TRAIN + " --steps 2 --checkpoint-dir run --resume latest --resume-weights-only other --lr 0.5 --dtype fp16",
     ["--resume-weights-only other is not read: the run goes on from run", "saved without loss scaling: it begins with a scale of ",
      "optimizer.params.lr"]),
    (TRAIN.replace("--sequence 16", "--sequence 8") + " --resume-weights-only run", ["was trained on sequences of 16 tokens, this run has 8",
                                                                                         "--lr: not given: 0.001, a rate for randomly initialised weights, but these were trained"]),
    (TRAIN + " --resume-weights-only foreign", ["foreign/step-00000002 was not written by this program: its tensors are compared, its tokenizer"]),
    ("checkpoint list torn", ["; --resume latest looks at the folders and takes the newest"]),
    (TRAIN + " --steps 3 --checkpoint-dir torn --resume latest", ["passed over: "]),
    # models of other programs
    ("checkpoint import model --to base", ["left behind in model: notes.md (weights, configuration, tokenizer and chat template are taken)",
                                           "weights that were not read in model: consolidated.safetensors (model.safetensors has those of the model)"]),
    ("checkpoint import model --to configured --model model/config.json", ["config.json of model does not travel: the model is --model model/config.json"]),
    ("checkpoint import broken --to broken-run", ["the tokenizer is taken as it is, but tranche cannot use it for text: ", "tokenizer.json"]),
    ("checkpoint import ruined --to ruined-run", [" not finite, the first one element 0 of model.norm.weight (nan): training and generation"]),
    ("checkpoint import adapter --base base --to tuned", ["the tokenizer of adapter takes the place of the base's",
                                                          "config.json of adapter does not travel: the model is the base's"]),
    ("checkpoint export undigested --to undigested-export", [" does not say which values the base of its adapters had: they were not compared"]),
    ("generate --from undigested --prompt a --tokens 1", [" does not say which values the base of its adapters had: they were not compared"]),
    ("checkpoint export moved --peft --to moved-export", [" any more: it was not compared"]),
    (TRAIN + " --checkpoint-dir drawn --set tranche.lora.rank=2 --set tranche.lora.targets=[\"c_attn\"]", ["tranche.lora: adapters are trained on a randomly initialised base; --resume-weights-only takes a model's weights"]),
    ("checkpoint export drawn --peft --to drawn-export", ["adapter_config.json names no base, because the base was not imported: write its path or name",
                                                          " carries no tokenizer: checkpoints carry what checkpoint import found"]),
    # generation
    ("generate --from model --base other --prompt a --tokens 2 --tokens 1", ["the base other is not read: model is whole without it",
                                                                             "--tokens was given 2 times: 1, the last, is taken"]),
    ("generate --from base --base other --prompt a --tokens 1", [" is not read: base/step-00000000 is whole without it"]),
    ("generate --from model --prompts prompts.txt --tokens 1", ["--prompts 'prompts.txt' holds JSON lines, an object a line, each a prompt",
                                                                "--prompts 'prompts.txt': keys of its lines that are not read: id, source"]),
    ("generate --from model --tokenizer swapped --prompt a --tokens 1 --greedy --top-k 2",
     ["the tokenizer of --tokenizer 'swapped' has other tokens than the model's in 'model': the same numbers mean other text",
      "--top-k has no effect: --greedy always takes the likeliest token"]),
    ("generate --from bare --prompt-tokens 1,2 --tokens 1", ["no end token is known: bare has no eos_token_id"]),
    ("generate --from broken --prompt-tokens 1,2 --tokens 1", ["the end token of the tokenizer is not known: "]),
    (f"generate --from bare --prompt-tokens {','.join(['1'] * 1030)} --tokens 1", ["the model sees 1024 tokens at once: prompt 1 has 1030, and nothing of its first 6"]),
]


def write_adapter(folder, base):
    draw, header, data = random.Random(2), {}, b""
    for layer in (0, 1):
        for side, shape in (("A", [4, 16]), ("B", [16, 4])):
            block = struct.pack("<64f", *[draw.gauss(0, 0.1) for _ in range(64)])
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(block)]}
            data += block
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": 4, "lora_alpha": 8, "lora_dropout": 0.0,
        "bias": "none", "target_modules": ["q_proj"], "fan_in_fan_out": False, "inference_mode": True}))


def write_inputs(at):
    text = "\n".join(str(number) for number in range(1500))
    for name in ("t.txt", "t.txt:2", "v.txt", "day=v.txt"):
        (at / name).write_text(text)
    (at / "mark.txt").write_text("\ufeff" + text)
    lines = "".join(json.dumps({"prompt": "p", "text": f"the text of line {number}, which is long", "id": number}) + "\n" for number in range(60))
    for name in ("lines.txt", "lines.jsonl"):
        (at / name).write_text(lines)
    (at / "prompts.txt").write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "source": "x"}\n')
    (at / "empty.jsonl").write_text('{"text": ""}\n{"text": "a"}\n')
    (at / "left.safetensors.new-0123456789abcdef").write_text("x")
    (at / "other.safetensors.parts").mkdir()
    (at / "other.safetensors.parts/inputs.json").write_text("{}")
    (at / "pairs.jsonl").write_text('{"prompt": "the prompt of", "completion": "an answer"}\n' * 60)
    (at / "misspelt.json").write_text('{"model_type": "gpt2", "n_layers": 2}')
    (at / "units.json").write_text(json.dumps({"units": [{"name": "whole", "tensors": {"w": [1000, 1000]}}]}))
    (at / "deepspeed.json").write_text(json.dumps({
        "wandb": {"enabled": True}, "bf16": {"enabled": "auto"}, "activation_checkpointing": {"cpu_checkpointing": True},
        "zero_optimization": {"stage": 1, "cpu_offload": True, "offload_param": {"device": "cpu"}, "reduce_bucket_size": 0, "sub_group_size": 5000},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}))
    (at / "warmup.json").write_text(json.dumps({
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "total_num_steps": 50}}}))
    (at / "length.json").write_text(json.dumps({"tranche": {"total_steps": 20}, "scheduler": {
        "type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "warmup_max_lr": 0.5}}}))
    for name in ("model", "bare", "broken", "ruined", "adapter"):
        (at / name).mkdir()
        if name != "adapter":
            write_model(at / name)
    for name in ("model", "adapter"):
        write_tokenizer(at / name)
    (at / "broken/tokenizer.json").write_text("{}")
    (at / "swapped").mkdir()
    swapped = json.loads((at / "model/tokenizer.json").read_text())
    swapped["model"]["vocab"] |= {"1": ord("2"), "2": ord("1")}
    (at / "swapped/tokenizer.json").write_text(json.dumps(swapped))
    (at / "model/notes.md").write_text("x")
    shutil.copy(at / "model/model.safetensors", at / "model/consolidated.safetensors")
    weights = (at / "ruined/model.safetensors").read_bytes()
    length = struct.unpack("<Q", weights[:8])[0]
    begin = 8 + length + json.loads(weights[8 : 8 + length])["model.norm.weight"]["data_offsets"][0]
    (at / "ruined/model.safetensors").write_bytes(weights[:begin] + struct.pack("<f", float("nan")) + weights[begin + 4 :])
    write_adapter(at / "adapter", "base")
    shutil.copy(at / "model/config.json", at / "adapter/config.json")


def crafted(at, source, name, change):
    """Makes a copy of a run's folder whose newest manifest is changed and has a correct digest."""
    shutil.copytree(at / source, at / name, symlinks=True)
    manifest = sorted((at / name).glob("step-*"))[-1] / "manifest.json"
    head, body = manifest.read_bytes().split(b"\n", 1)
    document = json.loads(b"{" + body)
    change(document)
    body = ("".join(f'"{key}": {json.dumps(value)},\n' for key, value in document.items())[:-2] + "}\n").encode()
    library = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
    library.XXH3_64bits.restype = ctypes.c_uint64
    library.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    manifest.write_bytes(re.sub(rb"[0-9a-f]{16}", f"{library.XXH3_64bits(body, len(body)):016x}".encode(), head) + b"\n" + body)


def prepare(at, command):
    """Prepares what a command needs from earlier ones."""
    if command.endswith("foreign"):
        crafted(at, "run", "foreign", lambda manifest: manifest["run"].update(user={"program": "another"}))
    elif command == "checkpoint list torn":
        shutil.copytree(at / "run", at / "torn", symlinks=True)
        (at / "torn/latest").unlink()
        (at / "torn/latest").write_text("step-00000009")
        (at / "torn/step-00000003").mkdir()
        (at / "torn/step-00000003/manifest.json").write_text("torn")
    elif command.startswith("checkpoint export undigested"):
        crafted(at, "tuned", "undigested", lambda manifest: manifest["base"].update(digest=""))
    elif command.startswith("checkpoint export moved"):
        crafted(at, "tuned", "moved", lambda manifest: manifest["base"].update(folder=str(at / "gone")))


def notes_of(output):
    """The lines, with runs of blanks replaced by one."""
    lines = [" ".join(line.split()) for line in output.replace("\r", "\n").splitlines()]
    return [line for line in lines if re.match(r"(note|changed)\b", line)]


def run_cases(program):
    failures = 0
    with tempfile.TemporaryDirectory(prefix="tranche-test-") as folder:
        at = pathlib.Path(folder)
        write_inputs(at)
        for command, expected in CASES:
            prepare(at, command)
            done = subprocess.run([program] + command.split(), cwd=at, capture_output=True, text=True, errors="replace", timeout=100,
                                  check=False, stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
            notes = notes_of(done.stdout + "\n" + done.stderr)
            missing = [text for text in expected if not any(" ".join(text.split()) in note for note in notes)]
            if done.returncode != 0 or missing:
                failures += 1
                print(f"FAILED: {command[:200]}\n  status {done.returncode}, no note has: {missing}\n  notes: " + "\n    ".join(notes))
                if done.returncode != 0:
                    print(f"  {(done.stdout + done.stderr)[-600:]}")
    return failures


# A note whose text is in its own call or at its beginning; other calls pass on texts written elsewhere.
SITE = re.compile(r'notes\.(?:push|emplace)_back\(|\bnote\(|\boptions_?\.say\(|"note: |row\("(?:note|changed)",')
FOLDERS = ("checkpoint", "config", "engine", "models", "planner", "tools", "training")
SHORT = 28  # characters of a part that distinguish one note from the others


def call_at(text, at):
    """The text from a position to the end of the call that begins there or encloses it."""
    depth, quoted, i = 0, False, at
    while i < len(text):
        if quoted:
            i += text[i] == "\\"
            quoted = text[i] != '"'
        elif text[i] == '"':
            quoted = True
        elif text[i] in "()":
            depth += 1 if text[i] == "(" else -1
            if depth <= 0 and text[i] == ")":
                break
        elif text[i] == ";" and depth <= 0:
            break
        i += 1
    return text[at:i]


def pieces_of(call):
    """The literal parts of its strings, between the values that are filled in."""
    joined = re.sub(r'"\s*"', "", call)
    texts = [text.replace('\\"', '"') for text in re.findall(r'"((?:[^"\\]|\\.)*)"', joined)]
    return [piece for text in texts for piece in re.split(r"\{[^{}]*\}|\\n", text) if len(piece.strip()) >= 8]


def sites_of(text):
    """(line, parts) of each note with a text of its own."""
    for found in SITE.finditer(text):
        pieces = pieces_of(call_at(text, found.start()))
        if pieces:
            yield text.count("\n", 0, found.start()) + 1, pieces


def is_covered(pieces, tested):
    return any(piece[i : i + SHORT] in tested for piece in pieces for i in range(max(1, len(piece) - SHORT + 1)))


def check_sources():
    tested = "\n".join(text for _, expected in CASES for text in expected)
    tests = ROOT / "tests"
    for test in sorted([*tests.rglob("*.cpp"), *tests.rglob("*.py")]):
        if test.resolve() != pathlib.Path(__file__).resolve():
            tested += "\n" + re.sub(r'"\s*[frb]*"', "", test.read_text(encoding="utf-8", errors="replace")).replace('\\"', '"')
    count, failures = 0, 0
    for source in sorted(name for folder in FOLDERS for name in (ROOT / folder).rglob("*.cpp")):
        for line, pieces in sites_of(source.read_text(encoding="utf-8")):
            count += 1
            if not is_covered(pieces, tested):
                failures += 1
                print(f"FAILED: {source.relative_to(ROOT)}:{line}: no test has a piece of this note: {pieces}\n  add a case to {__file__}")
    made_up = list(sites_of('notes.push_back(fmt::format("no test has a word of this {} and never "\n "will", name));'))
    if len(made_up) != 1 or is_covered(made_up[0][1], tested) or count < 100:
        failures += 1
        print(f"FAILED: notes are not found in the sources: {count}, {made_up}")
    print(f"{count} notes in the sources, {len(CASES)} commands")
    return failures


if __name__ == "__main__":
    sys.exit(1 if check_sources() + run_cases(os.path.abspath(sys.argv[1])) else 0)
