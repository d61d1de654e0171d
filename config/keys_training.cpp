#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "config/keys.h"
#include "tranche/optim/rules.h"

namespace tranche::detail {
namespace {

using enum ValueKind;

constexpr double most_chunks = 1024;  // the most chunks of a rank
constexpr double smallest = std::numeric_limits<double>::denorm_min(),
                 largest = std::numeric_limits<double>::max();
constexpr double below_1 = 0x1.fffffffffffffp-1;
constexpr std::string_view progress_names[] = {"thread", "inline"};

constexpr auto progress_field = [](Config& config) -> FieldPointer {
  return named_field(config.inline_progress, progress_names);
};

constexpr auto batch_is_known = [](const Config& config) { return config.train_batch_size > 0; };
/// With the setting, accumulation follows from the number of ranks, on which the result does not depend.
constexpr auto ranks_matter = [](const Config& config) { return !config.world_size_invariant; };
constexpr auto tensorboard_is_on = [](const Config& config) { return config.tensorboard.enabled; };
constexpr auto csv_monitor_is_on = [](const Config& config) { return config.csv_monitor.enabled; };
constexpr auto scales_loss = [](const Config& config) {
  return config.precision.compute == DataType::float16;
};
constexpr auto scales_dynamically = [](const Config& config) {
  return scales_loss(config) && config.loss_scaler.dynamic;
};
constexpr auto measures_noise = [](const Config& config) { return config.gradient_noise_scale; };
constexpr auto has_adapters = [](const Config& config) { return config.lora.any(); };

template <DataType compute>
constexpr auto computes_in = [](const Config& config) { return Json(config.precision.compute == compute); };
constexpr auto fixed_loss_scale = [](const Config& config) {
  return Json(config.loss_scaler.dynamic ? 0.0 : config.loss_scaler.initial_scale);
};
constexpr auto loss_scale_power = [](const Config& config) {
  return Json(std::lround(std::log2(config.loss_scaler.initial_scale)));
};
constexpr auto effective_alpha = [](const Config& config) { return Json(config.lora.effective_alpha()); };
/// A 0 set by a program would be read as the default; 1 is an equivalent limit.
template <std::int64_t Config::*elements>
constexpr auto at_least_1 =
    [](const Config& config) { return Json(std::max<std::int64_t>(config.*elements, 1)); };

// clang-format off
constexpr ConfigKey keys[] = {
    // Batch, steps, clipping, prints.
    field<&Config::train_batch_size>("train_batch_size", "samples of a step over all ranks").may_be_auto().otherwise("derived").written_if(batch_is_known),
    field<&Config::micro_batch_size>("train_micro_batch_size_per_gpu", "samples of a micro-batch on one rank").may_be_auto().otherwise("derived, else 1"),
    field<&Config::accumulation_steps>("gradient_accumulation_steps", "micro-batches of a step").may_be_auto().otherwise("derived, else 1").written_if(ranks_matter),
    field<&Config::gradient_clipping>("gradient_clipping", "largest global gradient norm; 0 is off, auto is 1.0")
        .may_be_auto().otherwise("0").within({.least = 0, .most = largest, .wrong = "{0} is neither 0 (off) nor above"}),
    field<&Config::steps_per_print>("steps_per_print", "steps between progress lines; null leaves it to the program").may_be_auto().otherwise("null").at_least(0).quiet(),
    field<&Config::wall_clock_breakdown>("wall_clock_breakdown", "a line of times with each progress line; forward and backward in the report").quiet(),
    block_of("tensorboard", "event files for TensorBoard, written by rank 0 of tranche train").quiet().written_if(tensorboard_is_on).written_as(empty_block),
    block_of("csv_monitor", "a CSV file a curve, written by rank 0 of tranche train").quiet().written_if(csv_monitor_is_on).written_as(empty_block),

    // Precision.
    field<&Config::precision, &PrecisionConfig::communication>("communication_data_type",
        "dtype of gradients between ranks: fp32, bf16 or fp16").may_be_auto().otherwise("the compute dtype"),
    block_of("data_types", "dtypes"),
    field<&Config::precision, &PrecisionConfig::accumulation>("data_types.grad_accum_dtype", "dtype of the reduced gradient: fp32 or bf16").may_be_auto(),
    refused("data_types.param_dtype", "null", "the dtype of parameters follows from bf16.enabled and fp16.enabled"),
    refused("data_types.buffer_dtype", "null", "models keep no buffers beside their parameters"),
    block_of("bf16", "bf16 training"),
    own<&Config::precision, &PrecisionConfig::compute>(automatic("bf16.enabled", boolean, "false",
        "compute in bf16; neither this nor fp16 is fp32; auto is true unless fp16 is on")).read_by(read_compute).written_as(computes_in<DataType::bfloat16>),
    no_meaning("bf16.immediate_grad_update", "gradients are always added to the accumulator at once"),
    no_meaning("bf16.check_grad_overflow", "gradients are checked in every dtype and stage"),
    refused("bf16.bf16_master_weights_and_grads", "false", "set tranche.master to \"none\" and data_types.grad_accum_dtype to \"bf16\" instead"),
    refused("bf16.bf16_optimizer_states", "false", "set tranche.moments to \"bf16\" instead"),
    block_of("bfloat16", "older name of bf16"),
    automatic("bfloat16.enabled", boolean, "false", "older name of bf16.enabled"),
    block_of("fp16", "fp16 training with loss scaling"),
    automatic("fp16.enabled", boolean, "false", "compute in fp16").written_as(computes_in<DataType::float16>),
    own<&Config::loss_scaler, &LossScalerOptions::dynamic>(automatic("fp16.loss_scale", number, "0",
        "fixed loss scale; 0 is dynamic")).only_if(scales_loss).read_by(read_loss_scale).written_as(fixed_loss_scale),
    own<&Config::loss_scaler, &LossScalerOptions::initial_scale>(automatic("fp16.initial_scale_power", integer, "16",
        "the dynamic scale starts at 2 to this power")).written_if(scales_dynamically).written_as(loss_scale_power),
    field<&Config::loss_scaler, &LossScalerOptions::window>("fp16.loss_scale_window", "clean steps after which the scale doubles").may_be_auto().only_if(scales_loss),
    field<&Config::loss_scaler, &LossScalerOptions::hysteresis>("fp16.hysteresis", "overflows until the scale halves").may_be_auto().only_if(scales_loss),
    field<&Config::loss_scaler, &LossScalerOptions::consecutive_hysteresis>("fp16.consecutive_hysteresis",
        "every clean step refills the hysteresis").may_be_auto().only_if(scales_loss),
    field<&Config::loss_scaler, &LossScalerOptions::minimum_scale>("fp16.min_loss_scale", "an overflow at this scale ends the run").may_be_auto().only_if(scales_loss),
    no_meaning("fp16.auto_cast", "models read token numbers, which need no cast"),
    no_meaning("fp16.fused_mode", "there is one fused update"),
    refused("fp16.fp16_master_weights_and_grads", "false", "with fp16 weights master weights are fp32"),

    // The keys of curves; their blocks are above.
    field<&Config::tensorboard, &MonitorConfig::enabled>("tensorboard.enabled", "write them").written_if(tensorboard_is_on),
    field<&Config::tensorboard, &MonitorConfig::output_path>("tensorboard.output_path", "the folder above that of the job").may_be_auto().written_if(tensorboard_is_on),
    field<&Config::tensorboard, &MonitorConfig::job_name>("tensorboard.job_name", "the folder of the event files").may_be_auto().written_if(tensorboard_is_on),
    field<&Config::csv_monitor, &MonitorConfig::enabled>("csv_monitor.enabled", "write them").written_if(csv_monitor_is_on),
    field<&Config::csv_monitor, &MonitorConfig::output_path>("csv_monitor.output_path", "the folder above that of the job").may_be_auto().written_if(csv_monitor_is_on),
    field<&Config::csv_monitor, &MonitorConfig::job_name>("csv_monitor.job_name", "the folder of the files").may_be_auto().written_if(csv_monitor_is_on),

    // Optimizer; the keys of its rules follow optimizer.params.
    block_of("optimizer", "the update rule"),
    field<&Config::optimizer, &OptimizerConfig::type>("optimizer.type", "one of the optimizers below, in any case of letters").read_by(read_optimizer),
    no_meaning("optimizer.legacy_fusion", "there is one fused update"),
    own<&Config::optimizer, &OptimizerConfig::parameters>(block_of("optimizer.params", "its parameters")).written_as(optimizer_parameters_json),
    no_meaning("optimizer.params.torch_adam", "there is one Adam, bit-equal on every device; without weight_decay it is 0 (in PyTorch 0.01)"),
    no_meaning("optimizer.params.fused", "the update is always fused"),
    no_meaning("optimizer.params.foreach", "the update is always fused"),
    no_meaning("optimizer.params.set_grad_none", "gradients are freed by the engine"),
    refused("optimizer.params.bias_correction", "true", "moments are always bias-corrected"),
    refused("optimizer.params.eps_inside_sqrt", "false", "eps is added to the root"),
    refused("optimizer.params.maximize", "false", "losses are minimised"),
    refused("optimizer.params.max_grad_norm", "0", "write gradient_clipping at the top level instead"),

    // Scheduler.
    block_of("scheduler", "the learning rate over the steps"),
    field<&Config::schedule, &ScheduleConfig::type>("scheduler.type",
        "constant, WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, WSD or InverseSquareRoot").read_by(read_schedule),
    own<&Config::schedule, &ScheduleConfig::parameters_json>(block_of("scheduler.params", "its parameters")).written_as(schedule_parameters_json),
    automatic("scheduler.params.warmup_min_lr", number, "0", "WarmupLR, WarmupDecayLR"),
    automatic("scheduler.params.warmup_max_lr", number, "the optimizer's lr", "WarmupLR, WarmupDecayLR"),
    automatic("scheduler.params.warmup_num_steps", integer, "1000", "WarmupLR, WarmupDecayLR, WarmupCosineLR"),
    automatic("scheduler.params.warmup_type", text, "\"log\"", "log or linear; the same three"),
    automatic("scheduler.params.total_num_steps", integer, "the steps of the run", "WarmupDecayLR, WarmupCosineLR"),
    automatic("scheduler.params.warmup_min_ratio", number, "0", "WarmupCosineLR"),
    automatic("scheduler.params.cos_min_ratio", number, "0.0001", "WarmupCosineLR"),
    honoured("scheduler.params.cycle_min_lr", number, "required", "OneCycle"),
    honoured("scheduler.params.cycle_max_lr", number, "required", "OneCycle"),
    honoured("scheduler.params.decay_lr_rate", number, "0", "OneCycle"),
    honoured("scheduler.params.cycle_first_step_size", integer, "2000", "OneCycle"),
    honoured("scheduler.params.cycle_second_step_size", integer, "the first's", "OneCycle"),
    honoured("scheduler.params.cycle_first_stair_count", integer, "0", "OneCycle"),
    honoured("scheduler.params.cycle_second_stair_count", integer, "the first's", "OneCycle"),
    honoured("scheduler.params.decay_step_size", integer, "0", "OneCycle"),
    honoured("scheduler.params.cycle_momentum", boolean, "true", "OneCycle: cycles Adam's beta1; beta2 stays the optimizer's"),
    honoured("scheduler.params.cycle_min_mom", number, "0.8", "OneCycle"),
    honoured("scheduler.params.cycle_max_mom", number, "0.9", "OneCycle"),
    honoured("scheduler.params.decay_mom_rate", number, "0", "OneCycle"),
    honoured("scheduler.params.lr_range_test_min_lr", number, "0.001", "LRRangeTest: the first rate"),
    honoured("scheduler.params.lr_range_test_step_size", integer, "2000", "LRRangeTest: steps of an interval"),
    honoured("scheduler.params.lr_range_test_step_rate", number, "1", "LRRangeTest: the first rate's multiple that an interval adds"),
    honoured("scheduler.params.lr_range_test_staircase", boolean, "false", "LRRangeTest: once an interval instead of every step"),
    honoured("scheduler.params.num_warmup_steps", integer, "0", "WSD, InverseSquareRoot: steps of linear warm-up"),
    honoured("scheduler.params.num_stable_steps", integer, "what the others leave of the run", "WSD: steps at the full rate"),
    honoured("scheduler.params.num_decay_steps", integer, "required", "WSD: steps of decay"),
    honoured("scheduler.params.min_lr_ratio", number, "0", "WSD: the share of the rate after the decay"),
    honoured("scheduler.params.decay_type", text, "\"cosine\"", "WSD: cosine, linear or 1-sqrt"),
    honoured("scheduler.params.timescale", integer, "num_warmup_steps, else 10000",
        "InverseSquareRoot: the rate is that of sqrt(timescale / step), shifted so that it begins at the full rate"),
    refused("scheduler.params.last_batch_iteration", "-1", "the step to go on from is the checkpoint's"),

    // ZeRO.
    block_of("zero_optimization", "what is sharded and how it moves"),
    no_meaning("zero_optimization.load_from_fp32_weights", "checkpoints hold fp32 master weights"),
    field<&Config::stage>("zero_optimization.stage",
        "what is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters").within({.least = 0, .most = 3, .wrong = "stage is 0 to 3, not {0}"}),
    field<&Config::quantized_gradients>("zero_optimization.zero_quantized_gradients",
        "gradients travel as int8 blocks of 256 elements (qgZ), in every stage").written_if_set(),
    field<&Config::quantized_weights>("zero_optimization.zero_quantized_weights",
        "weights that training reads travel as int8 blocks of 256 elements (qwZ), in every stage").written_if_set(),
    field<&Config::overlap>("zero_optimization.overlap_comm", "collectives behind compute; never changes a bit").may_be_auto().quiet(),
    field<&Config::reduce_bucket_elements>("zero_optimization.reduce_bucket_size", "elements reduced at once").may_be_auto().zero_for_default().at_least(1).quiet(),
    field<&Config::allgather_bucket_elements>("zero_optimization.allgather_bucket_size",
        "elements gathered at once").may_be_auto().zero_for_default().at_least(1).quiet(),
    field<&Config::prefetch_elements>("zero_optimization.stage3_prefetch_bucket_size",
        "elements prefetched in stage 3 beyond the next unit, which is always prefetched if tranche.depth is above 1")
        .may_be_auto().or_as("zero_optimization.prefetch_bucket_size").zero_for_default().written_as(at_least_1<&Config::prefetch_elements>).at_least(0).quiet(),
    automatic("zero_optimization.prefetch_bucket_size", integer, "50000000", "other name of stage3_prefetch_bucket_size"),
    field<&Config::max_live_elements>("zero_optimization.stage3_max_live_parameters",
        "elements gathered at once in stage 3; bounds what is prefetched beyond the next unit")
        .may_be_auto().or_as("zero_optimization.max_live_parameters").zero_for_default().written_as(at_least_1<&Config::max_live_elements>).at_least(0).quiet(),
    automatic("zero_optimization.max_live_parameters", integer, "1000000000", "other name of stage3_max_live_parameters"),
    field<&Config::persistent_tensor_elements>("zero_optimization.stage3_param_persistence_threshold",
        "stage 3 keeps a unit's tensors whole on every rank if each has at most this many elements; 0 is none")
        .may_be_auto().or_as("zero_optimization.param_persistence_threshold").at_least(0).quiet(),
    automatic("zero_optimization.param_persistence_threshold", integer, "0", "other name of stage3_param_persistence_threshold"),
    field<&Config::persistent_model_elements>("zero_optimization.stage3_model_persistence_threshold",
        "most elements in all that stage 3 keeps whole this way, counted in the order of units").may_be_auto().or_as("zero_optimization.model_persistence_threshold").at_least(0).quiet(),
    automatic("zero_optimization.model_persistence_threshold", integer, "9223372036854775807", "other name of stage3_model_persistence_threshold"),

    // Tranche's own.
    block_of("tranche", "what DeepSpeed's schema has no key for"),
    field<&Config::reduction>("tranche.reduction", "when gradients are reduced: boundary, micro_batch, or auto (boundary for stages 0-1 and one rank)").may_be_auto(),
    field<&Config::world_size_invariant>("tranche.world_size_invariant",
        "the same bits for every number of ranks: train_batch_size / train_micro_batch_size_per_gpu micro-batches a step, added up one by one").written_if_set(),
    field<&Config::gradient_noise_scale>("tranche.gradient_noise_scale",
        "steps report the noise of their gradient as a batch size (McCandlish et al., 2018); takes at least two micro-batches or ranks that are reduced apart")
        .written_if_set(),
    field<&Config::gradient_noise_smoothing>("tranche.gradient_noise_smoothing",
        "weight of the past in the two averages whose ratio is reported, at least 0 and below 1; 0: each step by itself")
        .written_if(measures_noise).within({.least = 0, .most = below_1, .wrong = "{0} is not at least 0 and below 1"}),
    field<&Config::mesh>("tranche.mesh",
        "axes of the ranks with their sizes, slowest first: replicate (copies of the sharded state), pipeline (stages of layers), shard, context (parts of sequences) and tensor (parts of layers); * takes the rest")
        .otherwise("\"shard=*\""),
    own<&Config::layout>(honoured("tranche.layout", any, "{}",
        "by the name of a tensor's dimension, like {\"vocabulary\": \"whole\"}: whole leaves tensors whole along it on every rank of the axis tensor, tensor cuts them"))
        .read_by(read_layout).written_as(layout_json).written_if_set(),
    field<&Config::replicate>("tranche.replicate",
        "what each replica of the mesh has a copy of: all (HSDP, MiCS), or parameters, where gradients and optimizer state are sharded over all ranks (hpZ; stages 1-3)")
        .quiet(),
    field<&Config::replica_sum>("tranche.replica_sum", "when replicas add up gradients that are reduced every micro-batch: micro_batch (every micro-batch too), or step (once a step; rounds differently)"),
    field<&Config::update>("tranche.update",
        "when a step updates a unit: at_the_boundary, once the ranks have agreed on all gradients, or as_reduced, once the unit's own gradient is complete: the "
        "same bits, but a gradient that is not finite ends the run (docs/guides/offload.md)").written_if_set().quiet(),
    field<&Config::tie_sum>("tranche.tie_sum",
        "how the gradients of a tensor with several uses (a tied token table) are added: together, or by_use: each use's is rounded by itself and they are added in "
        "order, which a mesh with a pipeline always does").written_if_set(),
    field<&Config::pipeline_cuts>("tranche.pipeline_cuts",
        "where a pipeline cuts the model: balanced (the largest stage has as few operations as possible), parameters (as few parameters as possible), equal (the same number of units per "
        "stage), or a list with the number of the first unit of every stage except the first (of every chunk, if a rank has several); the embedding is unit 0, the head the last")
        .of_kind(any).read_by(read_cuts).written_as(cuts_json).written_if_set().quiet(),
    field<&Config::pipeline_schedule>("tranche.pipeline_schedule",
        "the order of a pipeline's work: 1f1b (one forward, one backward; as many micro-batches are open as there are stages), afab (all forward, all backward, as "
        "GPipe has it), interleaved, breadth-first, zb-h1, zb-v, or the path of a file with a schedule (docs/guides/pipeline.md)").written_if_set().quiet(),
    field<&Config::pipeline_chunks>("tranche.pipeline_chunks",
        "runs of units on each rank of a pipeline; 0: as many as the schedule has, which is 2 for interleaved, breadth-first and zb-v, and 1 for others")
        .within({.least = 0, .most = most_chunks, .wrong = "{0} is not in 0 to 1024"}).written_if_set().quiet(),
    field<&Config::tensor_sums>("tranche.tensor_sums",
        "how the ranks of the mesh's axis tensor add up their parts of a layer: rank_order (each part by itself), or chain (each rank goes on where the one before "
        "ended, which has one rank's bits and is slow)").written_if_set(),
    field<&Config::context_exchange>("tranche.context_exchange",
        "how attention sees the whole sequence on the mesh's axis context: gather (each rank gathers the keys and values of all), or ulysses (parts of the "
        "sequence are exchanged for parts of the heads)").written_if_set(),
    field<&Config::reduction_group>("tranche.reduction_group",
        "ranks in the inner groups of the fixed-order sum; recorded in checkpoints; 0 is auto").may_be_auto().otherwise("ranks on a node").at_least(0),
    field<&Config::depth>("tranche.depth", "units gathered at once in stage 3, the one in use included").may_be_auto().at_least(1).quiet(),
    field<&Config::gather_for>("tranche.gather_for",
        "use: stage 3 frees a unit after each use and gathers it again; step: it stays from its first use in a step to the step's end, gathered once").quiet(),
    field<&Config::communication_timeout>("tranche.communication_timeout",
        "seconds until a collective counts as hung").within({.least = smallest, .most = largest, .wrong = "{0} seconds is not above 0"}).quiet(),
    honoured("tranche.progress", text, "\"thread\"", "thread: one thread a rank makes all MPI calls; inline: the caller's thread does").bound_to(progress_field).quiet(),
    field<&Config::threads>("tranche.threads",
        "compute threads of a rank; 0 is auto, which is at most SLURM_CPUS_PER_TASK").may_be_auto().otherwise("cores / ranks").at_least(0).quiet(),
    field<&Config::device_memory_limit>("tranche.device_memory", "most bytes of device memory a rank may take").of_kind(size).zero_as_null().at_least(0).quiet(),
    field<&Config::workspace_bytes>("tranche.workspace", "workspace of kernels; 0 is the default").otherwise("8MiB, on GPUs 32MiB").of_kind(size).at_least(0),
    field<&Config::staging_bytes>("tranche.communication_slab",
        "communication buffers of a communicator; 0 is the default").otherwise("8MiB, more beyond 4096 ranks").of_kind(size).at_least(0).quiet(),
    field<&Config::seed>("tranche.seed", "of initial weights, data order and dropout"),
    field<&Config::frozen>("tranche.frozen", "name patterns (* and ?) of tensors that are not trained"),
    block_of("tranche.lora", "low-rank adapters beside linear layers; all else is frozen (docs/guides/fine-tuning.md)"),
    field<&Config::lora, &LoraConfig::rank>("tranche.lora.rank", "of the adapters; 0 is none").written_if(has_adapters),
    field<&Config::lora, &LoraConfig::alpha>("tranche.lora.alpha",
        "what an adapter adds is multiplied by alpha / rank").otherwise("the rank").written_if(has_adapters).written_as(effective_alpha),
    field<&Config::lora, &LoraConfig::dropout>("tranche.lora.dropout", "of the adapters' inputs").written_if(has_adapters),
    field<&Config::lora, &LoraConfig::targets>("tranche.lora.targets",
        "names of linear layers or their ends (q_proj), with * and ?; all-linear is all but the head").written_if(has_adapters),
    field<&Config::lora, &LoraConfig::rank_scaled>("tranche.lora.rslora", "multiply by alpha / sqrt(rank) instead").written_if(has_adapters),
    field<&Config::lora, &LoraConfig::save_base>("tranche.lora.save_base", "checkpoints hold the frozen weights too").written_if(has_adapters).quiet(),
    refused("tranche.lora.use_dora", "false", "DoRA (weight-decomposed adapters) is not part of this version"),
    refused("tranche.lora.load_in_4bit", "false",
        "QLoRA (a base in 4 bits) is not part of this version: the frozen base is kept in the compute dtype; shard it (stage 3) or offload it (offload_param)"),
    refused("tranche.lora.load_in_8bit", "false",
        "QLoRA (a base in 8 bits) is not part of this version: the frozen base is kept in the compute dtype; shard it (stage 3) or offload it (offload_param)"),
    refused("tranche.lora.quantization", "null",
        "QLoRA (a quantised base) is not part of this version: the frozen base is kept in the compute dtype; shard it (stage 3) or offload it (offload_param)"),
    honoured("tranche.decay", texts, "[]", "name patterns of tensors that decay; before parameter_groups"),
    honoured("tranche.no_decay", texts, "[]", "name patterns of tensors that do not decay; after decay"),
    own<&Config::group_rules>(honoured("tranche.parameter_groups", any, "[]",
        "list of rules; later ones win. Without a rule tensors with fewer than two dimensions do not decay")).read_by(read_groups).written_as(groups_json),
    honoured("tranche.parameter_groups[].pattern", text, "required", "name pattern"),
    honoured("tranche.parameter_groups[].learning_rate_factor", number, "1", "multiplies the learning rate"),
    honoured("tranche.parameter_groups[].decay", boolean, "by dimensions", "whether weight decay applies"),
    honoured("tranche.parameter_groups[].weight_decay", number, "the optimizer's", "weight decay of these tensors, which then decay whatever their dimensions"),
    honoured("tranche.parameter_groups[].learning_rate", number, "the schedule's",
        "learning rate of these tensors in every step, in place of the schedule's; the factor multiplies it too"),
    honoured("tranche.parameter_groups[].betas", numbers, "the optimizer's", "for optimizers that have betas; also replaces a beta1 that OneCycle cycles"),
    honoured("tranche.parameter_groups[].eps", number, "the optimizer's", "for optimizers that have eps"),
    field<&Config::collectives>("tranche.collectives",
        "auto or ours: the fixed-order sum; messages, shared: the same bits, and ranks of a node send each other data or read each other's memory (auto takes the "
        "quicker by size); nccl: NCCL reduces, and promise 1 (equal bits) does not hold; GPUs only").may_be_auto(),
    field<&Config::device_transport>("tranche.device_transport",
        "how GPU memory travels: nccl (one rank a GPU), staged (through host memory), shared (threads of one process); auto takes the quickest that serves all ranks")
        .may_be_auto().quiet(),
    field<&Config::maximum_consecutive_skips>("tranche.maximum_consecutive_skips", "skipped steps in a row that end the run").at_least(1).quiet(),
    field<&Config::activation_checkpointing>("tranche.activation_checkpointing", "keep block inputs only, compute blocks again").quiet(),
    field<&Config::checkpoint_every>("tranche.checkpoint_every",
        "blocks between kept inputs; up to tranche.depth of them stay gathered from recomputation to backward").at_least(1).quiet(),
    field<&Config::vocabulary_chunk>("tranche.vocabulary_chunk", "columns of the head whose logits exist at once, in blocks of 4096; 0 is all").at_least(0).quiet(),
    field<&Config::precision, &PrecisionConfig::moments>("tranche.moments",
        "format of an optimizer's states: fp32, bf16, or block8 (8 bits in blocks of 256 with a scale; tensors below 4096 elements in fp32)")
        .one_of("fp32, bf16, block8"),
    field<&Config::precision, &PrecisionConfig::master>("tranche.master",
        "format of master weights in bf16 training: fp32; split, which keeps beside a bf16 weight the 16 bits that make the fp32 number; or none")
        .in_any_case().written_if_set(),
    field<&Config::precision, &PrecisionConfig::stochastic_rounding>("tranche.stochastic_rounding",
        "with tranche.master none: updated weights are rounded up or down at random, so that the mean is exact").written_if_set(),
    field<&Config::save_buffer>("tranche.save_buffer", "take the host memory of asynchronous saves at the start, not at the first save").quiet(),
    field<&Config::total_steps_hint>("tranche.total_steps", "length of the run for schedules that end").otherwise("the program's --steps").at_least(0),
    block_of("tranche.debug", "for finding faults").quiet(),
    field<&Config::debug, &DebugConfig::poison_memory>("tranche.debug.poison_memory", "fill step memory with NaN when acquired and released"),
    field<&Config::debug, &DebugConfig::plan_memory>("tranche.debug.plan_memory", "pack the step's buffers after it was recorded"),
    field<&Config::debug, &DebugConfig::ranks_per_host>("tranche.debug.ranks_per_host",
        "treat this many consecutive ranks as one node, whatever the real nodes are; 0: the real nodes").at_least(0),
    field<&Config::debug, &DebugConfig::compare_calls>("tranche.debug.compare_calls",
        "compare the order of the ranks' gathers and reductions in every step; stages 0 to 2 work with different orders, because a gather sends nothing there, but stage 3 does not")
        .written_if_set(),
    field<&Config::debug, &DebugConfig::host_link_bytes_per_second>("tranche.debug.host_link_bandwidth",
        "bytes per second between device and host tier on the CPU device; 0 is no bound")
        .of_kind(size).within({.least = 0, .most = 0x1p53, .multiple_of = 1, .wrong = "{0} is neither 0 (no bound) nor whole bytes per second"}),
    field<&Config::offload, &OffloadConfig::tile_elements>("tranche.offload_tile", "elements of offloaded state that are updated at a time, a multiple of 4096")
        .may_be_auto().within({.least = 4096, .most = 0x1p30, .multiple_of = 4096, .wrong = "{0} is not a multiple of 4096 between {1} and {2}"}).quiet(),
    field<&Config::offload, &OffloadConfig::io_engine>("tranche.io_engine",
        "automatic: io_uring, or threads where the kernel refuses it; uring; threads").may_be_auto().one_of("automatic, uring, threads").quiet(),
    field<&Config::offload, &OffloadConfig::host_memory_limit>("tranche.host_memory",
        "most bytes of host memory that a rank may take for what it offloads, saves and sends").of_kind(size).zero_as_null().at_least(0).quiet(),
    field<&Config::offload, &OffloadConfig::host_state>("tranche.host_state",
        "host memory of a rank for state that is asked for on nvme: state that fits stays there, weights first, and the remaining bytes are read-ahead buffers; auto is what is free, 0 none")
        .of_kind(size).may_be_auto().within({.least = -1, .most = std::numeric_limits<double>::infinity(), .wrong = "{0} is neither auto nor at least 0"}).quiet()
        .written_if([](const Config& config) { return config.offload.uses_nvme(); })
        .written_as([](const Config& config) { return config.offload.host_state < 0 ? Json("auto") : Json(config.offload.host_state); }),
    field<&Config::offload, &OffloadConfig::nvme_limit>("tranche.nvme_space", "most bytes of a rank's swap file").of_kind(size).zero_as_null().at_least(0).quiet(),
};
// clang-format on

}  // namespace

namespace {

std::string default_of(const RuleOption& option) {
  switch (option.kind) {
    case RuleOption::Kind::flag:
      return option.first != 0 ? "true" : "false";
    case RuleOption::Kind::pair:
      return fmt::format("[{}, {}]", option.first, option.second);
    case RuleOption::Kind::choice:
      return fmt::format("\"{}\"", option.choices.front());
    case RuleOption::Kind::number:
      break;
  }
  return std::isfinite(option.first) ? fmt::format("{}", option.first) : "none";
}

/// A key of optimizer.params, described by the rules that have it.
struct RuleKey {
  std::string path, default_value, text;
  RuleOption::Kind kind = RuleOption::Kind::number;
};

/// The types of a rule, as "AdamW, Adam".
std::string types_of(const UpdateRule& rule) {
  return fmt::format("{}", fmt::join(rule.types, ", "));
}

std::deque<RuleKey> keys_of_rules() {
  std::deque<RuleKey> keys;
  std::set<const UpdateRule*> seen;
  RuleKey& rate = keys.emplace_back();
  rate.path = "optimizer.params.lr";
  rate.default_value = "0.001";
  rate.text = "learning rate where no schedule sets it";
  for (const RuleType& type : rule_types()) {
    const UpdateRule& rule = *type.rule;
    if (!seen.insert(&rule).second) continue;
    if (rule.learning_rate != 0.001) {
      rate.text += fmt::format("; {} in {}", rule.learning_rate, types_of(rule));
    }
    for (const RuleOption& option : rule.options) {
      const std::string path = "optimizer.params." + std::string(option.name);
      const auto known =
          std::find_if(keys.begin(), keys.end(), [&](const RuleKey& key) { return key.path == path; });
      const bool first = known == keys.end();
      RuleKey& key = first ? keys.emplace_back() : *known;
      const std::string own = default_of(option);
      if (first) {
        key.path = path;
        key.default_value = own;
        key.kind = option.kind;
      }
      key.text += fmt::format("{}{}{}: {}", first ? "" : "; ", types_of(rule),
                              own == key.default_value ? "" : " (" + own + ")", option.meaning);
    }
  }
  return keys;
}

ConfigKey learning_rate(const ConfigKey& row) {
  return field<&Config::optimizer, &OptimizerConfig::learning_rate>(row.path, row.text)
      .may_be_auto()
      .otherwise(row.default_value)
      .within({.least = 0, .most = largest, .wrong = "{0} is not a rate of at least 0"});
}

}  // namespace

std::span<const ConfigKey> training_keys() {
  static const std::deque<RuleKey> rules = keys_of_rules();
  static const std::vector<ConfigKey> all = [] {
    std::vector<ConfigKey> result;
    for (const ConfigKey& key : keys) {
      result.push_back(key);
      if (key.path != "optimizer.params") continue;
      for (const RuleKey& of_rule : rules) {
        const ValueKind kind = of_rule.kind == RuleOption::Kind::flag     ? boolean
                               : of_rule.kind == RuleOption::Kind::pair   ? numbers
                               : of_rule.kind == RuleOption::Kind::choice ? text
                                                                          : number;
        // Hugging Face writes "auto" for these.
        constexpr std::string_view automatic_names[] = {"lr", "betas", "eps", "weight_decay", "momentum"};
        const std::string_view name = std::string_view(of_rule.path).substr(of_rule.path.rfind('.') + 1);
        const bool may_be_auto = std::find(std::begin(automatic_names), std::end(automatic_names), name) !=
                                 std::end(automatic_names);
        ConfigKey row = honoured(of_rule.path, kind, of_rule.default_value, of_rule.text);
        if (may_be_auto) row = row.may_be_auto();
        result.push_back(name == "lr" ? learning_rate(row) : row);
      }
    }
    return result;
  }();
  return all;
}

}  // namespace tranche::detail
