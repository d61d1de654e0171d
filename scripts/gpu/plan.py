"""The items that run.sh runs, in this order, with their limits. This is the only table of shares of time; suite.py prints it at the start.

`until` is the fraction of the whole limit at which a part is stopped. Time that a part does not use is available to later parts.
"""
import re
from collections import namedtuple

Part = namedtuple("Part", "name until does")
PLAN = [
    Part("probe", 0.085, "seconds of a CUDA start; one check of each thing that all else stands on"),
    Part("kernels", 0.15, "programs of device, kernels and models, four at a time"),
    Part("first look", 0.28, "peak, copy, AdamW, attention; three trainings, each with its device time by kernel"),
    Part("peer", 0.35, "the host's PyTorch at our shapes, and our attention against its own"),
    Part("tests", 0.53, "engine, offload, generation, pipelines, combinations, comm, NCCL"),
    Part("benches", 0.62, "all benches for GPUs"),
    Part("training", 0.80, "CPU against GPU for 20 steps in fp32; state in host memory and on NVMe, and meshes of two processes, against one "
         "process; trainings at 0.5 M tokens a step"),
    Part("memcheck", 0.87, "tests of kernels under compute-sanitizer, each allocation CUDA's own"),
    Part("ncu", 0.91, "Nsight Compute's figures of six kernels"),
    Part("racecheck", 0.96, "the same tests under compute-sanitizer's racecheck"),
    Part("lazy loading", 1.0, "ranks that are threads, with kernels loaded at their first launch"),
]
PARTS_OF = {"tests": {"probe", "kernels", "tests", "memcheck", "racecheck", "lazy loading"},
            "benches": {"probe", "first look", "peer", "benches", "training", "ncu"}}

# Each test case may take CASE_SECONDS. If the slowest case of a program takes longer than a quarter of that on the emulation, its limit is
# four times the emulated seconds: (part of the program's name, seconds). Measured with AddressSanitizer on two cores;
# scripts/gpu/case_times.py prints the slowest cases of a results folder.
CASE_SECONDS = 40
EMULATED_SECONDS = [("test_kernels_layers_gpu", 85), ("test_kernels_gpu", 22.4), ("test_kernels_matrix_gpu", 16.8)]
# Programs whose cases train and whose emulated seconds have not been measured.
TRAIN = r"combinations|engine|models|pipeline"

# The first programs depend on nothing but the GPU. Programs whose ranks are threads run alone.
AT_ONCE = 4
SMOKE_PROGRAMS = r"device_gpu|offload_gpu"  # a few seconds each on the emulation, with AddressSanitizer too
FIRST_PROGRAMS = r"device|kernels|models|gpu_(cases|probe)"
# Tests of parts on which later tests depend come first. Tests whose ranks wait for others, and so are most likely to hang, come last.
ORDER = [r"device", r"kernels_gpu", r"kernels_layers", r"kernels", r"models", r"engine", r"offload", r"", r"combinations",
         r"comm", r"nccl|mpi"]
# Ranks that are threads share a context. Our kernels are loaded before ranks wait for each other. Those of cuBLASLt are not, and their
# loading at the first launch may wait for the whole GPU.
RANKS_ARE_THREADS = r"comm|engine|models|combinations|offload|generation|pipeline"

# One bench for each peak, and benches of the kernels that dominate a training: (program, filter).
FIRST_BENCHES = [("bench_matrix_gpu", "^(matmul_peak|attention_(forward|backward)/head:(64/time:1024|128/time:4096).*)"),
                 ("bench_kernels_gpu", "^(device_copy|adamw)(/|$)")]
# The trainings of the first look, with a trace, and those for the figures: (preset, sequences of a micro-batch, of which the largest that
# fits is used, micro-batches a step, seconds).
FIRST_TRAININGS = [("gpt2", (32, 16, 8), 4, 10), ("gpt2-xl", (16, 8, 4), 4, 20), ("qwen2.5-1.5b", (8, 4, 2), 8, 20)]
TRAININGS = [("gpt2-xl", (16, 8, 4), 524288, 24), ("qwen2.5-1.5b", (8, 4, 2), 524288, 24)]
SMOKE_TRAININGS = [("gpt-nano", (2,), 2, 2)]
# Ways of `tranche train` to train the same steps: processes, micro-batches a step, flags. FOLDER is one that can be written.
Way = namedtuple("Way", "name ranks accumulate flags")
ONE_PROCESS = Way("", 1, 2, ())
WAYS = [Way("state in host memory", 1, 2, ("--stage", 3, "--offload-optimizer", "cpu", "--offload-param", "cpu")),
        Way("state on NVMe", 1, 2, ("--stage", 3, "--offload-optimizer", "nvme", "--offload-param", "nvme", "--nvme-path", "FOLDER",
                                    "--host-state", 0)),
        Way("shard=2", 2, 1, ("--stage", 3)),
        Way("pipeline=2", 2, 2, ("--mesh", "pipeline=2")),
        Way("tensor=2", 2, 2, ("--mesh", "tensor=2")),
        Way("context=2", 2, 2, ("--mesh", "context=2"))]
# Kernels for Nsight Compute: (kernel, program, bench).
PROFILED = [("flash_forward_kernel", "bench_matrix_gpu", "^attention_forward/head:128/time:4096"),
            ("key_gradient_kernel", "bench_matrix_gpu", "^attention_backward/head:128/time:4096"),
            ("query_gradient_kernel", "bench_matrix_gpu", "^attention_backward/head:128/time:4096"),
            ("update_kernel", "bench_kernels_gpu", "^adamw"),
            ("backward_kernel", "bench_kernels_gpu", "^layer_norm_backward"),
            ("gradient_kernel", "bench_kernels_gpu", "^cross_entropy_gradient")]

# (our bench, PyTorch's figure of the same operations), both in TFLOP/s.
PEERS = [(f"bench_matrix_gpu/attention_{way}/head:{head}/time:{time}/batch:{batch}", f"attention {way} head {head} time {time}")
         for way in ("forward", "backward") for head in (64, 128) for time, batch in ((1024, 16), (4096, 4))]


def item_of(way):
    return f"agreement with one process on the GPU, {way.name}"


def case_seconds(name):
    """The time limit for one case of a test program."""
    least = 3 * CASE_SECONDS if re.search(TRAIN, name) else CASE_SECONDS
    return max([least] + [4 * seconds for part, seconds in EMULATED_SECONDS if part in name])


def table(limit):
    lines = [f"{'until':>7}  part"]
    return "\n".join(lines + [f"{part.until * limit:5.0f} s  {part.name}: {part.does}" for part in PLAN])
