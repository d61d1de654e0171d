#!/usr/bin/env python3
"""checkpoint_program_test.py PROGRAM: three ranks train and save; one process lists, verifies, shows, exports and imports. h5py reads the
same weights from model.h5 as the exported safetensors contain, and generate writes the same text from all of them.
"""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy
except ImportError as missing:
    sys.exit(f"{missing}: install Debian's package python3-h5py (scripts/setup.sh)")

PROGRAM = sys.argv[1]
RUN_MPI = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "run_mpi.sh"


def tranche(*arguments, ranks=0, status=0):
    command = ([str(RUN_MPI), str(ranks)] if ranks else []) + [PROGRAM] + [str(argument) for argument in arguments]
    done = subprocess.run(command, capture_output=True, timeout=75, check=False, env=dict(os.environ, TRANCHE_MPI_TIMEOUT="60"))
    if done.returncode != status:
        sys.exit(f"{' '.join(command)}\nended with status {done.returncode}, not {status}\n"
                 f"{(done.stdout + done.stderr).decode(errors='replace')}")
    return done.stdout


def read_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    del header["__metadata__"]
    assert all(entry["dtype"] == "F32" for entry in header.values())
    return {name: numpy.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
            for name, entry in header.items()}


def main(folder):
    model = folder / "config.json"
    model.write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_head": 3, "n_embd": 33, "n_inner": 61, "vocab_size": 256,
                                 "n_positions": 32, "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}))
    text = folder / "text.txt"
    text.write_bytes(b"the cat sat on a mat and saw seven rats\n" * 100)
    run = folder / "run"
    train = ("train", "--model", model, "--data", text, "--sequence", 13, "--steps", 3, "--threads", 1, "--stage", 3,
             "--eval-batches", 1, "--set", "tranche.workspace=8MiB", "--set", "tranche.communication_slab=1MiB")
    tranche(*train, "--checkpoint-dir", run, ranks=3)

    listed = json.loads(tranche("checkpoint", "list", run, "--json"))
    assert listed["newest"] == listed["latest"] == "step-00000003" and listed["checkpoints"][0]["world"] == 3, listed
    assert json.loads(tranche("checkpoint", "verify", run, "--json"))["verified"]
    shown = json.loads(tranche("checkpoint", "show", run, "--json"))
    assert shown["step"] == 3 and shown["stage"] == 3 and shown["user"]["sequence"] == 13, shown["user"]
    assert len({shard["rank"] for tensor in shown["tensors"] for shard in tensor["shards"]}) == 3, "each rank holds a part"

    tranche("checkpoint", "export", run, "--to", folder / "hf")
    exported = read_safetensors(folder / "hf" / "model.safetensors")
    with h5py.File(run / "step-00000003" / "model.h5") as master:
        assert set(master["weights"]) == set(exported) | {"lm_head.weight"}, sorted(master["weights"])
        for name, values in exported.items():
            assert numpy.array_equal(master["weights"][name][...], values), name
            assert master["state/exp_avg"][name].shape == values.shape
        head = master["weights/lm_head.weight"][...]
        assert numpy.array_equal(head, exported["transformer.wte.weight"])
        print("weights/lm_head.weight of three ranks, by h5py:", head, sep="\n")

    tranche("checkpoint", "import", folder / "hf", "--to", folder / "imported")
    tranche("checkpoint", "export", folder / "imported", "--to", folder / "again")
    for name in ("model.safetensors", "config.json"):
        assert (folder / "hf" / name).read_bytes() == (folder / "again" / name).read_bytes(), name
    difference = json.loads(tranche("checkpoint", "diff", run, folder / "imported", "--json", status=1))
    assert {entry["what"] for entry in difference["differences"]} == {"only_in_first"}, "weights are equal, state is not imported"
    tranche("checkpoint", "list", run, ranks=2, status=2)
    tranche(*train, "--resume-weights-only", folder / "imported")
    tranche(*train, "--resume", folder / "imported", status=4)  # there is no optimizer state to continue with

    def written(source, *more, ranks=0):
        return tranche("generate", "--from", source, "--prompt", "the ca", "--tokens", 25, "--threads", 1, *more, ranks=ranks)

    alone = written(run)
    assert alone.startswith(b"the ca") and len(alone) == 6 + 25 + 1, alone
    assert written(run, "--stage", 3, ranks=2) == alone
    # A folder does not contain the sequence length, so all positions would be visible. The texts are equal only while they are shorter.
    greedy = ("--greedy", "--tokens", 7)
    assert written(folder / "hf", *greedy) == written(folder / "imported", *greedy) == written(run, *greedy)


with tempfile.TemporaryDirectory(prefix="tranche-test-") as name:
    main(pathlib.Path(name))
