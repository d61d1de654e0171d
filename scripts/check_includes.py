#!/usr/bin/env python3
"""Proves that no #include climbs the layers of docs/internals/design.md, that public headers (include/tranche/) need no private one, and that
MPI, CUDA, NCCL, HDF5 and liburing stay where they belong: their headers, and the names of CUDA and NCCL. The engine, the models,
the optimizers and the checkpoints do not even know that there is such a device.

usage: check_includes.py [ROOT]     ROOT is the source tree, this script's own by default
Exit status: 0 clean, 1 violations (one line each on stdout: file:line: what, and what to do), 2 nothing to check.
"""
import fnmatch
import pathlib
import re
import sys

# Folders of the same layer may not include each other.
LAYERS = [
    ["core"], ["device", "partition", "schedule"], ["kernels"], ["comm", "optim", "offload"], ["checkpoint", "config"], ["engine"], ["pipeline"],
    ["report", "models"], ["training"], ["planner"], ["tools"], ["libtorch"],
]
LAYER = {folder: number for number, folders in enumerate(LAYERS) for folder in folders}
# A folder inside another one that is a layer of its own: integers and text, which the engine, planner and tools include too.
WITHIN = {"pipeline/schedule/": "schedule/"}
# These are above all layers: they may include everything but each other, and call MPI where they act as the user's program.
OUTSIDE = ["tests", "bench", "examples"]
# The models use only what a user's own model can use; they read files of other programs with the help of core/.
MODELS_MAY = ["core", "device", "partition", "kernels", "comm", "config", "engine", "pipeline", "models"]
# The adapters use only what a user's own program can use, and consist of public headers (libtorch.h, libtorch/).
ADAPTERS = ["libtorch"]
# The folders whose headers a user's own model and training loop need.
UMBRELLA_MAY = ["core", "kernels", "config", "engine", "report"]
PUBLIC = "include/tranche/"
# Headers that CMake generates in the build folder.
GENERATED = ("kernels/built_with.h",)
# The engine's façade includes the engine's parts, never the reverse.
FACADE = ["tranche/engine/engine.h", "engine/engine_impl.h"]
FACADE_FILES = ["engine/engine.cpp", "engine/engine_*", "engine/engine.h", "engine/check_gradients.cpp", "engine/step_guard.h"]
SUFFIXES = {".h", ".hpp", ".cuh", ".inl", ".c", ".cpp", ".cu"}
HEADERS = {".h", ".hpp", ".cuh", ".inl"}

# (name, matching headers, files that may include them)
LIBRARIES = [
    ("MPI", ["mpi.h", "mpi-ext.h", "mpi/*"], ["comm/mpi*", "comm/*/mpi*", "tests/*", "bench/*", "examples/*"]),
    ("NCCL", ["nccl*.h", "nccl_device/*"], ["comm/nccl*", "tests/comm/nccl*", "tests/probe/nccl*", "tests/cuda_emulation/*"]),
    ("CUDA", ["cuda*", "cublas*", "cub/*", "thrust/*", "cooperative_groups*", "nvtx*", "device_launch_parameters.h"],
     ["*/cuda*", "comm/nccl*", "tests/comm/nccl*", "tests/probe/nccl*"]),
    ("HDF5", ["hdf5*.h", "H5*.h"], ["checkpoint/*", "tests/checkpoint/*", "bench/checkpoint*"]),
    ("a library of tokenizers", ["pcre2*.h", "utf8proc.h", "sentencepiece*.h"], ["training/*", "tests/training/*"]),
    ("LibTorch", ["torch/*", "ATen/*", "c10/*"], ["libtorch.h", "libtorch/*", "tests/libtorch/*", "examples/libtorch*", "bench/libtorch*"]),
    ("liburing", ["liburing*"], ["offload/*", "tests/offload/*", "bench/raw_io*"]),
]
# Each of these headers costs every file that includes it a second or more of compile time.
HEAVY = ["nlohmann/json.hpp", "spdlog/*", "fmt/*"]

