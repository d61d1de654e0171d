// Checks the fields of a Config against each other, whether it was parsed or made in C++.

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "comm/device_communicator.h"
#include "config/keys.h"
#include "config/reader.h"
#include "core/output_file.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/load.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {
namespace {

/// Larger batch figures are typing errors, and their products would overflow.
constexpr std::int64_t largest_batch = 1'000'000'000;

/// With tranche.world_size_invariant: divides the given micro-batches of a step among the ranks.
void share_out_batch(Config& config, std::int64_t ranks, Problems& problems) {
  const std::int64_t train = config.train_batch_size, micro = config.micro_batch_size;
  constexpr const char* key = "tranche.world_size_invariant";
  if (train == 0 || micro == 0) {
    problems.add(
        fmt::format("{}: train_batch_size and train_micro_batch_size_per_gpu say what a step is for every "
                    "number of ranks; give both",
                    key));
    return;
  }
  const std::int64_t micro_batches = train / micro, rounds = (micro_batches + ranks - 1) / ranks;
  if (train % micro != 0) {
    problems.add(fmt::format("{}: train_batch_size {} is not a multiple of train_micro_batch_size_per_gpu {}",
                             key, train, micro));
  } else if (micro_batches < ranks) {
    problems.add(fmt::format(
        "{}: the {} micro-batch{} of a step (train_batch_size {} / train_micro_batch_size_per_gpu "
        "{}) leave {} of {} ranks without any; start at most {}",
        key, micro_batches, micro_batches == 1 ? "" : "es", train, micro, ranks - micro_batches, ranks,
        micro_batches));
  } else if (config.accumulation_steps != 0 && config.accumulation_steps != rounds) {
    problems.add(
        fmt::format("gradient_accumulation_steps {}: with {} the {} micro-batches of a step take {} on {} "
                    "rank{}; leave it out, so that any number of ranks fits",
                    config.accumulation_steps, key, micro_batches, rounds, ranks, ranks == 1 ? "" : "s"));
  }
  config.accumulation_steps = rounds;
}

/// "4 ranks", or "1 data rank" where `all` ranks share data.
std::string ranks_text(std::int64_t ranks, int all) {
  return fmt::format("{} {}rank{}", ranks, ranks == all ? "" : "data ", ranks == 1 ? "" : "s");
}

void complete_batch(Config& config, std::int64_t ranks, int all, Problems& problems) {
  std::int64_t& train = config.train_batch_size;
  std::int64_t& micro = config.micro_batch_size;
  std::int64_t& steps = config.accumulation_steps;
  for (const auto& [name, value] :
       {std::pair("train_batch_size", train), std::pair("train_micro_batch_size_per_gpu", micro),
        std::pair("gradient_accumulation_steps", steps)}) {
    if (value < 0 || value > largest_batch) {
      problems.add(fmt::format("{}: {} is not between 1 and {}", name, value, largest_batch));
      return;
    }
  }
  if (config.world_size_invariant) return share_out_batch(config, ranks, problems);
  if (train == 0) {
    if (micro == 0) micro = 1;
    if (steps == 0) steps = 1;
    // The product of two factors of at most 1e9 fits; the division shows whether the third one does too.
    if (micro * steps > largest_batch * 1000 / ranks) {
      problems.add(
          fmt::format("train_micro_batch_size_per_gpu {} * gradient_accumulation_steps {} * {} is "
                      "beyond any batch",
                      micro, steps, ranks_text(ranks, all)));
      return;
    }
    train = micro * steps * ranks;
    return;
  }
  if (micro == 0 && steps == 0) steps = 1;
  if (micro != 0 && steps != 0) {
    const double product =
        static_cast<double>(micro) * static_cast<double>(steps) * static_cast<double>(ranks);
    if (product != static_cast<double>(train)) {
      problems.add(
          fmt::format("train_batch_size {} is not train_micro_batch_size_per_gpu {} * "
                      "gradient_accumulation_steps {} * {} "
                      "= {}; change one, or leave one out and it is derived",
                      train, micro, steps, ranks_text(ranks, all), product));
    }
    return;
  }
  std::int64_t& wanted = micro == 0 ? micro : steps;
  const std::int64_t known = micro == 0 ? steps : micro;
  const char* known_name = micro == 0 ? "gradient_accumulation_steps" : "train_micro_batch_size_per_gpu";
  const char* wanted_name = micro == 0 ? "train_micro_batch_size_per_gpu" : "gradient_accumulation_steps";
  if (train % (known * ranks) != 0) {
    problems.add(fmt::format("train_batch_size {} is not a multiple of {} {} * {} = {}, so no {} fits", train,
                             known_name, known, ranks_text(ranks, all), known * ranks, wanted_name));
    return;
  }
  wanted = train / (known * ranks);
}

void check_precision(const Config& config, Problems& problems) {
  const PrecisionConfig& precision = config.precision;
  const auto trains_in = [](DataType dtype) {
    return dtype == DataType::float32 || dtype == DataType::bfloat16 || dtype == DataType::float16;
  };
  if (!trains_in(precision.compute)) {
    problems.add(fmt::format("compute dtype {} is not one of fp32, bf16, fp16", name_of(precision.compute)));
  }
  if (!trains_in(precision.communication)) {
    problems.add(fmt::format("communication_data_type: {} is not one of fp32, bf16, fp16",
                             name_of(precision.communication)));
  }
  const auto lasts = [](DataType dtype) { return dtype == DataType::float32 || dtype == DataType::bfloat16; };
  if (!lasts(precision.accumulation)) {
    problems.add(fmt::format("data_types.grad_accum_dtype: {} is not one of fp32, bf16",
                             name_of(precision.accumulation)));
  }
  if (!lasts(precision.moments) && precision.moments != DataType::block8) {
    problems.add(
        fmt::format("tranche.moments: {} is not one of fp32, bf16, block8", name_of(precision.moments)));
  }
  if (precision.master != MasterFormat::fp32 && precision.compute != DataType::bfloat16) {
    problems.add(fmt::format(
        "tranche.master: {} is a format beside bf16 weights; these are {}: set bf16.enabled, or leave it out",
        name_of(precision.master), name_of(precision.compute)));
  }
  if (precision.stochastic_rounding && precision.master != MasterFormat::none) {
    problems.add(
        fmt::format("tranche.stochastic_rounding: with master weights (tranche.master {}) no update is lost "
                    "to rounding; set tranche.master to none, or leave it out",
                    name_of(precision.master)));
  }
  if (config.quantized_gradients && precision.communication == DataType::float16) {
    problems.add(
        "zero_optimization.zero_quantized_gradients: gradients travel as int8 blocks in place of fp16, whose "
        "range loss scaling is made for; write communication_data_type fp32 or bf16, or leave one of the two "
        "out");
  }
  if (config.quantized_weights && precision.compute == DataType::float16) {
    problems.add(
        "zero_optimization.zero_quantized_weights: with fp16.enabled weights travel in fp16; compute in bf16 "
        "or "
        "fp32, or leave it out");
  }
  if (config.loss_scaling != (precision.compute == DataType::float16)) {
    problems.add("loss_scaling goes with fp16, and fp16 with loss scaling");
  }
  if (!config.loss_scaling) return;
  const LossScalerOptions& scaler = config.loss_scaler;
  int exponent = 0;
  if (scaler.dynamic && std::frexp(scaler.initial_scale, &exponent) != 0.5) {
    problems.add(fmt::format("fp16: the initial loss scale {} is not a power of two", scaler.initial_scale));
    return;
  }
  try {
    const LossScaler probe(scaler);
  } catch (const InvalidArgument& error) {
    problems.add("fp16: " + error.message());
  }
}

/// Refuses settings under which the number of ranks would change the order in which gradients are added.
void check_invariance(Config& config, Problems& problems) {
  if (!config.world_size_invariant) return;
  const auto refuse = [&](const std::string& setting, const char* why) {
    problems.add(fmt::format("tranche.world_size_invariant: {} {}", setting, why));
  };
  if (config.reduction == ReductionPolicy::boundary) {
    refuse("tranche.reduction boundary", "adds up the micro-batches of each rank first; write micro_batch");
  }
  if (config.reduction_group > 1) {
    refuse(fmt::format("tranche.reduction_group {}", config.reduction_group),
           "adds up groups of ranks first; leave it out");
  }
  if (config.precision.accumulation != DataType::float32) {
    refuse(fmt::format("data_types.grad_accum_dtype {}", name_of(config.precision.accumulation)),
           "rounds the sum once per round, and the number of rounds depends on the ranks; write fp32");
  }
  if (config.collectives == "nccl") {
    refuse("tranche.collectives nccl", "leaves the order to NCCL; write auto");
  }
  config.reduction = ReductionPolicy::micro_batch;
}

/// Refuses a noise scale if a step has only one gradient, so that nothing can be compared.
void check_noise(const Config& config, int ranks, Problems& problems) {
  if (!config.gradient_noise_scale || config.micro_batch_size < 1)
    return;  // the batch is reported as a separate problem
  const std::int64_t last = config.accumulation_steps - 1;
  const std::int64_t micro_batches = last * ranks + config.ranks_with_samples(last, ranks);
  if (micro_batches < 2) {
    problems.add(
        "tranche.gradient_noise_scale: needs at least two gradients a step, but the step has one "
        "micro-batch; give gradient_accumulation_steps 2 and tranche.reduction micro_batch, or more ranks");
  } else if (ranks == 1 && config.effective_reduction(ranks) == ReductionPolicy::boundary) {
    problems.add(fmt::format(
        "tranche.gradient_noise_scale: needs at least two gradients a step, but one rank adds its {} "
        "micro-batches up before they are reduced; write tranche.reduction micro_batch",
        config.accumulation_steps));
  }
}

/// Refuses settings that need all gradients of a step before its first update, if units are updated earlier
/// (tranche.update: as_reduced).
void check_update(const Config& config, Problems& problems) {
  if (config.update == UpdateTime::at_the_boundary) return;
  const auto refuse = [&](bool asked, const std::string& setting, const char* why) {
    if (asked)
      problems.add(fmt::format("tranche.update: as_reduced cannot be used with {}, {}", setting, why));
  };
  refuse(config.gradient_clipping > 0, fmt::format("gradient_clipping {}", config.gradient_clipping),
         "which needs the norm of all gradients before the first update; write 0 there, or at_the_boundary "
         "here");
  refuse(config.loss_scaling, "fp16",
         "whose loss scale skips a step where any gradient overflows; write bf16 there, or at_the_boundary "
         "here");
  refuse(config.gradient_noise_scale, "tranche.gradient_noise_scale",
         "which measures all gradients before the update; leave one of the two out");
  refuse(
      config.offload.activations && config.offload.optimizer != OffloadTier::none,
      "activation_checkpointing.cpu_checkpointing plus offload_optimizer",
      "because kept block inputs would queue behind new weights on the host link; leave one of the two out");
}

/// Refuses settings that are impossible for replicas with different gradients and optimizer state.
void check_replicas(Config& config, int data_ranks, Problems& problems) {
  if (config.replica_sum == ReplicaSum::step &&
      config.effective_reduction(data_ranks) == ReductionPolicy::boundary) {
    config.notes.emplace_back(
        "tranche.replica_sum has no effect: gradients are reduced once a step (tranche.reduction boundary)");
  }
  if (config.replica_sum == ReplicaSum::step && config.precision.accumulation != DataType::float32) {
    problems.add(fmt::format(
        "tranche.replica_sum: step accumulates in fp32, but data_types.grad_accum_dtype is {}; write fp32 "
        "there, or micro_batch here",
        name_of(config.precision.accumulation)));
  }
  if (config.replicate != Replicate::parameters) return;
  if (config.stage == 0) {
    problems.add(
        "tranche.replicate: parameters shards gradients and optimizer state over all ranks, but stage 0 "
        "shards nothing; write stage 1, 2 or 3, or all here");
  }
  if (config.offload.parameters != OffloadTier::none) {
    problems.add(fmt::format(
        "tranche.replicate: parameters with offload_param.device {}: the ranks of all replicas bring each "
        "other new weights on the device; leave offload_param out, or write all here",
        name_of(config.offload.parameters)));
  }
}

/// Refuses settings that pipelines, or sums by use, do not support.
void check_pipeline(Config& config, const Mesh& mesh, Problems& problems) {
  const int stages = mesh.size(MeshAxis::pipeline);
  const std::string& schedule = config.pipeline_schedule;
  if (pipeline::find_schedule(schedule) == nullptr && !pipeline::names_a_file(schedule)) {
    problems.add("tranche.pipeline_schedule: " + pipeline::unknown_schedule(schedule));
  }
  if (stages > 1) config.tie_sum = TieSum::by_use;
  for (const auto& [asked, key] :
       {std::pair(config.pipeline_cuts != PipelineCuts::balanced, config.pipeline_cuts_key),
        std::pair(config.pipeline_schedule != "1f1b", std::string("tranche.pipeline_schedule")),
        std::pair(config.pipeline_chunks > 0, std::string("tranche.pipeline_chunks"))}) {
    if (asked && stages == 1) {
      config.notes.push_back(fmt::format("{} has no effect: the mesh has no axis pipeline", key));
    }
  }
  if (config.tie_sum != TieSum::by_use) return;
  const std::string what =
      stages > 1 ? fmt::format("tranche.mesh \"{}\"", config.mesh) : std::string("tranche.tie_sum by_use");
  const auto refuse = [&](bool asked, std::string_view key, std::string_view reason) {
    if (asked) problems.add(fmt::format("{}: not with {}: {}", key, what, reason));
  };
  refuse(config.gradient_noise_scale, "tranche.gradient_noise_scale",
         stages > 1 ? "each stage has only part of each gradient; turn the noise scale off"
                    : "gradients are added by use, as on a pipeline, whose stages each have only part of a "
                      "gradient; turn the noise scale off");
  if (stages == 1) return;
  if (config.accumulation_steps < stages) {
    config.notes.push_back(fmt::format(
        "{} micro-batch{} on {} stages of a pipeline: at most {} of {} stages can work at once; a "
        "step of more micro-batches keeps them busy (gradient_accumulation_steps)",
        config.accumulation_steps, config.accumulation_steps == 1 ? "" : "es", stages,
        config.accumulation_steps, stages));
  }
  refuse(config.offload.parameters != OffloadTier::none, "zero_optimization.offload_param",
         "each micro-batch would bring a stage's weights anew; a deeper pipeline or offload_optimizer takes "
         "less memory too");
  refuse(config.offload.activations, "activation_checkpointing.cpu_checkpointing",
         "several micro-batches are open at once; leave it out");
}

void check_layout(Config& config, const Mesh& mesh, Problems& problems) {
  for (const auto& [name, place] : config.layout) {
    if (place == "whole" || place == "tensor") continue;
    problems.add(fmt::format("tranche.layout: {} is '{}', which is neither whole nor tensor", name, place));
  }
  if (!config.layout.empty() && mesh.size(MeshAxis::tensor) == 1) {
    config.notes.emplace_back("tranche.layout has no effect: the mesh has no axis tensor");
  }
}

/// Refuses settings that the axis `tensor` does not support.
void check_tensor(Config& config, const Mesh& mesh, Problems& problems) {
  const bool chain = config.tensor_sums == TensorSums::chain;
  if (mesh.size(MeshAxis::tensor) == 1) {
    const std::string idle = "tranche.tensor_sums has no effect: the mesh has no axis tensor";
    const bool told = std::find(config.notes.begin(), config.notes.end(), idle) != config.notes.end();
    if (chain && !told) config.notes.push_back(idle);
    return;
  }
  if (config.lora.any() && config.lora.dropout > 0 && config.leaves_whole("inner")) {
    problems.add(
        "tranche.lora.dropout: tranche.layout leaves inner whole, so adapters of the MLP see only their "
        "rank's own rows, and their dropout masks would differ from those of a run on one rank; set it to "
        "0, or leave inner out of the layout");
  }
}

/// Refuses settings that the axis `context` does not support.
void check_context(Config& config, const Mesh& mesh, Problems& problems) {
  const int ranks = mesh.size(MeshAxis::context);
  if (ranks == 1) {
    if (config.context_exchange != ContextExchange::gather) {
      config.notes.emplace_back("tranche.context_exchange has no effect: the mesh has no axis context");
    }
    return;
  }
  const auto refuse = [&](bool asked, std::string_view key, std::string_view reason) {
    if (!asked) return;
    problems.add(fmt::format("{}: tranche.mesh \"{}\" with context={} cannot be used with it: {}", key,
                             config.mesh, ranks, reason));
  };
  refuse(config.world_size_invariant, "tranche.world_size_invariant",
         "a sample's gradient is the sum over the ranks of context, which rounds differently on another "
         "number of them; leave one of the two out");
  refuse(config.gradient_noise_scale, "tranche.gradient_noise_scale",
         "each rank of context has only part of each sample's gradient; turn the noise scale off");
  refuse(config.tensor_sums == TensorSums::chain && mesh.size(MeshAxis::tensor) > 1, "tranche.tensor_sums",
         "chain promises the bits of one rank, but sums over parts of sequences round differently; write "
         "rank_order");
}

void check_mesh(Config& config, int ranks, Problems& problems) {
  try {
    const Mesh mesh = config.mesh_of(ranks);
    check_pipeline(config, mesh, problems);
    check_layout(config, mesh, problems);
    check_tensor(config, mesh, problems);
    check_context(config, mesh, problems);
    const auto check_axis = [&](MeshAxis axis, const char* key, int asked) {
      if (asked == 0 || asked == mesh.size(axis)) return;
      problems.add(
          fmt::format("{}: {} with tranche.mesh (--mesh) \"{}\", whose axis {} has {}; give one of the two",
                      key, asked, config.mesh, name_of(axis), mesh.size(axis)));
    };
    check_axis(MeshAxis::pipeline, "pipeline.stages", config.pipeline_stages);
    check_axis(MeshAxis::context, "sequence_parallel_size", config.context_ranks);
    check_axis(MeshAxis::tensor, "tensor_parallel.autotp_size", config.tensor_ranks);
    const int shards = mesh.size(MeshAxis::shard);
    if (config.shard_size > 0 && config.shard_size != shards) {
      problems.add(fmt::format(
          "{}: {} with tranche.mesh (--mesh) \"{}\", where {} ranks share a copy; give one of the two",
          config.shard_size_key, config.shard_size, config.mesh, shards));
    }
    if (mesh.size(MeshAxis::replicate) == 1) {
      if (config.replicate == Replicate::parameters && config.shard_size == 0) {
        config.notes.emplace_back("tranche.replicate has no effect: the mesh has no axis replicate");
      }
      return;
    }
    if (config.world_size_invariant) {
      problems.add(
          fmt::format("tranche.world_size_invariant: tranche.mesh \"{}\" has {} copies of the model, whose "
                      "ranks add up each on their own first; leave the mesh out",
                      config.mesh, mesh.size(MeshAxis::replicate)));
    }
    check_replicas(config, mesh.data_ranks(), problems);
    const int in_a_copy = mesh.state_ranks();
    if (config.reduction_group == 0 || config.reduction_group == in_a_copy) return;
    problems.add(
        fmt::format("tranche.reduction_group: {} with tranche.mesh \"{}\", where gradients are added within "
                    "the {} ranks of shard{} first; leave it out",
                    config.reduction_group, config.mesh, in_a_copy,
                    mesh.size(MeshAxis::context) > 1 ? " and context" : ""));
  } catch (const ConfigurationError& error) {
    problems.add(std::string(config.pipeline_stages > 1 ? "pipeline.stages, " : "") +
                 (config.context_ranks > 1 ? "sequence_parallel_size, " : "") +
                 (config.tensor_ranks > 1 ? "tensor_parallel.autotp_size, " : "") +
                 (config.shard_size > 0 ? config.shard_size_key + ", " : "") +
                 "tranche.mesh: " + error.message());
  }
}

void check_names(const Config& config, Problems& problems) {
  if (const std::string problem = config.lora.problem(); !problem.empty()) problems.add(problem);
  if (config.lora.any() && !config.frozen.empty()) {
    problems.add(
        "tranche.frozen: with tranche.lora everything but the adapters is frozen already; leave it out");
  }
  try {
    const ParameterGroups probe(config.group_rules, config.frozen);
  } catch (const InvalidArgument& error) {
    problems.add("tranche.parameter_groups: " + error.message());
  }
  try {
    (void)comm::collective_choice(config.device_transport, config.collectives);
  } catch (const ConfigurationError& error) {
    problems.add(error.message());
  }
}

/// Refuses folders that only a shell would find: a folder named ~ would be made in the working folder.
void check_folders(const Config& config, Problems& problems) {
  const std::pair<const char*, const std::string*> folders[] = {
      {"zero_optimization.offload_optimizer.nvme_path", &config.offload.nvme_path},
      {"tensorboard.output_path", &config.tensorboard.output_path},
      {"csv_monitor.output_path", &config.csv_monitor.output_path}};
  for (const auto& [key, path] : folders) {
    if (!begins_at_home(*path)) continue;
    problems.add(
        fmt::format("{}: no shell replaces ~ in '{}', so that it would be a folder of that name; write the "
                    "whole path, or "
                    "./{} if that is meant",
                    key, *path, *path));
  }
}

/// Removes repeated lines: the parser validates a configuration, and each engine validates it again.
void keep_first_of_each(std::vector<std::string>& notes) {
  std::vector<std::string> kept;
  for (std::string& note : notes) {
    if (std::find(kept.begin(), kept.end(), note) == kept.end()) kept.push_back(std::move(note));
  }
  notes = std::move(kept);
}

/// The number of data ranks; all ranks if the mesh is invalid, which check_mesh() reports.
int data_ranks_of(const Config& config, int ranks) {
  try {
    return config.data_ranks(ranks);
  } catch (const ConfigurationError&) {
    return ranks;
  }
}

}  // namespace

void check_fields(Config& config, int ranks, Problems& problems) {
  int data_ranks = ranks;
  if (ranks < 1) {
    problems.add(fmt::format("{} ranks; there must be at least one", ranks));
  } else {
    data_ranks = data_ranks_of(config, ranks);
    complete_batch(config, data_ranks, ranks, problems);
    check_mesh(config, ranks, problems);
  }
  for (const ConfigKey& key : configuration_keys()) check_field(key, config, problems);
  if (config.threads > most_threads) {
    problems.add(fmt::format("tranche.threads: {} is not between 0 and {}", config.threads, most_threads));
  }
  if (config.staging_bytes == 0 && ranks >= 1) {
    config.staging_bytes = default_staging_bytes(ranks);
  }
  check_invariance(config, problems);
  if (ranks >= 1) check_noise(config, data_ranks, problems);
  check_update(config, problems);
  check_offload(config, problems);
  check_folders(config, problems);
  check_precision(config, problems);
  check_names(config, problems);
  try {
    make_optimizer(config);
  } catch (const ConfigurationError& error) {
    problems.add(error.message());
  }
  check_schedule(config, problems);
  keep_first_of_each(config.notes);
}

}  // namespace tranche::detail
