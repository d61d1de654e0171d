"""Draws configurations of short training runs, for compare_commits.py: each value of each dimension is there about as often as its others.

A configuration is {dimension: value}. configuration() makes the file of it, with every key written out, so that no default is asked for.
"""
import collections
import random

STEPS, MORE = 5, 2  # steps of a run, and of the run that resumes it
OPTIONAL = {"tensor_sums": "tranche.tensor_sums", "gather_for": "tranche.gather_for", "persistent": "tranche.gather_for", "master": "tranche.master", "stochastic_rounding": "tranche.master"}  # dimensions that are not drawn if a program does not know their key
ALWAYS = lambda drawn: True
AT = lambda name, *values: lambda drawn: drawn[name] in values
NOT = lambda name, *values: lambda drawn: drawn[name] not in values
ADAM = AT("optimizer", "AdamW", "Adam", "Adam L2")

# name: its values, and the condition under which it has an effect; the condition may use earlier dimensions.
DIMENSIONS = {
    "ranks": ([1, 2, 3, 4, 5], ALWAYS),
    "stage": ([0, 1, 2, 3], ALWAYS),
    "dtype": (["fp32", "bf16", "fp16"], ALWAYS),
    "optimizer_tier": (["none", "cpu", "nvme"], ALWAYS),
    "ratio": ([1.0, 0.5], NOT("optimizer_tier", "none")),
    "parameter_tier": (["none", "cpu", "nvme"], AT("stage", 3)),
    "micro_batch": ([1, 2], ALWAYS),
    "accumulation": ([1, 2, 3], ALWAYS),
    "reduction": (["boundary", "micro_batch"], ALWAYS),
    "reduction_group": ([0, 1, 2], NOT("ranks", 1)),
    "ranks_per_host": ([0, 2], NOT("ranks", 1)),
    "checkpointing": ([False, True], ALWAYS),
    "checkpoint_every": ([1, 2], AT("checkpointing", True)),
    "checkpoint_tier": (["device", "cpu"], AT("checkpointing", True)),
    "frozen": ([[], ["*wpe*"], ["*h.0.*", "*.bias"]], ALWAYS),
    "optimizer": (["AdamW", "Adam", "Adam L2", "SGD", "SGD momentum", "SGD nesterov"], ALWAYS),
    "moments": (["fp32", "bf16"], ADAM),
    "weight_decay": ([0.0, 0.1], ALWAYS),
    "groups": (["none", "factor", "decay", "no_decay"], ALWAYS),
    "schedule": (["constant", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle"], ALWAYS),
    "clipping": ([0.0, 0.25], ALWAYS),
    "dropout": ([0.0, 0.1], ALWAYS),
    "loss_scale": (["dynamic", "overflow", "fixed"], AT("dtype", "fp16")),
    "communication": (["fp32", "bf16", "fp16"], ALWAYS),
    "quantized_gradients": ([False, True], NOT("communication", "fp16")),
    "quantized_weights": ([False, True], NOT("dtype", "fp16")),
    "accumulated": (["fp32", "bf16"], ALWAYS),
    "tensor_sums": (["rank_order"], ALWAYS),
    "reduce_bucket": ([1000, 7000, 500000000], ALWAYS),
    "gather_bucket": ([1000, 7000, 500000000], ALWAYS),
    "prefetch": ([1, 10000, 50000000], AT("stage", 3)),
    "live": ([1, 20000, 1000000000], AT("stage", 3)),
    "depth": ([1, 2, 3], AT("stage", 3)),
    "gather_for": (["use", "step"], AT("stage", 3)),
    "persistent": ([0, 100, 3000], AT("stage", 3)),
    "overlap": ([False, True], ALWAYS),
    "progress": (["thread", "inline"], AT("ranks", 1)),  # several ranks accept inline only with the caller's own communicator
    "collectives": (["auto", "messages", "shared"], ALWAYS),
    "slab": ([1 << 20, 8 << 20], ALWAYS),
    "threads": ([1, 2], AT("ranks", 1, 2)),
    "vocabulary_chunk": ([0, 4096], ALWAYS),
    "tile": ([4096, 1048576], NOT("optimizer_tier", "none")),
    "io_engine": (["uring", "threads"], ALWAYS),
    "memory": (["planned", "unplanned", "poisoned"], ALWAYS),
    "save_buffer": ([False, True], ALWAYS),
    "shape": (["odd", "wide", "gpt-nano"], ALWAYS),
    "planned_model": (["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"], ALWAYS),
    "planned_ranks": ([8, 60, 1024], ALWAYS),
    "master": (["fp32", "split", "none"], AT("dtype", "bf16")),
    "stochastic_rounding": ([False, True], AT("master", "none")),
}


def draw(count, seed, left_out=(), ranks=None):
    """Draws `count` configurations. Each value of a dimension occurs equally often among the configurations in which the dimension has an
    effect."""
    generator = random.Random(f"tranche {seed}")
    cases = [{} for _ in range(count)]
    for name, (values, applies) in DIMENSIONS.items():
        values = ranks if name == "ranks" and ranks else values
        members = [] if name in left_out else [case for case in cases if applies(collections.defaultdict(type(None), case))]
        deck = [value for _ in range(len(members) // len(values) + 1) for value in generator.sample(values, len(values))][:len(members)]
        generator.shuffle(deck)
        for case, value in zip(members, deck):
            case[name] = value
    return cases


def scarce(cases, left_out=(), ranks=None, least=2):
    """[(dimension, value)] that occur in fewer than `least` of the cases."""
    return [(name, value) for name, (values, _) in DIMENSIONS.items() if name not in left_out
            for value in (ranks if name == "ranks" and ranks else values) if sum(case.get(name) == value for case in cases) < least]


def put(document, path, value):
    for block in path.split(".")[:-1]:
        document = document.setdefault(block, {})
    document[path.split(".")[-1]] = value


def remove(document, path):
    for block in path.split(".")[:-1]:
        document = document.get(block, {})
    document.pop(path.split(".")[-1], None)


def optimizer(drawn):
    kind = drawn["optimizer"]
    values = {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-8, "adam_w_mode": kind != "Adam L2", "amsgrad": kind == "Adam"}
    if kind.startswith("SGD"):
        values = {"lr": 0.05, "momentum": 0.0 if kind == "SGD" else 0.9, "dampening": 0.1 if kind == "SGD momentum" else 0.0, "nesterov": kind == "SGD nesterov"}
    return {"type": kind.split()[0], "params": {**values, "weight_decay": drawn["weight_decay"]}}


def schedule(drawn):
    kind = drawn["schedule"]
    warmup = {"warmup_min_lr": 0.0001, "warmup_max_lr": 0.004, "warmup_num_steps": 3, "warmup_type": "log" if kind == "WarmupLR" else "linear"}
    cosine = {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": STEPS + MORE, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}
    cycle = {"cycle_min_lr": 0.0005, "cycle_max_lr": 0.004, "decay_lr_rate": 0.1, "cycle_first_step_size": 2, "cycle_second_step_size": 3,
             "cycle_first_stair_count": 0, "cycle_second_stair_count": 0, "decay_step_size": 1, "cycle_momentum": not drawn["optimizer"].startswith("SGD"),
             "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0}
    return {"type": kind, "params": {"constant": {}, "WarmupLR": warmup, "WarmupDecayLR": {**warmup, "total_num_steps": STEPS + MORE},
                                     "WarmupCosineLR": cosine, "OneCycle": cycle}[kind]}


def configuration(drawn):
    """The whole configuration file of drawn values; a dimension without an effect has its earlier default."""
    get = collections.defaultdict(type(None), drawn)
    scale = get["loss_scale"]
    zero = {"stage": get["stage"], "overlap_comm": get["overlap"], "reduce_bucket_size": get["reduce_bucket"], "allgather_bucket_size": get["gather_bucket"],
            "stage3_prefetch_bucket_size": get["prefetch"] or 50000000, "stage3_max_live_parameters": get["live"] or 1000000000, "sub_group_size": 1000000000,
            "zero_quantized_gradients": bool(get["quantized_gradients"]), "zero_quantized_weights": bool(get["quantized_weights"]),
            "stage3_param_persistence_threshold": get["persistent"] or 0, "stage3_model_persistence_threshold": 1 << 62,
            "offload_optimizer": {"device": get["optimizer_tier"], "nvme_path": "swap", "ratio": get["ratio"] or 1.0, "buffer_count": 4},
            "offload_param": {"device": get["parameter_tier"] or "none", "nvme_path": "swap", "buffer_count": 3}}
    groups = get["groups"]
    own = {"reduction": get["reduction"], "mesh": "", "replicate": "all", "replica_sum": "micro_batch", "reduction_group": get["reduction_group"] or 0, "depth": get["depth"] or 2, "gather_for": get["gather_for"] or "use", "communication_timeout": 120,
           "progress": get["progress"] or "thread", "threads": get["threads"] or 1, "device_memory": None, "host_memory": None, "nvme_space": None,
           "offload_tile": get["tile"] or 1048576, "io_engine": get["io_engine"], "workspace": 8 << 20, "communication_slab": get["slab"], "seed": 1234,
           "frozen": get["frozen"], "decay": ["*"] if groups == "decay" else [], "no_decay": ["*wte*"] if groups == "no_decay" else [],
           "parameter_groups": [{"pattern": "*.bias", "learning_rate_factor": 0.5, "decay": True}] if groups == "factor" else [],
           "collectives": get["collectives"], "device_transport": "auto", "maximum_consecutive_skips": 100, "activation_checkpointing": get["checkpointing"],
           "checkpoint_every": get["checkpoint_every"] or 1, "vocabulary_chunk": get["vocabulary_chunk"], "moments": get["moments"] or "fp32",
           "master": get["master"] or "fp32", "stochastic_rounding": bool(get["stochastic_rounding"]),
           "save_buffer": get["save_buffer"], "total_steps": STEPS + MORE, "tensor_sums": get["tensor_sums"] or "rank_order",
           "debug": {"poison_memory": get["memory"] == "poisoned", "host_link_bandwidth": 0, "plan_memory": get["memory"] != "unplanned",
                     "ranks_per_host": get["ranks_per_host"] or 0}}
    return {"train_batch_size": get["ranks"] * get["micro_batch"] * get["accumulation"], "train_micro_batch_size_per_gpu": get["micro_batch"],
            "gradient_accumulation_steps": get["accumulation"], "gradient_clipping": get["clipping"], "steps_per_print": 1, "wall_clock_breakdown": False,
            "communication_data_type": get["communication"], "data_types": {"grad_accum_dtype": get["accumulated"]}, "bf16": {"enabled": get["dtype"] == "bf16"},
            "fp16": {"enabled": get["dtype"] == "fp16", "loss_scale": 512 if scale == "fixed" else 0, "initial_scale_power": 30 if scale == "overflow" else 12,
                     "loss_scale_window": 2, "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1},
            "optimizer": optimizer(get), "scheduler": schedule(get), "zero_optimization": zero, "tranche": own,
            "activation_checkpointing": {"cpu_checkpointing": get["checkpoint_tier"] == "cpu"}, "aio": {"block_size": 65536, "queue_depth": 4}}