# Names of the CUDA and NCCL interfaces, wherever they are declared.
CUDA_NAME = re.compile(r"\b(cuda[A-Z]\w*|cu(?:Mem|Stream|Event|Ctx|Device|Graph|Get)[A-Z]\w*|CU(?:DA|BLAS|_)[A-Z_]\w*|cublas\w+|"
                       r"nccl[A-Z]\w*|nvtx[A-Z]\w*|__(?:global|device|host|shared)__|__syncthreads|__shfl\w*)")
# Public headers contain only public declarations; helpers of their templates are in a folder detail/.
INTERNAL_WORD = re.compile(r"^\s*///?.*\binternal\b", re.IGNORECASE)
CUDA_HOMES = ["*/cuda*", "comm/nccl*", "tests/*", "bench/*"]
# These folders serve every device with the same code, which must not mention cuda.
DEVICE_BLIND = ["optim", "checkpoint", "config", "engine", "models"]
DEVICE_WORD = re.compile(r"cuda|nccl|cublas", re.IGNORECASE)

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def matches(name, patterns):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def layer_complaint(file, public, target, target_is_public):
    """The complaint about an #include of one of our headers, or None. `file` and `target` have the form folder/name, wherever the files
    are; `public` says that the file is a public header."""
    for folder, layer in WITHIN.items():
        file, target = (layer + name.removeprefix(folder) if name.startswith(folder) else name for name in (file, target))
    here, parts = file.split("/")[0].removesuffix(".h") if file == "libtorch.h" else file.split("/")[0], target.split("/")
    if target == "version.h":
        return None
    there = {"tranche.h": "report", "libtorch.h": "libtorch"}.get(target, parts[0])
    if there in ADAPTERS and here in LAYER and here != there:
        return f"{here}/ includes {target}: nothing of the library knows its adapters"
    if there in OUTSIDE:
        if there == here or (there == "tests" and here == "bench"):
            return None
        return f"{here}/ includes {there}/, which is for itself only: move what both need to a layer"
    if there not in LAYER:
        return f"{target} is in no folder with a layer"
    if public and not target_is_public:
        return f"a public header includes the private {target}: users do not have it"
    internal = len(parts) > 2 and there != here and here not in ("tests", "bench")
    if internal and not (parts[1].startswith("cuda") and matches(file, ["*/cuda*", "comm/nccl*"])):
        return f"{target} is internal to {there}/: include what {there}/*.h declares"
    if here in OUTSIDE or here == there:
        return None
    if here == "tranche.h":  # the umbrella header
        if there in UMBRELLA_MAY:
            return None
        return f"tranche.h may include only headers of {', '.join(UMBRELLA_MAY)}, not {there}/"
    if LAYER[there] > LAYER[here]:
        return (f"{here}/ (layer {LAYER[here]}) includes {there}/ (layer {LAYER[there]}): includes go down the layers; "
                f"move what is needed to {here}/ or lower, or pass it in")
    if LAYER[there] == LAYER[here]:
        return f"{here}/ includes its neighbour {there}/ (both layer {LAYER[here]}): what both need belongs one layer down"
    if file == "models/tensor_rows.cpp" and there == "comm" and target_is_public:
        return None  # messages of the axis `tensor`
    if here == "models" and (there not in MODELS_MAY or not (target_is_public or there == "core")):
        return f"models/ includes {target}: models see only public headers of device/, partition/, kernels/, comm/ and engine/, as a user's, and core/"
    return None


