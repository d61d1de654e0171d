"""What run.sh runs, in this order, and until when. The one table of shares of time: suite.py prints it at the start.

`until` is the share of the whole limit at which a part is stopped; time that a part leaves goes to those after it.
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
    Part("training", 0.77, "CPU against GPU for 20 steps in fp32; trainings at 0.5 M tokens a step"),
    Part("memcheck", 0.85, "tests of kernels under compute-sanitizer, each allocation CUDA's own"),
    Part("ncu", 0.90, "Nsight Compute's figures of six kernels"),
    Part("racecheck", 0.96, "the same tests under compute-sanitizer's racecheck"),
    Part("lazy loading", 1.0, "ranks that are threads, with kernels loaded at their first launch"),
]
PARTS_OF = {"tests": {"probe", "kernels", "tests", "memcheck", "racecheck", "lazy loading"},
            "benches": {"probe", "first look", "peer", "benches", "training", "ncu"}}

# No check fails for being slow before CASE_SECONDS. A program whose slowest case takes longer than a quarter of that on the
# emulation has four times the case's emulated seconds: (part of the program's name, seconds). Measured with AddressSanitizer
# on two cores; scripts/gpu/case_times.py prints the slowest cases of a results folder.
CASE_SECONDS = 40
EMULATED_SECONDS = [("test_kernels_layers_gpu", 85), ("test_kernels_gpu", 22.4), ("test_kernels_matrix_gpu", 16.8)]
# Programs whose cases train, and which have not been measured so.
TRAIN = r"combinations|engine|models|pipeline"

# The first programs stand on nothing else, and wait for nothing but the GPU. Ranks that are threads run alone.
AT_ONCE = 4
SMOKE_PROGRAMS = r"device_gpu|offload_gpu"  # a few seconds each on the emulation, with AddressSanitizer too
FIRST_PROGRAMS = r"device|kernels|models|gpu_(cases|probe)"
# Tests that later ones stand on come first; those that wait for others, and so hang likeliest, come last.
ORDER = [r"device", r"kernels_gpu", r"kernels_layers", r"kernels", r"models", r"engine", r"offload", r"", r"combinations",
         r"comm", r"nccl|mpi"]
# Ranks that are threads share a context. Kernels of ours are loaded before they wait for each other; those of cuBLASLt are
# not, and loading one at its first launch may wait for the whole GPU.
RANKS_ARE_THREADS = r"comm|engine|models|combinations|offload|generation|pipeline"

# A bench of each ceiling and of what decides a training's speed: (program, filter).
FIRST_BENCHES = [("bench_matrix_gpu", "^(matmul_peak|attention_(forward|backward)/head:(64/time:1024|128/time:4096).*)"),
                 ("bench_kernels_gpu", "^(device_copy|adamw)(/|$)")]
# Trainings of the first look, with a trace, and those for the figures: (preset, sequences of a micro-batch, the largest that fits,
# micro-batches a step, seconds).
FIRST_TRAININGS = [("gpt2", (32, 16, 8), 4, 10), ("gpt2-xl", (16, 8, 4), 4, 20), ("qwen2.5-1.5b", (8, 4, 2), 8, 20)]
TRAININGS = [("gpt2-xl", (16, 8, 4), 524288, 24), ("qwen2.5-1.5b", (8, 4, 2), 524288, 24)]
SMOKE_TRAININGS = [("gpt-nano", (2,), 2, 2)]
# What Nsight Compute looks at: (kernel, program, bench).
PROFILED = [("flash_forward_kernel", "bench_matrix_gpu", "^attention_forward/head:128/time:4096"),
            ("key_gradient_kernel", "bench_matrix_gpu", "^attention_backward/head:128/time:4096"),
            ("query_gradient_kernel", "bench_matrix_gpu", "^attention_backward/head:128/time:4096"),
            ("update_kernel", "bench_kernels_gpu", "^adamw"),
            ("backward_kernel", "bench_kernels_gpu", "^layer_norm_backward"),
            ("gradient_kernel", "bench_kernels_gpu", "^cross_entropy_gradient")]

# (our bench, PyTorch's figure of the same operations), both in TFLOP/s.
PEERS = [(f"bench_matrix_gpu/attention_{way}/head:{head}/time:{time}/batch:{batch}", f"attention {way} head {head} time {time}")
         for way in ("forward", "backward") for head in (64, 128) for time, batch in ((1024, 16), (4096, 4))]


def case_seconds(name):
    """What one case of a test program may take."""
    least = 3 * CASE_SECONDS if re.search(TRAIN, name) else CASE_SECONDS
    return max([least] + [4 * seconds for part, seconds in EMULATED_SECONDS if part in name])


def table(limit):
    lines = [f"{'until':>7}  part"]
    return "\n".join(lines + [f"{part.until * limit:5.0f} s  {part.name}: {part.does}" for part in PLAN])
