"""Opens a checkpoint of three ranks with h5py, and reads its exports by hand according to the documentation of the safetensors format.

usage: h5py_test.py CHECKPOINT_SAMPLE FOLDER
"""
import json
import pathlib
import shutil
import struct
import subprocess
import sys

try:
    import h5py
    import numpy
except ImportError as missing:
    sys.exit(f"{missing}: install Debian's package python3-h5py (scripts/setup.sh)")


def read_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors, data, at = {}, raw[8 + length :], 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == at, "no holes"
        at = end
        if entry["dtype"] == "F32":
            values = numpy.frombuffer(data[begin:end], "<f4")
        else:
            assert entry["dtype"] == "BF16"
            values = (numpy.frombuffer(data[begin:end], "<u2").astype("<u4") << 16).view("<f4")
        tensors[name] = values.reshape(entry["shape"])
    assert at == len(data)
    return tensors


def round_to_bf16(values):
    bits = numpy.ascontiguousarray(values, "<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype("<u4").view("<f4").reshape(values.shape)


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "uint8": 1}


def indices(start, stride, count, block):
    return [start + i * stride + j for i in range(count) for j in range(block)]


def read_tensor(step, manifest, unit, number, section):
    """Reads a tensor as the format's page describes it: an array with its shape, or an array of its blocks."""
    shape = unit["tensors"][number]["shape"]
    block = section.get("block", {"elements": 1, "bytes": BYTES[section["dtype"]]})
    elements = int(numpy.prod(shape, dtype=int))
    whole = numpy.zeros((-(-elements // block["elements"]), block["bytes"]), "u1")
    seen = numpy.zeros(len(whole), int)
    which, places = manifest["sections"].index(section), [0] * manifest["world"]
    for other in manifest["units"]:
        for buffer in other["buffers"]:
            if buffer["frozen"] != section["frozen"]:
                continue
            for instance in buffer["instances"]:
                parts = []
                for rank, begin, end in instance["ranges"]:
                    with open(step / manifest["shards"][rank]["name"], "rb") as file:
                        first = places[rank] // block["elements"] * block["bytes"]
                        file.seek(manifest["shards"][rank]["offsets"][which] + first)
                        parts.append(file.read((end - begin) // block["elements"] * block["bytes"]))
                    places[rank] += end - begin
                flat = numpy.frombuffer(b"".join(parts), "u1").reshape(-1, block["bytes"])
                for placed in instance["tensors"]:
                    if other is not unit or placed["tensor"] != number:
                        continue
                    numbers = numpy.arange(elements).reshape(shape)
                    if "box" in placed:
                        numbers = numbers[numpy.ix_(*[indices(*dimension) for dimension in placed["box"]])]
                    numbers = numbers.ravel()[:: block["elements"]] // block["elements"]
                    first = placed["offset"] // block["elements"]
                    whole[numbers] = flat[first : first + len(numbers)]
                    seen[numbers] += 1
    assert (seen == 1).all(), (unit["tensors"][number], section)
    if "block" in section:
        return whole
    if section["dtype"] == "bf16":
        values = (whole.copy().view("<u2").astype("<u4") << 16).view("<f4")
    else:
        values = whole.copy().view("<f4")
    return values.reshape(shape)


def other_layouts(sample, folder):
    for kind in ("hybrid", "boxed"):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sample, folder, "7", kind], check=True)
        step = pathlib.Path(folder) / "run" / "step-00000007"
        manifest = json.loads((step / "manifest.json").read_text())
        assert (manifest["version"], manifest["minor"]) == (2, 0) and manifest["world"] == 4
        exported, blocks = read_safetensors(pathlib.Path(folder) / "fp32" / "model.safetensors"), 0
        with h5py.File(step / "model.h5", "r") as master:
            for section in manifest["sections"]:
                for unit in manifest["units"]:
                    for number, tensor in enumerate(unit["tensors"]):
                        if tensor["frozen"] != section["frozen"]:
                            continue
                        values = read_tensor(step, manifest, unit, number, section)
                        if "block" in section:
                            blocks += len(values)
                            assert section["dataset"] not in master
                            continue
                        if section["kind"] == "weight":
                            assert numpy.array_equal(values, exported[tensor["name"]]), tensor
                        shown = master["weights" if section["kind"] == "weight" else section["dataset"]][tensor["name"]]
                        assert numpy.array_equal(shown[...].reshape(values.shape), values), (section, tensor)
        assert (blocks > 0) == (kind == "boxed")
        held = {rank for unit in manifest["units"] for buffer in unit["buffers"] for instance in buffer["instances"]
                for rank, _, _ in instance["ranges"]}
        assert held == {0, 1, 2, 3}, "replicas share the load"


def main(sample, folder):
    other_layouts(sample, folder)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sample, folder, "7"], check=True)
    folder = pathlib.Path(folder)
    step = folder / "run" / (folder / "run" / "latest").read_text().split()[0]
    manifest = json.loads((step / "manifest.json").read_text())
    whole = read_safetensors(folder / "fp32" / "model.safetensors")
    names = [tensor["name"] for unit in manifest["units"] for tensor in unit["tensors"]]
    assert sorted(whole) == sorted(names), (sorted(whole), names)

    with h5py.File(step / "model.h5", "r") as master:
        for name in names:
            shown = master["weights"][name][...]
            expected = whole[name] if whole[name].shape else whole[name].reshape(1)
            assert shown.shape == expected.shape and numpy.array_equal(shown, expected), name
        assert numpy.array_equal(master["weights/lm_head.weight"][...], whole["wte.weight"])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert sorted(master["state"][kind]) == sorted(
                ["lm_head.weight"] + [t["name"] for u in manifest["units"] for t in u["tensors"] if not t["frozen"]])
            assert master["state"][kind]["h.0.w"].shape == (17, 5, 11)
        print("weights/wte.weight of three ranks:")
        print(master["weights/wte.weight"][...])

    # Reads the shards directly; they are flat, as the manifest describes.
    for shard in manifest["shards"]:
        with h5py.File(step / shard["name"], "r") as file:
            assert file.attrs["version"] == 2 and file.attrs["rank"] == shard["rank"] and file.attrs["world"] == 3 and file.attrs["step"] == 7
            for section, offset in zip(manifest["sections"], shard["offsets"]):
                assert file[section["dataset"]].id.get_offset() == offset and offset % 4096 == 0

    # Reads exports that were rounded, in several files with an index.
    index = json.loads((folder / "bf16" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    total = 0
    for file in files:
        for name, values in read_safetensors(folder / "bf16" / file).items():
            assert index["weight_map"].pop(name) == file
            assert numpy.array_equal(values, round_to_bf16(whole[name])), name
            total += values.size * 2
    assert not index["weight_map"] and total == index["metadata"]["total_size"]
    assert json.loads((folder / "bf16" / "config.json").read_text()) == {"model_type": "gpt2"}

    # The elements of a missing shard are NaN, never zero.
    (step / manifest["shards"][1]["name"]).unlink()
    with h5py.File(step / "model.h5", "r") as master:
        for name in ("weights/wte.weight", "state/exp_avg_sq/tail.w"):
            values = master[name][...]
            assert numpy.isnan(values).any() and not numpy.isnan(values).all(), name
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
