#include <nlohmann/json.hpp>

#include "config/keys.h"

namespace tranche::detail {
namespace {

using enum ValueKind;

constexpr std::string_view always_pinned = "host memory that a GPU copies from and to is always pinned";
constexpr std::string_view tiles_overlap = "reading, updating and writing of tiles always overlap";
constexpr std::string_view own_queue =
    "files are read and written by Tranche's own engine; see tranche.io_engine";
constexpr std::string_view whole_units = "units are gathered whole into one buffer each";
constexpr std::string_view drawn_in_place = "each rank draws just those initial weights that it keeps";
constexpr std::string_view rows_in_compute =
    "rows that ranks of the axis tensor share out travel in the compute dtype";
constexpr std::string_view named_dimensions =
    "a model names the dimensions of its tensors that are cut; tranche.layout leaves some of them whole";
constexpr std::string_view in_report =
    "every step's figures are in the report file, and with --metrics in a file as the run goes";

constexpr auto has_swap_folder = [](const Config& config) { return !config.offload.nvme_path.empty(); };
constexpr auto swap_folder = [](const Config& config) { return Json(config.offload.nvme_path); };

// clang-format off
constexpr ConfigKey keys[] = {
    // zero_optimization: buffers and traffic.
    no_meaning("zero_optimization.contiguous_gradients", "gradients always live in one flat buffer a unit"),
    no_meaning("zero_optimization.reduce_scatter", "gradients always go to their owners in a fixed-order sum"),
    no_meaning("zero_optimization.use_multi_rank_bucket_allreduce", "shards are reduced to all owners at once"),
    no_meaning("zero_optimization.allgather_partitions", "weights are always gathered by an all-gather"),
    no_meaning("zero_optimization.round_robin_gradients", "every unit is spread over all ranks"),
    no_meaning("zero_optimization.elastic_checkpoint", "checkpoints open at any number of ranks"),
    no_meaning("zero_optimization.ignore_unused_parameters", "unused units are declared by the model"),
    no_meaning("zero_optimization.stage3_max_reuse_distance", "when a unit is freed follows from tranche.depth"),
    no_meaning("zero_optimization.max_reuse_distance", "when a unit is freed follows from tranche.depth"),
    no_meaning("zero_optimization.stage3_gather_16bit_weights_on_model_save", "checkpoints are never gathered"),
    no_meaning("zero_optimization.gather_16bit_weights_on_model_save", "checkpoints are never gathered"),
    no_meaning("zero_optimization.stage3_gather_fp16_weights_on_model_save", "checkpoints are never gathered"),
    no_meaning("zero_optimization.stage3_module_granularity_threshold", whole_units),
    no_meaning("zero_optimization.module_granularity_threshold", whole_units),
    no_meaning("zero_optimization.stage3_use_all_reduce_for_fetch_params", whole_units),
    no_meaning("zero_optimization.use_all_reduce_for_fetch_params", whole_units),
    no_meaning("zero_optimization.stage3_allgather_sequential", whole_units),
    no_meaning("zero_optimization.allgather_sequential", whole_units),
    no_meaning("zero_optimization.stage3_partition_stream_chunk_size", drawn_in_place),
    no_meaning("zero_optimization.partition_stream_chunk_size", drawn_in_place),
    no_meaning("zero_optimization.memory_efficient_linear", "tranche.gather_for says whether backward finds a unit gathered"),
    no_meaning("zero_optimization.override_module_apply", drawn_in_place),
    no_meaning("zero_optimization.pipeline_loading_checkpoint", "ranks read only their own shards"),
    no_meaning("zero_optimization.log_trace_cache_warnings", "units are declared, not traced"),
    no_meaning("zero_optimization.enable_sanity_checks", "the sequence of collectives is always checked"),
    no_meaning("zero_optimization.compute_grad_norm", "the norm is part of every step's result"),
    no_meaning("zero_optimization.leaf_module", "units are declared by the model"),
    no_meaning("zero_optimization.leaf_module.classes", "units are declared by the model"),
    no_meaning("zero_optimization.leaf_module.names", "units are declared by the model"),
    no_meaning("zero_optimization.leaf_module.name_suffixes", "units are declared by the model"),
    no_meaning("zero_optimization.save_muon_momentum_buffer_in_memory", "the momentum buffer lies where offload_optimizer says"),

    // zero_optimization: state in host memory and on NVMe.
    block_of("zero_optimization.offload_optimizer", "where master weights and the optimizer's state live, and are updated; any stage").quiet().written_as(empty_block),
    block_of("zero_optimization.offload_param", "where the shards of weights in the compute dtype live; stage 3").quiet(),
    field<&Config::offload, &OffloadConfig::parameters>("zero_optimization.offload_param.device",
        "none: on the device; cpu: in host memory; nvme: in a swap file").may_be_auto(),
    field<&Config::offload, &OffloadConfig::parameter_buffers>("zero_optimization.offload_param.buffer_count",
        "nvme: shards of units in host memory at once, 2 to 64").may_be_auto().between(2, 64),
    automatic("zero_optimization.offload_param.nvme_path", text, "none",
        "folder for the swap file; the same in both blocks").written_if(has_swap_folder).written_as(swap_folder),
    no_meaning("zero_optimization.offload_param.buffer_size", "a buffer is as large as the largest unit's shard"),
    field<&Config::offload, &OffloadConfig::most_weights_in_host>("zero_optimization.offload_param.max_in_cpu",
        "nvme: most elements of a rank's shards that stay in host memory, as far as tranche.host_state has room").may_be_auto().otherwise("no bound").at_least(0).written_if_set(),
    no_meaning("zero_optimization.offload_param.pin_memory", always_pinned),
    field<&Config::offload, &OffloadConfig::optimizer>("zero_optimization.offload_optimizer.device",
        "none: on the device; cpu: in host memory; nvme: in a swap file").may_be_auto(),
    field<&Config::offload, &OffloadConfig::ratio>("zero_optimization.offload_optimizer.ratio",
        "share of the state that leaves the device, 0 to 1, at any stage; 0 is device none").may_be_auto().between(0, 1),
    field<&Config::offload, &OffloadConfig::tile_buffers>("zero_optimization.offload_optimizer.buffer_count",
        "tiles in host memory at once, 3 to 64").may_be_auto().between(3, 64),
    field<&Config::offload, &OffloadConfig::nvme_path>("zero_optimization.offload_optimizer.nvme_path",
        "folder for the swap file; the same in both blocks").may_be_auto().otherwise("none").written_if(has_swap_folder),
    no_meaning("zero_optimization.offload_optimizer.pin_memory", always_pinned),
    no_meaning("zero_optimization.offload_optimizer.pipeline", tiles_overlap),
    no_meaning("zero_optimization.offload_optimizer.pipeline_read", tiles_overlap),
    no_meaning("zero_optimization.offload_optimizer.pipeline_write", tiles_overlap),
    no_meaning("zero_optimization.offload_optimizer.fast_init", "state is always computed tile by tile into a file that was allocated before"),
    no_meaning("zero_optimization.offload_optimizer.convert_grad_on_cpu", "gradients travel in data_types.grad_accum_dtype and are converted within the update"),
    no_meaning("zero_optimization.offload_optimizer.cpuadam_cores_perc", "ranks share the cores of their host; tranche.threads says how many each has"),
    refused("zero_optimization.offload_optimizer.super_offload", "false",
        "updates that start before the gradients of the whole step are known to be finite are not part of this version"),
    honoured("zero_optimization.cpu_offload", boolean, "false", "older name of offload_optimizer.device \"cpu\""),
    honoured("zero_optimization.cpu_offload_param", boolean, "false", "older name of offload_param.device \"cpu\""),
    no_meaning("zero_optimization.cpu_offload_use_pin_memory", always_pinned),
    automatic("zero_optimization.sub_group_size", integer, "1000000000",
        "most elements of a tile of offloaded state; bounds tranche.offload_tile, rounded down to a multiple of 4096 (at least that)"),

    // zero_optimization: what this version does not do.
    refused("zero_optimization.zenflow", "null", "updates that lag behind their gradients would change the result"),
    honoured("zero_optimization.zero_hpz_partition_size", integer, "1",
        "ranks that share one copy of the parameters in stage 3: tranche.mesh \"replicate=*, shard=SIZE\" and tranche.replicate parameters; 1 is off"),
    refused("zero_optimization.zero_quantized_nontrainable_weights", "false",
        "frozen weights have no master weights beside them, so they are kept and gathered in the compute dtype"),
    refused("zero_optimization.zeropp_loco_param", "null",
        "it keeps the error of every gradient that a rank sends, which no stage shards; zero_quantized_gradients rounds without it"),
    honoured("zero_optimization.mics_shard_size", integer, "-1", "ranks that share one copy of the state: tranche.mesh \"replicate=*, shard=SIZE\"; -1 is all"),
    refused("zero_optimization.mics_hierarchical_params_gather", "false", "a unit is gathered in one step from the ranks that share it"),
    refused("zero_optimization.legacy_stage1", "false", "there is one stage 1"),
    refused("allgather_size", "null", "write zero_optimization.allgather_bucket_size instead"),

    // Gradients and communication.
    no_meaning("prescale_gradients", "partial sums travel in fp32 and are divided once, in the update"),
    no_meaning("gradient_predivide_factor", "partial sums travel in fp32 and are divided once, in the update"),
    refused("gradient_allreduce_op", "\"mean\"", "gradients are averaged over the tokens of the step"),
    refused("managed_gradient_accumulation", "true", "micro-batches are counted by the engine"),
    refused("sparse_gradients", "false", "gradients are dense"),
    no_meaning("disable_allgather", "weights are always gathered"),
    no_meaning("seq_parallel_comm_data_type", rows_in_compute),
    no_meaning("seq_parallel_communication_data_type", rows_in_compute),
    own<&Config::context_ranks>(automatic("sequence_parallel_size", integer, "1",
        "the axis context of tranche.mesh: \"shard=*, context=SIZE\" where no mesh is given, and tranche.context_exchange ulysses where that is not given; 1 is off")),
    no_meaning("zero_allow_untested_optimizer", "every optimizer works in every stage"),
    no_meaning("zero_force_ds_cpu_optimizer", "the update runs where its state lives"),
    no_meaning("vocabulary_size", "the model's own configuration says it"),
    no_meaning("dataloader_drop_last", "every step is a full batch"),
    no_meaning("graph_harvesting", "forward and backward are not captured into graphs"),

    // Activations.
    block_of("activation_checkpointing", "switched on by tranche.activation_checkpointing").quiet(),
    no_meaning("activation_checkpointing.partition_activations", "each rank of the axis tensor keeps rows of its own, whether it is asked for or not"),
    no_meaning("activation_checkpointing.contiguous_memory_optimization", "kept inputs live in the packed arena"),
    no_meaning("activation_checkpointing.number_checkpoints", "set tranche.activation_checkpointing and tranche.checkpoint_every"),
    no_meaning("activation_checkpointing.synchronize_checkpoint_boundary", "order is kept by events"),
    no_meaning("activation_checkpointing.profile", in_report),
    field<&Config::offload, &OffloadConfig::activations>("activation_checkpointing.cpu_checkpointing",
        "what activation checkpointing keeps goes to host memory until backward; needs tranche.activation_checkpointing"),

    // Reports.
    no_meaning("flops_profiler", "operations are counted by every kernel and stand in the report file"),
    no_meaning("flops_profiler.enabled", in_report), no_meaning("flops_profiler.profile_step", in_report),
    no_meaning("flops_profiler.module_depth", in_report), no_meaning("flops_profiler.top_modules", in_report),
    no_meaning("flops_profiler.detailed", in_report), no_meaning("flops_profiler.output_file", in_report),
    no_meaning("flops_profiler.recompute_fwd_factor", in_report),
    no_meaning("comms_logger", "all traffic is metered without stopping for it and stands in the report file"),
    no_meaning("comms_logger.enabled", in_report), no_meaning("comms_logger.prof_all", in_report),
    no_meaning("comms_logger.prof_ops", in_report), no_meaning("comms_logger.verbose", in_report),
    no_meaning("comms_logger.debug", in_report),
    no_meaning("memory_breakdown", "the ledger of memory stands in the report file"),
    no_meaning("dump_state", "the effective configuration stands in the report file"),
    no_meaning("log_level", "the program's own flags say what is logged"),
    no_meaning("timers", "timing never stops the device"),
    no_meaning("timers.throughput", "timing never stops the device"),
    no_meaning("timers.throughput.enabled", "timing never stops the device"),
    no_meaning("timers.throughput.synchronized", "timing never stops the device"),
    no_meaning("wandb", in_report), no_meaning("wandb.enabled", in_report),
    no_meaning("wandb.group", in_report),
    no_meaning("wandb.team", in_report), no_meaning("wandb.project", in_report),
    no_meaning("comet", in_report), no_meaning("comet.enabled", in_report),
    no_meaning("comet.samples_log_interval", in_report), no_meaning("comet.project", in_report),
    no_meaning("comet.workspace", in_report), no_meaning("comet.api_key", in_report),
    no_meaning("comet.experiment_name", in_report), no_meaning("comet.experiment_key", in_report),
    no_meaning("comet.online", in_report), no_meaning("comet.mode", in_report),
    no_meaning("trackio", in_report), no_meaning("trackio.enabled", in_report),
    no_meaning("trackio.project", in_report),

    // Files.
    block_of("aio", "how swap files are read and written").quiet(),
    field<&Config::offload, &OffloadConfig::io_block_bytes>("aio.block_size", "bytes of one transfer, a multiple of 4096; 0 is calibrated for the disk")
        .may_be_auto().otherwise("calibrated").of_kind(size).within({.least = 4096, .most = 0x1p30, .multiple_of = 4096, .or_zero = true, .wrong = "{0} is neither 0 (calibrated) nor a multiple of 4096 bytes up to {2}"}),
    field<&Config::offload, &OffloadConfig::io_depth>("aio.queue_depth", "transfers under way at once, 1 to 1024; 0 is calibrated for the disk")
        .may_be_auto().otherwise("calibrated").within({.least = 1, .most = 1024, .or_zero = true, .wrong = "{0} is neither 0 (calibrated) nor between 1 and {2}"}),
    no_meaning("aio.thread_count", own_queue),
    no_meaning("aio.intra_op_parallelism", own_queue),
    no_meaning("aio.single_submit", own_queue),
    no_meaning("aio.overlap_events", own_queue),
    refused("aio.use_gds", "false", "transfers between disks and GPUs go through host memory"),
    no_meaning("checkpoint", "checkpoints are sharded files that open at any number of ranks"),
    no_meaning("checkpoint.tag_validation", "one manifest names the step"),
    no_meaning("checkpoint.load_universal", "every checkpoint is universal"),
    no_meaning("checkpoint.use_node_local_storage", "the program's --checkpoint-dir says where"),
    no_meaning("checkpoint.parallel_write", "every rank writes its own file"),
    no_meaning("checkpoint.parallel_write.pipeline_stage", "every rank writes its own file"),
    no_meaning("checkpoint.checkpoint_serialization", "checkpoints are HDF5 files"),
    no_meaning("checkpoint.writer", "every rank writes its own file"),
    refused("nebula", "null", "checkpoints go to file systems"),
    refused("datastates_ckpt", "null", "checkpoints go to file systems"),

    // Other ways to train.
    refused("amp", "null", "Apex AMP is a PyTorch extension; use bf16 or fp16"),
    refused("torch_autocast", "null", "autocasting is PyTorch's; use bf16 or fp16"),
    refused("sparse_attention", "null", "attention is dense and causal"),
    block_of("pipeline", "stages of layers on different ranks"),
    own<&Config::pipeline_stages>(automatic("pipeline.stages", integer, "1",
        "the axis pipeline of tranche.mesh: \"pipeline=STAGES, shard=*\" where no mesh is given; 1 is off")),
    automatic("pipeline.partition", text, "\"best\"",
        "where the model is cut, as tranche.pipeline_cuts: uniform is equal, best is balanced, parameters is parameters; type:REGEX is refused"),
    no_meaning("pipeline.seed_layers", "random numbers are keyed by tensor, step and sample, not by layer"),
    no_meaning("pipeline.activation_checkpoint_interval", "set tranche.activation_checkpointing and tranche.checkpoint_every"),
    no_meaning("pipeline.use_reentrant", "recomputation is not done by an autograd library"),
    no_meaning("pipeline.pipe_partitioned", "rows between stages are always spread over the axis tensor"),
    no_meaning("pipeline.grad_partitioned", "rows between stages are always spread over the axis tensor"),
    block_of("tensor_parallel", "layers on several ranks"),
    own<&Config::tensor_ranks>(automatic("tensor_parallel.autotp_size", integer, "0",
        "the axis tensor of tranche.mesh: \"shard=*, tensor=SIZE\" where no mesh is given; 0 and 1 are off")),
    no_meaning("tensor_parallel.dtype", "bf16 and fp16 say in which dtype layers are computed"),
    no_meaning("tensor_parallel.tp_overlap_comm", "a layer waits for its rows, which are gathered and scattered as one message each"),
    no_meaning("tensor_parallel.keep_module_on_host", drawn_in_place),
    no_meaning("tensor_parallel.preset_model", named_dimensions),
    refused("tensor_parallel.partition_config", "null", named_dimensions),
    refused("tensor_parallel.injection_policy_tuple", "null", named_dimensions),
    refused("tensor_parallel.tp", "null", "write tensor_parallel.autotp_size instead"),
    refused("tensor_parallel.replace_with_kernel_inject", "false", "kernels of other libraries are not put in place of layers"),
    refused("tensor_parallel.kernel_inject", "false", "kernels of other libraries are not put in place of layers"),
    refused("expert_parallel", "null", "expert parallelism is not part of this version"),
    refused("use_data_before_expert_parallelism", "false", "expert parallelism is not part of this version"),
    refused("hybrid_engine", "null", "generation inside of training is not part of this version"),
    refused("elasticity", "null", "the batch is fixed; checkpoints open at any number of ranks"),
    refused("autotuning", "null", "plan says before a run what fits"),
    no_meaning("compile", "there is no graph compiler"),
    refused("eigenvalue", "null", "eigenvalues of the loss are not part of this version"),
    refused("quantize_training", "null", "quantization is not part of this version"),
    refused("compression_training", "null", "compression is not part of this version"),
    refused("weight_quantization", "null", "quantization is not part of this version"),
    refused("progressive_layer_drop", "null", "dropping layers would change the model"),
    refused("curriculum_learning", "null", "the order of samples is a function of seed and step alone"),
    refused("data_efficiency", "null", "the order of samples is a function of seed and step alone"),
};
// clang-format on

}  // namespace

std::span<const ConfigKey> deepspeed_keys() {
  return keys;
}

}  // namespace tranche::detail
