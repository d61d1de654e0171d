"""Opens a checkpoint of three ranks with h5py, and its exports by hand as docs of the safetensors format have it.

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


def main(sample, folder):
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

    # The shards themselves: flat, as the manifest says.
    for shard in manifest["shards"]:
        with h5py.File(step / shard["name"], "r") as file:
            assert file.attrs["rank"] == shard["rank"] and file.attrs["world"] == 3 and file.attrs["step"] == 7
            for section, offset in zip(manifest["sections"], shard["offsets"]):
                assert file[section["dataset"]].id.get_offset() == offset and offset % 4096 == 0

    # Rounded exports, in several files and an index.
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

    # A missing shard is not a number, never zero.
    (step / manifest["shards"][1]["name"]).unlink()
    with h5py.File(step / "model.h5", "r") as master:
        for name in ("weights/wte.weight", "state/exp_avg_sq/tail.w"):
            values = master[name][...]
            assert numpy.isnan(values).any() and not numpy.isnan(values).all(), name
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