def complaint(root, place, quote, target):
    """The complaint about an #include in the file at `place`, or None."""
    public = place.startswith(PUBLIC)
    file = place.removeprefix(PUBLIC)
    if target in FACADE and file.startswith("engine/") and not matches(file, FACADE_FILES):
        return f"{target} is the façade, which parts of the engine do not know: take what is needed in the constructor"
    if target.startswith("tranche/"):
        name = target.removeprefix("tranche/")
        if quote == "<" and file.split("/")[0] in LAYER:
            return f'<{target}> is the users\' form: write #include "{target}"'
        if (root / "include" / target).is_file():
            return layer_complaint(file, public, name, True)
        return f'{target} is private: write #include "{name}"' if (root / name).is_file() else f"{target} does not exist"
    for library, headers, homes in LIBRARIES:
        if matches(target, headers):
            if matches(file, homes):
                return None
            return f"<{target}> is {library}, which belongs only in {', '.join(homes)}"
    if pathlib.PurePath(file).suffix in HEADERS and file.split("/")[0] in LAYER and matches(target, HEAVY):
        return f"<{target}> is heavy: include it in .cpp files only (json_fwd.hpp, or text, serves a header)"
    if quote == "<" or target.startswith("hwy/"):
        return None
    if target in GENERATED:
        return layer_complaint(file, public, target, False)
    if "/" in target and (root / target).is_file():
        return layer_complaint(file, public, target, False)
    if (root / PUBLIC / target).is_file():
        return f'{target} is public: write #include "tranche/{target}"'
    if file.split("/")[0] in OUTSIDE and (root / place).parent.joinpath(target).is_file():
        return None
    if target.split("/")[0] in [*LAYER, *OUTSIDE]:
        return f"{target} does not exist"
    return f'"{target}" is neither "tranche/<folder>/<public header>" nor "<folder>/<private header>" (other libraries take <>)'


def code_lines(text):
    """The lines of a source without comments and literals."""
    def blank(found):
        return re.sub(r"[^\n]", " ", found[0])
    pattern = r'R"\((?:.|\n)*?\)"|//[^\n]*|/\*(?:.|\n)*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-zA-Z_])\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, blank, text).splitlines()


def name_complaint(file, line):
    if INCLUDE.match(line):
        return None
    found = CUDA_NAME.search(line)
    if found and not matches(file, CUDA_HOMES):
        return f"{found[0]} is a name of CUDA's, which belong only in {', '.join(CUDA_HOMES)}"
    folder = file.split("/")[0]
    found = DEVICE_WORD.search(line)
    if found and folder in DEVICE_BLIND:
        return (f"'{found[0]}' in {folder}/, which serves every device with the same lines: ask the Device for what "
                f"differs")
    return None


def sources(root):
    for name in sorted(path.name for path in root.iterdir()):
        path = root / name
        if path.is_file() and path.suffix in SUFFIXES:
            yield path
        elif path.is_dir() and (name in LAYER or name in OUTSIDE or name == "include"):
            yield from (p for p in sorted(path.rglob("*")) if p.suffix in SUFFIXES and p.is_file())


def check(root):
    """(number of files read, complaints)"""
    complaints, count = [], 0
    for path in sources(root):
        count += 1
        file = path.relative_to(root).as_posix()
        whole = path.read_text(encoding="utf-8")
        for number, line in enumerate(code_lines(whole), 1):
            text = name_complaint(file.removeprefix(PUBLIC), line)
            if text:
                complaints.append(f"{file}:{number}: {text}")
        for number, line in enumerate(whole.splitlines(), 1):
            if file.startswith(PUBLIC) and "/detail/" not in file and INTERNAL_WORD.match(line):
                complaints.append(f"{file}:{number}: a public header that calls something internal: move it to a private header, or to detail/")
            found = INCLUDE.match(line)
            if found:
                text = complaint(root, file, found[1], found[2])
                if text:
                    complaints.append(f"{file}:{number}: {text}")
    return count, complaints


def main(arguments):
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).resolve().parent.parent
    count, complaints = check(root)
    for line in complaints:
        print(line)
    if count == 0:
        print(f"check_includes: no sources under {root}", file=sys.stderr)
        return 2
    print(f"check_includes: {count} files, {len(complaints)} violations")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
